"""The cluster: places, cancels, counts and refuses requests. Each one offered ends in exactly one Finished."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rubato.core.capabilities import cure
from rubato.core.clock import PLAN, Clock, Handle
from rubato.core.events import (
    Assigned,
    Demoted,
    Event,
    Finished,
    HandedOff,
    Left,
    Lost,
    Offered,
    Placed,
    Preempted,
    Stepped,
    Transferred,
)
from rubato.core.interfaces import (
    Assigner,
    Autoscaler,
    Dispatch,
    Host,
    LengthPredictor,
    Router,
    SeqView,
    TransferError,
    View,
)
from rubato.core.plan import Role
from rubato.core.request import SATURATED, Outcome, Progress, Request
from rubato.core.slo import StageTimes, judge
from rubato.fleet.event_bus import EventBus, Listener
from rubato.fleet.fair_gate import FairGate
from rubato.fleet.fair_share import FairShare
from rubato.fleet.local_host import FAILURES
from rubato.fleet.scaling import FleetScaling
from rubato.replica.plan_check import PlanError, check_dispatch
from rubato.replica.sequence import Seq

log = logging.getLogger(__name__)

RECENT = 64  # completions that the estimate of Retry-After looks back on

FREES_PLACES = (Finished, HandedOff)
FREES_KV = (Stepped, Preempted)
LEAVES = (Finished, HandedOff, Transferred, Lost)  # after which nothing may be left at a replica
WANTS = frozenset({"step"})  # what a router may ask for in `wants`

HostLost = Callable[[str, BaseException, Sequence[Request]], None]  # which, why, and what must go elsewhere
HostMaker = Callable[[str, Listener, HostLost], Host]  # of that id; told where to send events and to report its loss


class Cluster:
    """Hosts behind a router, in this process or elsewhere.

    The hosts r0, r1, ... are built by `makers`, which are given where to send events and where to report the loss of a
    host: its requests go to the others. `dead` is set when none is left, or the router fails time after time.
    max_in_flight: requests beyond it are refused as saturated (None: no bound). fair: the tenants' shares, None for
    first come, first served. lengths: what the router sees as `predicted`; hosts in this process have the same one, and
    teach it. autoscaler, extra_host: what adds and drains hosts, and what makes them. Raises ValueError for a router
    that wants what there is not.
    """

    def __init__(
        self,
        makers: Sequence[HostMaker],
        router: Router,
        clock: Clock,
        *,
        max_in_flight: int | None = None,
        slo_rule: str = "deadline",
        fair: FairShare | None = None,
        lengths: LengthPredictor | None = None,
        autoscaler: Autoscaler | None = None,
        extra_host: HostMaker | None = None,
    ) -> None:
        if (autoscaler is None) != (extra_host is None):
            raise ValueError("give an autoscaler and what makes its hosts (`extra_host`), or neither")
        self._policy = type(router).__module__.removeprefix("rubato.policies.").removeprefix("rubato policy ")
        wants: object = getattr(router, "wants", frozenset())
        if not isinstance(wants, frozenset):
            raise ValueError(f"router {self._policy!r}: `wants` is {wants!r}: give a frozenset")
        if unknown := wants - WANTS:
            raise ValueError(
                f"router {self._policy!r} wants {', '.join(sorted(unknown))}; known is {', '.join(sorted(WANTS))}"
            )
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: give at least 1, or none for no bound")
        hosts = [make(f"r{i}", self._emit, self._lost) for i, make in enumerate(makers)]
        self.hosts = {host.id: host for host in hosts}
        self.clock = clock
        self._scaling = FleetScaling(
            self.hosts, clock, autoscaler,
            None if extra_host is None else lambda id: extra_host(id, self._emit, self._lost),
            check=self._check_needs, emit=self._emit, joined=self._ask,
        )  # fmt: skip
        self.offered = 0
        self.finished = 0
        self.dead = asyncio.Event()
        self.error: BaseException | None = None
        self._why_dead = ""
        self._router = router
        self._max_in_flight = max_in_flight
        self._slo_rule = slo_rule
        self._lengths = lengths
        self._steps = "step" in wants  # asked when a step has ended, and once an instant
        self._soon: Handle | None = None  # to ask the router at the end of this instant
        self._timer: Handle | None = None
        self._wake_at: float | None = None  # as the router said
        self._opens_at: float | None = None  # when the tenants' shares let something pass
        self._failures = 0  # of the router, in a row
        self._order = 0
        self._held: dict[str, Seq] = {}
        self._moving: set[str] = set()  # held requests with KV at a replica; may wait for memory at another
        self._placed: dict[str, tuple[str, Request]] = {}
        self._transfers: dict[str, Handle] = {}
        self._cancelled: dict[str, str] = {}  # what a host was asked to cancel, and why
        self._groups: dict[str, tuple[str, set[str]]] = {}  # a group's replica, and its requests there
        self._listeners = EventBus()
        self._fair = None if fair is None else FairGate(fair, self._listeners)
        self._observed: Listener = lambda event: router.observe((event,))
        self._observed.__qualname__ = f"observe of router {self._policy!r}"  # what an error of it is reported as
        self._own: dict[str, Listener] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._draining = False
        self._placing = False
        self._gone: list[Host] = []
        self._empty = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._held) + len(self._placed)

    @property
    def wants_steps(self) -> bool:
        """Whether the router is asked after each step: its end may free KV memory that a held request waits for."""
        return self._steps or bool(self._moving)

    @property
    def listener_errors(self) -> Mapping[str, int]:
        """By its name, how many events a listener failed on; also how often the tenants' fair shares failed."""
        return self._listeners.errors

    async def start(self) -> None:
        """Raises ValueError when the router wants more replicas than there are, or needs what one of them lacks."""
        roles = self._roles()
        await asyncio.gather(*(host.start() for host in self.hosts.values()))
        self._assign(roles)

    def begin(self) -> None:
        """`start`, for hosts that have nothing to start."""
        self._assign(self._roles())

    def _roles(self) -> Mapping[str, Role]:
        return self._router.roles(list(self.hosts)) if isinstance(self._router, Assigner) else {}

    def _assign(self, roles: Mapping[str, Role]) -> None:
        for host in self.hosts.values():
            self._check_needs(host)
        for id, role in roles.items():
            self._give_role(id, role)

    def _check_needs(self, host: Host) -> None:
        if missing := self._router.needs - (supports := host.view().supports):
            raise ValueError(
                f"router {self._policy!r} needs {', '.join(sorted(missing))}, which replica {host.id!r} lacks (it "
                f"supports {', '.join(sorted(supports)) or 'nothing extra'}): {cure(missing)}"
            )

    def _give_role(self, replica: str, role: Role) -> None:
        self.hosts[replica].assign(role)
        self._emit(Assigned(self.clock.now(), replica, role))

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
        seq = self._hold(request)
        if self._fair is not None:
            self._fair.enter(request, self.clock.now())
        if listener is not None:
            self._own[request.id] = listener
        self._emit(Offered(self.clock.now(), request.id, request))
        if self._draining:
            self._refuse(seq, "rejected-shutting-down")
        elif full:
            self._refuse(seq, SATURATED)
        else:
            self._ask()

    def refuse(self, request: Request, reason: str, listener: Listener | None = None) -> Finished:
        """Offered, and ended at once by a limit that is not the cluster's: only listeners hear of it. Its end."""
        now = self.clock.now()
        end = Finished(now, request.id, "refused", reason, judge(request, [], "refused", self._slo_rule))
        self.offered += 1
        self.finished += 1
        for event in (Offered(now, request.id, request), end):
            if listener is not None:
                self._listeners.tell_one(listener, event)
            self._listeners.tell(event)
        return end

    def cancel(self, id: str, reason: str = "client disconnected") -> None:
        """End a request early; an id that is not in flight is ignored (it has just finished)."""
        if id in self._held:
            self._end(self._held[id], "cancelled", reason)
        elif id in self._transfers:  # by now the target may have forgotten it, having begun afresh
            self._end(self._take_back(id), "cancelled", reason)
        elif id in self._placed:
            self._cancelled[id] = reason  # the host may have died unnoticed
            self.hosts[self._placed[id][0]].cancel(id, reason)

    def resume(self, id: str) -> None:
        """The tool that a request waits for (`Stage.tool`) has returned: that stage begins, and waits its turn where
        the request is. Ignored for one that waits for none: it may have ended meanwhile."""
        if id in self._placed:
            self.hosts[self._placed[id][0]].resume(id)

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
        self._draining = self._placing = True  # nothing is placed any more
        self._wake_at = self._opens_at = None
        self._set_timer()
        self._gone += self._scaling.close()
        for id in list(self._transfers):
            self._take_back(id)
        # All at once: each may take its time limit, and a server has promised when it ends.
        hosts = [*self.hosts.values(), *self._gone]
        closed = await asyncio.gather(*(host.close() for host in hosts), return_exceptions=True)
        for host, error in zip(hosts, closed, strict=True):
            if error is not None:
                log.error("replica %s did not close", host.id, exc_info=error)
        for id in list(self._placed):  # at one of these
            if (request := self._forget(id)) is not None:
                self._end(self._hold(request), "failed", "the server closed")
        for id in list(self._held):
            self.cancel(id, "the server closed")

    # ----------------------------------------------------------------- adding and draining machines

    def drain_replica(self, id: str) -> None:
        """It takes nothing more, and leaves when nothing is there; what waits there comes back where hosts can hand it
        back. Raises ValueError for a replica that is not there, or is the last that serves."""
        self._scaling.drain(id, self._placed_at())

    def _placed_at(self) -> set[str]:
        return {replica for replica, _ in self._placed.values()}

    def _scale(self) -> None:
        if not self._why_dead:
            ask = self._scale if self.in_flight else None
            self._scaling.ask_now(list(self._held.values()), self._placed_at, ask)

    # ----------------------------------------------------------------- parts

    def _end_cancelled(self) -> None:
        """End what has come back from a host that was asked to cancel it."""
        for id in [id for id in self._cancelled if id in self._held]:
            self._end(self._held[id], "cancelled", self._cancelled[id])

    def _hold(self, request: Request) -> Seq:
        """It waits here, as a router sees it: with what it has received, and the KV that it would bring along."""
        self._order += 1
        seq = Seq(request, self._order, self.clock.now(), lengths=self._lengths)
        self._moving.discard(request.id)
        if request.handoff is not None:
            seq.cached = request.handoff.cached
            if seq.cached:
                self._moving.add(request.id)
        self._held[request.id] = seq
        return seq

    def _ask(self) -> None:
        """Something has happened that the router is asked at: now, or, one that is told of steps, when all has that
        happens at this instant."""
        if not self._steps or self._why_dead:
            self._place()
        elif self._soon is None and not self._placing:
            self._soon = self.clock.call_at(self.clock.now(), PLAN, self._place)

    def _place(self) -> None:
        """Ask the router until it places no more. Placing may end requests, which asks again: not in the middle."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._placing:
            return
        self._placing = True
        try:
            if self._why_dead:
                self._end_held()
            while self.hosts and self._held and self._place_once():
                pass
        finally:
            self._placing = False

    def _place_once(self) -> bool:
        if self._cancelled:
            self._end_cancelled()
        now = self.clock.now()
        views = self._scaling.open_views()
        held = list(self._held.values())
        if self._fair is not None:  # what was handed off has passed already
            new = {s.id: s for s in held if s.request.handoff is None}
            moved = [s for s in held if s.id not in new]
            held = moved + [new[r.id] for r in self._fair.open([s.request for s in new.values()], views, now)]
            self._opens_at = self._fair.wake_at
            self._set_timer()
        joining = [s for s in held if s.request.group in self._groups] if self._groups else []
        for seq in joining:
            if seq.id in self._held and seq.request.group in self._groups:
                self._submit(seq, self._groups[seq.request.group][0], now)
        if joining:
            held = [s for s in held if s.request.group not in self._groups and s.id in self._held]
        if not held:
            return bool(joining)
        dispatch = self._asked(held, views, now)
        if dispatch is None:
            return not self.dead.is_set()
        for replica, role in dispatch.assign.items():
            self._give_role(replica, role)
        for replica, kind in dispatch.recall.items():
            self.hosts[replica].recall(kind)
        # From here on each one may end another, or find a host gone.
        for id in dispatch.demote:
            if id in self._held:
                self._demote(self._held[id], now)
        for id, reason in dispatch.reject.items():
            if id in self._held:
                self._refuse(self._held[id], reason)
        placed = False
        for id, replica in dispatch.place.items():
            if id in self._held and replica in self.hosts:
                seq = self._held[id]
                to = self._groups.get(seq.request.group, (replica,))[0]
                placed |= self._submit(seq, to, now, dispatch.why.get(id, ""))
        return bool(joining or dispatch.reject or placed)

    def _asked(self, held: Sequence[Seq], fleet: Sequence[View], now: float) -> Dispatch | None:
        """What the router says. None where it fails or says what cannot be done: then all that it was asked about ends
        with the error, as a replica's requests do for a plan, and after so many failures in a row it is given up."""
        try:
            dispatch = self._router.place(held, fleet, now)
            check_dispatch(dispatch, held, fleet, now, self._policy, placed=len(self._placed), replicas=self.hosts)
        except Exception as error:  # whatever a policy may raise: told to every client, never hidden
            log.error("router %s failed; %d requests end", self._policy, len(held), exc_info=error)
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, PlanError):
                why = f"router {self._policy!r}, t={now:.6f}: {why}"
            for seq in held:
                if seq.id in self._held:
                    self._end(seq, "failed", why)
            self._failures += 1
            if self._failures >= FAILURES:
                last = f"router {self._policy!r}: {self._failures} dispatches in a row failed; the last: {why}"
                self._give_up(last, RuntimeError(last))
            return None
        self._failures = 0
        if dispatch.wake_at != self._wake_at:
            self._wake_at = dispatch.wake_at
            self._set_timer()
        return dispatch

    def _set_timer(self) -> None:
        """Ask again when the router said so, or when what is held passes though nothing happens until then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [t for t in (self._wake_at, self._opens_at) if t is not None]
        if times:
            self._timer = self.clock.call_at(min(times), PLAN, lambda: self._woken(min(times)))

    def _woken(self, at: float) -> None:
        self._timer = None
        self._wake_at, self._opens_at = (None if t == at else t for t in (self._wake_at, self._opens_at))
        self._place()

    def _demote(self, seq: Seq, now: float) -> None:
        """It is best effort from now on, also where it is placed."""
        had = seq.request.progress or Progress((seq.request.arrival,), ((),))
        seq.request = replace(seq.request, progress=replace(had, demoted=True))
        seq.demoted = True
        self._emit(Demoted(now, seq.id))

    def _submit(self, seq: Seq, replica: str, now: float, why: str = "") -> bool:
        """Give a held request to a replica; False when that has no KV memory for what the request brings along."""
        request = seq.request
        source = request.handoff.source if request.handoff is not None and request.handoff.cached else None
        if source is not None and not self.hosts[replica].reserve(request):
            return False
        del self._held[request.id]
        self._moving.discard(request.id)
        self._placed[request.id] = (replica, request)
        if request.group:
            self._groups.setdefault(request.group, (replica, set()))[1].add(request.id)
        if self._fair is not None and request.handoff is None:
            self._fair.placed(request.id, now)
        self._emit(Placed(now, request.id, replica, why))
        if request.id not in self._placed:  # a listener to `Placed` cancelled it
            return True
        if source is None:
            try:
                self.hosts[replica].submit(request)
                if request.id in self._cancelled and request.id in self._placed:  # when told of its placement
                    self.hosts[replica].cancel(request.id, self._cancelled[request.id])
            except Exception as error:  # a fault of ours: it must not stay in flight for ever, nor go unseen
                log.exception("replica %s could not take request %r", replica, request.id)
                if request.id in self._placed:
                    why = f"replica {replica} could not take it: {type(error).__name__}: {error}"
                    self._end(seq, "failed", why)
        else:
            moving = self._transfer(request.id, self.hosts[source], self.hosts[replica])
            self._transfers[request.id] = self.clock.spawn(moving, f"KV of {request.id}")
        return True

    async def _transfer(self, id: str, source: Host, target: Host) -> None:
        try:
            await source.transfer(id, target)
        except TransferError as error:  # one of the two began afresh
            log.warning("%s; it is placed again", error)
            self._take_back(id)
            self._place_moved()
        except Exception as error:  # an engine that cannot take or give this KV: told to the client, never hidden
            log.exception("the KV of request %r could not be moved", id)
            why = f"its KV could not be moved from {source.id} to {target.id}: {error}"
            self._end(self._take_back(id), "failed", why)
        else:
            self._place_moved()

    def _take_back(self, id: str) -> Seq:
        """Stop a transfer; the request is held again, with its KV where that still is."""
        task = self._transfers.pop(id)
        if task is not self.clock.current_task():
            task.cancel()
        replica, request = self._placed[id]
        self._forget(id)
        if replica in self.hosts:
            self.hosts[replica].release(id)
        return self._hold(self._with_kv(request))

    def _with_kv(self, request: Request) -> Request:
        """The request, its hand-off without KV if the replica that held it holds it no more."""
        handoff = request.handoff
        if handoff is None or not handoff.cached:
            return request
        if any(s.id == request.id for s in self._moving_at(handoff.source)):
            return request
        return replace(request, handoff=replace(handoff, cached=0))

    def _moving_at(self, replica: str) -> Sequence[SeqView]:
        return self.hosts[replica].view().moving if replica in self.hosts else ()

    def _forget(self, id: str) -> Request | None:
        """It is placed no longer, if it was."""
        _, request = self._placed.pop(id, (None, None))
        if request is not None and request.group in self._groups:
            _, left = self._groups[request.group]
            left.discard(id)
            if not left:
                del self._groups[request.group]
        return request

    def _refuse(self, seq: Seq, reason: str) -> None:
        self._end(seq, "refused", reason)

    def _end(self, seq: Seq, outcome: Outcome, reason: str) -> None:
        """End a request that no host has."""
        had = seq.request.progress
        stages = [] if had is None else [StageTimes(*stage) for stage in zip(had.starts, had.times, strict=True)]
        verdict = judge(seq.request, stages, outcome, self._slo_rule, None if had is None else had.delays)
        output = sum(len(stage.tokens) for stage in stages)
        self._emit(Finished(self.clock.now(), seq.id, outcome, reason, verdict, output, seq.best_effort))

    def _emit(self, event: Event) -> None:
        last = False
        if isinstance(event, Finished):
            last = True
            self._let_go(event.id)
            if self._fair is not None:
                self._fair.finished(event.id, event.outcome, event.output, event.at)
            self.finished += 1
            if event.outcome == "completed":
                self._recent.append(event.at)
        elif isinstance(event, HandedOff):
            self._forget(event.id)
            self._hold(event.request)
        elif isinstance(event, Transferred):
            self._transfers.pop(event.id, None)  # it is the target's: from now on a cancel is for that to carry out
        # The router first: a listener may cancel, and what that leads to is not to be observed before what led to it.
        self._listeners.tell_one(self._observed, event)
        if self._own:
            own = self._own.pop(event.id, None) if last else self._own.get(event.id)
            if own is not None:
                self._listeners.tell_one(own, event)
        self._listeners.tell(event)
        if last or isinstance(event, Offered):
            self._scaling.ask_soon(self._scale)
        if self._scaling.draining and isinstance(event, LEAVES):
            self._scaling.let_leave(self._placed_at())
        if not self._held:
            if last and not self._placed:
                self._empty.set()
        elif isinstance(event, FREES_PLACES):
            self._ask()
        elif isinstance(event, FREES_KV):
            self._place_moved()

    def _place_moved(self) -> None:
        """A step has ended, or KV memory may have come free: all that a request with KV of its own may be waiting for.
        With nothing placed, what ended was cancelled, and no other event will come."""
        if self.wants_steps or not self._placed:
            self._ask()

    def _let_go(self, id: str) -> None:
        """It has ended: so does its transfer, and its KV where it was handed off is free."""
        seq = self._held.pop(id, None)
        self._moving.discard(id)
        request = self._forget(id) if seq is None else seq.request
        self._cancelled.pop(id, None)
        task = self._transfers.pop(id, None)
        if task is not None and task is not self.clock.current_task():
            task.cancel()
        if request is not None and request.handoff is not None and request.handoff.source in self.hosts:
            self.hosts[request.handoff.source].release(id)

    def _lost(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        """A host is gone. What it served goes elsewhere, with what it had received; without another host it fails.
        What it was asked to cancel ends here."""
        log.error("replica %s is lost (%s); %d requests go elsewhere", id, error, len(requests))
        self._gone.append(self.hosts.pop(id))
        now = self.clock.now()
        self._emit(Left(now, id))
        for request in requests:
            if request.id in self._placed and request.id not in self._transfers:  # these are taken back below
                self._forget(request.id)
                self._hold(self._with_kv(request))
                if self._fair is not None and request.handoff is None:
                    self._fair.returned(request.id, now)
                self._emit(Lost(now, request.id, id))
        for seq in list(self._held.values()):
            if (request := self._with_kv(seq.request)) is not seq.request:
                self._hold(request)
        for moving in list(self._transfers):
            target, request = self._placed[moving]
            if request.handoff is not None and id in (target, request.handoff.source):
                self._take_back(moving)
                self._emit(Lost(now, moving, id))
        if self.hosts:
            self._ask()
        else:
            self._give_up(f"no replica is left: {error}", error)

    def _give_up(self, why: str, error: BaseException) -> None:
        """Nothing can be placed any more: whatever is held ends, also what comes later."""
        self.error = error
        self._why_dead = why
        placing, self._placing = self._placing, True
        self._end_cancelled()
        self.dead.set()
        self._end_held()
        self._placing = placing

    def _end_held(self) -> None:
        for seq in list(self._held.values()):
            self._end(seq, "failed", self._why_dead)
