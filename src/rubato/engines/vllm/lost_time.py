"""Seconds that a request inside vLLM lost to others, by cause: what a miss is put down to.

As `rubato.replica.miss_cause` has it, where vLLM and not our replica runs the steps: of a step, what the latency model
says that it took beyond what the request alone would have taken. Worked out once a request has missed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

import numpy as np

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.core.request import Cause
from rubato.engines.vllm.sequence import VllmSeq
from rubato.replica.miss_cause import Shares, add_delay, decode_interference

KEPT = 8192  # steps that are remembered, at least


@dataclass(slots=True)
class _Step:
    """decodes: those of its batch that decode. shares: what it cost each of these, once that was asked for."""

    seconds: float
    shape: Shape
    decodes: Shape
    shares: Shares | None = None


class LostTime:
    """latency: what steps are predicted to take, as learnt by the time that is asked."""

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._ends: list[float] = []
        self._steps: list[_Step] = []

    def stepped(self, end: float, seconds: float, shape: Shape, decodes: Shape) -> None:
        """A step ended. decodes: the part of its shape that is requests which decode."""
        self._ends.append(end)
        self._steps.append(_Step(seconds, shape, decodes))
        if len(self._steps) > 2 * KEPT:
            del self._steps[:KEPT], self._ends[:KEPT]

    def cause(self, seq: VllmSeq) -> Cause | None:
        """What cost a request most until its first late token."""
        delays = self.delays(seq)
        return max(delays.items(), key=lambda item: item[1])[0] if delays else None

    def delays(self, seq: VllmSeq) -> dict[Cause, float]:
        """Seconds lost to each cause until the first token that was late."""
        delays: dict[Cause, float] = {}
        times, late = seq.times_of_stage(), _first_late(seq)
        waited = [*seq.waited, (inf, inf, "queue")]
        for at, (begin, until, cause) in enumerate(waited[:-1]):
            add_delay(delays, cause, min(until, late) - begin)
            runs_until = min(waited[at + 1][0], late)
            came = bisect_right(times, until)
            token = min(times[came] if came < len(times) else inf, runs_until)
            self._prefill(delays, until, token, seq.request.prompt - seq.cached_at_start, again=at > 0)
            self._decode(delays, token, runs_until)
        return delays

    def _between(self, begin: float, end: float) -> list[_Step]:
        return self._steps[bisect_right(self._ends, begin) : bisect_right(self._ends, end)]

    def _prefill(self, delays: dict[Cause, float], begin: float, end: float, tokens: int, *, again: bool) -> None:
        """Steps from a start to the next token: what they took beyond a batch of this prompt alone. again: after a
        preemption, which also that is the price of."""
        steps = self._between(begin, end)
        seconds = sum(step.seconds for step in steps)
        alone = min(seconds, self._latency.step_time(Shape().plus(max(1, tokens), 0)))
        together = sum(self._latency.step_time(step.decodes) for step in steps if step.decodes.seqs)
        by_decode = min(seconds - alone, together)
        add_delay(delays, "preemption", alone if again else 0.0)
        add_delay(delays, "prefill interference", seconds - alone - by_decode)
        add_delay(delays, "decode interference", by_decode)

    def _decode(self, delays: dict[Cause, float], begin: float, end: float) -> None:
        for step in self._between(begin, end):
            if step.shares is None:
                step.shares = self._shares(step)
            add_delay(delays, "prefill interference", step.shares[0])
            add_delay(delays, "decode interference", step.shares[1])

    def _shares(self, step: _Step) -> Shares:
        if not step.decodes.seqs:
            return step.seconds, 0.0  # a step that passed this one over
        predicted = self._latency.step_time(step.shape)
        by_prefill, by_decode = decode_interference(self._latency, predicted, step.decodes)
        scale = step.seconds / predicted
        return max(by_prefill * scale, 0.0), max(by_decode * scale, 0.0)


def _first_late(seq: VllmSeq) -> float:
    """When the first token that was late came; the last one, if none was."""
    times = seq.times_of_stage()
    if not times:
        return inf
    late = seq.deadlines.are_late(times)
    return float(times[int(np.argmax(late))]) if late.any() else float(times[-1])
