"""Asks a cluster's router where unplaced requests go, and carries its dispatches out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rubato.core.clock import PLAN, Clock, Handle
from rubato.core.events import Assigned, Demoted
from rubato.core.interfaces import Dispatch, Host, Router, View
from rubato.core.plan import Role
from rubato.core.request import Outcome, Progress
from rubato.fleet.event_bus import Listener
from rubato.fleet.local_host import MAX_FAILED_STEPS
from rubato.fleet.request_table import RequestTable
from rubato.fleet.router_calls import RouterCalls, RouterError, RoutingTimer, Shares
from rubato.fleet.scaling import FleetScaling
from rubato.replica.sequence import Seq


class Routing:
    """Places the unplaced requests of a cluster.

    Args:
        hosts: the serving hosts, by id.
        submit: gives a request to a replica, for a reason (`Cluster._submit`); returns whether it is placed.
        end: ends an unplaced request.
        end_cancelled: ends requests that a host returned after it was asked to cancel them.
        give_up: called when the router has failed several times in a row.
        emit: the cluster's listener.

    Raises:
        ValueError: the router's `wants` names something unknown.
    """

    def __init__(
        self, router: Router, hosts: Mapping[str, Host], requests: RequestTable, shares: Shares, clock: Clock, *,
        submit: Callable[[Seq, str, float, str], bool], end: Callable[[Seq, Outcome, str], None],
        end_cancelled: Callable[[], None], give_up: Callable[[str, BaseException], None], emit: Listener,
    ) -> None:  # fmt: skip
        self.router = RouterCalls(router)
        self.why_stopped = ""  # every unplaced request ends with this error
        self.scaling: FleetScaling  # set by the cluster, whose scaling is told of routing
        self._hosts, self._requests, self._shares, self._clock = hosts, requests, shares, clock
        self._submit, self._end, self._end_cancelled, self._give_up, self._emit = (
            submit, end, end_cancelled, give_up, emit,
        )  # fmt: skip
        self._timer = RoutingTimer(clock, self.route_until_settled)
        self._routing_scheduled: Handle | None = None  # at the end of this instant
        self._is_routing = False  # while the router is asked; always, once closed
        self._cooldown_timer: Handle | None = None  # for the end of the first cooldown, if all hosts cool down

    @property
    def wants_steps(self) -> bool:
        """Whether the router is asked after each step: its end may free KV that an unplaced request waits for."""
        return self.router.wants_steps or bool(self._requests.with_kv)

    def assign_all(self, roles: Mapping[str, Role]) -> None:
        """Checks the hosts, and assigns the roles. Raises ValueError for a host that lacks what the router needs."""
        for host in self._hosts.values():
            self.router.check_needs(host)
        for id, role in roles.items():
            self._assign_role(id, role)

    def _assign_role(self, replica: str, role: Role) -> None:
        self._hosts[replica].assign(role)
        self._emit(Assigned(self._clock.now(), replica, role))

    def close(self) -> None:
        """Places nothing any more."""
        self._is_routing = True
        self._timer.stop()
        if self._cooldown_timer is not None:
            self._cooldown_timer.cancel()

    def stop(self, why: str) -> None:
        """Ends all unplaced requests, and all later ones: nothing can be placed any more."""
        self.why_stopped = why
        is_routing, self._is_routing = self._is_routing, True
        self._end_cancelled()
        self.end_unplaced()
        self._is_routing = is_routing

    def end_unplaced(self) -> None:
        for seq in list(self._requests.unplaced.values()):
            self._end(seq, "failed", self.why_stopped)

    def request_routing(self) -> None:
        """Asks the router after an event: now, or, if it wants steps, after all else that happens at this instant."""
        if not self.router.wants_steps or self.why_stopped:
            self.route_until_settled()
        elif self._routing_scheduled is None and not self._is_routing:
            self._routing_scheduled = self._clock.call_at(self._clock.now(), PLAN, self.route_until_settled)

    def route_if_kv_freed(self) -> None:
        """Asks the router again if a request waits for KV: a step has ended, or KV may be free. If nothing is placed, a
        cancelled request has ended, and no other event will come."""
        if self.wants_steps or not self._requests.placements:
            self.request_routing()

    def route_until_settled(self) -> None:
        """Asks the router until it places no more. Placing may end requests, after which it is asked again."""
        if self._routing_scheduled is not None:
            self._routing_scheduled.cancel()
            self._routing_scheduled = None
        if self._is_routing:
            return
        self._is_routing = True
        try:
            if self.why_stopped:
                self.end_unplaced()
            while self._hosts and self._requests.unplaced and self._route_once():
                pass
        finally:
            self._is_routing = False

    def _route_after_cooldown(self) -> None:
        self._cooldown_timer = None
        self.route_until_settled()

    def _route_once(self) -> bool:
        """Asks the router once and carries its dispatch out. Returns whether a request was placed or ended: ask
        again."""
        self._end_cancelled()
        now = self._clock.now()
        if not (views := self.scaling.views_to_route(now)):
            if self._cooldown_timer is None and (at := self.scaling.first_cooldown_end()) is not None:
                self._cooldown_timer = self._clock.call_at(at, PLAN, self._route_after_cooldown)
            return False
        unplaced = list(self._requests.unplaced.values())
        if self._shares.fair is not None:
            unplaced = self._shares.release(self._shares.fair, unplaced, views, now)
            self._timer.set_shares_time(self._shares.wake_at)
        groups = self._requests.groups
        joined = bool(groups) and self._join_groups(unplaced, now)
        if joined:
            unplaced = [s for s in unplaced if s.request.group not in groups and s.id in self._requests.unplaced]
        if not unplaced:
            return joined
        dispatch = self._call_router(unplaced, views, now)
        if dispatch is None:
            return not self.why_stopped
        return self._carry_out(dispatch, now) or joined

    def _join_groups(self, unplaced: Sequence[Seq], now: float) -> bool:
        """Places requests whose group has a replica; returns whether any."""
        groups = self._requests.groups
        joining = [s for s in unplaced if s.request.group in groups]
        for seq in joining:
            if seq.id in self._requests.unplaced and seq.request.group in groups:
                self._submit(seq, groups[seq.request.group][0], now, "")
        return bool(joining)

    def _call_router(self, unplaced: Sequence[Seq], fleet: Sequence[View], now: float) -> Dispatch | None:
        """Returns what the router decides; None if it fails. The requests it was asked about then end with the error,
        as after a failed plan; after several failures in a row the router is given up."""
        try:
            placed = len(self._requests.placements)
            dispatch = self.router.place(unplaced, fleet, now, placed=placed, replicas=self._hosts)
        except RouterError as error:
            for seq in unplaced:
                if seq.id in self._requests.unplaced:
                    self._end(seq, "failed", str(error))
            if (failures := self.router.failures) >= MAX_FAILED_STEPS:
                last = f"router {self.router.policy!r}: {failures} dispatches in a row failed; the last: {error}"
                self._give_up(last, RuntimeError(last))
            return None
        self._timer.set_router_time(dispatch.wake_at)
        return dispatch

    def _carry_out(self, dispatch: Dispatch, now: float) -> bool:
        """Carries a dispatch out. Returns whether any request was rejected or placed."""
        for replica, role in dispatch.assign.items():
            self._assign_role(replica, role)
        for replica, kind in dispatch.recall.items():
            self._hosts[replica].recall(kind)
        # From here on each may end another request, or find a host gone.
        unplaced = self._requests.unplaced
        for id in dispatch.demote:
            if id in unplaced:
                self._demote(unplaced[id], now)
        for id, reason in dispatch.reject.items():
            if id in unplaced:
                self._end(unplaced[id], "refused", reason)
        is_any_placed = False
        for id, replica in dispatch.place.items():
            if id in unplaced and replica in self._hosts:
                seq = unplaced[id]
                to = self._requests.groups.get(seq.request.group, (replica,))[0]
                is_any_placed |= self._submit(seq, to, now, dispatch.why.get(id, ""))
        return bool(dispatch.reject) or is_any_placed

    def _demote(self, seq: Seq, now: float) -> None:
        """Makes a request best effort from now on, also at its replica."""
        progress = seq.request.progress or Progress((seq.request.arrival,), ((),))
        seq.request = replace(seq.request, progress=replace(progress, demoted=True))
        seq.demoted = True
        self._emit(Demoted(now, seq.id))
