"""One replica in this process: the loop that plans, checks and executes each step and publishes its events."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rubato.core.capabilities import cure
from rubato.core.clock import PLAN, Clock
from rubato.core.events import Event, Stepped
from rubato.core.interfaces import Engine, Host, LatencyModel, Scheduler, TransferError, View
from rubato.core.plan import KV, Batch, Plan, Recall, Role, Sample, StepResult
from rubato.core.replica_options import DEFAULT_OPTIONS, ReplicaOptions
from rubato.core.request import Request
from rubato.replica import handoff
from rubato.replica.replica import Replica

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_FAILED_STEPS = 3  # in a row, each followed by a restart of the engine, before the host is dead
MAX_STEP_SLOWDOWN = 20.0  # a step may take this many times its prediction beyond `step_timeout`
TICK_S = 1.0  # a step is waited for in ticks
DRAFTER_HINT = "--set engine.drafter=suffix; of a simulated engine, --set engine.drafter.alpha=0.7"
CLOSE_S = 3.0  # for a cancelled step to end, and then for the engine to close


class StepTimeoutError(Exception):
    """A step did not end: the device, a driver or a lock in the engine hangs."""


class LocalHost:
    """Replica + Scheduler + Engine in this process (`Host`).

    Args:
        emit: called with each event, in order, on the event loop.
        lost: called once, with the id, the error and no requests, when the engine is beyond recovery; by then every
            request here has ended.
        kv_transfer: whether KV can go from here to another host; if not, requests are handed off without it.
        step_timeout: seconds, plus `MAX_STEP_SLOWDOWN` times the predicted ones, after which a step or a restart of
            the engine counts as hung and the engine as beyond recovery; None: no limit.
    """

    cooldown_until = 0.0

    def __init__(
        self, id: str, engine: Engine, scheduler: Scheduler, latency: LatencyModel, clock: Clock, *,
        emit: Callable[[Event], None], lost: Callable[[str, BaseException, Sequence[Request]], None], policy: str,
        options: ReplicaOptions = DEFAULT_OPTIONS, kv_transfer: bool = True, step_timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.supports = (engine.supports | {"handoff", "recall", "step_times"}) - (
            set() if kv_transfer else {"kv_transfer"}
        )
        missing = scheduler.needs - self.supports
        if missing:
            raise ValueError(
                f"policy {policy!r} needs {', '.join(sorted(missing))}, which engine {type(engine).__module__} lacks "
                f"here (it supports {', '.join(sorted(self.supports)) or 'nothing extra'}): "
                f"{cure(missing, DRAFTER_HINT)}"
            )
        self.id = id
        self.engine = engine
        self.scheduler = scheduler
        self.latency = latency
        self.clock = clock
        self.policy = policy
        self.replica: Replica | None = None
        self.error: BaseException | None = None
        self._options = options
        self._step_timeout = step_timeout
        self._emit = emit
        self._lose_host = lost
        self._outbox: list[Event] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._failures = 0
        self._observe_error: RuntimeError | None = None  # of the scheduler's `observe`: the next step raises it
        self._is_restarting = False
        self._task: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        await self.engine.start()
        self.replica = Replica(self.id, self.engine.limits, self.latency, self._options, supports=self.supports)
        self._task = asyncio.create_task(self._run(self.replica), name=f"replica {self.id}")

    def submit(self, request: Request) -> None:
        """Queues a request; it ends in exactly one Finished, also when the engine refuses it."""
        replica = self._started_replica()
        now = self.clock.now()
        events = replica.submit(request, now)
        if not events and self.error is not None:
            events = replica.cancel(request.id, now, f"replica {self.id} is dead: {self.error}", "failed")
        elif not events and not self._is_restarting:
            events = self._add(replica, request)
        self._publish(events)

    def cancel(self, id: str, reason: str) -> None:
        self._publish(self._started_replica().cancel(id, self.clock.now(), reason))

    def resume(self, id: str) -> None:
        self._publish(self._started_replica().resume(id, self.clock.now()))

    def view(self) -> View:
        return self._started_replica().view(self.clock.now())

    def assign(self, role: Role) -> None:
        self._started_replica().role = role
        self._wake.set()

    def recall(self, kind: Recall) -> None:
        if handoff.recall(self._started_replica(), kind):
            self._wake.set()

    def reserve(self, request: Request) -> bool:
        """Reserves KV for a request from another host. A request that is refused for good ends soon after."""
        replica = self._started_replica()
        events = None if self.error is not None else handoff.reserve(replica, request, self.clock.now())
        if events is None:
            return False
        if not events and not self._is_restarting:
            events = self._add(replica, request)
        self._outbox += events
        self._wake.set()
        return True

    async def transfer(self, id: str, to: Host) -> None:
        seq = self._started_replica().migrating_out.get(id)
        if seq is None:
            raise TransferError(f"replica {self.id} has no KV of request {id!r} any more")
        kv = await self.engine.export_kv(tuple(seq.block_ids), seq.cached)
        await to.receive(id, kv)
        self.release(id)

    async def receive(self, id: str, kv: KV) -> None:
        replica = self._started_replica()
        seq = replica.migrating_in.get(id)
        if seq is not None:
            await self.engine.import_kv(tuple(seq.block_ids), kv)
        if seq is None or replica.migrating_in.get(id) is not seq:
            raise TransferError(f"replica {self.id} expects no KV of request {id!r} any more")
        self._publish(handoff.arrive(replica, id, kv.size, self.clock.now()))

    def release(self, id: str) -> None:
        if handoff.release(self._started_replica(), id):
            self._wake.set()

    async def drain(self) -> None:
        while not self._started_replica().empty and self.error is None:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Ends all requests as failed. An engine that does not close within `CLOSE_S` is left as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        if self.replica is not None:
            self._outbox += self.replica.fail(self.clock.now(), "the server closed")
            self._flush()
        try:
            await asyncio.wait_for(self.engine.close(), CLOSE_S)
        except TimeoutError:
            log.error("replica %s: its engine did not close within %.0f s", self.id, CLOSE_S)

    # ----------------------------------------------------------------- the loop

    async def _run(self, replica: Replica) -> None:
        while self.error is None:
            try:
                await self._step(replica)
            except Exception as error:  # whatever a policy or an engine may raise: told to every client, never hidden
                await self._recover(replica, error)

    async def _step(self, replica: Replica) -> None:
        await self.clock.settle()
        self._wake.clear()  # the plan is made with all that has come
        if self._observe_error is not None:
            raise self._observe_error
        self._forget_gone(replica)
        began = self.clock.now()
        self._outbox += handoff.hand_back(replica, began)
        plan = Plan() if replica.idle else self.scheduler.plan(replica.view(self.clock.now()))
        batch, events = (Batch(), []) if replica.idle else replica.apply(plan, self.clock.now(), self.policy)
        self._outbox += events
        if not batch.entries:
            self._flush()
            if not events:
                await self._wait(plan.wake_at)
            return
        predicted = 0.0 if self._step_timeout is None else self.latency.step_time(batch.shape)
        running = asyncio.ensure_future(self.engine.execute(batch))
        await asyncio.sleep(0)  # the engine starts before clients are written to
        self._flush()
        result = await self._wait_for(running, f"a step of {batch.shape.tokens} tokens", predicted)
        # The outbox after the wait, not before it. What a step takes is what a client waits for: planning, the way
        # to the engine's thread and back included, not only the engine's own time.
        self._commit(replica, batch, replace(result, seconds=self.clock.now() - began))
        if self._observe_error is None:
            self._failures = 0

    async def _wait_for(self, work: asyncio.Future[T], what: str, predicted: float = 0.0) -> T:
        """Returns the result of `work`.

        Args:
            work: of the engine.
            what: it does, for the error.
            predicted: its seconds.

        Raises:
            StepTimeoutError: it takes longer than it ever should.
        """
        if self._step_timeout is None:
            return await work
        limit = seconds_left = self._step_timeout + MAX_STEP_SLOWDOWN * predicted
        try:
            # Counted in waits, not read from a clock: a process that was itself stopped, as a virtual machine may be
            # for minutes, has not waited meanwhile.
            while seconds_left > 0.0 and not work.done():
                await asyncio.wait({work}, timeout=min(TICK_S, seconds_left))
                seconds_left -= TICK_S
        finally:
            work.cancel()
        if work.done() and not work.cancelled():
            return work.result()
        raise StepTimeoutError(f"replica {self.id}: the engine hangs: {what} has not ended after {limit:.1f} s")

    def _commit(self, replica: Replica, batch: Batch, result: StepResult) -> None:
        now = self.clock.now()
        events = replica.commit(batch, result, now)
        self._outbox += [Stepped(now, self.id, batch.shape, result.seconds), *events]
        # last: no event is lost where this fails
        self.latency.update(Sample(batch.shape, result.seconds, result.drafting))

    async def _wait(self, until: float | None) -> None:
        """Waits until a request is submitted or cancelled, or until this time."""
        if self._started_replica().empty:
            self._idle.set()
        timer = None if until is None else self.clock.call_at(until, PLAN, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._wake.clear()

    async def _recover(self, replica: Replica, error: Exception) -> None:
        """Fails every request with the error, and restarts the engine; if that fails the host is dead."""
        log.error("replica %s: step failed", self.id, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # what the step allocated is free before the engine begins afresh
        self._failures += 1
        try:
            self._outbox += replica.fail(self.clock.now(), f"{type(error).__name__}: {error}")
            self._flush()
            self._observe_error = None
            if isinstance(error, StepTimeoutError):
                raise error  # its thread or device is still in that step: beginning afresh would hang, too
            if self._failures >= MAX_FAILED_STEPS:
                last = f"{type(error).__name__}: {error}"
                raise RuntimeError(
                    f"policy {self.policy!r}: {self._failures} steps in a row failed; the last: {last}"
                ) from error
            await self._restart(replica)
        except Exception as fatal:  # beyond recovery: reported through `lost`, which may end the process
            self.error = fatal
            self._outbox += replica.fail(self.clock.now(), f"replica {self.id} is dead: {fatal}")
            self._flush()
            self._idle.set()
            self._lose_host(self.id, fatal, ())

    async def _restart(self, replica: Replica) -> None:
        """Restarts the engine, and adds the requests that were submitted meanwhile."""
        self._is_restarting = True
        try:
            await self._wait_for(asyncio.ensure_future(self.engine.start()), "its start after a failed step")
        finally:
            self._is_restarting = False
        replica.take_gone_ids()
        for seq in [*replica.waiting, *replica.migrating_in.values(), *replica.running.values()]:
            self._outbox += self._add(replica, seq.request)

    # ----------------------------------------------------------------- parts

    def _add(self, replica: Replica, request: Request) -> list[Event]:
        self._forget_gone(replica)  # a request may come back that the engine still has from when it was handed off
        try:
            self.engine.add(request)
        except ValueError as error:
            return replica.cancel(request.id, self.clock.now(), f"rejected-invalid: {error}", "refused")
        except Exception as error:  # the engine's fault: told to the client, and the request ends
            log.exception("replica %s: the engine could not take request %r", self.id, request.id)
            why = f"the engine could not take it: {type(error).__name__}: {error}"
            return replica.cancel(request.id, self.clock.now(), why, "failed")
        return []

    def _forget_gone(self, replica: Replica) -> None:
        ids = replica.take_gone_ids()
        if ids:
            self.engine.forget(ids)

    def _publish(self, events: Sequence[Event]) -> None:
        """Publishes the events of an outside call, after the queued ones, and wakes the loop."""
        self._outbox += events
        if events:
            self._flush()
        self._wake.set()

    def _flush(self) -> None:
        """Publishes queued events. If the scheduler raises on them, the next step fails with that error."""
        events, self._outbox = self._outbox, []
        for event in events:
            self._emit(event)
        if events:
            try:
                self.scheduler.observe(events)
            except Exception as error:  # not raised here: a client that leaves, or a peer's KV, is not to pay for it
                why = f"policy {self.policy!r} failed to observe: {type(error).__name__}: {error}"
                self._observe_error = RuntimeError(why)
                self._observe_error.__cause__ = error
                self._wake.set()

    def _started_replica(self) -> Replica:
        if self.replica is None:
            raise RuntimeError(f"host {self.id!r} is not started: await start() first")
        return self.replica
