"""Results of runs as JSON and as text for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from rubato.core.request import SLO
from rubato.measure.promises import promises
from rubato.measure.records import BenchResult, TierSummary, fingerprint, summarise, summarise_sessions
from rubato.measure.replica_seconds import ReplicaSeconds
from rubato.measure.tables import aligned

FORMAT = "rubato-results/3"
BEST_EFFORT = "best effort"
INTERVAL_SHORT = "95 %, the wider of Wilson's and a moving-block bootstrap"
INTERVAL = (
    "95 %, on each side the wider of Wilson's, which takes requests as independent, and a moving-block bootstrap over "
    "arrival time, since neighbours share a queue; twelve blocks, at least 5 s each"
)


# --------------------------------------------------------------------------- files


def dumps(runs: Sequence[BenchResult], comparisons: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """`to_json` as a file has it."""
    return as_json(to_json(runs, comparisons))


def to_json(runs: Sequence[BenchResult], comparisons: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Returns all of the runs but each request's description and token times.

    Args:
        comparisons: as `ComparisonReport.to_json` has them.
    """
    grouped = by_label(runs)
    sessions = {label: found for label, own in grouped.items() if (found := summarise_sessions(own))}
    return {
        "format": FORMAT,
        "attainment": f"met / offered; interval: {INTERVAL}",
        "attained_rps": "requests attained per second, over the seconds in which requests were offered; where "
        "their times follow from how others end, until the last has ended",
        "goodput_tokens_per_s": "output tokens of attained requests per second, over the same seconds",
        "policies": {label: summarise(own) for label, own in grouped.items()},
        **({"sessions": sessions} if sessions else {}),
        "promises": {label: promises(own) for label, own in grouped.items()},
        "runs": [run_json(run) for run in runs],
        "comparisons": comparisons,
    }


def by_label(runs: Sequence[BenchResult]) -> dict[str, list[BenchResult]]:
    """Rounds of one policy together."""
    grouped: dict[str, list[BenchResult]] = {}
    for run in runs:
        grouped.setdefault(run.label, []).append(run)
    return grouped


def run_json(run: BenchResult, requests: bool = True) -> dict[str, Any]:
    """One run of a result file; without `requests` only its sums, which is all that a sweep keeps of each."""
    load = run.workload
    data = {
        "policy": run.label,
        "slo_rule": run.slo_rule,
        "valid": run.valid,
        "problems": list(run.problems),
        "notes": list(run.notes),
        "workload": {
            "name": load.name,
            "seed": load.seed,
            "rate": load.rate,
            "duration": run.seconds,
            "requests": len(load.arrivals),
            "fingerprint": fingerprint(load),
            "tiers": {name: asdict(slo) for name, slo in load.tiers.items()},
            "notes": dict(load.notes),
        },
        "goodput": asdict(run.goodput) if run.goodput else None,
        "tiers": [asdict(row) for row in summarise(run)],
        "client": asdict(run.client) if run.client else None,
        "promises": asdict(promises(run)),
        "replica_seconds": asdict(run.replica_seconds) if run.replica_seconds else None,
        "settings": dict(run.settings),
        "versions": dict(run.versions),
    }
    if sessions := summarise_sessions(run):
        data["sessions"] = asdict(sessions)
    return data | {"requests": columns(run)} if requests else data


def columns(run: BenchResult) -> dict[str, list[Any]]:
    """Each request's outcome, by column, in order of arrival: what `rubato compare` needs."""
    measures = [(r.verdict.ttft, r.verdict.tpot, r.verdict.e2e, r.verdict.pause) for r in run.records]
    columns: dict[str, list[Any]] = {
        "id": [r.id for r in run.records],
        "tier": [r.tier for r in run.records],
        "at": [r.at for r in run.records],
        "outcome": [r.outcome for r in run.records],
        "met": [r.verdict.met for r in run.records],
        "met_by_deadline": [bool(r.verdict.met_by_deadline) for r in run.records],
        "met_by_windows": [bool(r.verdict.met_by_windows) for r in run.records],
        "output": [r.output for r in run.records],
    }
    if run.goodput:
        columns["good"] = [run.good(r) for r in run.records]
    return columns | {name: [m[i] for m in measures] for i, name in enumerate(("ttft", "tpot", "e2e", "pause"))}


def as_json(value: Any) -> bytes:
    """Indented JSON of plain values and dataclasses; what is not finite becomes null."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def write_json(path: str | Path, runs: Sequence[BenchResult], comparisons: Sequence[Mapping[str, Any]] = ()) -> None:
    Path(path).write_bytes(dumps(runs, comparisons))


def write_records(path: str | Path, runs: BenchResult | Sequence[BenchResult]) -> None:
    """The raw per-request records, one JSON object a line; each says the policy and the workload's seed."""
    with open(path, "wb") as file:
        for run in [runs] if isinstance(runs, BenchResult) else runs:
            for record in run.records:
                file.write(orjson.dumps({"policy": run.label, "seed": run.workload.seed, **asdict(record)}) + b"\n")


# --------------------------------------------------------------------------- text


RULES = "by deadline each token has its own, by windows each ten tokens have ten TPOTs"  # of the column of both
HEAD = (
    "policy|tier|SLO (ms)|offered|met|attained [95 %]|by deadline / windows|TTFT p50/p99|TPOT p50/p99|e2e p50|"
    "pause p99/max|refused|failed|best effort"
)


def table(runs: Sequence[BenchResult]) -> str:
    """A table for the terminal, and what is to be known of the runs. Times in ms."""
    text = aligned([HEAD.split("|"), *table_rows(runs)], 3)
    return "\n".join(line.rstrip() for line in [*text, "", *findings(runs), *notes(runs)])


def table_rows(runs: Sequence[BenchResult]) -> list[list[str]]:
    """Cells under `HEAD`: per policy (rounds pooled) and tier."""
    lines = []
    for label, own in by_label(runs).items():
        slos = {tier: _promise(slo) for tier, slo in own[0].workload.tiers.items()}
        timed = {a.tier for a in own[0].workload.arrivals if a.session_e2e is not None}
        slos |= {tier: f"{slos[tier].replace(BEST_EFFORT, '')} session e2e".lstrip() for tier in timed}
        lines += [[label if i == 0 else "", *_cells(row, slos)] for i, row in enumerate(summarise(own))]
    return lines


def findings(runs: Sequence[BenchResult]) -> list[str]:
    """How requests were judged; then, by policy, rates, promises, sessions, cost, goodput, and what was not served."""
    paced = any(run.paced_seconds is not None for run in runs)
    since = "when requests were to be offered" if paced else "scheduled arrivals"
    foot = [f"Judged by the {runs[0].slo_rule} rule from {since}; {RULES}. Times in ms. Interval: {INTERVAL_SHORT}."]
    for label, own in by_label(runs).items():
        total = summarise(own)[-1]
        if total.attained_rps is not None and total.goodput_tokens_per_s is not None:
            foot.append(
                f"{label}: {total.attained_rps:.2f} attained requests/s, "
                f"{total.goodput_tokens_per_s:.1f} output tokens/s of attained requests"
            )
        if (own_promises := promises(own)).broken:
            at_once = (
                "" if own_promises.together is None else f", up to {own_promises.together} of them within a second"
            )
            foot.append(
                f"{label}: {own_promises.broken} of {own_promises.made} requests whose first token was in time missed "
                f"a later one ({100 * own_promises.share:.1f} %){at_once}"
            )
        if sessions := summarise_sessions(own):
            low, high = sessions.attainment_low, sessions.attainment_high
            foot.append(
                f"{label}: {sessions.met} of {sessions.offered} sessions attained, {100 * sessions.attainment:.1f} % "
                f"[{100 * low:.1f}, {100 * high:.1f}], of {sessions.turns / sessions.offered:.1f} turns each"
            )
        costs = [run.replica_seconds for run in own if run.replica_seconds is not None]
        if costs:
            foot.append(f"{label}: {_cost(costs)}")
        if total.good is not None and total.goodput_rps is not None:
            foot.append(
                f"{label}: goodput {total.goodput_rps:.2f} requests/s [{total.goodput_rps_low:.2f}, "
                f"{total.goodput_rps_high:.2f}] within {own[0].goodput}: {total.good} of {total.offered}; per tier "
                + ", ".join(f"{row.tier} {row.good}/{row.offered}" for row in summarise(own)[:-1])
            )
        refused = Counter(
            r.reason.partition(":")[0] if r.outcome == "refused" else r.reason
            for run in own for r in run.records if r.outcome in ("refused", "failed")
        )  # fmt: skip
        foot += [f"{label}: {count} requests were not served: {why}" for why, count in refused.most_common(5)]
    return foot


def notes(runs: Sequence[BenchResult]) -> list[str]:
    """What a reader should know besides, and reasons not to trust a run."""
    return [f"{run.label}: {note}" for run in runs for note in run.notes] + [
        f"INVALID {run.label}: {problem}" for run in runs for problem in run.problems
    ]


def _cost(costs: Sequence[ReplicaSeconds]) -> str:
    """Of all runs together."""
    by_tier: Counter[str] = Counter()
    for cost in costs:
        by_tier.update(cost.tiers)
    parts = [f"{tier or 'no tier'} {seconds:.0f}" for tier, seconds in by_tier.items()]
    parts.append(f"idle {sum(cost.idle for cost in costs):.0f}")
    if starting := sum(cost.starting for cost in costs):
        parts.append(f"starting {starting:.0f}")
    return f"{sum(cost.total for cost in costs):.0f} replica-seconds: {', '.join(parts)}"


def _cells(row: TierSummary, slos: Mapping[str, str]) -> list[str]:
    return [
        row.tier,
        slos.get(row.tier, ""),
        str(row.offered),
        str(row.met),
        f"{100 * row.attainment:.1f} % [{100 * row.attainment_low:.1f}, {100 * row.attainment_high:.1f}]",
        " / ".join(f"{100 * met / max(1, row.offered):.1f} %" for met in (row.met_by_deadline, row.met_by_windows)),
        f"{_ms(row.ttft_p50)} / {_ms(row.ttft_p99)}",
        f"{_ms(row.tpot_p50, 1)} / {_ms(row.tpot_p99, 1)}",
        _ms(row.e2e_p50),
        f"{_ms(row.pause_p99)} / {_ms(row.pause_max)}",
        str(row.refused),
        str(row.failed),
        str(row.best_effort),
    ]


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"


def _promise(slo: SLO) -> str:
    if slo.best_effort:
        return BEST_EFFORT
    return " ".join(f"{name} {1000 * value:.4g}" for name, value in slo.bounds.items())
