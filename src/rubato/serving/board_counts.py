"""Counts for the board: requests offered to each tier and their outcomes, by slice of time and since the start.

It adds to the record of each request (`frontdoor.history`) at constant cost: counts of the first `MAX_TIERS` tiers, and
for each of them slices of the last `RING_S` seconds. `board_replicas` does so for replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import log2
from typing import Any

from rubato.core.events import Event, Finished, Offered
from rubato.core.request import Request
from rubato.frontdoor.history import RequestHistory
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

MEASURED = ("ttft", "tpot", "e2e")  # times of a verdict
Times = Counter[int]  # how many measured times fell into each bucket


@dataclass(slots=True)
class TierSlice:
    """Counts one tier's requests within a slice of time, or within several.

    `offered` counts requests that arrived then, all else those that ended then, `causes` misses and refusals.
    """

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
        """Counts a request that has ended."""
        judged = end.verdict
        for name in MEASURED:
            if (seconds := getattr(judged, name)) is not None:
                getattr(self, name)[_bucket(seconds)] += 1
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
        """Returns the counts as JSON.

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
            **{f"{name}_ms": _percentiles(getattr(self, name)) for name in MEASURED},
            "max_pause_ms": ms(self.pause),
        }


def sum_slices(parts: Iterable[TierSlice]) -> TierSlice:
    """Returns the sum of several slices."""
    total = TierSlice()
    for part in parts:
        for name in ("offered", "met", "missed", "unjudged", "tokens"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("causes", *MEASURED):
            getattr(total, name).update(getattr(part, name))
        if part.pause is not None:
            total.pause = max(part.pause, total.pause or 0.0)
    return total


class TierCounts:
    """Counts one tier's requests; `has_slo` is whether any of them has had an SLO."""

    def __init__(self) -> None:
        self.since_start = TierSlice()
        self.outcomes: Counter[str] = Counter()
        self.has_slo = False
        self._slices: dict[int, TierSlice] = {}  # by number
        self._ended_tokens = self._counted_tokens = 0

    @property
    def in_flight(self) -> int:
        total = self.since_start
        return total.offered - total.met - total.missed - total.unjudged

    def slice_at(self, number: int) -> TierSlice:
        """Returns the slice of this number, which is made if need be."""
        tier_slice = self._slices.setdefault(number, TierSlice())
        if len(self._slices) > SLICES:
            del self._slices[min(self._slices)]
        return tier_slice

    def offer(self, request: Request, number: int) -> None:
        """Counts an offered request."""
        self.has_slo = self.has_slo or not request.best_effort
        self.since_start.offered += 1
        self.slice_at(number).offered += 1

    def finish(self, end: Finished, offered_in: int, number: int) -> None:
        """Counts the end of a request.

        Args:
            end: of the request.
            offered_in: number of the slice in which it was offered.
            number: of the current slice.
        """
        if end.is_client_error:
            self.since_start.offered -= 1
            self.slice_at(offered_in).offered -= 1
            return
        self.outcomes[end.outcome] += 1
        self._ended_tokens += end.output
        self.since_start.add(end)
        self.slice_at(number).add(end)

    def count_tokens(self, in_flight: int, number: int) -> None:
        """Counts the output tokens since the last call.

        Args:
            in_flight: tokens so far of requests that have not ended.
            number: of the current slice.
        """
        total = self._ended_tokens + in_flight
        came, self._counted_tokens = max(0, total - self._counted_tokens), max(total, self._counted_tokens)
        if came:
            self.slice_at(number).tokens += came
            self.since_start.tokens += came

    def sum_window(self, seconds: float, number: int) -> TierSlice:
        """Returns the sum of the slices in the last `seconds`."""
        oldest = number - round(seconds / SLICE_S)
        return sum_slices([part for at, part in self._slices.items() if at > oldest])

    def to_json(self, number: int, late: int = 0) -> dict[str, Any]:
        """Returns totals and windows as JSON.

        Args:
            number: of the current slice.
            late: requests in flight with a late token, as in `TierSlice.to_json`.
        """
        windows = {f"{window:.0f}": self.sum_window(window, number).to_json(late) for window in WINDOWS_S}
        return {
            "best_effort": not self.has_slo,
            "in_flight": self.in_flight,
            "outcomes": dict(self.outcomes),
            "windows": {**windows, "start": self.since_start.to_json(late)},
        }

    def history(self, first: int, last: int) -> dict[str, Any]:
        """Returns the counts of each slice from `first` to `last`, as JSON."""
        blank = TierSlice()
        parts = [self._slices.get(number, blank) for number in range(first, last + 1)]
        causes = sorted({cause for part in parts for cause in part.causes})
        columns = {name: [getattr(part, name) for part in parts] for name in ("offered", "met", "tokens")}
        return {**columns, "causes": {cause: [part.causes[cause] for part in parts] for cause in causes}}


class BoardCounts:
    """Counts events for the board, as a listener for `Cluster.listen`.

    Args:
        requests: their records, which this listener finds folded already.
        new_slice: called with the time of the first event of each slice; it must not read replicas before the listener
            has returned.
    """

    hears_tokens = False

    def __init__(self, requests: RequestHistory, new_slice: Callable[[float], None] = lambda at: None) -> None:
        self.tiers: dict[str, TierCounts] = {}
        self.misses = BoardMisses(SLICES)
        self.replicas = BoardReplicas(SLICES)
        self.number = -1  # of the current slice
        self._requests, self._new_slice = requests, new_slice

    def __call__(self, event: Event) -> None:
        number = int(event.at / SLICE_S)
        if number > self.number:
            self.number = number
            self._new_slice(event.at)
        if isinstance(event, Offered):
            tier = self.tiers.setdefault(self._tier_name(event.request), TierCounts())
            tier.offer(event.request, int(event.at / SLICE_S))
        elif isinstance(event, Finished):
            record = self._requests.record(event.id)
            tier = self.tiers[self._tier_name(record.request)]
            tier.finish(event, int(record.offered_at / SLICE_S), self.number)
            if event.verdict.missed and not event.is_client_error:
                self.misses.add(record.request, event, self.number)
        else:
            self.replicas.add(event, self.number)

    def advance(self, now: float) -> int:
        """Counts the new tokens of all tiers. Returns the number of the current slice."""
        self.number = max(self.number, int(now / SLICE_S))
        tokens: Counter[str] = Counter()  # of requests in flight, by tier
        for record in self._requests.in_flight.values():
            tokens[self._tier_name(record.request)] += record.output
        for name, tier in self.tiers.items():
            tier.count_tokens(tokens[name], self.number)
        return self.number

    def _tier_name(self, request: Request) -> str:
        """Returns the key of the tier that counts a request."""
        return request.tier if request.tier in self.tiers or len(self.tiers) < MAX_TIERS else OTHER_TIER


def _bucket(seconds: float) -> int:
    return int(log2(max(seconds, 1e-4) * 1e4) * BUCKETS_PER_DOUBLING)


def _percentiles(times: Times) -> list[float] | None:
    """Returns the median and the 99th percentile in milliseconds; None where nothing was measured."""
    count, count_so_far, percentiles = times.total(), 0, list[float]()
    for bucket in sorted(times):
        count_so_far += times[bucket]
        while len(percentiles) < 2 and count_so_far >= (0.5, 0.99)[len(percentiles)] * count:
            percentiles.append(float(f"{2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING) / 10:.3g}"))
    return percentiles or None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
