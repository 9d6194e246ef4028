"""The cluster: places, cancels, counts and refuses requests. Each one offered ends in exactly one Finished."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from rubato.core.clock import PLAN, Clock
from rubato.core.events import (
    Event,
    Finished,
    HandedOff,
    Left,
    Lost,
    Offered,
    Placed,
    Preempted,
    Stepped,
    Tokens,
    Transferred,
)
from rubato.core.interfaces import (
    Autoscaler,
    Host,
    LengthPredictor,
    NotReadyError,
    Router,
    SeqView,
)
from rubato.core.request import NO_REPLICA, NO_REPLICA_TIMEOUT_S, SATURATED, SHUTTING_DOWN, Outcome, Request
from rubato.core.slo import StageTimes, judge
from rubato.fleet.event_bus import EventBus, Listener, without_tokens
from rubato.fleet.request_table import RequestTable
from rubato.fleet.router_calls import Shares
from rubato.fleet.routing import Routing
from rubato.fleet.scaling import FleetScaling
from rubato.fleet.transfers import KVTransfers
from rubato.policy_kit.fair_share import FairShare
from rubato.replica.sequence import Seq

log = logging.getLogger(__name__)

FREES_PLACES = (Finished, HandedOff)
FREES_KV = (Stepped, Preempted)
SLO_RESERVE_DIVISOR = 10  # a tenth of `max_in_flight` is reserved for requests with an SLO
MAX_LOSSES = 2  # a request ends when this many replicas were lost while they ran it
MAX_RECENT_COMPLETIONS = 64  # from which `retry_after` computes the rate
FREES_REPLICA = (Finished, HandedOff, Transferred, Lost)  # after these a replica may be empty

HostLost = Callable[[str, BaseException, Sequence[Request]], None]  # which, why, and what must go elsewhere
HostMaker = Callable[[str, Listener, HostLost], Host]  # given its id, where its events go, and whom to tell of its loss


class Cluster:
    """Hosts behind a router, in this process or elsewhere.

    `dead` is set when no host is left and none may come, or when the router fails several times in a row.

    Args:
        makers: build the hosts r0, r1, ...; each gets a callback for events and one for its loss.
        router: places the requests.
        max_in_flight: requests beyond it are refused as saturated (None: no bound), best effort beyond nine tenths.
        slo_rule: how requests are judged.
        fair: the tenants' shares; None: first come, first served. If it raises, all held requests pass in order, and
            requests beyond `max_in_flight` are refused, whatever their tenant.
        lengths: predicts output lengths for the router; hosts in this process share it, and teach it.
        autoscaler: adds and drains hosts; `extra_host` must be given with it.
        extra_host: makes the hosts that the autoscaler adds.

    Raises:
        ValueError: the router's `wants` names something unknown.
    """

    def __init__(
        self, makers: Sequence[HostMaker], router: Router, clock: Clock, *, max_in_flight: int | None = None,
        slo_rule: str = "deadline", fair: FairShare | None = None, lengths: LengthPredictor | None = None,
        autoscaler: Autoscaler | None = None, extra_host: HostMaker | None = None,
    ) -> None:  # fmt: skip
        if (autoscaler is None) != (extra_host is None):
            raise ValueError("give an autoscaler and what makes its hosts (`extra_host`), or neither")
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: give at least 1, or none for no bound")
        self.hosts: dict[str, Host] = {}
        self.clock = clock
        self.offered = 0
        self.finished = 0
        self.dead = asyncio.Event()
        self.error: BaseException | None = None
        self._max_in_flight = max_in_flight
        self._slo_rule = slo_rule
        self._requests = RequestTable(clock, lengths)
        self._listeners = EventBus()
        self._shares = Shares(fair, self._listeners)
        self._routing = Routing(
            router, self.hosts, self._requests, self._shares, clock, submit=self._submit, end=self._end,
            end_cancelled=self._end_cancelled, give_up=self._give_up, emit=self._emit,
        )  # fmt: skip
        hosts = [make(f"r{i}", self._emit, self._lose_host) for i, make in enumerate(makers)]
        self.hosts.update({host.id: host for host in hosts})
        self._scaling = self._routing.scaling = FleetScaling(
            self.hosts, self._requests, clock, autoscaler,
            None if extra_host is None else lambda id: extra_host(id, self._emit, self._lose_host),
            check=self._routing.router.check_needs, emit=self._emit, on_join=self._routing.request_routing,
        )  # fmt: skip
        self._transfers = KVTransfers(
            self.hosts, self._requests, clock,
            fail=lambda seq, why: self._end(seq, "failed", why), on_kv_freed=self._handle_kv_freed,
        )  # fmt: skip
        self._cancel_reasons: dict[str, str] = {}  # what a host was asked to cancel, and why
        if autoscaler is not None:
            observe = autoscaler.observe
            self._listeners.add(without_tokens(lambda event: observe((event,))))
        self._request_listeners: dict[str, Listener] = {}
        self._completion_times: deque[float] = deque(maxlen=MAX_RECENT_COMPLETIONS)  # when each ended
        self._is_draining = False
        self._left_hosts: list[Host] = []
        self._empty = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def unplaced_requests(self) -> Sequence[SeqView]:
        """The requests at no replica, in order of arrival."""
        return list(self._requests.unplaced.values())

    @property
    def router(self) -> str:
        """The name of the policy that routes."""
        return self._routing.router.policy

    @property
    def draining_replicas(self) -> Collection[str]:
        """Ids of replicas that take no new requests."""
        return self._scaling.draining

    @property
    def wants_steps(self) -> bool:
        """Whether the router is asked after each step."""
        return self._routing.wants_steps

    @property
    def listener_errors(self) -> Mapping[str, int]:
        """How many events each listener failed on, by name; also how often fair shares failed."""
        return self._listeners.errors

    async def start(self) -> None:
        """Starts the hosts. With an autoscaler, hosts that are not ready are left out, unless all are.

        Raises:
            ValueError: the router wants more replicas, or a capability that one of them lacks.
            NotReadyError: a host is not ready.
        """
        router = self._routing.router
        roles = router.roles(list(self.hosts))
        hosts = list(self.hosts.values())
        results = await asyncio.gather(*(host.start() for host in hosts), return_exceptions=True)
        failed = [(host, error) for host, error in zip(hosts, results, strict=True) if error is not None]
        for host, error in failed:
            if not (isinstance(error, NotReadyError) and self._scaling.can_add and len(failed) < len(hosts)):
                raise error
            log.warning("replica %s is left out for now: %s", host.id, error)
            del self.hosts[host.id]
            await host.close()
        self._routing.assign_all(router.roles(list(self.hosts)) if failed else roles)
        self._scaling.ask_soon()

    def begin(self) -> None:
        """As `start`, for hosts that need no start."""
        self._routing.assign_all(self._routing.router.roles(list(self.hosts)))

    def listen(self, listener: Listener, *types: type[Event]) -> None:
        """Adds a listener, which gets every event of these types (none: of all) from now on, in order, on the event
        loop."""
        self._listeners.add(listener, *types)

    def offer(self, request: Request, listener: Listener | None = None) -> None:
        """Takes a request.

        Args:
            listener: gets the events of the request.

        Raises:
            ValueError: a request with this id is in flight already.
        """
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in flight already: ids must be unique")
        now = self.clock.now()
        is_full = self._max_in_flight is not None and self.in_flight >= self._max_in_flight - (
            self._max_in_flight // SLO_RESERVE_DIVISOR if request.best_effort else 0
        )
        if is_full and self._max_in_flight is not None:
            is_full = self._shares.is_beyond(request, self._max_in_flight, now)
        self.offered += 1
        seq = self._requests.hold(request)
        self._shares.add(request, now)
        if listener is not None:
            self._request_listeners[request.id] = listener
        self._emit(Offered(now, request.id, request))
        if self._is_draining:
            self._end(seq, "refused", SHUTTING_DOWN)
        elif is_full or not (self.hosts or self._routing.why_stopped):
            self._end(seq, "refused", SATURATED if is_full else NO_REPLICA)
        else:
            self._routing.request_routing()

    def refuse(self, request: Request, reason: str, listener: Listener | None = None) -> Finished:
        """Counts a request that a limit outside the cluster refuses, and tells listeners of it. Returns its end."""
        now = self.clock.now()
        end = Finished(now, request.id, "refused", reason, judge(request, [], "refused", self._slo_rule))
        self.offered += 1
        self.finished += 1
        for event in (Offered(now, request.id, request), end):
            self._listeners.publish(event, *([] if listener is None else [listener]))
        return end

    def cancel(self, id: str, reason: str = "client disconnected") -> None:
        """Ends a request early. Ignores an id that is not in flight: the request has just finished."""
        if id in self._requests.unplaced:
            self._end(self._requests.unplaced[id], "cancelled", reason)
        elif id in self._transfers:  # by now the target may have forgotten it, having begun afresh
            self._end(self._transfers.take_back(id), "cancelled", reason)
        elif id in self._requests.placements:
            self._cancel_reasons[id] = reason  # the host may have died unnoticed
            self.hosts[self._requests.placements[id][0]].cancel(id, reason)

    def resume(self, id: str) -> None:
        """Begins the next stage of a request: the tool that it waits for (`Stage.tool`) has returned. The request waits
        its turn where it is. Ignores a request that waits for no tool: it may have ended."""
        if id in self._requests.placements:
            self.hosts[self._requests.placements[id][0]].resume(id)

    def retry_after(self) -> float:
        """Returns the seconds until about half of the requests in flight will have finished, at the recent rate."""
        return retry_after(self._completion_times, self.in_flight)

    async def drain(self) -> None:
        """Refuses new requests; returns when none is in flight."""
        self._is_draining = True
        while self.in_flight:
            self._empty.clear()
            await self._empty.wait()

    async def close(self) -> None:
        """Stops at once: all requests in flight end as failed."""
        self._is_draining = True
        self._routing.close()
        self._left_hosts += self._scaling.close()
        self._transfers.take_back_all()
        # Close all at once: each may take its time limit, and the server must end in time.
        hosts = [*self.hosts.values(), *self._left_hosts]
        closed = await asyncio.gather(*(host.close() for host in hosts), return_exceptions=True)
        for host, error in zip(hosts, closed, strict=True):
            if error is not None:
                log.error("replica %s did not close", host.id, exc_info=error)
        for id in list(self._requests.placements):  # at one of these
            if (request := self._requests.take_from_replica(id)) is not None:
                self._end(self._requests.hold(request), "failed", "the server closed")
        for id in list(self._requests.unplaced):
            self.cancel(id, "the server closed")

    # ----------------------------------------------------------------- placing

    def _submit(self, seq: Seq, replica: str, now: float, why: str) -> bool:
        """Gives an unplaced request to a replica. Returns False when the replica has no memory for the KV that comes
        with the request."""
        request = seq.request
        source = request.handoff.source if request.handoff is not None and request.handoff.cached else None
        if source is not None and not self.hosts[replica].reserve(request):
            return False
        self._requests.place(request, replica)
        self._shares.place(request, now)
        self._emit(Placed(now, request.id, replica, why))
        if request.id not in self._requests.placements:  # a listener to `Placed` cancelled it
            return True
        if source is not None:
            self._transfers.start(request, source, replica)
            return True
        try:
            self.hosts[replica].submit(request)
            if request.id in self._cancel_reasons and request.id in self._requests.placements:  # by a listener
                self.hosts[replica].cancel(request.id, self._cancel_reasons[request.id])
        except Exception as error:  # a fault of ours: it must not stay in flight for ever, nor go unseen
            log.exception("replica %s could not take request %r", replica, request.id)
            if request.id in self._requests.placements:
                self._end(seq, "failed", f"replica {replica} could not take it: {type(error).__name__}: {error}")
        return True

    # ----------------------------------------------------------------- ends and events

    def _end(self, seq: Seq, outcome: Outcome, reason: str) -> None:
        """Ends an unplaced request."""
        progress = seq.request.progress
        times = () if progress is None else zip(progress.starts, progress.times, strict=True)
        stages = [StageTimes(*stage) for stage in times]
        delays = None if progress is None else progress.delays
        verdict = judge(seq.request, stages, outcome, self._slo_rule, delays, reason)
        output = sum(len(stage.tokens) for stage in stages)
        self._emit(Finished(self.clock.now(), seq.id, outcome, reason, verdict, output, seq.best_effort))

    def _end_cancelled(self) -> None:
        """Ends requests that a host returned after it was asked to cancel them."""
        for id in [id for id in self._cancel_reasons if id in self._requests.unplaced]:
            self._end(self._requests.unplaced[id], "cancelled", self._cancel_reasons[id])

    def _handle_kv_freed(self) -> None:
        """Handles freed KV memory of a replica, which may be draining."""
        if self._scaling.draining:
            self._scaling.remove_empty_hosts()
        self._routing.route_if_kv_freed()

    def _emit(self, event: Event) -> None:
        if type(event) is Tokens:  # most are, and nothing follows from them
            own = self._request_listeners.get(event.id)
            if own is None or not getattr(own, "hears_tokens", True):
                self._listeners.publish(event)
            else:
                self._listeners.publish(event, own)
            return
        is_end = False
        if isinstance(event, Finished):
            is_end = True
            self._record_end(event)
        elif isinstance(event, HandedOff):
            if event.id in self._transfers:  # the KV is given up that was about to move: its transfer fails
                return
            self._requests.take_back(event.request)
            self._requests.hold(event.request)
        elif isinstance(event, Transferred):
            self._transfers.end_transfer(event.id)
        # The router first: a listener may cancel, and effects must not be observed before their cause.
        own = self._request_listeners.pop(event.id, None) if is_end else self._request_listeners.get(event.id)
        observe = self._routing.router.observe
        if own is None:
            self._listeners.publish(event, observe)
        else:
            self._listeners.publish(event, observe, own)
        if is_end or isinstance(event, Offered):
            self._scaling.ask_soon()
        if self._scaling.draining and isinstance(event, FREES_REPLICA):
            self._scaling.remove_empty_hosts()
        if not self._requests.unplaced:
            if is_end and not self._requests.placements:
                self._completion_times.clear()  # idle time says nothing of its speed
                self._empty.set()
        elif isinstance(event, FREES_PLACES):
            self._routing.request_routing()
        elif isinstance(event, FREES_KV):
            self._routing.route_if_kv_freed()

    def _record_end(self, event: Finished) -> None:
        """Removes an ended request, with its transfer, its place and its part of its tenant's share."""
        request = self._requests.remove(event.id)
        self._cancel_reasons.pop(event.id, None)
        if request is not None:
            self._transfers.end(request)
        self._shares.end(event)
        self.finished += 1
        if event.outcome == "completed":
            self._completion_times.append(event.at)

    # ----------------------------------------------------------------- losses

    def _lose_host(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        """Handles the loss of a host: its requests go to other hosts with their output so far, or fail if there is
        none. Requests that it was asked to cancel end."""
        log.error("replica %s is lost (%s); %d requests go elsewhere", id, error, len(requests))
        self._left_hosts.append(self.hosts.pop(id))
        now = self.clock.now()
        self._emit(Left(now, id))
        for request in requests:
            if request.id in self._requests.placements and request.id not in self._transfers:  # (these: see below)
                self._requests.take_from_replica(request.id)
                self._requests.hold(self._transfers.without_lost_kv(request))
                self._shares.take_back(request, now)
                self._emit(Lost(now, request.id, id))
                self._end_after_losses(request.id)
        for seq in list(self._requests.unplaced.values()):
            if (request := self._transfers.without_lost_kv(seq.request)) is not seq.request:
                self._requests.hold(request)
        for moving in self._transfers.transfers_of(id):
            if moving in self._transfers:  # a listener may have cancelled it
                self._transfers.take_back(moving)
                self._emit(Lost(now, moving, id))
        self._scaling.ask_soon()
        if self._scaling.is_open:
            self._routing.request_routing()
        elif self._scaling.can_add or self.hosts:  # (those that drain take nothing)
            self.clock.call_at(now + NO_REPLICA_TIMEOUT_S, PLAN, self._end_if_alone)
        else:
            self._give_up(f"no replica is left: {error}", error)

    def _end_after_losses(self, id: str) -> None:
        """Ends a request that may be the cause of lost replicas: it would take the next one down, too."""
        if (seq := self._requests.unplaced.get(id)) is None or not (losses := seq.request.losses):
            return
        if losses >= MAX_LOSSES:
            log.error("request %s ends: %d replicas were lost while they ran it", id, losses)
            self._end(seq, "failed", f"{losses} replicas were lost while they ran it")
        elif seq.request.handoff is not None and losses + seq.request.handoff.failures >= MAX_LOSSES:
            self._end(seq, "failed", "a replica was lost while it ran it, and another failed at it")

    def _end_if_alone(self) -> None:
        """Ends all held requests if no replica has replaced the lost ones. Later requests may find one."""
        if not self._scaling.is_open and not self._routing.why_stopped:
            for seq in list(self._requests.unplaced.values()):
                self._end(seq, "failed", f"no replica has come back for {NO_REPLICA_TIMEOUT_S:g} s")

    def _give_up(self, why: str, error: BaseException) -> None:
        """Ends unplaced and later requests: nothing can be placed any more."""
        self.error = error
        self._scaling.stop_asking()
        self.dead.set()
        self._routing.stop(why)


def retry_after(completed: Sequence[float], in_flight: int) -> float:
    """Returns the seconds until about half of the requests in flight will have finished, at the rate of the `completed`
    times."""
    if len(completed) < 2 or completed[-1] <= completed[0]:
        return 1.0
    rate = (len(completed) - 1) / (completed[-1] - completed[0])
    return max(1.0, in_flight / 2 / rate)
