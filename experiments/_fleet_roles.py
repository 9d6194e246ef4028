"""Which replica had which role when, and what that costs in replica-seconds: a fold over the fleet's events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import inf

from rubato.core.events import Assigned, Event, Joined, Left
from rubato.core.plan import Role

GONE = ""


def label(role: Role) -> str:
    """A role in a word or two: its kind and its tier, or its phase where it has neither."""
    return " ".join(filter(None, (role.kind, role.tier))) or role.phase


class FleetRoles:
    """A listener of a cluster. A replica has the role it was given last; before the first it counts as nothing."""

    def __init__(self) -> None:
        self._roles: dict[str, list[tuple[float, str]]] = {}  # of each replica, from when on

    def __call__(self, event: Event) -> None:
        if isinstance(event, Assigned):
            self._roles.setdefault(event.id, []).append((event.at, label(event.role)))
        elif isinstance(event, Joined):
            self._roles.setdefault(event.id, []).append((event.at, label(Role())))
        elif isinstance(event, Left):
            self._roles.setdefault(event.id, []).append((event.at, GONE))

    def seconds(self, start: float, end: float) -> dict[str, float]:
        """Replica-seconds of each role between two times. Raises ValueError where `end` is before `start`."""
        if end < start:
            raise ValueError(f"from {start} s to {end} s: give the earlier one first")
        found: dict[str, float] = {}
        for changes in self._roles.values():
            for (at, role), until in zip(changes, [at for at, _ in changes[1:]] + [inf], strict=True):
                if role != GONE and (spent := min(until, end) - max(at, start)) > 0.0:
                    found[role] = found.get(role, 0.0) + spent
        return found

    def count(self, at: float) -> Mapping[str, int]:
        """Replicas of each role at a time; one that changes at it has its new one."""
        found: dict[str, int] = {}
        for changes in self._roles.values():
            if place := bisect_right(changes, at, key=lambda change: change[0]):
                role = changes[place - 1][1]
                if role != GONE:
                    found[role] = found.get(role, 0) + 1
        return found
