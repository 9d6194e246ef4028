"""Counts for the board: what each tier was offered and what became of it, in slices of time and since the start.

A fold over events, of constant cost. Kept: an entry for each request in flight, counts of the first `MAX_TIERS` tiers,
and for each of them a ring of the last `RING_S` seconds. `board_replicas` keeps the same for replicas.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Any

from rubato.core.events import Event, Finished, Offered
from rubato.core.request import Request
from rubato.frontdoor.request_record import RequestRecord
from rubato.frontdoor.verdict import ms
from rubato.serving.board_misses import BoardMisses
from rubato.serving.board_replicas import BoardReplicas

MAX_TIERS = 100  # the tier beyond them is OTHER
OTHER = "other"
SLICE_S = 5.0  # what happens within one slice is counted together
RING_S = 900.0
SLICES = round(RING_S / SLICE_S)
WINDOWS_S = (300.0, RING_S)  # that the page can switch between, besides all since the start
# The share of requests that a tier is to have on time. docs/alerts.yml and the capacity planner assume the same.
OBJECTIVE = 0.9
BUCKETS = 8  # of a time that doubles: a percentile is off by at most 4.5 %

Times = Counter[int]  # how many measured times fell into each bucket


@dataclass(slots=True)
class TierSlice:
    """What happened to one tier's requests within a slice of time, or within many together.

    offered counts those that came then, all else those that ended then. causes: of misses, refusals among them.
    """

    number: int = 0
    offered: int = 0
    met: int = 0
    missed: int = 0
    unjudged: int = 0  # a TTFT or TPOT that was asked for was not measured
    tokens: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    ttft: Times = field(default_factory=Counter)
    tpot: Times = field(default_factory=Counter)
    e2e: Times = field(default_factory=Counter)
    pause: float | None = None  # the longest between two tokens

    def add(self, end: Finished) -> None:
        """Count a request that has ended."""
        judged = end.verdict
        if judged.ttft is not None:
            self.ttft[_bucket(judged.ttft)] += 1
        if judged.tpot is not None:
            self.tpot[_bucket(judged.tpot)] += 1
        if judged.e2e is not None:
            self.e2e[_bucket(judged.e2e)] += 1
        if judged.pause is not None and judged.pause > (self.pause or 0.0):
            self.pause = judged.pause
        if judged.met:
            self.met += 1
        elif judged.unjudged:
            self.unjudged += 1
        else:
            self.missed += 1
            self.causes[judged.cause or "unknown"] += 1

    def shown(self, late: int) -> dict[str, Any]:
        """As JSON. late: requests in flight of which a token is late, which count as missed: a queue that only grows
        would hide its misses otherwise. attainment is of these and of what ended and could be judged; burn the misses
        as a multiple of what the objective allows, budget_left the share of those that is not used up (negative:
        overspent)."""
        judged = self.met + self.missed + late
        attainment = self.met / judged if judged else None
        burn = None if attainment is None else (1.0 - attainment) / (1.0 - OBJECTIVE)
        return {
            "offered": self.offered,
            "met": self.met,
            "missed": self.missed,
            "late": late,
            "unjudged": self.unjudged,
            "attainment": _rounded(attainment),
            "burn": _rounded(burn),
            "budget_left": _rounded(None if burn is None else 1.0 - burn),
            "tokens": self.tokens,
            "causes": dict(self.causes.most_common()),
            "ttft_ms": _percentiles(self.ttft),
            "tpot_ms": _percentiles(self.tpot),
            "e2e_ms": _percentiles(self.e2e),
            "max_pause_ms": ms(self.pause),
        }


def total_of(parts: Iterable[TierSlice]) -> TierSlice:
    """All of these together."""
    total = TierSlice()
    for part in parts:
        total.offered += part.offered
        total.met += part.met
        total.missed += part.missed
        total.unjudged += part.unjudged
        total.tokens += part.tokens
        total.causes.update(part.causes)
        total.ttft.update(part.ttft)
        total.tpot.update(part.tpot)
        total.e2e.update(part.e2e)
        if part.pause is not None:
            total.pause = max(part.pause, total.pause or 0.0)
    return total


class TierCounts:
    """One tier. has_slo: one of its requests asked for a time."""

    def __init__(self) -> None:
        self.since_start = TierSlice()
        self.outcomes: Counter[str] = Counter()
        self.has_slo = False
        self._ring: deque[TierSlice] = deque(maxlen=SLICES)
        self._ended_tokens = self._counted_tokens = 0

    @property
    def in_flight(self) -> int:
        total = self.since_start
        return total.offered - total.met - total.missed - total.unjudged

    def slice_at(self, number: int) -> TierSlice:
        """The slice of this number, which is the newest."""
        if not self._ring or self._ring[-1].number != number:
            self._ring.append(TierSlice(number))
        return self._ring[-1]

    def offer(self, request: Request, number: int) -> TierSlice:
        """Count a request that comes. Where it was counted."""
        self.has_slo = self.has_slo or not request.best_effort
        self.since_start.offered += 1
        offered_in = self.slice_at(number)
        offered_in.offered += 1
        return offered_in

    def finish(self, offered_in: TierSlice, end: Finished, number: int) -> None:
        if end.is_client_error:
            self.since_start.offered -= 1
            offered_in.offered -= 1
            return
        self.outcomes[end.outcome] += 1
        self._ended_tokens += end.output
        self.since_start.add(end)
        self.slice_at(number).add(end)

    def count_tokens(self, in_flight: int, number: int) -> None:
        """Count the output tokens since this was last called. in_flight: of requests that have not ended, so far."""
        total = self._ended_tokens + in_flight
        came, self._counted_tokens = max(0, total - self._counted_tokens), max(total, self._counted_tokens)
        if came:
            self.slice_at(number).tokens += came
            self.since_start.tokens += came

    def within(self, seconds: float, number: int) -> TierSlice:
        """All of the last so many seconds."""
        oldest = number - round(seconds / SLICE_S)
        return total_of([part for part in self._ring if part.number > oldest])

    def shown(self, number: int, late: int = 0) -> dict[str, Any]:
        """As JSON, without what depends on the time slice by slice. late: as `TierSlice.shown` takes it."""
        windows = {f"{window:.0f}": self.within(window, number).shown(late) for window in WINDOWS_S}
        return {
            "best_effort": not self.has_slo,
            "in_flight": self.in_flight,
            "outcomes": dict(self.outcomes),
            "windows": {**windows, "start": self.since_start.shown(late)},
        }

    def history(self, first: int, last: int) -> dict[str, Any]:
        """Counts of each slice from the first to the last, as JSON."""
        slots = {part.number: part for part in self._ring if first <= part.number <= last}
        parts = [slots.get(number) for number in range(first, last + 1)]
        causes = sorted({cause for part in slots.values() for cause in part.causes})
        columns = {
            name: [getattr(part, name) if part else 0 for part in parts] for name in ("offered", "met", "tokens")
        }
        return {**columns, "causes": {cause: [part.causes[cause] if part else 0 for part in parts] for cause in causes}}


class BoardCounts:
    """A listener for `Cluster.listen`. new_slice: called with the time when the first event of a slice comes, at most
    once in `SLICE_S`; it must not look at replicas before the listener has returned."""

    hears_tokens = False

    def __init__(self, new_slice: Callable[[float], None] = lambda at: None) -> None:
        self.tiers: dict[str, TierCounts] = {}
        self.misses = BoardMisses(SLICES)
        self.replicas = BoardReplicas(SLICES)
        self.number = -1  # of the slice that is now
        self._new_slice = new_slice
        self._open: dict[str, tuple[Request, TierCounts, TierSlice]] = {}

    def __call__(self, event: Event) -> None:
        number = int(event.at / SLICE_S)
        if number > self.number:
            self.number = number
            self._new_slice(event.at)
        kind = type(event)
        if kind is Offered:
            assert isinstance(event, Offered)
            self._offered(event)
        elif kind is Finished:
            assert isinstance(event, Finished)
            self._finished(event)
        else:
            self.replicas.add(event, self.number)

    def advance(self, now: float, in_flight: Mapping[str, RequestRecord]) -> int:
        """Count the tokens that have come, of all tiers. The number of the slice that is now."""
        self.number = max(self.number, int(now / SLICE_S))
        tokens = dict.fromkeys(self.tiers, 0)
        for record in in_flight.values():
            name = record.request.tier if record.request.tier in tokens else OTHER
            if name in tokens:
                tokens[name] += record.output
        for name, tier in self.tiers.items():
            tier.count_tokens(tokens[name], self.number)
        return self.number

    def _offered(self, event: Offered) -> None:
        name = event.request.tier
        if name not in self.tiers and len(self.tiers) >= MAX_TIERS:
            name = OTHER
        tier = self.tiers.setdefault(name, TierCounts())
        self._open[event.id] = (event.request, tier, tier.offer(event.request, self.number))

    def _finished(self, event: Finished) -> None:
        if (found := self._open.pop(event.id, None)) is None:
            return  # it was offered before the board was there
        request, tier, offered_in = found
        tier.finish(offered_in, event, self.number)
        if event.verdict.missed and not event.is_client_error:
            self.misses.add(request, event, self.number)


def _bucket(seconds: float) -> int:
    return int(log2(max(seconds, 1e-4) * 1e4) * BUCKETS)


def _percentiles(times: Times) -> list[float] | None:
    """The median and the 99th percentile, in milliseconds; None of nothing."""
    count, seen, found = times.total(), 0, list[float]()
    for bucket in sorted(times):
        seen += times[bucket]
        while len(found) < 2 and seen >= (0.5, 0.99)[len(found)] * count:
            found.append(float(f"{2.0 ** ((bucket + 0.5) / BUCKETS) / 10:.3g}"))
    return found or None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
