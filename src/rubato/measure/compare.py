"""Two policies against each other, tier by tier, from runs as result files keep them (`rubato compare`).

Runs of the same workloads (by fingerprint) are paired, request by request, which cancels what made a request hard for
both; otherwise each side is resampled by itself. Attainment and goodput come with intervals (`confidence`), latency
quantiles are those of the requests that have the measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rubato.core.did_you_mean import nearest
from rubato.measure.confidence import ALL, Difference, RequestOutcome, default_block, paired, unpaired
from rubato.measure.records import BenchResult
from rubato.measure.results import FORMAT, run_json
from rubato.measure.tables import aligned, points_of

QUANTILES = (0.5, 0.9, 0.99, 1.0)
MEASURES = ("ttft", "tpot", "e2e", "pause")
RULES = {"met_by_deadline": "deadline rule", "met_by_windows": "windowed rule"}  # columns of requests
MIN_BLOCKS = 10  # blocks: with fewer the intervals are rough


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One run as a result file keeps it.

    Args:
        requests: the values of each column, in order of arrival.
    """

    label: str
    slo_rule: str
    fingerprint: str
    duration: float
    valid: bool
    goodput: Mapping[str, float | None] | None
    requests: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class TierContrast:
    """One tier under a beside the same under b.

    Args:
        good: the same as `attained`, of the goodput bounds, if both sides had the same ones.
        by_rule: the same by the deadline rule and by the windowed one, whichever rule judged.
        latency: seconds of a and of b by measure and quantile; None where nothing was measured.
    """

    attained: Difference
    by_rule: Mapping[str, Difference]
    good: Difference | None
    latency: Mapping[tuple[str, float], tuple[float | None, float | None]]


@dataclass(frozen=True)
class ComparisonReport:
    a: str
    b: str
    slo_rule: str
    paired: bool
    tiers: Mapping[str, TierContrast]
    notes: tuple[str, ...]

    @property
    def method(self) -> str:
        how = "paired by request, the workloads are the same" if self.paired else "unpaired, the workloads differ"
        return f"{how}; 95 % intervals by moving-block bootstrap over arrival time"

    def text(self) -> str:
        """Two tables for the terminal: attainment by each rule, and latency."""
        head = ["tier", "by", f"{self.a}: met", f"{self.b}: met", "points [95 %]", "met per second [95 %]"]
        shares, times = [head], [["tier", "ms", *map(_name, QUANTILES)]]
        for tier, contrast in self.tiers.items():
            rules = {f"{self.slo_rule} rule": contrast.attained}
            rules |= {rule: d for column, d in contrast.by_rule.items() if (rule := RULES[column]) not in rules}
            rules |= {} if contrast.good is None else {"goodput": contrast.good}
            shares += [[tier, by, *_difference(d)] for by, d in rules.items()]
            for measure in MEASURES:
                pairs = [contrast.latency[measure, q] for q in QUANTILES]
                if any(value is not None for pair in pairs for value in pair):
                    times.append([tier, measure, *(f"{_ms(one)} / {_ms(other)}" for one, other in pairs)])
        lines = [f"{self.a} against {self.b}: {self.method}.", "", *aligned(_once(shares), 2)]
        if len(times) > 1:
            lines += ["", f"Times in ms, {self.a} / {self.b}:", *aligned(_once(times), 2)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON (an infinite ratio becomes null there)."""
        tiers = {
            tier: {
                "attained": contrast.attained,
                **contrast.by_rule,
                "good": contrast.good,
                "latency": {
                    measure: {_name(q): contrast.latency[measure, q] for q in QUANTILES} for measure in MEASURES
                },
            }
            for tier, contrast in self.tiers.items()
        }
        head = {"a": self.a, "b": self.b, "slo_rule": self.slo_rule, "paired": self.paired, "method": self.method}
        return {**head, "tiers": tiers, "notes": list(self.notes)}


def read(source: str) -> list[SavedRun]:
    """The runs of one policy in a result file: FILE, or FILE:POLICY where it holds several.

    Raises ValueError, naming the file, when it is no result file, or which policy is meant is not clear.
    """
    path, _, label = (source, "", "") if Path(source).exists() else source.rpartition(":")
    path = path or source
    try:
        data = orjson.loads(Path(path).read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise ValueError(f"{path}: its format is {found!r}, expected {FORMAT!r}: give what `bench --json` wrote")
    given = data.get("runs")
    if not isinstance(given, list) or not given:
        raise ValueError(f"{path} holds no runs: give what `bench --json` wrote, all of it")
    runs = [_read_run(path, number, run) for number, run in enumerate(given, 1)]
    labels = list(dict.fromkeys(run.label for run in runs))
    if not label and len(labels) != 1:
        raise ValueError(f"{path} holds {', '.join(labels)}: say which, as {path}:{labels[0]}")
    if label and label not in labels:
        raise ValueError(f"{path} has no policy {label!r}{nearest(label, labels)}")
    return [run for run in runs if run.label == (label or labels[0])]


def saved(run: BenchResult) -> SavedRun:
    """The run as a result file would keep it."""
    return _read_run(run.label, 1, run_json(run))


def _read_run(path: str, number: int, run: Any) -> SavedRun:
    """Raises ValueError for a run of which a part is not there."""
    try:
        load, columns = run["workload"], run["requests"]
        sizes = {len(columns[name]) for name in ("id", "at", "tier", "met", *RULES, *MEASURES)}
        if run["goodput"] is not None:
            sizes.add(len(columns["good"]))
        if len(sizes) != 1:
            raise ValueError(f"{path}, run {number}: its requests' columns are of {sizes} rows: the file is damaged")
        return SavedRun(
            run["policy"], run["slo_rule"], load["fingerprint"], load["duration"], run["valid"], run["goodput"], columns
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}, run {number}: a part is not there ({error}): the file is damaged") from error


def compare(a: Sequence[SavedRun], b: Sequence[SavedRun]) -> ComparisonReport:
    """Raises ValueError for runs judged by different rules, or that share no tier."""
    rules = {run.slo_rule for run in (*a, *b)}
    if len(rules) != 1:
        raise ValueError(f"the runs are judged by different rules ({', '.join(sorted(rules))}): compare under one")
    alike = Counter((run.fingerprint, run.duration) for run in a) == Counter(
        (run.fingerprint, run.duration) for run in b
    )
    notes: list[str] = []
    if not alike and Counter(run.fingerprint for run in a) == Counter(run.fingerprint for run in b):
        notes.append("the requests are the same but came as others ended: they are not paired")
    elif not alike and {run.fingerprint for run in a} & {run.fingerprint for run in b}:
        notes.append("some workloads are the same and some are not: give files of the same seeds to have them paired")
    for run in (*a, *b):
        if not run.valid:
            notes.append(f"a run of {run.label} is INVALID: its load generator could not keep the schedule")
    seconds = min(sum(run.duration for run in side) for side in (a, b))
    if round(seconds / default_block({"": seconds})) < MIN_BLOCKS:
        notes.append(f"only {seconds:.0f} s of arrivals: the intervals are rough, run longer")
    attained = _differences(a, b, "met", alike)
    if attained[ALL].difference_low == attained[ALL].difference_high == 0.0:
        notes.append("no resample has a difference: an interval without width does not mean certainty")
    bounds = {str(run.goodput) for run in (*a, *b)}
    with_goodput = len(bounds) == 1 and a[0].goodput is not None
    if len(bounds) > 1:
        notes.append("the goodput bounds differ: goodput is not compared")
    good = _differences(a, b, "good", alike) if with_goodput else {}
    by_rule = {column: _differences(a, b, column, alike) for column in RULES}
    tiers = {
        tier: TierContrast(d, {c: all_[tier] for c, all_ in by_rule.items()}, good.get(tier), _latency(a, b, tier))
        for tier, d in attained.items()
    }
    return ComparisonReport(a[0].label, b[0].label, rules.pop(), alike, tiers, tuple(notes))


def _differences(a: Sequence[SavedRun], b: Sequence[SavedRun], column: str, alike: bool) -> dict[str, Difference]:
    sides = [sorted(side, key=lambda run: run.fingerprint) for side in (a, b)]
    durations = [{run.fingerprint: run.duration for run in side} for side in sides]
    if not alike:
        seconds = (sum(run.duration for run in a), sum(run.duration for run in b))
        return unpaired(_fates(sides[0], column), _fates(sides[1], column), durations[0], durations[1], seconds)
    met_b: list[bool] = []
    for one, other in zip(*sides, strict=True):
        theirs = dict(zip(other.requests["id"], other.requests[column], strict=True))
        if single := theirs.keys() ^ set(one.requests["id"]):
            raise ValueError(
                f"request {min(single)!r} is in one of two runs of the same workload only: a file is damaged"
            )
        met_b += [theirs[id] for id in one.requests["id"]]
    return paired(_fates(sides[0], column), met_b, durations[0], block=default_block(durations[0]))


def _fates(runs: Sequence[SavedRun], column: str) -> list[RequestOutcome]:
    return [
        RequestOutcome(run.fingerprint, at, tier, met)
        for run in runs
        for at, tier, met in zip(run.requests["at"], run.requests["tier"], run.requests[column], strict=True)
    ]


def _latency(
    a: Sequence[SavedRun], b: Sequence[SavedRun], tier: str
) -> dict[tuple[str, float], tuple[float | None, float | None]]:
    quantiles: dict[tuple[str, float], tuple[float | None, float | None]] = {}
    for measure in MEASURES:
        one, other = (_quantiles(side, tier, measure) for side in (a, b))
        quantiles |= {(measure, q): (one[i], other[i]) for i, q in enumerate(QUANTILES)}
    return quantiles


def _quantiles(runs: Sequence[SavedRun], tier: str, measure: str) -> list[float | None]:
    numbers = [
        value
        for run in runs
        for value, own in zip(run.requests[measure], run.requests["tier"], strict=True)
        if value is not None and tier in (own, ALL)
    ]
    return [float(q) for q in np.quantile(numbers, QUANTILES)] if numbers else [None] * len(QUANTILES)


def _once(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Without a tier's name where the row above has it, too."""
    return [[*rows[0]], *([b[0] if b[0] != a[0] else "", *b[1:]] for a, b in pairwise(rows))]


def _difference(d: Difference) -> list[str]:
    """The cells of both sides, of the difference and of the ratio."""
    ratio = "neither met any" if d.ratio is None else f"{d.ratio:.2f}× [{d.ratio_low:.2f}, {d.ratio_high:.2f}]"
    return [f"{d.met_a} of {d.offered_a}", f"{d.met_b} of {d.offered_b}", points_of(d.estimate), ratio]


def _name(quantile: float) -> str:
    return "max" if quantile == 1.0 else f"p{100 * quantile:g}"


def _ms(seconds: float | None) -> str:
    """Without exponents; from 100 ms on in whole ones."""
    return "-" if seconds is None else f"{1e3 * seconds:.{1 if seconds < 0.09995 else 0}f}"
