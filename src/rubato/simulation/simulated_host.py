"""Defines a host without tasks: a replica, its scheduler, an engine that only takes time (`Host`), on a hand-set clock.

It calls the same replica as `local_host.LocalHost` does, in the same order. Unless every token is asked for, a plan is
carried out as a run of one or more equal steps, which ends where the next plan may differ: at the first token or the
end of a stage, at the end of a prefill, when KV runs short, and when something arrives. Other steps are run one by one
by the simulated engine: those whose tokens are reported, as policies that draft need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat

from rubato.core.capabilities import cure
from rubato.core.clock import COMPLETION, PLAN
from rubato.core.events import Event, Finished, Stepped
from rubato.core.interfaces import Host, LatencyModel, Scheduler, TransferError, View
from rubato.core.plan import KV, NO_BATCH, Emitted, Plan, Recall, Role, Sample
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import NOTHING, Request
from rubato.core.slo import StageTimes
from rubato.engines.simulated import VOCAB_SIZE, Engine
from rubato.policies import optional
from rubato.replica import handoff
from rubato.replica.kv_ledger import KVCounts
from rubato.replica.plan_check import PlanError
from rubato.replica.replica import Replica
from rubato.replica.sequence import Seq
from rubato.replica.step_log import StepRun
from rubato.simulation.queue_clock import QueueClock
from rubato.simulation.step_times import StepTimes

MAX_STEPS_AHEAD = 48  # steps of a run computed ahead; an arrival discards the rest
NEVER = 1 << 60
DRAFTER = "--set engine.drafter.alpha=0.7: how often it is right"
ONE_TOKEN = Emitted(1)
STAGE_DONE = Emitted(1, stage_done=True)
STOP = Emitted(1, finish="stop")
LENGTH = Emitted(1, finish="length")


@dataclass(frozen=True)
class HostOptions:
    """Options of a simulated host.

    Args:
        counts: KV as counts.
        tokens: report every step and token (`Stepped`, `Tokens`), as always where a policy drafts.
        on_run, on_end: called with each finished run of a replica, and with each end and its tokens' times.
    """

    counts: bool = True
    tokens: bool = False
    on_run: Callable[[str, StepRun], None] | None = None
    on_end: Callable[[Finished, Sequence[StageTimes]], None] | None = None


class SimulatedHost:
    """A replica and its scheduler, as a host of a cluster.

    Args:
        engine: of the same limits, for drafts and for moving KV; it adds no noise, which is in `times`.
        latency: what the scheduler believes of step times; it goes on learning with `learns`.
        targets: request id -> output tokens of each stage.
        every_step: tells whether the cluster has to be told of every step now.
    """

    cooldown_until = 0.0

    def __init__(
        self,
        id: str,
        engine: Engine,
        scheduler: Scheduler,
        latency: LatencyModel,
        times: StepTimes,
        clock: QueueClock,
        *,
        emit: Callable[[Event], None],
        policy: str,
        targets: Mapping[str, Sequence[int]],
        replica_options: ReplicaOptions,
        host_options: HostOptions,
        learns: bool,
        every_step: Callable[[], bool],
    ) -> None:
        supports = engine.supports | {"handoff", "recall", "step_times"}
        if missing := scheduler.needs - supports:
            raise ValueError(
                f"policy {policy!r} needs {', '.join(sorted(missing))}, which a simulated engine lacks here (it "
                f"supports {', '.join(sorted(supports))}): {cure(missing, DRAFTER)}"
            )
        # The engine then runs each step and each token is reported: a drafter's KV follows the engine's KV,
        # and policies learn from the events how much of it was right.
        drafts = "draft" in supports and "draft" in scheduler.needs | optional(scheduler)
        self._step_by_step = tokens = host_options.tokens or drafts
        self.id, self.scheduler, self.clock = id, scheduler, clock
        self.replica = Replica(
            id, engine.limits, latency, replica_options, supports=supports, counts=host_options.counts, tokens=tokens,
            clock=clock, on_decode=self._set_milestone, on_end=host_options.on_end,
            output_ids=None if tokens else lambda first, after: [(n + 1) % VOCAB_SIZE for n in range(first, after)],
        )  # fmt: skip
        self._steps = self.replica.steps
        self._pool = self.replica.pool
        self._engine = engine
        self._times = times
        self._emit, self._policy = emit, policy
        self._targets = targets
        self._every_step = every_step
        self._learns = learns
        self._on_run = host_options.on_run
        self._outbox: list[Event] = []
        self._milestones: list[tuple[int, int, Seq]] = []  # (step, order, sequence) of first and last tokens of stages
        self._milestone_order = itertools.count()  # orders the milestones of a step
        self._needs_engine: set[str] = set()  # sequences whose tokens the engine must check one by one
        self._report_this_step = False  # report the end of the step under way
        self._emitted: Mapping[str, Emitted] | None = None  # output of the step under way, where the engine runs it
        self._shape = NO_BATCH  # of that step
        self._version = 0
        self._plan_is_due = False
        self._repeat_steps = 0  # more steps for which the last plan stands, unless an event comes
        self._refresh = learns or not host_options.counts
        self._live_view = self.replica.view(clock.time)
        self._at_once = repeat(self._live_view).__next__  # called for every host at every arrival
        self.view: Callable[[], View] = self._refreshed if self._refresh else self._at_once
        self._plan_at(clock.time)  # hosts that begin together plan in the order in which they began

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        await self._engine.start()

    async def drain(self) -> None: ...

    async def close(self) -> None: ...

    def submit(self, request: Request) -> None:
        self._forget()
        events = self.replica.submit(request, self.clock.time)
        self._listen_to(request, events)
        self._tell(events)

    def reserve(self, request: Request) -> bool:
        self._forget()
        events = handoff.reserve(self.replica, request, self.clock.time)
        if events is None:
            return False
        self._listen_to(request, events)
        self._outbox += events
        self._changed()
        return True

    def cancel(self, id: str, reason: str) -> None:
        self.replica.sync()
        self._tell(self.replica.cancel(id, self.clock.time, reason))

    def resume(self, id: str) -> None:
        self.replica.sync()
        self._tell(self.replica.resume(id, self.clock.time))

    def assign(self, role: Role) -> None:
        self.replica.sync()
        self.replica.role = role
        self._changed()

    def recall(self, kind: Recall) -> None:
        self.replica.sync()
        if handoff.recall(self.replica, kind):
            self._changed()

    async def transfer(self, id: str, to: Host) -> None:
        seq = self.replica.migrating_out.get(id)
        if seq is None:
            raise TransferError(f"replica {self.id} has no KV of request {id!r} any more")
        kv = await self._engine.export_kv(seq.block_ids, seq.cached)
        await to.receive(id, kv)
        self.release(id)

    async def receive(self, id: str, kv: KV) -> None:
        seq = self.replica.migrating_in.get(id)
        if seq is not None:
            await self._engine.import_kv(range(self.replica.limits.blocks(kv.tokens)), kv)
        if seq is None or self.replica.migrating_in.get(id) is not seq:
            raise TransferError(f"replica {self.id} expects no KV of request {id!r} any more")
        self.replica.sync()
        self._tell(handoff.arrive(self.replica, id, kv.size, self.clock.time))

    def release(self, id: str) -> None:
        self.replica.sync()
        if handoff.release(self.replica, id):
            self._changed()

    def _refreshed(self) -> View:
        return self.replica.view(self.clock.time)

    def _synced(self) -> View:
        self.replica.sync()
        return self._live_view

    # ----------------------------------------------------------------- time passes

    def complete(self, version: int) -> bool:
        """Ends the run, whose last step is over; returns False if something came between."""
        replica, run = self.replica, self.replica.run
        if run is None or version != self._version:
            return False
        replica.book(run)
        now = run.ends[-1]
        if self._on_run is not None:
            self._on_run(self.id, run)
        last = run.steps - 1
        emitted, self._emitted = self._emitted, None
        shape = None
        if self._report_this_step:
            shape = run.shape(last) if emitted is None else self._shape
        looked_at: Sequence[Seq] = ()
        if emitted is None:
            if self._milestones and self._milestones[0][0] <= self._steps.tick:
                looked_at = self._reached_milestones()
            emitted = self._due(run, looked_at) if run.chunks or looked_at else NOTHING
        is_busy = bool(emitted or run.chunks or replica.idle_decodes or replica.ending)
        events = replica.end(emitted, now)
        if shape is not None:
            seconds = now - (run.ends[last - 1] if last else run.begin)
            if self._learns:
                replica.latency.update(Sample(shape, seconds))
            self._outbox.append(Stepped(now, self.id, shape, seconds))
        self._outbox += events
        run.ends = []
        self._plan_is_due = True
        if run.chunks and not self._refresh:
            self.view = self._at_once
        for seq in looked_at:
            if seq.decoding and seq.milestone < 0:
                self._set_milestone(seq)
        if is_busy and (replica.waiting or replica.prefilling):
            self._repeat_steps = 0
        return True

    def plan(self, version: int) -> None:
        """Asks the policy, and begins what it says. Does nothing for an outdated `version`, unless a plan is due."""
        replica = self.replica
        if replica.run is not None or not (self._plan_is_due or version == self._version):
            return
        self._plan_is_due = False
        self._version += 1
        now = self.clock.time
        if replica.recalled:
            self._outbox += handoff.hand_back(replica, now)
        if replica.idle:
            self._flush()
            return
        if self._repeat_steps > 0 and self._pool.blocks() <= replica.kv.free:  # the last plan stands
            self._start(replica.go_on(now), True)
            if self._outbox:
                self._flush()
            return
        if self._refresh:
            replica.view(now)
        plan = self._ask()
        run, events = replica.begin(plan, now, self._policy)
        self._outbox += events
        if run is not None:
            self._start(run, plan.decode_all)
            self._flush()
            return
        self._flush()
        self._repeat_steps = 0  # nothing was run that could go on
        if self._plan_is_due:
            return
        if events:
            self._plan_at(now)
        elif plan.wake_at is not None:
            self.clock.add(plan.wake_at, PLAN, self, self._version)

    def _ask(self) -> Plan:
        """Returns the policy's plan, and notes how often it may be repeated."""
        view = self._live_view
        try:
            plan = self.scheduler.plan(view)
            changes = plan.preempt or plan.drop or plan.demote or plan.promote
            again = plan.repeat_steps and plan.decode_all and not changes
        except PlanError:
            raise
        except Exception as error:
            where = f"policy {self._policy!r}, replica {self.id!r}, t={view.now:.6f}"
            raise PlanError(f"{where}: {type(error).__name__}: {error}") from error
        self._repeat_steps = plan.repeat_steps + 1 if again else 0
        return plan

    def _start(self, run: StepRun, is_repeated: bool) -> None:
        """Begins the run: decides how many steps it has, more than one only if its plan `is_repeated`, and when each
        ends.
        """
        wants_every = self._every_step()
        self._report_this_step = wants_every or self._learns or self._step_by_step
        if self._step_by_step or self._needs_engine:
            self._run_on_engine(run)
        else:
            most = 1
            if is_repeated and self._repeat_steps > 1 and not (self._refresh or wants_every):
                most = min(self._repeat_steps, MAX_STEPS_AHEAD, self._next_milestone() - run.tick)
                for chunk in run.chunks:
                    most = min(most, -(-chunk.total // chunk.tokens))
                kv = self.replica.kv
                assert isinstance(kv, KVCounts)
                most = kv.steps_that_fit(run, most)
                if run.chunks and most > 1:
                    self.view = self._synced
            self._repeat_steps -= most
            self._times.take(run, most)
        self._end_with(run)

    def _end_with(self, run: StepRun) -> None:
        """Lets the clock call `complete` when the run's last step ends."""
        self._version += 1
        since = run.ends[-2] if len(run.ends) > 1 else run.begin
        self.clock.add(run.ends[-1], COMPLETION, self, self._version, since)

    def _run_on_engine(self, run: StepRun) -> None:
        """Lets the engine run a single step, which says what each sequence gets."""
        replica, engine = self.replica, self._engine
        self._repeat_steps = 0
        batch = replica.batch(run)
        running, place = replica.running, engine.place
        for entry in batch.entries:
            seq = running[entry.seq]
            output = seq.output
            place(seq.request, seq.stage, output, seq.earlier_output + output)
        result = engine.run(batch)
        self._emitted, self._shape = result.emitted, batch.shape
        run.ends = [run.begin + result.seconds * self._times.factor(run.tick)]

    # ----------------------------------------------------------------- first and last tokens of a stage

    def _target(self, seq: Seq) -> int:
        """Returns the output tokens of a sequence's stage: what was drawn for it, unless max_tokens comes first."""
        left = seq.request.sampling.max_tokens - seq.earlier_output
        targets = self._targets.get(seq.id)
        return left if targets is None else min(left, targets[seq.stage])

    def _set_milestone(self, seq: Seq) -> None:
        """Notes the step that brings a sequence's first, or else its last, token of the stage."""
        if self._step_by_step:
            return
        tick = self._steps.tick
        at = seq.milestone = tick + 1 if seq.first_token_at is None else self._target(seq) - seq._output
        heappush(self._milestones, (at, next(self._milestone_order), seq))

    def _reached_milestones(self) -> list[Seq]:
        """Takes and returns the sequences whose first or last token of a stage has come."""
        reached: list[Seq] = []
        milestones, tick = self._milestones, self._steps.tick
        while milestones and milestones[0][0] <= tick:
            at, _, seq = heappop(milestones)
            if seq.milestone == at and seq.decoding and not seq.ended:
                seq.milestone = -1  # it may be there twice, having rested
                reached.append(seq)
        return reached

    def _next_milestone(self) -> int:
        """Returns a step before which none brings a first or last token of a stage."""
        milestones = self._milestones
        if milestones and milestones[0][0] <= self._steps.tick:
            for seq in self._reached_milestones():  # of a step that the engine ran
                self._set_milestone(seq)
        return milestones[0][0] if milestones else NEVER

    def _due(self, run: StepRun, looked_at: Sequence[Seq]) -> dict[str, Emitted]:
        """Returns what `looked_at` and completed prefills get, in the batch's order."""
        came = [(seq, seq.output) for seq in looked_at]
        came += [(c.seq, c.seq.output + 1) for c in run.chunks if not c.seq.ended and c.seq.pending == 0]
        if len(came) > 1:  # decodes in order of start, then those the plan named
            place = {seq.id: i for i, seq in enumerate(run.order)}
            came.sort(key=lambda item: (place.get(item[0].id, -1), item[0].start_order))
        return {seq.id: self._output_of(seq, output) for seq, output in came}

    def _output_of(self, seq: Seq, output: int) -> Emitted:
        if output < self._target(seq):
            return ONE_TOKEN
        if seq.earlier_output + output >= seq.request.sampling.max_tokens:
            return LENGTH
        return STOP if seq.stage + 1 == len(seq.request.stages) else STAGE_DONE

    # ----------------------------------------------------------------- telling

    def _listen_to(self, request: Request, refused: Sequence[Event]) -> None:
        """Gives the engine a new request whose tokens it must check one by one."""
        if not refused and (request.sampling.stop or request.sampling.stop_ids):
            self._engine.add(request)
            self._needs_engine.add(request.id)

    def _forget(self) -> None:
        """Lets the engine forget requests that are gone: one handed off may come back."""
        self.replica.sync()
        if ids := self.replica.take_gone_ids():
            self._engine.forget(ids)
            self._needs_engine.difference_update(ids)

    def _changed(self) -> None:
        """Lets the run end with the step that is under way, and then asks the policy, since something came."""
        self._repeat_steps = 0
        if self.replica.run is not None:
            self.cut()
        elif not self._plan_is_due:
            self._plan_at(self.clock.time)

    def report_steps(self) -> None:
        """Reports each step, from the one under way on."""
        self._report_this_step = True
        self.replica.sync()
        self.cut()

    def cut(self) -> None:
        """Lets no step of the run begin after the one under way. The steps that are over are booked."""
        run, now = self.replica.run, self.clock.time
        if run is None or run.steps == 1:
            return
        keep = run.steps_done + (run.steps_done == 0 or run.ends[run.steps_done - 1] < now)
        if keep < run.steps:
            self._repeat_steps += run.steps - keep if self._repeat_steps else 0
            del run.ends[keep:]
            run.steps = keep
            self._end_with(run)

    def _plan_at(self, when: float) -> None:
        self._plan_is_due = True
        self.clock.add(when, PLAN, self, self._version)

    def _tell(self, events: Sequence[Event]) -> None:
        """Publishes what a call from outside caused, after what was still to be told."""
        self._outbox += events
        if events:
            self._flush()
        self._changed()

    def _flush(self) -> None:
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        for event in events:
            self._emit(event)
        self.scheduler.observe(events)

    def clear(self) -> None:
        """Clears the log: the host is in reference cycles, and what it holds would wait for collection."""
        self.replica.log.clear()
