"""Little's law, which holds in every run that begins and ends empty, whatever the policy: L = λ·W.

L is counted from arrivals and last tokens; W is the mean e2e of the verdicts, which the replica judged by itself. A
driver that skips ahead, or a replica that loses a moment, breaks the equality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rubato.measure.records import BenchResult


@dataclass(frozen=True, slots=True)
class LittlesLaw:
    """in_system: L, requests in the system on average over time. rate: λ, arrivals a second. sojourn: W, seconds.
    left_out: requests that did not complete, which have no sojourn."""

    in_system: float
    rate: float
    sojourn: float
    left_out: int

    @property
    def gap(self) -> float:
        """|L - λ·W| / L."""
        return abs(self.in_system - self.rate * self.sojourn) / self.in_system


def littles_law(run: BenchResult) -> LittlesLaw:
    """Measure both sides over a whole run. Raises ValueError for a run without a completed request, and for a record
    that contradicts itself: tokens before the arrival, out of order, or not as many as were counted."""
    done = [record for record in run.records if record.outcome == "completed"]
    if not done:
        raise ValueError(f"run {run.label!r} completed no request: there is no sojourn to measure")
    for record in done:
        if (
            record.tokens[-1] != record.output
            or record.times[0] < record.at
            or list(record.times) != sorted(record.times)
        ):
            raise ValueError(
                f"run {run.label!r}: the times of request {record.id!r} contradict its counts or its arrival"
            )
    begins = np.array([record.at for record in done])
    ends = np.array([record.times[-1] for record in done])
    moments = np.concatenate([begins, ends])
    order = np.argsort(moments, kind="stable")
    inside = np.cumsum(np.concatenate([np.ones(len(done)), -np.ones(len(done))])[order])
    span = float(moments[order[-1]] - moments[order[0]])
    area = float(np.dot(inside[:-1], np.diff(moments[order])))
    sojourns = [record.verdict.e2e for record in done if record.verdict.e2e is not None]
    if len(sojourns) != len(done):
        raise ValueError(
            f"run {run.label!r}: {len(done) - len(sojourns)} completed requests have no e2e in their verdict"
        )
    return LittlesLaw(area / span, len(done) / span, float(np.mean(sojourns)), len(run.records) - len(done))
