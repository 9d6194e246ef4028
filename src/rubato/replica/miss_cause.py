"""Seconds that a request lost to others, by cause: what a miss is put down to. Worked out from the step log once a
request has missed, or when it moves; steps that are not asked about cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rubato.core.infeasible import StageLengths, find_infeasible
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits, Shape
from rubato.core.request import Cause
from rubato.replica.sequence import Seq, StepEnds
from rubato.replica.step_log import StepLog, StepRun

INTERFERENCE: tuple[Cause, Cause] = ("prefill interference", "decode interference")
Shares = tuple[float, float]  # seconds of a step as the model has it: lost to prefill, and to decodes, of others


def of_decode(latency: LatencyModel, predicted: float, decodes: Shape) -> Shares:
    """What a step of `predicted` seconds costs each of its decodes, beyond a step of its own."""
    together = latency.step_time(decodes)
    drafts = Shape(spec_steps=decodes.spec_steps, draft_tokens=decodes.draft_tokens // decodes.seqs)
    alone = drafts.plus(1, decodes.kv // decodes.seqs)
    return predicted - together, together - latency.step_time(alone)


def is_infeasible(seq: Seq, cached: int, latency: LatencyModel, limits: Limits, slo_rule: str) -> bool:
    """Whether a request that has ended would have missed its SLO on this replica alone, too. cached: tokens of its
    first prompt that need not be run."""
    outputs = [len(times) for times in seq.times_of_all() if len(times)]
    stages = [
        StageLengths(stage.prompt, stage.slo, n, n) for stage, n in zip(seq.request.stages, outputs, strict=False)
    ]
    cached = min(cached, seq.request.stages[0].prompt - 1)
    tokens_per_step = sum(outputs) / max(1, sum(outputs) - seq.accepted)
    most = limits.max_num_batched_tokens
    return bool(find_infeasible(stages, latency, most, slo_rule, cached=cached, tokens_per_step=tokens_per_step))


class MissCauses:
    """Attributes, for each sequence, the time that its replica's steps took beyond what it alone would have taken.
    Shares come from the latency model: whole batch, the batch's decodes, the sequence by itself."""

    def __init__(self, steps: StepEnds, log: StepLog, latency: LatencyModel) -> None:
        self._steps = steps
        self._log = log
        self._latency = latency

    def delays(self, seq: Seq) -> dict[Cause, float]:
        """Seconds lost to each cause until the first token that was late, elsewhere and here."""
        delays = dict(seq.delays_elsewhere)
        if seq.late_elsewhere:
            return delays
        last = self._first_late(seq)
        decoded = list(seq.token_spans_now())
        # it waits before it runs, and before it is handed off
        for wait, ran in zip_longest(seq.waits, seq.running_spans):
            if wait.until <= last:
                book(delays, wait.cause, wait.seconds)
            if ran is None:
                break
            begin, end = ran
            stop = min(last + 1, self._steps.tick if end < 0 else end)
            for first, after, decodes in _pieces(begin, stop, decoded):
                if decodes and after - first > 1:
                    _book_each(delays, self._shares(first, after))
                    continue
                for at in range(first, after):
                    for cause, seconds in self._of_step(seq, at, decodes):
                        book(delays, cause, seconds)
        return delays

    def _shares(self, first: int, after: int) -> NDArray[np.float64]:
        """(2, after - first): seconds that each step cost each that decoded in it, the same for all, lost to prefill
        and to decodes of others; none below 0. Worked out once for each run, when wanted."""
        shares: list[Shares] = []
        for run in self._log.runs(first, after):
            until = min(after - run.tick, run.steps)
            if len(run.shares) < until:
                run.shares = [*run.shares, *(self._of_decodes(run, i) for i in range(len(run.shares), until))]
            shares += run.shares[max(first - run.tick, 0) : until]
        return np.array(shares).T

    def _of_decodes(self, run: StepRun, i: int) -> Shares:
        """What step `i` of a run cost each that decoded in it."""
        if run.chunks or run.speculation:
            decodes = run.shape(i, decodes=True)
            if not decodes.seqs:
                return 0.0, 0.0
            predicted = self._latency.step_time(run.shape(i))
            by_prefill, by_decode = of_decode(self._latency, predicted, decodes)
        else:  # the same for a step with nothing else in it, as most are
            n, seconds_of = run.seqs, self._latency.seconds_of
            kv = run.kv + (i + 1) * n
            predicted = seconds_of(n, n, kv, 0, 0, 0, 0)
            by_prefill, by_decode = 0.0, predicted - seconds_of(1, 1, kv // n + 1, 0, 0, 0, 0)
        scale = self._log.seconds(run, i) / predicted if predicted > 0.0 else 0.0
        return max(by_prefill * scale, 0.0), max(by_decode * scale, 0.0)

    def _of_step(self, seq: Seq, at: int, decodes: bool) -> tuple[tuple[Cause, float], ...]:
        """What one step cost it, beyond what it would have taken alone."""
        run = self._log.at(at)
        i = at - run.tick
        seconds = self._log.seconds(run, i)
        whole = run.shape(i)
        single = run.shape(i, decodes=True)
        mine = [chunk for chunk in run.chunks if chunk.seq is seq]
        if not mine and not decodes:
            mostly: Cause = "prefill interference" if whole.tokens > 2 * single.tokens else "decode interference"
            return ((mostly, seconds),)
        model = self._latency
        predicted = model.step_time(whole)
        scale = seconds / predicted if predicted > 0.0 else 0.0
        tokens, start = mine[0].at(i) if mine else (1, 0)
        if mine and seq.id in run.speculation:
            tokens += len(run.speculation[seq.id].verify)
        if tokens == 1:
            by_prefill, by_decode = of_decode(model, predicted, single)
            again = 0.0
        else:
            beside = model.step_time(single.plus(tokens, start))
            alone = model.step_time(Shape.prefill(tokens, start))
            by_prefill, by_decode = predicted - beside, beside - alone
            wait = next(wait for wait in reversed(seq.waits) if wait.until <= at)
            came = any(wait.until <= first < at for first, _ in seq.token_spans_now())
            again = alone if wait.recompute and not came else 0.0  # preempted, and no token came out since
        return (
            ("preemption", again * scale),
            ("prefill interference", by_prefill * scale),
            ("decode interference", by_decode * scale),
        )

    def _first_late(self, seq: Seq) -> int:
        """The step that brought the first token that was late; the next step, if none was."""
        for due, times in zip([*seq.past_deadlines, seq.deadlines], seq.times_of_all(), strict=True):
            if not times:
                break
            late = due.are_late(times)
            if late.any():
                return self._steps.which(times[int(np.argmax(late))])
        return self._steps.tick


def book(delays: dict[Cause, float], cause: Cause, seconds: float) -> None:
    """Add seconds that were lost to a cause; what is no loss is not booked."""
    if seconds > 0.0:
        delays[cause] = delays.get(cause, 0.0) + seconds


def _pieces(begin: int, stop: int, decoded: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """The steps [begin, stop) in parts, and whether each brought tokens in every step. A part with tokens in every step
    may, if it is one step, also be the end of a prefill; a longer one is not."""
    at = begin
    for a, b in decoded:
        first, after = max(a, at), min(b, stop)
        if first < after:
            if at < first:
                yield at, first, False
            yield first, after, True
            at = after
    if at < stop:
        yield at, stop, False


def _book_each(delays: dict[Cause, float], shares: NDArray[np.float64]) -> None:
    """Add up step by step, as floats add up; of two causes with the same sum in the end, the earlier one counts."""
    rows = [(int(np.argmax(row > 0.0)), cause, row) for cause, row in zip(INTERFERENCE, shares, strict=True)]
    for _, cause, row in sorted(rows, key=lambda item: item[0]):
        if row.any():
            delays[cause] = float(np.add.accumulate(np.concatenate([[delays.get(cause, 0.0)], row]))[-1])
