"""What a fit run says: step times as a client meets them, their spread, and what requests spend outside the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import numpy as np

from experiments._timelines import timelines
from rubato.core.events import Event, Finished, Offered, Stepped
from rubato.core.plan import Sample, Shape
from rubato.core.request import SLO
from rubato.core.timeline import Timeline, steps
from rubato.latency import affine
from rubato.latency.fit import FitReport, fit
from rubato.measure.records import BenchResult, Record, rejudged

DISTURBED = 1.1  # seconds in steps for each that the median step would say: beyond, the machine had other work


def say(text: str) -> None:
    """To standard error: a figure's JSON may go to standard output."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LearnedModel:
    """What the fit run gave. truth: seconds from one step's end to the next one's, for the simulated engine; believed:
    the steps' own seconds, for schedulers; inside, held_out: None = nothing was fitted; noise: spread of steps around
    truth; gap: median seconds between steps; first, last: mean seconds that a client sees a request's first and last
    token later than the server timed them."""

    truth: affine.Model
    believed: affine.Model
    inside: FitReport | None = None
    held_out: FitReport | None = None
    noise: float = 0.0
    gap: float = 0.0
    first: float = 0.0
    last: float = 0.0


def lengthened(events: Sequence[Event]) -> tuple[list[Sample], float]:
    """The steps, each with the seconds since the previous one's end where the server was busy all the time (else with
    the median of those); and that median."""
    stepped = [e for e in events if isinstance(e, Stepped)]
    offered = np.sort([e.at for e in events if isinstance(e, Offered)])
    finished = np.sort([e.at for e in events if isinstance(e, Finished)])
    gaps: list[float | None] = [None]
    for before, step in pairwise(stepped):
        end = before.at
        here = np.searchsorted(offered, end, side="left") - np.searchsorted(finished, end, side="right")
        gaps.append(max(0.0, step.at - step.seconds - end) if here > 0 else None)
    known = [gap for gap in gaps if gap is not None]
    if not known:
        raise ValueError("the log holds no two steps in a row: was the server under load?")
    usual = median(known)
    samples = [
        Sample(e.shape, e.seconds + (usual if gap is None else gap)) for e, gap in zip(stepped, gaps, strict=True)
    ]
    return samples, usual


def learn(bursts: Sequence[Event], load: Sequence[Event], run: BenchResult) -> LearnedModel:
    """Fits on both logs; scale and spread of step times, and what requests spend outside, from the open-loop part."""
    under_load, gap = lengthened(load)
    truth = fit([*lengthened(bursts)[0], *under_load])
    assert isinstance(truth.model, affine.Model)
    believed = affine.Model()
    believed.fit([*steps(bursts), *steps(load)])
    # The fit is in relative error, outliers left out; what adds up to a request's e2e is the mean, with most of them.
    logs = np.log([s.seconds / truth.model.step_time(s.shape) for s in under_load])
    low, high = np.quantile(logs, [0.01, 0.99])
    usual = np.clip(logs, low, high)
    noise = float(usual.std())
    if pace(truth.model, under_load) > DISTURBED * float(np.exp(np.median(logs))):
        say("  WARNING: spells of slow steps in the fit run, something else used the machine: results will not hold")
    first, last = outside(run.records, list(timelines(load)))
    model = scaled(truth.model, float(np.exp(usual).mean()))
    return LearnedModel(model, believed, truth.inside, truth.held_out, min(noise, 0.9), gap, first, last)


def scaled(model: affine.Model, factor: float) -> affine.Model:
    """Every step takes `factor` times as long."""
    return affine.Model(
        k=(factor * model.k[0], factor * model.k[1]), b=(factor * model.b[0], factor * model.b[1]),
        **{name: factor * getattr(model, name) for name in affine.NUMBERS},
    )  # fmt: skip


def pace(model: affine.Model, samples: Sequence[Sample]) -> float:
    """Seconds that the steps took, for each second that the model says: 1.1 = the machine was a tenth slower."""
    return sum(s.seconds for s in samples) / sum(model.step_time(s.shape) for s in samples)


def outside(records: Sequence[Record], lines: Sequence[Timeline]) -> tuple[float, float]:
    """Mean seconds by which the client's TTFT and e2e (from scheduled arrivals) exceed the server's (from the offer).

    Requests are matched by order of arrival. Raises ValueError when their prompts say that this was wrong.
    """
    ordered = sorted(lines, key=lambda line: line.request.arrival)
    first: list[float] = []
    last: list[float] = []
    for record, line in zip(records, ordered, strict=True):
        if record.prompt_tokens not in (None, line.request.stages[0].prompt):
            continue  # two that arrived within a millisecond may have changed places
        if record.outcome == "completed" and record.verdict.ttft is not None and record.verdict.e2e is not None:
            first.append(record.verdict.ttft - (line.times[0] - line.request.arrival))
            last.append(record.verdict.e2e - (line.times[-1] - line.request.arrival))
    if len(first) < 0.9 * len(records):
        raise ValueError(f"only {len(first)} of {len(records)} requests of the fit run could be matched with its log")
    return mean(first), mean(last)


def delivered(run: BenchResult, what: LearnedModel) -> BenchResult:
    """The simulated run as a client would have seen it: every token later by what requests spend outside."""
    records = []
    for r in run.records:
        times = tuple(t + (what.first if i == 0 else what.last) for i, t in enumerate(r.times))
        records.append(replace(r, times=times))
    return rejudged(replace(run, records=tuple(records)), run.slo_rule)


def promises(model: affine.Model) -> dict[str, SLO]:
    """Multiples of the unloaded TTFT of 256 prompt tokens and of a lone decode step, as the demo has them."""
    ttft = model.step_time(Shape().plus(256, 0))
    step = model.step_time(Shape().plus(1, 255))
    return {"chat": SLO(ttft=7 * ttft, tpot=4 * step), "code": SLO(ttft=8 * ttft, tpot=4.5 * step)}
