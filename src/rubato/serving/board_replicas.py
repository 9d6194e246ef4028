"""Replicas for the board: the load of each in the last minutes, and flags on the fleet's events.

Step times come with events. Running and waiting requests and KV in use are sampled at each refresh of the board, and
once in a slice of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rubato.core.events import Draining, Event, HandedOff, Joined, Left, Lost, Stepped
from rubato.core.interfaces import View
from rubato.frontdoor.verdict import ms

MAX_FLAGS = 100
STEP_TIMES_KEPT = 32  # the step time shown is their mean
FLAG_BY_HANDOFF_REASON = {
    "failed": "placed again",
    "declined": "moved",
    "offloaded": "moved",
    "recalled": "moved",
}  # by reason


@dataclass(slots=True)
class _Slice:
    """Sums up a slice of time: the steps that ended in it and their seconds, and the load at its last sample."""

    number: int
    steps: int = 0
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    kv: float | None = None


@dataclass(slots=True)
class _Replica:
    steps: deque[float]
    ring: deque[_Slice]

    def slice_at(self, number: int) -> _Slice:
        if not self.ring or self.ring[-1].number != number:
            before = self.ring[-1] if self.ring else _Slice(number)
            self.ring.append(_Slice(number, running=before.running, waiting=before.waiting, kv=before.kv))
        return self.ring[-1]


@dataclass(slots=True)
class Flag:
    """Marks an event that happened `count` times within a slice; `replica` is "" where it concerns none."""

    number: int
    at: float
    kind: str
    replica: str
    count: int = 1


@dataclass
class BoardReplicas:
    """Keeps the load of all replicas in the last `slices` slices, and flags.

    Args:
        slices: how many are kept.
        lost_at: by id, when replicas left without being drained; seconds.
    """

    slices: int
    flags: deque[Flag] = field(default_factory=lambda: deque(maxlen=MAX_FLAGS))
    lost_at: dict[str, float] = field(default_factory=dict)
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    _draining: set[str] = field(default_factory=set)

    def add(self, event: Event, number: int) -> None:
        """Counts an event of a replica, or of a request that moves."""
        if isinstance(event, Stepped):
            replica = self._replica(event.id)
            replica.steps.append(event.seconds)
            now = replica.slice_at(number)
            now.steps += 1
            now.seconds += event.seconds
        elif isinstance(event, Lost):
            self.flag(event.at, number, "placed again", event.replica)
        elif isinstance(event, HandedOff):
            handoff = event.request.handoff
            if handoff is not None and handoff.reason in FLAG_BY_HANDOFF_REASON:
                self.flag(event.at, number, FLAG_BY_HANDOFF_REASON[handoff.reason], handoff.source)
        elif isinstance(event, Joined):
            self.flag(event.at, number, "joined", event.id)
        elif isinstance(event, Draining):
            self._draining.add(event.id)
            self.flag(event.at, number, "draining", event.id)
        elif isinstance(event, Left) and event.id in self._draining:
            self._draining.discard(event.id)
            self._replicas.pop(event.id, None)
            self.flag(event.at, number, "drained", event.id)
        elif isinstance(event, Left):
            self.lost_at[event.id] = event.at
            self.flag(event.at, number, "lost", event.id)

    def flag(self, at: float, number: int, kind: str, replica: str) -> None:
        """Records an event; equal ones within a slice are counted together."""
        for last in reversed(self.flags):
            if last.number != number:
                break
            if (last.kind, last.replica) == (kind, replica):
                last.count += 1
                return
        self.flags.append(Flag(number, at, kind, replica))

    def sample(self, views: Sequence[View], number: int, counted_replicas: Collection[str] = ()) -> None:
        """Records the load of each replica; KV of `counted_replicas` that is all free means unknown."""
        for view in views:
            now = self._replica(view.id).slice_at(number)
            now.running, now.waiting = len(view.running), len(view.waiting)
            used = view.kv_total - view.kv_free
            now.kv = used / view.kv_total if view.kv_total and (used or view.id not in counted_replicas) else None

    def step_seconds(self, replica: str) -> float | None:
        """Returns the mean time of the replica's last steps; None before the first."""
        steps = self._replicas[replica].steps if replica in self._replicas else ()
        return sum(steps) / len(steps) if steps else None

    def succeed(self, lost: str, id: str) -> None:
        """Continues a lost replica's history under the new id of its server, which is back."""
        ring, flags = self._replica(id).ring, [flag for flag in self.flags if flag.replica == lost]
        before = [part for part in self._replica(lost).ring if not ring or part.number < ring[0].number]
        self._replicas[id].ring = deque([*before, *ring], maxlen=self.slices)
        for flag in flags:
            flag.replica = id
        self.forget(lost)

    def forget(self, id: str) -> None:
        """Drops a lost replica."""
        self.lost_at.pop(id, None)
        self._replicas.pop(id, None)

    def history(self, names: Mapping[str, str], first: int, last: int) -> dict[str, Any]:
        """Returns the load of each replica in each slice from `first` to `last`, as JSON; None before it joined.

        Args:
            names: key of each replica in the JSON, by id.
            first: number of the first slice.
            last: number of the last slice.
        """
        return {names[id]: _columns(one.ring, first, last) for id, one in self._replicas.items() if id in names}

    def flags_json(self, now: float, number: int) -> list[dict[str, Any]]:
        """Returns the flags of the slices that are kept, as JSON, oldest first."""
        return [
            {"ago_ms": ms(now - flag.at), "kind": flag.kind, "replica": flag.replica, "count": flag.count}
            for flag in self.flags
            if flag.number > number - self.slices
        ]

    def _replica(self, id: str) -> _Replica:
        return self._replicas.setdefault(id, _Replica(deque(maxlen=STEP_TIMES_KEPT), deque(maxlen=self.slices)))


def _columns(ring: deque[_Slice], first: int, last: int) -> dict[str, Any]:
    """Returns columns by slice; a slice without a sample repeats the last part, with no steps."""
    by_number = {part.number: part for part in ring}
    latest = next((part for part in reversed(ring) if part.number < first), None)
    columns: dict[str, list[Any]] = {"running": [], "waiting": [], "kv": [], "step_ms": []}
    for number in range(first, last + 1):
        latest = by_number.get(number, latest)
        steps = latest.steps if latest is not None and latest.number == number else 0
        columns["running"].append(latest and latest.running)
        columns["waiting"].append(latest and latest.waiting)
        columns["kv"].append(None if latest is None or latest.kv is None else round(latest.kv, 2))
        columns["step_ms"].append(float(f"{latest.seconds / steps * 1e3:.3g}") if latest and steps else None)
    return columns
