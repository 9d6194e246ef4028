"""Calls to a cluster's router and to its tenants' shares: checks, and when to ask the router again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from rubato.core.capabilities import cure
from rubato.core.clock import PLAN, Clock, Handle
from rubato.core.events import Event, Finished
from rubato.core.interfaces import Assigner, Dispatch, Host, Router, SeqView, View
from rubato.core.plan import Role
from rubato.core.registry import name_of
from rubato.core.request import Request
from rubato.fleet.event_bus import EventBus
from rubato.policy_kit.candidates import Candidates
from rubato.policy_kit.fair_share import FairShare
from rubato.policy_kit.prefix_affinity import PrefixAffinity
from rubato.replica.plan_check import PlanError, check_dispatch
from rubato.replica.sequence import Seq

log = logging.getLogger(__name__)

WANTS = frozenset({"step"})  # what a router may ask for in `wants`


class RouterError(Exception):
    """The router failed, or decided what cannot be done: the message names it and says why."""


class RouterCalls:
    """Calls a router. `wants_steps` says whether it is asked after each step, `failures` how often `place` failed in a
    row.

    Raises:
        ValueError: the router's `wants` names something unknown.
    """

    def __init__(self, router: Router) -> None:
        policy_router = router
        while isinstance(policy_router, PrefixAffinity | Candidates):
            policy_router = policy_router.inner
        self.policy = name_of(type(policy_router).__module__).removeprefix("rubato.policies.")
        wants: object = getattr(router, "wants", frozenset())
        if not isinstance(wants, frozenset):
            raise ValueError(f"router {self.policy!r}: `wants` is {wants!r}: give a frozenset")
        if unknown := wants - WANTS:
            raise ValueError(
                f"router {self.policy!r} wants {', '.join(sorted(unknown))}; known is {', '.join(sorted(WANTS))}"
            )
        self.wants_steps = "step" in wants
        self.failures = 0
        self._router = router
        self.observe: Callable[[Event], None] = lambda event: router.observe((event,))
        self.observe.__qualname__ = f"observe of router {self.policy!r}"  # what an error of it is reported as

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Returns the roles of the replicas at the start. Raises ValueError if there are too few replicas."""
        return self._router.roles(replicas) if isinstance(self._router, Assigner) else {}

    def check_needs(self, host: Host) -> None:
        """Raises ValueError for a host that lacks what the router needs."""
        if missing := self._router.needs - (supports := host.view().supports):
            raise ValueError(
                f"router {self.policy!r} needs {', '.join(sorted(missing))}, which replica {host.id!r} lacks (it "
                f"supports {', '.join(sorted(supports)) or 'nothing extra'}): {cure(missing)}"
            )

    def place(
        self, unplaced: Sequence[SeqView], fleet: Sequence[View], now: float, *, placed: int, replicas: Collection[str]
    ) -> Dispatch:
        """Returns the router's decision.

        Args:
            unplaced: requests to place.
            fleet: views of the replicas.
            now: the time (s).
            placed: number of requests at replicas.
            replicas: ids of all replicas.

        Raises:
            RouterError: the router failed, or decided what cannot be done.
        """
        try:
            dispatch = self._router.place(unplaced, fleet, now)
            check_dispatch(dispatch, unplaced, fleet, now, self.policy, placed=placed, replicas=replicas)
        except Exception as error:  # whatever a policy may raise: told to every client, never hidden
            log.error("router %s failed; %d requests end", self.policy, len(unplaced), exc_info=error)
            self.failures += 1
            where = "" if isinstance(error, PlanError) else f"router {self.policy!r}, t={now:.6f}: "
            raise RouterError(f"{where}{type(error).__name__}: {error}") from error
        self.failures = 0
        return dispatch


class RoutingTimer:
    """Calls `wake` at the earlier of two times: when the router asked for it, and when the tenants' shares let a
    request pass without an event."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._router_at: float | None = None
        self._shares_at: float | None = None
        self._timer: Handle | None = None

    def set_router_time(self, at: float | None) -> None:
        if at != self._router_at:
            self._router_at = at
            self._restart()

    def set_shares_time(self, at: float | None) -> None:
        self._shares_at = at
        self._restart()

    def stop(self) -> None:
        self._router_at = self._shares_at = None
        self._restart()

    def _restart(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [t for t in (self._router_at, self._shares_at) if t is not None]
        if times:
            self._timer = self._clock.call_at(min(times), PLAN, lambda: self._on_wake(min(times)))

    def _on_wake(self, at: float) -> None:
        self._timer = None
        self._router_at, self._shares_at = (None if t == at else t for t in (self._router_at, self._shares_at))
        self._wake()


class Shares:
    """Calls fair shares.

    Args:
        fair: the shares; None: first come, first served.
        listeners: count the failures.
    """

    def __init__(self, fair: FairShare | None, listeners: EventBus) -> None:
        self.wake_at: float | None = None  # when a request passes without an event
        self.fair = fair
        self._listeners = listeners

    def is_beyond(self, request: Request, places: int, now: float) -> bool:
        """Returns whether the request's tenant has its share of the places already. Without shares every tenant has."""
        if self.fair is None:
            return True
        # a tenant with less than its share of the places gets one: another's flood must not take them all
        return self._listeners.guarded(now, True, self.fair.beyond_share, request, places, now)

    def add(self, request: Request, now: float) -> None:
        if self.fair is not None:
            self._listeners.guarded(now, None, self.fair.add_request, request, now)

    def place(self, request: Request, now: float) -> None:
        """Records that a request was placed."""
        if self.fair is not None and request.handoff is None:
            self._listeners.guarded(now, None, self.fair.record_placement, request.id)

    def take_back(self, request: Request, now: float) -> None:
        """Records that a placed request is unplaced again."""
        if self.fair is not None and request.handoff is None:
            self._listeners.guarded(now, None, self.fair.record_return, request.id)

    def end(self, event: Finished) -> None:
        if self.fair is not None:
            self._listeners.guarded(
                event.at, None, self.fair.record_end, event.id, event.outcome, event.output, event.at
            )

    def release(self, fair: FairShare, unplaced: Sequence[Seq], views: Sequence[View], now: float) -> list[Seq]:
        """Returns the requests that the shares let pass. Handed-off requests have passed before, and go first."""
        new = {s.id: s for s in unplaced if s.request.handoff is None}
        handed_off = [s for s in unplaced if s.id not in new]
        requests = [s.request for s in new.values()]
        passing = self._listeners.guarded(now, None, fair.release, requests, views, now)
        self.wake_at = None if passing is None else fair.wake_at
        return handed_off + [new[request.id] for request in (requests if passing is None else passing)]
