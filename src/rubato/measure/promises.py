"""Promises of a run: requests whose first token came in time, and what became of them.

Attainment counts whoever is in time, so a policy that serves many first tokens and loses the rest looks like one that
refuses. A stream that begins in time and then stalls is what users see: it is counted apart, and how many stall at once
too, since one step that takes long may cost all that run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rubato.core.request import Request
from rubato.core.slo import TOLERANCE_S, StageTimes, deadlines, tool_seconds
from rubato.measure.records import BenchResult, Record, stages
from rubato.workloads import Arrival
from rubato.workloads.offering import as_offered

TOGETHER_S = 1.0


@dataclass(frozen=True, slots=True)
class Promises:
    """Promises that requests were given and that were broken.

    Args:
        made: requests with an SLO whose first token came in time, before they were best effort.
        broken: of these, those that missed it in the end; what its client cancelled is not counted at all.
        together: the highest number broken within one second; None where the run did not keep when tokens came.
    """

    made: int
    broken: int
    together: int | None

    @property
    def share(self) -> float:
        """Broken of those made, 0 where none was."""
        return self.broken / self.made if self.made else 0.0


def promises(runs: BenchResult | Sequence[BenchResult]) -> Promises:
    """Of one run, or of several together. When a request was demoted is known of simulated runs; of others what was
    served as best effort in the end counts as promised nothing."""
    made = broken = together = 0
    timed = True
    for run in [runs] if isinstance(runs, BenchResult) else runs:
        late: list[float] = []
        records = {record.id: record for record in run.records}
        sessions = run.workload.session_e2es
        began: dict[str, float] = {}  # a session's turns are offered with what remains of its e2e
        for request, arrival in zip(run.workload.requests(), run.workload.arrivals, strict=True):
            record = records.get(request.id)
            if record is None:
                continue
            request = as_offered(request, record.at, began.setdefault(request.session, record.at), sessions)
            if not _has_promise(request, record):
                continue
            made += 1
            if not record.verdict.met:
                broken += 1
                if record.times:
                    late.append(_broken_at(request, arrival, record))
                else:
                    timed = False
        late.sort()
        together = max([together, *(i + 1 - bisect_left(late, at - TOGETHER_S) for i, at in enumerate(late))])
    return Promises(made, broken, together if timed else None)


def _has_promise(request: Request, record: Record) -> bool:
    first, slo = record.verdict.ttft, request.stages[0].slo
    if request.best_effort or record.outcome == "cancelled" or first is None:
        return False
    demoted_at = record.demoted_at
    if demoted_at is None:
        demoted_at = record.at if record.best_effort else inf
    return first <= min(slo.ttft or inf, slo.e2e or inf) + TOLERANCE_S and record.at + first <= demoted_at + TOLERANCE_S


def _broken_at(request: Request, arrival: Arrival, record: Record) -> float:
    """When the first token that was late came; where none did, when it was demoted, or else when the token was due that
    never came, or the last one came."""
    timed_stages = stages(arrival, record.times, record.tokens)
    timed_stages[0] = timed_stages[0]._replace(
        start=record.at
    )  # where that follows from the run its workload does not know it
    reached = len(timed_stages)
    if (
        reached < len(request.stages) and len(timed_stages[-1].tokens) == arrival.parts[reached - 1].output
    ):  # none of the next
        timed_stages.append(StageTimes(record.times[-1] + arrival.parts[reached].pause, []))
    continues: float | None = None
    missing = inf  # when the token after the last one was due
    for i, (stage, (start, tokens)) in enumerate(zip(request.stages, timed_stages, strict=False)):
        begun, before = record.at + tool_seconds(timed_stages[: i + 1]), None if stage.prompt else continues
        due = deadlines(stage.slo, begun, start, float(tokens[0]) if len(tokens) else None, before)
        if not len(tokens):
            missing = due.token(0)
            break
        late = due.are_late(list(tokens))
        if late.any():
            return float(tokens[int(late.argmax())])
        missing = due.token(len(tokens), float(tokens[-1]))
        last_due = due.token(len(tokens) - 1)
        continues = last_due if last_due < inf else float(tokens[-1])
    if record.demoted_at is not None:
        return record.demoted_at
    return missing if record.outcome != "completed" and missing < inf else record.times[-1]
