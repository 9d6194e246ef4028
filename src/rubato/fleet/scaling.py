"""Machines of a fleet that come and go: an autoscaler is asked, hosts are added, drained and removed when empty."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rubato.core.clock import SCALE, Clock, Handle
from rubato.core.events import Draining, Joined, Left
from rubato.core.interfaces import Autoscaler, Host, View
from rubato.fleet.event_bus import Listener
from rubato.fleet.request_table import RequestTable

START_RETRY_S = 60.0  # after a replica failed to start

log = logging.getLogger(__name__)


def is_idle(view: View) -> bool:
    """Returns whether a replica has no request."""
    return not (view.running or view.waiting or view.moving)


class FleetScaling:
    """Adds and drains hosts of a cluster.

    Args:
        hosts: the serving hosts, by id; changed here.
        requests: of the cluster.
        autoscaler: decides; None: the fleet stays as it is.
        make: makes a further host, given its id; None: none can be added.
        check: raises ValueError for a host that lacks what the router needs.
        emit: the cluster's listener.
        on_join: called when a host has joined.
    """

    def __init__(
        self, hosts: dict[str, Host], requests: RequestTable, clock: Clock, autoscaler: Autoscaler | None,
        make: Callable[[str], Host] | None, *, check: Callable[[Host], None], emit: Listener,
        on_join: Callable[[], None],
    ) -> None:  # fmt: skip
        self.draining: set[str] = set()  # ids of hosts that take nothing more
        self._hosts = hosts
        self._requests = requests
        self._clock = clock
        self._autoscaler = autoscaler
        self._make = make
        self._check = check
        self._emit = emit
        self._on_join = on_join
        self._host_count = len(hosts)
        self._joining: dict[str, tuple[Host, Handle]] = {}  # starting
        self._timer: Handle | None = None
        self._next_ask: Handle | None = None
        self._next_start_at = 0.0  # when a replica may be started again

    @property
    def can_add(self) -> bool:
        """Whether replicas may be added."""
        return self._autoscaler is not None

    @property
    def is_open(self) -> bool:
        """Whether some host takes requests."""
        return len(self.draining) < len(self._hosts)

    def open_views(self) -> list[View]:
        """Returns views of the hosts that take requests."""
        return [host.view() for id, host in self._hosts.items() if id not in self.draining]

    def views_to_route(self, now: float) -> list[View]:
        """Returns the views of open hosts that do not cool down; none if all hosts of a phase cool down."""
        hosts = list(self._hosts.values())
        if self.draining:
            hosts = [host for host in hosts if host.id not in self.draining]
        views = [host.view() for host in hosts if host.cooldown_until <= now]
        if len(views) == len(hosts):
            return views
        cooling = self._cooling_down(hosts, now)
        views = [host.view() for host in hosts if host not in cooling]
        phases = {host.view().role.phase for host in cooling}
        return views if phases <= {view.role.phase for view in views} else []

    def _cooling_down(self, hosts: list[Host], now: float) -> list[Host]:
        """Returns hosts that cool down after failed requests: at most half of the fleet, since with more failures the
        requests are to blame."""
        cooling = sorted([host for host in hosts if host.cooldown_until > now], key=lambda host: -host.cooldown_until)
        return cooling[: len(hosts) // 2]

    def first_cooldown_end(self) -> float | None:
        """Returns when the first cooldown of an open host ends; None if no open host cools down."""
        now = self._clock.now()
        hosts = [host for id, host in self._hosts.items() if id not in self.draining]
        return min([host.cooldown_until for host in self._cooling_down(hosts, now)], default=None)

    def drain(self, id: str) -> None:
        """Gives a host nothing more; it leaves when it is empty. Its waiting requests come back where hosts can recall.

        Raises:
            ValueError: there is no such replica, or it is the last that serves.
        """
        if id not in self._hosts:
            raise ValueError(f"no replica {id!r}: there are {', '.join(self._hosts)}")
        if id in self.draining:
            return
        if len(self._hosts) - len(self.draining) == 1:
            raise ValueError(f"replica {id!r} is the last that serves: add another before it drains")
        self.draining.add(id)
        self._emit(Draining(self._clock.now(), id))
        host = self._hosts.get(id)
        if host is not None and "recall" in host.view().supports:
            host.recall("waiting")
        self.remove_empty_hosts()

    def _add(self, make: Callable[[str], Host]) -> None:
        """Starts a further host, which serves once it has started."""
        id = f"r{self._host_count}"
        self._host_count += 1
        host = make(id)
        self._joining[id] = (host, self._clock.spawn(self._join(host), f"start of replica {id}"))

    async def _join(self, host: Host) -> None:
        asked_at = self._clock.now()
        try:
            await host.start()
            self._check(host)
        except Exception:  # the fleet goes on without it; the log says why
            log.exception(
                "replica %s did not start; another is tried in %.0f s at the earliest", host.id, START_RETRY_S
            )
            self._clock.spawn(host.close(), f"end of replica {host.id}, which did not start")
            self._next_start_at = self._clock.now() + START_RETRY_S
            return
        finally:
            self._joining.pop(host.id, None)
        self._hosts[host.id] = host
        now = self._clock.now()
        self._emit(Joined(now, host.id, now - asked_at))
        self._on_join()

    def remove_empty_hosts(self) -> None:
        """Removes draining hosts that have no request left."""
        busy_ids = self._requests.replicas
        for id in list(self.draining):
            host = self._hosts.get(id)
            if host is None:
                self.draining.discard(id)
            elif id not in busy_ids and is_idle(host.view()):
                self.draining.discard(id)
                del self._hosts[id]
                self._clock.spawn(host.close(), f"end of replica {id}")
                self._emit(Left(self._clock.now(), id))

    def ask_soon(self) -> None:
        """Asks the autoscaler once, after all else that happens at this instant."""
        if self._autoscaler is not None and self._next_ask is None:
            self._next_ask = self._clock.call_at(self._clock.now(), SCALE, self._ask)

    def _ask(self) -> None:
        """Does what the autoscaler wants. If the autoscaler fails, the log says so, and the fleet stays as it is."""
        self._next_ask = None
        if self._autoscaler is None or self._make is None:
            return
        unplaced = list(self._requests.unplaced.values())
        try:
            now = self._clock.now()
            scaling = self._autoscaler.scale(unplaced, self.open_views(), len(self._joining), now)
            for _ in range(scaling.add if now >= self._next_start_at else 0):
                self._add(self._make)
            for id in scaling.drain:
                self.drain(id)
        except Exception:
            log.exception("the autoscaler failed; the fleet stays as it is")
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if scaling.wake_at is not None:
            self._timer = self._clock.call_at(scaling.wake_at, SCALE, self._ask)

    def stop_asking(self) -> None:
        """Asks the autoscaler no more."""
        self._autoscaler = None
        for timer in (self._timer, self._next_ask):
            if timer is not None:
                timer.cancel()

    def close(self) -> list[Host]:
        """Stops scaling. Returns the hosts that were starting, which are to be closed."""
        self.stop_asking()
        joining = list(self._joining.values())
        for _, start in joining:
            start.cancel()
        return [host for host, _ in joining]
