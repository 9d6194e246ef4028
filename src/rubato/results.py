"""What became of a workload: per-request records, summaries per tier, comparisons, as text and JSON.

Attainment is always met / offered: a refused, failed or cancelled request is a miss. Latencies count from the
*scheduled* arrival; their percentiles are over the requests that have the measure (TTFT: a first token came out; TPOT:
two tokens; e2e: completed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rubato.intervals import ALL, Difference, Pair, paired, wilson
from rubato.slo import StageTimes, judge
from rubato.types import SLO, Outcome, Request, Verdict
from rubato.workload import Workload

FORMAT = "rubato-results/1"
ATTAINMENT_INTERVAL = (
    "Wilson, 95 %, taking requests as independent; neighbours share a queue, so the true interval of one run is wider"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request's fate. Times in seconds from the workload's start; tokens[i] output tokens were out by times[i].

    at: scheduled arrival; sent: when the client began to send (None in simulation). asked, output: tokens asked for
    and received. counted: token counts are the server's usage (else one token was assumed per non-empty chunk).
    best_effort: the tier served was best effort. reason: of a refusal or failure. server: the server's own verdict.
    """

    id: str
    tier: str
    app: str
    at: float
    outcome: Outcome
    verdict: Verdict
    asked: int
    output: int
    times: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    sent: float | None = None
    status: int | None = None
    reason: str = ""
    prompt_tokens: int | None = None
    counted: bool = True
    best_effort: bool = False
    server: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """How the load generator itself fared, in seconds: of the whole run, cpu of the process that holds the client."""

    wall: float
    cpu: float
    send_delay_p50: float
    send_delay_p99: float
    send_delay_max: float
    lag_p99: float  # of the event loop: how late a timer fires
    bound: float  # on send_delay_p99 and lag_p99


@dataclass(frozen=True)
class Run:
    """One policy under one workload, once. problems: sentences, each a reason not to trust the numbers; notes: what a
    reader should know besides. client is None for a simulated run."""

    label: str
    workload: Workload
    records: tuple[Record, ...]
    rule: str
    client: Client | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        return not self.problems


def verdict(
    request: Request, times: Sequence[float], tokens: Sequence[int], outcome: Outcome, rule: str = "deadline"
) -> Verdict:
    """Judge a timeline in which tokens[i] tokens were out by times[i]: every token counts from the chunk it came in."""
    each: list[float] = []
    for at, total in zip(times, tokens, strict=True):
        each += [at] * (total - len(each))
    return judge(request, (StageTimes(request.arrival, each),), outcome, rule)


def rejudged(run: Run, rule: str) -> Run:
    """The same run by another judging rule (`slo.RULES`)."""
    requests = {request.id: request for request in run.workload.requests()}
    records = tuple(
        replace(r, verdict=verdict(requests[r.id], r.times, r.tokens, r.outcome, rule)) for r in run.records
    )
    return replace(run, records=records, rule=rule)


# --------------------------------------------------------------------------- summaries


@dataclass(frozen=True, slots=True)
class Row:
    """One tier (or "all") under one policy. Times in seconds, None where nothing was measured."""

    tier: str
    offered: int
    met: int
    attainment: float
    attainment_low: float
    attainment_high: float
    completed: int
    refused: int
    failed: int
    best_effort: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2e_p50: float | None
    attained_rps: float | None
    goodput_tokens_per_s: float | None


def summarise(runs: Run | Sequence[Run]) -> tuple[Row, ...]:
    """A row per tier and one for "all", pooling the runs given (rounds of one policy). Rates are over the seconds in
    which requests were offered; None for a workload that offers all at once. Raises ValueError for mixed judges."""
    pooled = [runs] if isinstance(runs, Run) else list(runs)
    if len({run.rule for run in pooled}) != 1:
        raise ValueError("runs to pool must exist and be judged by one rule: use rejudged()")
    seconds = sum(run.workload.duration for run in pooled)
    records = [record for run in pooled for record in run.records]
    tiers = list(dict.fromkeys(tier for run in pooled for tier in run.workload.tiers))
    rows = [_row(tier, [r for r in records if r.tier == tier], seconds) for tier in tiers]
    return (*(row for row in rows if row.offered), _row(ALL, records, seconds))


def _row(tier: str, records: Sequence[Record], seconds: float) -> Row:
    met = sum(r.verdict.met for r in records)
    low, high = wilson(met, len(records))
    good = sum(r.output for r in records if r.verdict.met)
    ttft_p50, ttft_p99 = _quantiles((r.verdict.ttft for r in records), 0.5, 0.99)
    tpot_p50, tpot_p99 = _quantiles((r.verdict.tpot for r in records), 0.5, 0.99)
    (e2e_p50,) = _quantiles((r.verdict.e2e for r in records), 0.5)
    return Row(
        tier=tier,
        offered=len(records),
        met=met,
        attainment=met / len(records) if records else 0.0,
        attainment_low=low,
        attainment_high=high,
        completed=sum(r.outcome == "completed" for r in records),
        refused=sum(r.outcome == "refused" for r in records),
        failed=sum(r.outcome in ("failed", "cancelled") for r in records),
        best_effort=sum(r.best_effort for r in records),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        tpot_p50=tpot_p50,
        tpot_p99=tpot_p99,
        e2e_p50=e2e_p50,
        attained_rps=met / seconds if seconds else None,
        goodput_tokens_per_s=good / seconds if seconds else None,
    )


def _quantiles(values: Iterable[float | None], *shares: float) -> list[float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return [None] * len(shares)
    return [float(q) for q in np.quantile(known, shares)]


# --------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policy a against policy b on the same requests, paired by id, rounds pooled; per tier and "all"."""

    a: str
    b: str
    rule: str
    rounds: int
    block: float
    blocks: int
    differences: Mapping[str, Difference]
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return (
            f"pairs of the same request under both policies; 95 % intervals by moving-block bootstrap over arrival "
            f"time (expanded percentile; {self.blocks} blocks of {self.block:g} s), since neighbours share one queue"
        )


def compare(a: Sequence[Run], b: Sequence[Run], *, block: float | None = None, resamples: int = 5000) -> Comparison:
    """Compare rounds of policy a with rounds of policy b: a[i] and b[i] must have run the same workload.

    block: seconds of arrival time resampled together; by default a twelfth of all offered time, at least 5 s. Blocks
    should outlast a spell of congestion. With spells of about 8 s, twelve blocks covered a planted difference in 86 %
    of trials of 60 s, 91 % of 120 s and 93-95 % of 300 s and more; thirty blocks in 80, 86 and 91-93 %. Raises
    ValueError when rounds do not pair up: different numbers, workloads, judges, or requests.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"{len(a)} rounds of one policy and {len(b)} of the other: each round needs its counterpart")
    pairs: list[Pair] = []
    durations: dict[str, float] = {}
    for number, (one, other) in enumerate(zip(a, b, strict=True), start=1):
        if one.rule != other.rule or one.rule != a[0].rule:
            raise ValueError(f"round {number}: judged by {one.rule} and {other.rule}; compare under one rule")
        key = fingerprint(one.workload)
        if key != fingerprint(other.workload):
            raise ValueError(f"round {number}: {one.label} and {other.label} ran different workloads")
        durations[key] = one.workload.duration
        theirs = {record.id: record for record in other.records}
        if theirs.keys() != {record.id for record in one.records}:
            raise ValueError(f"round {number}: {one.label} and {other.label} hold records of different requests")
        for mine in one.records:
            pairs.append(Pair(key, mine.at, mine.tier, mine.verdict.met, theirs[mine.id].verdict.met))
    if block is None:
        block = max(5.0, sum(durations.values()) / 12)
    blocks = max(1, round(sum(max(seconds, block) for seconds in durations.values()) / block))
    notes: tuple[str, ...] = (f"only {blocks} blocks: the intervals are rough, run longer",) if blocks < 10 else ()
    if all(pair.met_a == pair.met_b for pair in pairs):
        notes += ("no request fared differently: intervals without width do not mean certainty",)
    differences = paired(pairs, durations, block=block, resamples=resamples)
    return Comparison(a[0].label, b[0].label, a[0].rule, len(a), block, blocks, differences, notes)


def fingerprint(workload: Workload) -> str:
    """A short digest of what was offered, when and under which SLOs: equal for equal workloads."""
    content = [
        [[name, asdict(slo)] for name, slo in workload.tiers.items()],
        [[a.id, a.at, a.tier, a.prompt_tokens, a.output_tokens, a.messages] for a in workload.arrivals],
    ]
    return hashlib.blake2b(orjson.dumps(content), digest_size=8).hexdigest()


# --------------------------------------------------------------------------- files


def to_json(runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Everything but the per-request records, ready for JSON; infinite ratios become null."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    data = {
        "format": FORMAT,
        "attainment": f"met / offered; interval: {ATTAINMENT_INTERVAL}",
        "attained_rps": "requests attained per second, over the seconds in which requests were offered",
        "goodput_tokens_per_s": "output tokens of attained requests per second, over the same seconds",
        "policies": {label: [asdict(row) for row in summarise(own)] for label, own in by_label.items()},
        "runs": [_run_json(run) for run in runs],
        "comparisons": [asdict(c) | {"method": c.method} for c in comparisons],
    }
    return _finite(data)  # type: ignore[no-any-return]


def _run_json(run: Run) -> dict[str, Any]:
    load = run.workload
    return {
        "policy": run.label,
        "judge": run.rule,
        "valid": run.valid,
        "problems": list(run.problems),
        "notes": list(run.notes),
        "workload": {
            "name": load.name,
            "seed": load.seed,
            "rate": load.rate,
            "duration": load.duration,
            "requests": len(load.arrivals),
            "fingerprint": fingerprint(load),
            "tiers": {name: asdict(slo) for name, slo in load.tiers.items()},
            "notes": dict(load.notes),
        },
        "tiers": [asdict(row) for row in summarise(run)],
        "client": asdict(run.client) if run.client else None,
        "settings": dict(run.settings),
        "versions": dict(run.versions),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def dumps(runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> bytes:
    """`to_json` as indented text."""
    return orjson.dumps(to_json(runs, comparisons), option=orjson.OPT_INDENT_2) + b"\n"


def write_json(path: str | Path, runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> None:
    Path(path).write_bytes(dumps(runs, comparisons))


def write_records(path: str | Path, run: Run) -> None:
    """The raw per-request records, one JSON object a line."""
    with open(path, "wb") as file:
        for record in run.records:
            file.write(orjson.dumps({"policy": run.label, **asdict(record)}) + b"\n")


# --------------------------------------------------------------------------- text


HEAD = "policy|tier|SLO (ms)|offered|met|attained [95 %]|TTFT p50/p99|TPOT p50/p99|e2e p50|refused|failed|best effort"


def table(runs: Sequence[Run]) -> str:
    """A table for the terminal: per policy (rounds pooled) and tier. Times in ms."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    lines = [HEAD.split("|")]
    for label, own in by_label.items():
        slos = own[0].workload.tiers
        lines += [[label if i == 0 else "", *_cells(row, slos)] for i, row in enumerate(summarise(own))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "  ".join("-" * w for w in widths))
    foot = [f"Judged by the {runs[0].rule} rule from scheduled arrivals. Times in ms. Interval: Wilson."]
    for label, own in by_label.items():
        total = summarise(own)[-1]
        if total.attained_rps is not None and total.goodput_tokens_per_s is not None:
            foot.append(
                f"{label}: {total.attained_rps:.2f} attained requests/s, "
                f"{total.goodput_tokens_per_s:.1f} output tokens/s of attained requests"
            )
    foot += [f"{run.label}: {note}" for run in runs for note in run.notes]
    foot += [f"INVALID {run.label}: {problem}" for run in runs for problem in run.problems]
    return "\n".join(line.rstrip() for line in [*text, "", *foot])


def _cells(row: Row, slos: Mapping[str, SLO]) -> list[str]:
    return [
        row.tier,
        _promise(slos[row.tier]) if row.tier in slos else "",
        str(row.offered),
        str(row.met),
        f"{100 * row.attainment:.1f} % [{100 * row.attainment_low:.1f}, {100 * row.attainment_high:.1f}]",
        f"{_ms(row.ttft_p50)} / {_ms(row.ttft_p99)}",
        f"{_ms(row.tpot_p50, 1)} / {_ms(row.tpot_p99, 1)}",
        _ms(row.e2e_p50),
        str(row.refused),
        str(row.failed),
        str(row.best_effort),
    ]


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"


def _promise(slo: SLO) -> str:
    if slo.best_effort:
        return "best effort"
    named = (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e))
    return " ".join(f"{name} {1000 * value:.4g}" for name, value in named if value is not None)


def comparison_text(comparison: Comparison) -> str:
    """The comparison in words and numbers, for the terminal."""
    lines = [f"{comparison.a} against {comparison.b} ({comparison.rule} rule, {comparison.rounds} round(s)):"]
    for tier, d in comparison.differences.items():
        if d.ratio is None:
            ratio = "neither met any"
        else:
            ratio = f"met {_times(d.ratio)} [{_times(d.ratio_low)}, {_times(d.ratio_high)}]"
        lines.append(
            f"  {tier}: {d.met_a} against {d.met_b} met of {d.pairs}; attainment {100 * d.difference:+.1f} points "
            f"[{100 * d.difference_low:+.1f}, {100 * d.difference_high:+.1f}]; {ratio}"
        )
    return "\n".join([*lines, f"  {comparison.method}.", *(f"  {note}." for note in comparison.notes)])


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}×"
