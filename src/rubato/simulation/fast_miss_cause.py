"""The cause of a miss on a counted replica, worked out from the step log once a request has missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import LatencyModel
from rubato.core.miss_cause import of_chunk, of_decode, of_idle
from rubato.core.request import Cause
from rubato.core.slo import TOLERANCE, deadlines
from rubato.simulation.step_log import StepLog

if TYPE_CHECKING:
    from rubato.simulation.fast_sequence import FastSeq

INTERFERENCE: tuple[Cause, Cause] = ("prefill interference", "decode interference")


def delays_by_cause(seq: FastSeq, log: StepLog, latency: LatencyModel, tick: int) -> dict[Cause, float]:
    """Seconds lost to each cause until the first token that was late; `tick` steps are done."""
    delays: dict[Cause, float] = {}

    def book_delay(cause: Cause, seconds: float) -> None:
        if seconds > 0.0:
            delays[cause] = delays.get(cause, 0.0) + seconds

    last = _first_late(seq, log, tick)
    for at, seconds, again in seq.waits:
        if at <= last:
            book_delay("preemption" if again else "queue", seconds)
    decoded = [span for spans in seq.spans_now() for span in spans]
    for begin, end in seq.begun:
        stop = min(last + 1, tick if end < 0 else end)
        for first, after, decodes in _pieces(begin, stop, decoded):
            if decodes and after - first > 1:
                _book_each(delays, log.shares(first, after))
                continue
            for at in range(first, after):
                for cause, seconds in _step(seq, log, at, decodes, latency):
                    book_delay(cause, seconds)
    return delays


def _pieces(begin: int, stop: int, decoded: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """The steps [begin, stop) in parts, and whether each brought a token a step. A part of one that did may also have
    been the end of a prefill; one of more was not."""
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


def _step(seq: FastSeq, log: StepLog, at: int, decodes: bool, model: LatencyModel) -> tuple[tuple[Cause, float], ...]:
    """What one step cost it, beyond what it would have taken alone."""
    run = log.at(at)
    i = at - run.tick
    seconds = log.seconds(run, i)
    whole = run.shape(i)
    single = run.all_decodes(i)
    mine = [p for p in run.chunks if p.seq is seq]
    if not mine and not decodes:
        return ((of_idle(whole, single), seconds),)
    predicted = model.step_time(whole)
    scale = seconds / predicted if predicted > 0.0 else 0.0
    tokens, start = mine[0].at(i) if mine else (1, 0)
    if tokens == 1:
        by_prefill, by_decode = of_decode(model, predicted, single)
        again = 0.0
    else:
        (by_prefill, by_decode), alone = of_chunk(model, predicted, single, tokens, start)
        again = alone if _again(seq, at) else 0.0
    return (
        ("preemption", again * scale),
        ("prefill interference", by_prefill * scale),
        ("decode interference", by_decode * scale),
    )


def _again(seq: FastSeq, at: int) -> bool:
    """Whether it was preempted, and no token came out between then and this step."""
    began, _, preempted = next(wait for wait in reversed(seq.waits) if wait[0] <= at)
    return preempted and not any(began <= a < at for spans in seq.spans_now() for a, _ in spans)


def _first_late(seq: FastSeq, log: StepLog, tick: int) -> int:
    """The step that brought the first token that was late; the last step, if none was."""
    continues: float | None = None
    for stage, start, spans in zip(seq.request.stages, seq.starts, seq.spans_now(), strict=False):
        times = log.times(spans)
        if not len(times):
            break
        due = deadlines(
            stage.slo, seq.request.arrival, start, float(times[0]), continues if stage.prompt == 0 else None
        )
        late = times > due.tokens(len(times)) + TOLERANCE
        if late.any():
            return _nth(spans, int(np.argmax(late)))
        last = due.token(len(times) - 1)
        continues = last if last < float("inf") else float(times[-1])
    return tick - 1


def _nth(spans: Iterable[tuple[int, int]], n: int) -> int:
    """The n-th step, from 0, of these."""
    for a, b in spans:
        if n < b - a:
            return a + n
        n -= b - a
    raise AssertionError("fewer steps than tokens")
