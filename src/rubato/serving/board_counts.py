"""Counts for the board: what each tier was offered and what became of it, recent misses, and step times.

A fold over events. Kept: an entry for every request in flight, counts of the first `MOST_TIERS` tiers, the last
`MISSES` misses of each tenant, the last `STEPS` step times of each replica.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rubato.core.events import Event, Finished, Left, Offered, Stepped
from rubato.core.request import Request, without_texts
from rubato.frontdoor.verdict import in_ms, ms, served, verdict

MOST_TIERS = 100  # the tier beyond them is OTHER
OTHER = "other"
MISSES = 50
STEPS = 32
WINDOW = 300.0  # seconds that `recent` looks back
SLICE = 5.0  # seconds whose requests are counted together, so that the window moves on by as much


@dataclass(slots=True)
class _Slice:
    """The requests offered within one slice of time."""

    number: int
    offered: int = 0
    met: int = 0
    missed: int = 0
    unjudged: int = 0
    pause: float | None = None  # the longest between two tokens of one of them


@dataclass(slots=True)
class TierCounts:
    """Of one tier, since the server serves. offered = met + missed + unjudged + those in flight."""

    offered: int = 0
    met: int = 0
    missed: int = 0
    unjudged: int = 0  # a TTFT or TPOT that was asked for was not measured
    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)  # of misses
    _slices: deque[_Slice] = field(default_factory=deque)

    def shown(self, now: float) -> dict[str, Any]:
        """As JSON."""
        self._forget(now)
        recent = [sum(getattr(part, name) for part in self._slices) for name in _COUNTS]
        return {
            **_rates(self.offered, self.met, self.missed, self.unjudged),
            "outcomes": dict(self.outcomes),
            "causes": dict(self.causes.most_common()),
            "recent": _rates(*recent),
            "recent_max_pause_ms": ms(max([p for part in self._slices if (p := part.pause) is not None], default=None)),
        }

    def offer(self, at: float) -> _Slice:
        """Count a request; where its end is to be counted, too."""
        self.offered += 1
        self._forget(at)
        number = int(at // SLICE)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        self._slices[-1].offered += 1
        return self._slices[-1]

    def finish(self, offered_in: _Slice, end: Finished) -> None:
        if end.is_client_error:
            self.offered -= 1
            offered_in.offered -= 1
            return
        self.outcomes[end.outcome] += 1
        if (pause := end.verdict.pause) is not None:
            offered_in.pause = max(pause, offered_in.pause or 0.0)
        if end.verdict.met:
            self.met += 1
            offered_in.met += 1
        elif end.verdict.unjudged:
            self.unjudged += 1
            offered_in.unjudged += 1
        else:
            self.missed += 1
            offered_in.missed += 1
            self.causes[end.verdict.cause or "unknown"] += 1

    def _forget(self, now: float) -> None:
        oldest = int((now - WINDOW) // SLICE)
        while self._slices and self._slices[0].number <= oldest:
            self._slices.popleft()


class BoardCounts:
    """A listener for `Cluster.listen`."""

    hears_tokens = False

    def __init__(self) -> None:
        self.tiers: dict[str, TierCounts] = {}
        self._open: dict[str, tuple[Request, TierCounts, _Slice]] = {}
        self._misses: dict[str, deque[tuple[Request, Finished]]] = {}  # by tenant
        self._steps: dict[str, deque[float]] = {}  # seconds, by replica

    def __call__(self, event: Event) -> None:
        kind = type(event)
        if kind is Stepped:
            assert isinstance(event, Stepped)
            self._steps.setdefault(event.id, deque(maxlen=STEPS)).append(event.seconds)
        elif kind is Offered:
            assert isinstance(event, Offered)
            self._offered(event)
        elif kind is Finished:
            assert isinstance(event, Finished)
            self._finished(event)
        elif kind is Left:
            self._steps.pop(event.id, None)

    def _offered(self, event: Offered) -> None:
        name = event.request.tier
        if name not in self.tiers and len(self.tiers) >= MOST_TIERS:
            name = OTHER
        tier = self.tiers.setdefault(name, TierCounts())
        self._open[event.id] = (event.request, tier, tier.offer(event.at))

    def _finished(self, event: Finished) -> None:
        request, tier, offered_in = self._open.pop(event.id)
        tier.finish(offered_in, event)
        if event.verdict.missed and not event.is_client_error:
            misses = self._misses.setdefault(request.tenant, deque(maxlen=MISSES))
            misses.append((without_texts(request), event))

    def step_seconds(self, replica: str) -> float | None:
        """The mean of its last steps; None before the first."""
        steps = self._steps.get(replica)
        return sum(steps) / len(steps) if steps else None

    def misses(self, tenant: str | None, now: float) -> list[dict[str, Any]]:
        """The last of one tenant, or of all (None), as JSON, latest first."""
        found = [miss for name, misses in self._misses.items() if tenant in (None, name) for miss in misses]
        found.sort(key=lambda miss: miss[1].at)
        return [_miss(request, end, now) for request, end in found[: -MISSES - 1 : -1]]


def in_all(tiers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same rates of all tiers together, from `TierCounts.shown` of each."""

    def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return _rates(*(sum(row[name] for row in rows) for name in _COUNTS))

    return {**total(tiers), "recent": total([tier["recent"] for tier in tiers])}


_COUNTS = ("offered", "met", "missed", "unjudged")


def _rates(offered: int, met: int, missed: int, unjudged: int) -> dict[str, Any]:
    """Attainment is over what was offered: a request in flight is not met yet."""
    return {
        "offered": offered,
        "met": met,
        "missed": missed,
        "unjudged": unjudged,
        "in_flight": offered - met - missed - unjudged,
        "attainment": met / offered if offered else None,
    }


def _miss(request: Request, end: Finished, now: float) -> dict[str, Any]:
    return {
        "id": request.id,
        "tenant": request.tenant,
        "tier": request.tier,
        "age_ms": ms(max(0.0, now - end.at)),
        "outcome": end.outcome,
        "reason": "" if end.outcome == "completed" else end.reason[:200],
        "output_tokens": end.output,
        "served": served(request, end),
        "targets": in_ms(request.stages[0].slo),
        **verdict(end),
    }
