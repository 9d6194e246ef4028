"""A fleet as one: placing, cancelling, counting, refusing. Every request offered ends in exactly one Finished."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rubato.clock import PLAN, Clock
from rubato.fairness import FairShare
from rubato.interfaces import Engine, Host, LatencyModel, LengthPredictor, Router
from rubato.policies import load, load_router
from rubato.slo import judge
from rubato.types import Event, Finished, Lost, Offered, Outcome, Placed, Request
from rubato.worker import LocalHost

log = logging.getLogger(__name__)

RECENT = 64  # completions that the estimate of Retry-After looks back on

Listener = Callable[[Event], None]
HostLost = Callable[[str, BaseException, Sequence[Request]], None]  # which, why, and what must go elsewhere
HostMaker = Callable[..., Host]  # (id, *, emit, lost, policy, settings, options): the host of that id


class Listeners:
    """Who is told of every event, in order, on the event loop."""

    def __init__(self) -> None:
        self._all: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._all.append(listener)

    def tell(self, event: Event) -> None:
        for listener in list(self._all):
            try:
                listener(event)
            except Exception:  # a full disk under the event log must not cost a request its end
                log.exception("listener %r failed and gets no more events", listener)
                self._all.remove(listener)


class Cluster:
    """Hosts behind a router, in this process or elsewhere.

    The hosts are built by `make_hosts`, which is given where to send events and where to report the loss of a host:
    its requests go to the others. `dead` is set when none is left. max_in_flight: requests beyond it are refused as
    saturated (None: no bound). fair: the tenants' shares, None for first come, first served.
    """

    def __init__(
        self,
        make_hosts: Callable[[Listener, HostLost], Sequence[Host]],
        router: Router,
        clock: Clock,
        *,
        max_in_flight: int | None = None,
        rule: str = "deadline",
        fair: FairShare | None = None,
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: give at least 1, or none for no bound")
        self.hosts = {host.id: host for host in make_hosts(self._emit, self._lost)}
        self.clock = clock
        self.offered = 0
        self.finished = 0
        self.dead = asyncio.Event()
        self.error: BaseException | None = None
        self._router = router
        self._max_in_flight = max_in_flight
        self._rule = rule
        self._fair = fair
        self._timer: asyncio.TimerHandle | None = None
        self._held: dict[str, Request] = {}
        self._placed: dict[str, tuple[str, Request]] = {}
        self._groups: dict[str, tuple[str, set[str]]] = {}  # where a group is served, and who of it is left
        self._listeners = Listeners()
        self._own: dict[str, Listener] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._draining = False
        self._placing = False
        self._gone: list[Host] = []
        self._empty = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._held) + len(self._placed)

    async def start(self) -> None:
        await asyncio.gather(*(host.start() for host in self.hosts.values()))

    def listen(self, listener: Listener) -> None:
        """Every event from now on, in order, on the event loop."""
        self._listeners.add(listener)

    def offer(self, request: Request, listener: Listener | None = None) -> None:
        """Take a request; `listener` gets its events. Raises ValueError for an id that is in flight already."""
        if request.id in self._held or request.id in self._placed:
            raise ValueError(f"request id {request.id!r} is in flight already: ids must be unique")
        full = self._max_in_flight is not None and self.in_flight >= self._max_in_flight
        if full and self._fair is not None and self._max_in_flight is not None:
            # a tenant with less than its share of the places gets one: another's flood must not take them all
            full = self._fair.beyond_share(request, self._max_in_flight, self.clock.now())
        self.offered += 1
        self._held[request.id] = request
        if self._fair is not None:
            self._fair.enter(request, self.clock.now())
        if listener is not None:
            self._own[request.id] = listener
        now = self.clock.now()
        self._emit(Offered(now, request.id, request))
        if self._draining:
            self._refuse(request, "rejected-shutting-down")
        elif full:
            self._refuse(request, "rejected-saturated")
        elif not self.hosts:
            self._end(request, "failed", f"no replica is left: {self.error}")
        else:
            self._place()

    def cancel(self, id: str, reason: str = "client disconnected") -> None:
        """End a request early; an id that is not in flight is ignored (it has just finished)."""
        if id in self._held:
            self._end(self._held[id], "cancelled", reason)
        elif id in self._placed:
            self.hosts[self._placed[id][0]].cancel(id, reason)

    def retry_after(self) -> float:
        """Seconds until about half of what is in flight will have finished, at the rate of recent completions."""
        if len(self._recent) < 2 or self._recent[-1] <= self._recent[0]:
            return 1.0
        rate = (len(self._recent) - 1) / (self._recent[-1] - self._recent[0])
        return max(1.0, self.in_flight / 2 / rate)

    async def drain(self) -> None:
        """Refuse what comes from now on; return when nothing is in flight."""
        self._draining = True
        while self.in_flight:
            self._empty.clear()
            await self._empty.wait()

    async def close(self) -> None:
        """Stop at once: whatever is in flight ends as failed."""
        self._draining = True
        self._ask_again(None)
        for host in [*self.hosts.values(), *self._gone]:
            await host.close()
        for id in list(self._held):
            self.cancel(id, "the server closed")

    # ----------------------------------------------------------------- parts

    def _place(self) -> None:
        """Ask the router until it places no more. Placing may end requests, which asks again: not in the middle."""
        if self._placing or not self.hosts:
            return
        self._placing = True
        try:
            while self._held and self._place_once():
                pass
        finally:
            self._placing = False

    def _place_once(self) -> bool:
        now = self.clock.now()
        views = [host.view() for host in self.hosts.values()]
        held = list(self._held.values())
        if self._fair is not None:
            held = self._fair.open(held, views, now)
            self._ask_again(self._fair.wake_at)
        joining = [r for r in held if r.group in self._groups]
        for request in joining:
            if request.id in self._held and request.group in self._groups:
                self._submit(request, self._groups[request.group][0], now)
        held = [r for r in held if r.group not in self._groups and r.id in self._held]
        if not held:
            return bool(joining)
        dispatch = self._router.place(held, views, now)
        for id, reason in dispatch.reject.items():
            self._refuse(self._held[id], reason)
        for id, replica in dispatch.place.items():
            if id in self._held and replica in self.hosts:  # placing one may end another, or find its host gone
                request = self._held[id]
                self._submit(request, self._groups.get(request.group, (replica,))[0], now)
        return bool(joining or dispatch.reject or dispatch.place)

    def _ask_again(self, when: float | None) -> None:
        """What is held may pass at this time though nothing happens until then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self.clock.call_at(when, PLAN, self._place)

    def _submit(self, request: Request, replica: str, now: float) -> None:
        del self._held[request.id]
        self._placed[request.id] = (replica, request)
        if request.group:
            self._groups.setdefault(request.group, (replica, set()))[1].add(request.id)
        if self._fair is not None:
            self._fair.placed(request.id)
        self._emit(Placed(now, request.id, replica))
        self.hosts[replica].submit(request)

    def _forget(self, id: str) -> None:
        """It is placed no longer."""
        placed = self._placed.pop(id, None)
        if placed is None or placed[1].group not in self._groups:
            return
        _, left = self._groups[placed[1].group]
        left.discard(id)
        if not left:
            del self._groups[placed[1].group]

    def _refuse(self, request: Request, reason: str) -> None:
        self._end(request, "refused", reason)

    def _end(self, request: Request, outcome: Outcome, reason: str) -> None:
        """End a request that no host has."""
        verdict = judge(request, [], outcome, self._rule)
        self._emit(Finished(self.clock.now(), request.id, outcome, reason, verdict))

    def _emit(self, event: Event) -> None:
        last = isinstance(event, Finished)
        if isinstance(event, Finished):
            self._held.pop(event.id, None)
            self._forget(event.id)
            if self._fair is not None:
                self._fair.finished(event.id, event.output, event.at)
            self.finished += 1
            if event.outcome == "completed":
                self._recent.append(event.at)
        own = self._own.pop(event.id, None) if last else self._own.get(event.id)
        if own is not None:
            own(event)
        self._listeners.tell(event)
        self._router.observe((event,))
        if last:
            if not self.in_flight:
                self._empty.set()
            self._place()

    def _lost(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        """A host is gone. What it served goes elsewhere, with what it had received; without another host it fails."""
        log.error("replica %s is lost (%s); %d requests go elsewhere", id, error, len(requests))
        self._gone.append(self.hosts.pop(id))
        now = self.clock.now()
        for request in requests:
            if request.id in self._placed:
                self._forget(request.id)
                self._held[request.id] = request
                if self._fair is not None:
                    self._fair.returned(request.id)
                self._emit(Lost(now, request.id, id))
        if self.hosts:
            self._place()
            return
        self.error = error
        self.dead.set()
        for request in list(self._held.values()):
            self._end(request, "failed", f"no replica is left: {error}")


def cluster_of(
    makers: Sequence[HostMaker],
    clock: Clock,
    *,
    policy: str,
    settings: Mapping[str, object] | None = None,
    router: str = "least_loaded",
    router_settings: Mapping[str, object] | None = None,
    lengths: LengthPredictor | None = None,
    max_in_flight: int | None = None,
    rule: str = "deadline",
    prefix_cache: bool = False,
    fair: FairShare | None = None,
) -> Cluster:
    """A cluster of hosts r0, r1, ..., one of each maker, with one policy and one router.

    Raises PolicyError for an unknown policy, router or setting.
    """
    load(policy, settings)  # an error here, also where hosts load their own in another process
    options = {"lengths": lengths, "rule": rule, "prefix_cache": prefix_cache}

    def hosts(emit: Listener, lost: HostLost) -> list[Host]:
        return [
            make(f"r{i}", emit=emit, lost=lost, policy=policy, settings=settings, options=options)
            for i, make in enumerate(makers)
        ]

    placing = load_router(router, router_settings)
    return Cluster(hosts, placing, clock, max_in_flight=max_in_flight, rule=rule, fair=fair)


def local_cluster(engines: Sequence[Engine], latencies: Sequence[LatencyModel], clock: Clock, **given: Any) -> Cluster:
    """A cluster of hosts in this process, one an engine, each with a Scheduler and a latency model of its own.

    given: as `cluster_of` takes and raises; also ValueError for an engine that lacks what the policy needs.
    """

    def maker(engine: Engine, latency: LatencyModel) -> HostMaker:
        def make(id: str, *, emit: Listener, lost: HostLost, policy: str, settings: Mapping[str, object] | None,
                 options: Mapping[str, Any]) -> Host:  # fmt: skip
            scheduler = load(policy, settings)
            return LocalHost(id, engine, scheduler, latency, clock, emit=emit, lost=lost, policy=policy, **options)

        return make

    return cluster_of([maker(*pair) for pair in zip(engines, latencies, strict=True)], clock, **given)
