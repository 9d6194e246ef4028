"""Computes the seconds that a request lost, by cause; the largest explains a miss.

They are computed from the step log when a request has missed or moves; other steps cost nothing.
"""

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
Shares = tuple[float, float]  # predicted seconds of a step that others cost: their prefill, their decodes


def decode_interference(latency: LatencyModel, predicted: float, decodes: Shape) -> Shares:
    """Returns the seconds that a step of `predicted` seconds costs each of its decodes beyond a step of its own."""
    batch_seconds = latency.step_time(decodes)
    drafts = Shape(spec_steps=decodes.spec_steps, draft_tokens=decodes.draft_tokens // decodes.seqs)
    isolated = drafts.plus(1, decodes.kv // decodes.seqs)
    return predicted - batch_seconds, batch_seconds - latency.step_time(isolated)


def is_infeasible(seq: Seq, cached: int, latency: LatencyModel, limits: Limits, slo_rule: str) -> bool:
    """Returns whether an ended request would have missed its SLO even alone on this replica.

    Args:
        seq: the request.
        cached: tokens of its first prompt that were in KV.
        latency: predicts step times.
        limits: of the replica.
        slo_rule: one of `SLO_RULES`.
    """
    outputs = [len(times) for times in seq.times_of_all() if len(times)]
    stages = [
        StageLengths(stage.prompt, stage.slo, n, n) for stage, n in zip(seq.request.stages, outputs, strict=False)
    ]
    cached = min(cached, seq.request.stages[0].prompt - 1)
    tokens_per_step = sum(outputs) / max(1, sum(outputs) - seq.accepted)
    most = limits.max_num_batched_tokens
    return bool(find_infeasible(stages, latency, most, slo_rule, cached=cached, tokens_per_step=tokens_per_step))


class MissCauses:
    """Attributes the time of a replica's steps beyond a sequence's isolated time to causes.

    The latency model gives the shares: it predicts the whole batch, the batch's decodes, and the sequence by itself.
    """

    def __init__(self, steps: StepEnds, log: StepLog, latency: LatencyModel) -> None:
        self._steps = steps
        self._log = log
        self._latency = latency

    def delays(self, seq: Seq) -> dict[Cause, float]:
        """Returns the seconds lost to each cause until the first late token, on earlier replicas and here."""
        delays = dict(seq.delays_elsewhere)
        if seq.late_elsewhere:
            return delays
        last = self._first_late(seq)
        decoded = list(seq.token_spans_now())
        # it waits before it runs, and before it is handed off
        for wait, ran in zip_longest(seq.waits, seq.running_spans):
            if wait.until <= last:
                add_delay(delays, wait.cause, wait.seconds)
            if ran is None:
                break
            begin, end = ran
            stop = min(last + 1, self._steps.tick if end < 0 else end)
            for first, after, decodes in _spans(begin, stop, decoded):
                if decodes and after - first > 1:
                    _add_interference(delays, self._shares(first, after))
                    continue
                for at in range(first, after):
                    for cause, seconds in self._step_delays(seq, at, decodes):
                        add_delay(delays, cause, seconds)
        return delays

    def _shares(self, first: int, after: int) -> NDArray[np.float64]:
        """Returns (2, after - first): the seconds, 0 or more, that prefill and decodes of others cost every decode of
        each step.

        They are computed once for each run, on demand.
        """
        shares: list[Shares] = []
        for run in self._log.runs(first, after):
            until = min(after - run.tick, run.steps)
            if len(run.shares) < until:
                run.shares = [*run.shares, *(self._decode_shares(run, i) for i in range(len(run.shares), until))]
            shares += run.shares[max(first - run.tick, 0) : until]
        return np.array(shares).T

    def _decode_shares(self, run: StepRun, i: int) -> Shares:
        """Returns the seconds that others cost each decode of step `i` of a run."""
        if run.chunks or run.speculation:
            decodes = run.shape(i, decodes=True)
            if not decodes.seqs:
                return 0.0, 0.0
            predicted = self._latency.step_time(run.shape(i))
            by_prefill, by_decode = decode_interference(self._latency, predicted, decodes)
        else:  # the same result for a step of decodes only, as most are
            n, seconds_of = run.seqs, self._latency.seconds_of
            kv = run.kv + (i + 1) * n
            predicted = seconds_of(n, n, kv, 0, 0, 0, 0)
            by_prefill, by_decode = 0.0, predicted - seconds_of(1, 1, kv // n + 1, 0, 0, 0, 0)
        scale = self._log.seconds(run, i) / predicted if predicted > 0.0 else 0.0
        return max(by_prefill * scale, 0.0), max(by_decode * scale, 0.0)

    def _step_delays(self, seq: Seq, at: int, decodes: bool) -> tuple[tuple[Cause, float], ...]:
        """Returns, by cause, the seconds of one step beyond the sequence's isolated time."""
        run = self._log.at(at)
        i = at - run.tick
        seconds = self._log.seconds(run, i)
        batch = run.shape(i)
        decode_batch = run.shape(i, decodes=True)
        own_chunks = [chunk for chunk in run.chunks if chunk.seq is seq]
        if not own_chunks and not decodes:
            by_prefills, by_decodes = INTERFERENCE
            return ((by_prefills if batch.tokens > 2 * decode_batch.tokens else by_decodes, seconds),)
        model = self._latency
        predicted = model.step_time(batch)
        scale = seconds / predicted if predicted > 0.0 else 0.0
        tokens, start = own_chunks[0].at(i) if own_chunks else (1, 0)
        if own_chunks and seq.id in run.speculation:
            tokens += len(run.speculation[seq.id].verify)
        if tokens == 1:
            by_prefill, by_decode = decode_interference(model, predicted, decode_batch)
            recompute = 0.0
        else:
            with_decodes = model.step_time(decode_batch.plus(tokens, start))
            isolated = model.step_time(Shape.prefill(tokens, start))
            by_prefill, by_decode = predicted - with_decodes, with_decodes - isolated
            wait = next(wait for wait in reversed(seq.waits) if wait.until <= at)
            has_output = any(wait.until <= first < at for first, _ in seq.token_spans_now())  # since it resumed
            recompute = isolated if wait.recompute and not has_output else 0.0
        return (
            ("preemption", recompute * scale),
            ("prefill interference", by_prefill * scale),
            ("decode interference", by_decode * scale),
        )

    def _first_late(self, seq: Seq) -> int:
        """Returns the step of the first late token; the next step if none was late."""
        for due, times in zip([*seq.past_deadlines, seq.deadlines], seq.times_of_all(), strict=True):
            if not times:
                break
            late = due.are_late(times)
            if late.any():
                return self._steps.step_ending_at(times[int(np.argmax(late))])
        return self._steps.tick


def add_delay(delays: dict[Cause, float], cause: Cause, seconds: float) -> None:
    """Adds seconds lost to a cause, if above 0."""
    if seconds > 0.0:
        delays[cause] = delays.get(cause, 0.0) + seconds


def _spans(begin: int, stop: int, decoded: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Splits the steps [begin, stop) into (first, after, decodes).

    With `decodes`, each step of the span brought a token. Such a span of one step may also be the end of a prefill; a
    longer one is not.
    """
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


def _add_interference(delays: dict[Cause, float], shares: NDArray[np.float64]) -> None:
    """Adds the shares step by step, in the rounding of a loop; of two equal causes the earlier one counts."""
    rows = [(int(np.argmax(row > 0.0)), cause, row) for cause, row in zip(INTERFERENCE, shares, strict=True)]
    for _, cause, row in sorted(rows, key=lambda item: item[0]):
        if row.any():
            delays[cause] = float(np.add.accumulate(np.concatenate([[delays.get(cause, 0.0)], row]))[-1])
