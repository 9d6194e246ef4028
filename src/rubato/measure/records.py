"""Records of a run: one per request, and summaries by tier.

Attainment is always met / offered: a refused, failed or cancelled request is a miss. Latencies count from the
*scheduled* arrival (of a request whose time follows from how others end: from when it was to be offered); their
percentiles are over the requests that have the measure (TTFT: a first token came out; TPOT: two tokens; e2e:
completed).
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np
import orjson

from rubato.core.events import Verdict
from rubato.core.request import SLO, Outcome, Request
from rubato.core.slo import StageTimes, judge
from rubato.measure.confidence import ALL, RequestOutcome, proportion, wilson
from rubato.measure.goodput import SLOBounds
from rubato.measure.replica_seconds import ReplicaSeconds
from rubato.workloads import Arrival, Workload
from rubato.workloads.offering import as_offered


@dataclass(frozen=True, slots=True)
class Record:
    """One request's fate. Times in seconds from the workload's start; tokens[i] output tokens were out by times[i].

    Args:
        at: scheduled arrival, or, where that follows from how others end, when it was to be offered.
        sent: when the client began to send (None in simulation).
        asked, output: tokens asked for and received.
        counted: token counts are the server's usage (else one token was assumed per non-empty chunk).
        best_effort: the tier served was best effort.
        demoted_at: since when, where the request had not asked for that (None where it is not known, and live).
        reason: of a refusal or failure.
        server: the server's own verdict.
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
    demoted_at: float | None = None
    server: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the load generator itself was, in seconds.

    Args:
        cpu: CPU time of the client's process over the whole run.
    """

    wall: float
    cpu: float
    send_delay_p50: float
    send_delay_p99: float
    send_delay_max: float
    lag_p99: float  # of the event loop: how late a timer fires
    bound: float  # on send_delay_p99 and lag_p99


@dataclass(frozen=True)
class BenchResult:
    """The result of one policy under one workload, once.

    Args:
        problems: sentences, each a reason not to trust the numbers.
        client: None for a simulated run.
        notes: what a reader should know besides.
        goodput: bounds beside the tiers' SLOs.
        replica_seconds: what the fleet cost; known of simulated runs alone.
        paced_seconds: until the last request ended, of a run in which requests wait for others to end; None of other
            runs.
    """

    label: str
    workload: Workload
    records: tuple[Record, ...]
    slo_rule: str
    client: ClientLoad | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    goodput: SLOBounds | None = None
    replica_seconds: ReplicaSeconds | None = None
    paced_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Over which rates are taken: those in which the workload offers requests; where that depends on the run, until
        the last has ended."""
        return self.workload.duration if self.paced_seconds is None else self.paced_seconds

    @property
    def valid(self) -> bool:
        return not self.problems

    def good(self, record: Record) -> bool:
        """Did this request keep all goodput bounds? Raises ValueError when the run has none."""
        if self.goodput is None:
            raise ValueError(f"run {self.label!r} was given no goodput bounds")
        v = record.verdict
        return self.goodput.are_met(record.outcome, v.ttft, v.tpot, v.e2e)


def not_offered(arrival: Arrival, at: float, why: str, slo_rule: str) -> Record:
    """Of a request that never came, as was known `at`: offered work that was missed."""
    verdict = Verdict(False, slo_rule, "failed")
    return Record(arrival.id, arrival.tier, arrival.app, at, "failed", verdict, arrival.output_tokens, 0, reason=why)


def stages(arrival: Arrival, times: Sequence[float], tokens: Sequence[int]) -> list[StageTimes]:
    """A request's stages, from a timeline in which tokens[i] tokens were out by times[i]: every token counts from the
    chunk it came in. A stage that waits for a tool begins when it returns."""
    each = np.repeat(times, np.diff(tokens, prepend=0)) if times else np.zeros(0)
    if not arrival.parts:
        return [StageTimes(arrival.at, each)]
    stage_times: list[StageTimes] = []
    start, position = arrival.at, 0
    for part in arrival.parts:
        if stage_times:
            start = float(each[position - 1]) + part.pause
        stage_times.append(StageTimes(start, each[position : position + part.output]))
        position += part.output
        if position >= len(each):
            break
    return stage_times


def rejudged(run: BenchResult, slo_rule: str) -> BenchResult:
    """The same run by another judging rule (`slo.SLO_RULES`)."""
    sessions = run.workload.session_e2es
    began: dict[str, float] = {}
    for r, arrival in zip(run.records, run.workload.arrivals, strict=True):
        if arrival.session in sessions:
            began[arrival.session] = min(r.at, began.get(arrival.session, r.at))

    def judged(request: Request, arrival: Arrival, r: Record) -> Verdict:
        offered = as_offered(request, r.at, began.get(request.session, r.at), sessions)
        return judge(offered, stages(came(arrival, r.at), r.times, r.tokens), r.outcome, slo_rule)

    each = zip(run.workload.requests(), run.workload.arrivals, run.records, strict=True)
    records = tuple(replace(r, verdict=judged(request, arrival, r)) for request, arrival, r in each)
    return replace(run, records=records, slo_rule=slo_rule)


def came(arrival: Arrival, at: float) -> Arrival:
    """With the time at which it came, which a workload does not know where that follows from the run."""
    return arrival if arrival.at == at else replace(arrival, at=at)


# --------------------------------------------------------------------------- summaries


@dataclass(frozen=True, slots=True)
class TierSummary:
    """One tier (or "all") under one policy. Times in seconds, None where nothing was measured.

    Args:
        attainment_low, attainment_high: the interval of `confidence.proportion`.
        met_by_deadline, met_by_windows: `met` by these two rules, whichever rule judged.
        pause_p99, pause_max: of each request's longest pause between two tokens.
        good: requests that kept the goodput bounds.
        goodput_rps: good per second, with Wilson's interval for their share; None without bounds.
    """

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
    met_by_deadline: int
    met_by_windows: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2e_p50: float | None
    pause_p99: float | None
    pause_max: float | None
    attained_rps: float | None
    goodput_tokens_per_s: float | None
    good: int | None = None
    goodput_rps: float | None = None
    goodput_rps_low: float | None = None
    goodput_rps_high: float | None = None


def summarise(runs: BenchResult | Sequence[BenchResult]) -> tuple[TierSummary, ...]:
    """A row per tier and one for "all", pooling the runs given (rounds of one policy). Rates are over
    `BenchResult.seconds`; None for a workload that offers all at once. Raises ValueError for mixed judges."""
    pooled = [runs] if isinstance(runs, BenchResult) else list(runs)
    if len({run.slo_rule for run in pooled}) != 1:
        raise ValueError("runs to pool must exist and be judged by one rule: use rejudged()")
    if len({run.goodput for run in pooled}) != 1:
        raise ValueError("runs to pool must have the same goodput bounds")
    seconds = sum(run.seconds for run in pooled)
    durations: dict[str, float] = {}
    keyed: list[tuple[str, Record]] = []  # each with its workload
    for run in pooled:
        key = fingerprint(run.workload)
        durations[key] = max(run.seconds, durations.get(key, 0.0))
        keyed += [(key, record) for record in run.records]
    tiers = list(dict.fromkeys(tier for run in pooled for tier in run.workload.tiers))
    by_tier = {tier: [(key, record) for key, record in keyed if record.tier == tier] for tier in tiers}
    offered = {tier: own for tier, own in by_tier.items() if own} | {ALL: keyed}
    good = pooled[0].good if pooled[0].goodput else None
    return tuple(_row(tier, own, seconds, durations, good) for tier, own in offered.items())


def _row(
    tier: str, kept: Sequence[tuple[str, Record]], seconds: float, durations: Mapping[str, float],
    good: Callable[[Record], bool] | None,
) -> TierSummary:  # fmt: skip
    records = [record for _, record in kept]
    met = sum(r.verdict.met for r in records)
    low, high = proportion([RequestOutcome(key, r.at, tier, r.verdict.met) for key, r in kept], durations)
    tokens = sum(r.output for r in records if r.verdict.met)
    ttft_p50, ttft_p99 = _quantiles((r.verdict.ttft for r in records), 0.5, 0.99)
    tpot_p50, tpot_p99 = _quantiles((r.verdict.tpot for r in records), 0.5, 0.99)
    (e2e_p50,) = _quantiles((r.verdict.e2e for r in records), 0.5)
    pause_p99, pause_max = _quantiles((r.verdict.pause for r in records), 0.99, 1.0)
    return TierSummary(
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
        met_by_deadline=sum(bool(r.verdict.met_by_deadline) for r in records),
        met_by_windows=sum(bool(r.verdict.met_by_windows) for r in records),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        tpot_p50=tpot_p50,
        tpot_p99=tpot_p99,
        e2e_p50=e2e_p50,
        pause_p99=pause_p99,
        pause_max=pause_max,
        attained_rps=met / seconds if seconds else None,
        goodput_tokens_per_s=tokens / seconds if seconds else None,
        **(_goodput(sum(map(good, records)), len(records), seconds) if good and records else {}),
    )


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """The sessions of runs under one policy. A session is attained if all its turns were: each completed, kept its SLOs
    and ended within the session's e2e, if it has one.

    Args:
        turns: number of turns of all sessions.
        attainment_low, attainment_high: as in `TierSummary`.
    """

    offered: int
    met: int
    attainment: float
    attainment_low: float
    attainment_high: float
    turns: int


def summarise_sessions(runs: BenchResult | Sequence[BenchResult]) -> SessionSummary | None:
    """Pooled, over the sessions that were offered; None where no request is of a session."""
    turns = 0
    durations: dict[str, float] = {}
    fates: list[RequestOutcome] = []
    for run in [runs] if isinstance(runs, BenchResult) else runs:
        sessions: dict[str, list[Record]] = {}
        of = {arrival.id: arrival.session for arrival in run.workload.arrivals if arrival.session}
        for record in run.records if of else ():
            if session := of.get(record.id):
                sessions.setdefault(session, []).append(record)
        key = fingerprint(run.workload) if sessions else ""
        durations[key] = max(run.seconds, durations.get(key, 0.0))
        for own in sessions.values():
            turns += len(own)
            fates.append(RequestOutcome(key, min(r.at for r in own), ALL, all(r.verdict.met for r in own)))
    if not fates:
        return None
    met = sum(fate.met for fate in fates)
    return SessionSummary(len(fates), met, met / len(fates), *proportion(fates, durations), turns)


def _goodput(good: int, offered: int, seconds: float) -> dict[str, Any]:
    if not seconds:
        return {"good": good}
    low, high = (share * offered / seconds for share in wilson(good, offered))
    return {"good": good, "goodput_rps": good / seconds, "goodput_rps_low": low, "goodput_rps_high": high}


def _quantiles(values: Iterable[float | None], *shares: float) -> list[float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return [None] * len(shares)
    return [float(q) for q in np.quantile(known, shares)]


def fingerprint(workload: Workload) -> str:
    """A short digest of what was offered, when and under which SLOs: equal for equal workloads."""

    def parts(a: Arrival) -> list[dict[str, Any]]:
        return [asdict(part) | {"slo": _bounds(part.slo)} for part in a.parts]

    content = [
        [[name, _bounds(slo)] for name, slo in workload.tiers.items()],
        [
            [a.id, a.at, a.tier, a.prompt_tokens, a.output_tokens, a.messages]
            + ([a.slo and _bounds(a.slo), parts(a), a.blocks] if a.slo or a.parts or a.blocks else [])
            + ([a.after, a.gap, a.session, a.session_e2e] if a.after or a.session else [])
            for a in workload.arrivals
        ],
    ]
    if workload.concurrency is not None:
        content.append([workload.concurrency])
    return hashlib.blake2b(orjson.dumps(content), digest_size=8).hexdigest()


def _bounds(slo: SLO) -> dict[str, float | None]:
    return {name: value for name, value in asdict(slo).items() if name != "max_pause" or value is not None}


def versions(*packages: str) -> dict[str, str]:
    """Of Rubato, of the packages named and of what they run on, for a result file."""
    system = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    return {name: metadata.version(name) for name in ("rubato-llm", *packages)} | system
