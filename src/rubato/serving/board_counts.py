"""Counts for the board: requests offered to each tier and their outcomes, by slice of time and since the start.

This is a fold over events of constant cost. It keeps an entry for each request in flight, counts of the first
`MAX_TIERS` tiers, and for each of them a ring of the last `RING_S` seconds. `board_replicas` does so for replicas.
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

MAX_TIERS = 100  # further tiers count as OTHER_TIER
OTHER_TIER = "other"
SLICE_S = 5.0  # events within one slice are counted together
RING_S = 900.0
SLICES = round(RING_S / SLICE_S)
WINDOWS_S = (300.0, RING_S)  # which the page offers besides the time since the start
# The share of a tier's requests that should meet their SLO; docs/alerts.yml and the capacity planner use the same.
OBJECTIVE = 0.9
BUCKETS_PER_DOUBLING = 8  # a percentile is off by at most 4.5 %

Times = Counter[int]  # how many measured times fell into each bucket


@dataclass(slots=True)
class TierSlice:
    """Counts of one tier's requests within a slice of time, or within several.

    `offered` counts requests that arrived then, all else those that ended then. causes: of misses and refusals.
    """

    number: int = 0
    offered: int = 0
    met: int = 0
    missed: int = 0
    unjudged: int = 0  # a TTFT or TPOT of the SLO was not measured
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

    def to_json(self, late: int) -> dict[str, Any]:
        """The counts as JSON.

        `attainment` is the share of judged requests that met their SLO. `burn` is the share of misses over the share
        that the objective allows, `budget_left` is 1 - burn.

        Args:
            late: requests in flight with a late token; they count as missed, or a growing queue would hide its misses.
        """
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


def sum_slices(parts: Iterable[TierSlice]) -> TierSlice:
    """The sum of several slices."""
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
    """Counts of one tier. has_slo: whether any of its requests has had an SLO."""

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
        """The newest slice, which has this number; made if need be."""
        if not self._ring or self._ring[-1].number != number:
            self._ring.append(TierSlice(number))
        return self._ring[-1]

    def offer(self, request: Request, number: int) -> TierSlice:
        """Count an offered request. Returns the slice that counted it."""
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
        """Count the output tokens since the last call. in_flight: tokens so far of requests that have not ended."""
        total = self._ended_tokens + in_flight
        came, self._counted_tokens = max(0, total - self._counted_tokens), max(total, self._counted_tokens)
        if came:
            self.slice_at(number).tokens += came
            self.since_start.tokens += came

    def sum_window(self, seconds: float, number: int) -> TierSlice:
        """The sum of the slices in the last `seconds`."""
        oldest = number - round(seconds / SLICE_S)
        return sum_slices([part for part in self._ring if part.number > oldest])

    def to_json(self, number: int, late: int = 0) -> dict[str, Any]:
        """Totals and windows as JSON. late: as in `TierSlice.to_json`."""
        windows = {f"{window:.0f}": self.sum_window(window, number).to_json(late) for window in WINDOWS_S}
        return {
            "best_effort": not self.has_slo,
            "in_flight": self.in_flight,
            "outcomes": dict(self.outcomes),
            "windows": {**windows, "start": self.since_start.to_json(late)},
        }

    def history(self, first: int, last: int) -> dict[str, Any]:
        """Counts of each slice from `first` to `last`, as JSON."""
        slots = {part.number: part for part in self._ring if first <= part.number <= last}
        parts = [slots.get(number) for number in range(first, last + 1)]
        causes = sorted({cause for part in slots.values() for cause in part.causes})
        columns = {
            name: [getattr(part, name) if part else 0 for part in parts] for name in ("offered", "met", "tokens")
        }
        return {**columns, "causes": {cause: [part.causes[cause] if part else 0 for part in parts] for cause in causes}}


class BoardCounts:
    """A listener for `Cluster.listen`.

    Args:
        new_slice: called with the time of the first event of each slice; it must not read replicas before the listener
            has returned.
    """

    hears_tokens = False

    def __init__(self, new_slice: Callable[[float], None] = lambda at: None) -> None:
        self.tiers: dict[str, TierCounts] = {}
        self.misses = BoardMisses(SLICES)
        self.replicas = BoardReplicas(SLICES)
        self.number = -1  # of the current slice
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
            self._on_offered(event)
        elif kind is Finished:
            assert isinstance(event, Finished)
            self._on_finished(event)
        else:
            self.replicas.add(event, self.number)

    def advance(self, now: float, in_flight: Mapping[str, RequestRecord]) -> int:
        """Count the new tokens of all tiers. Returns the number of the current slice."""
        self.number = max(self.number, int(now / SLICE_S))
        tokens = dict.fromkeys(self.tiers, 0)
        for record in in_flight.values():
            name = record.request.tier if record.request.tier in tokens else OTHER_TIER
            if name in tokens:
                tokens[name] += record.output
        for name, tier in self.tiers.items():
            tier.count_tokens(tokens[name], self.number)
        return self.number

    def _on_offered(self, event: Offered) -> None:
        name = event.request.tier
        if name not in self.tiers and len(self.tiers) >= MAX_TIERS:
            name = OTHER_TIER
        tier = self.tiers.setdefault(name, TierCounts())
        self._open[event.id] = (event.request, tier, tier.offer(event.request, self.number))

    def _on_finished(self, event: Finished) -> None:
        if (found := self._open.pop(event.id, None)) is None:
            return  # it was offered before the board existed
        request, tier, offered_in = found
        tier.finish(offered_in, event, self.number)
        if event.verdict.missed and not event.is_client_error:
            self.misses.add(request, event, self.number)


def _bucket(seconds: float) -> int:
    return int(log2(max(seconds, 1e-4) * 1e4) * BUCKETS_PER_DOUBLING)


def _percentiles(times: Times) -> list[float] | None:
    """The median and the 99th percentile in milliseconds; None where nothing was measured."""
    count, seen, found = times.total(), 0, list[float]()
    for bucket in sorted(times):
        seen += times[bucket]
        while len(found) < 2 and seen >= (0.5, 0.99)[len(found)] * count:
            found.append(float(f"{2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING) / 10:.3g}"))
    return found or None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
