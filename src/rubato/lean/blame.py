"""Why a request missed, worked out from the log of runs when it has: what `Replica` books step by step."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from rubato.blame import of_chunk, of_decode, of_idle
from rubato.lean.run import Run
from rubato.slo import TOLERANCE, deadlines
from rubato.types import Cause

if TYPE_CHECKING:
    from rubato.lean.host import LeanHost
    from rubato.lean.seq import LeanSeq


def blame(seq: LeanSeq, host: LeanHost) -> dict[Cause, float]:
    """Seconds lost to each cause until the first token that was late."""
    lost: dict[Cause, float] = {}

    def lose(cause: Cause, seconds: float) -> None:
        if seconds > 0.0:
            lost[cause] = lost.get(cause, 0.0) + seconds

    last = _first_late(seq, host)
    for tick, seconds, again in seq.waits:
        if tick <= last:
            lose("preemption" if again else "queue", seconds)
    decodes = {t for spans in seq.spans_now() for a, b in spans for t in range(a, min(b, last + 1))}
    for begin, end in seq.begun:
        for tick in range(begin, min(last + 1, host.tick if end < 0 else end)):
            run = _run_of(host.log, tick)
            for cause, seconds in _step(seq, run, tick - run.tick, tick in decodes, host):
                lose(cause, seconds)
    return lost


def _step(seq: LeanSeq, run: Run, i: int, decodes: bool, host: LeanHost) -> tuple[tuple[Cause, float], ...]:
    """What one step cost it, beyond what it would have taken alone."""
    model = host.latency
    seconds = run.ends[i] - (run.ends[i - 1] if i else run.begin)
    whole = run.shape(i)
    single = run.decodes(i)
    for part in run.chunks:
        if part.tokens == 1:
            single = single.plus(1, part.start + i)
    mine = [p for p in run.chunks if p.seq is seq]
    if not mine and not decodes:
        return ((of_idle(whole, single), seconds),)
    predicted = model.step_time(whole)
    scale = seconds / predicted if predicted > 0.0 else 0.0
    if not mine or mine[0].tokens == 1:
        by_prefill, by_decode = of_decode(model, predicted, single)
        again = 0.0
    else:
        tokens, start = mine[0].tokens, mine[0].start + i * mine[0].tokens
        (by_prefill, by_decode), alone = of_chunk(model, predicted, single, tokens, start)
        resumed = any(a < run.tick + i for spans in seq.spans_now() for a, _ in spans)
        again = alone if resumed else 0.0
    return (
        ("preemption", again * scale),
        ("prefill interference", by_prefill * scale),
        ("decode interference", by_decode * scale),
    )


def _first_late(seq: LeanSeq, host: LeanHost) -> int:
    """The step that brought the first token that was late; the last step, if none was."""
    continues: float | None = None
    for stage, start, spans in zip(seq.request.stages, seq.starts, seq.spans_now(), strict=False):
        ticks = [t for a, b in spans for t in range(a, b)]
        if not ticks:
            break
        times = host.times(spans)
        due = deadlines(
            stage.slo, seq.request.arrival, start, float(times[0]), continues if stage.prompt == 0 else None
        )
        for i, (tick, at) in enumerate(zip(ticks, times, strict=True)):
            if at > due.token(i) + TOLERANCE:
                return tick
        last = due.token(len(ticks) - 1)
        continues = last if last < float("inf") else float(times[-1])
    return host.tick - 1


def _run_of(log: list[Run], tick: int) -> Run:
    return log[bisect_right(log, tick, key=lambda run: run.tick) - 1]
