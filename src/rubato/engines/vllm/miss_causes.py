"""Causes of misses inside vLLM: seconds that a request lost to other requests, by cause.

As `rubato.replica.miss_cause`, where vLLM runs the steps: the loss in a step is the time that the latency model
predicts beyond the request's own. Computed only for requests that missed."""

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

MIN_REMEMBERED_STEPS = 8192


@dataclass(slots=True)
class _Step:
    """Holds a past step.

    Args:
        decodes: the part of its shape that decodes.
        shares: seconds that each decode lost, once computed.
    """

    seconds: float
    shape: Shape
    decodes: Shape
    shares: Shares | None = None


class VllmMissCauses:
    """Remembers steps, and finds the cause of a miss.

    Args:
        latency: predicts the time of steps.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._ends: list[float] = []
        self._steps: list[_Step] = []

    def add_step(self, end: float, seconds: float, shape: Shape, decodes: Shape) -> None:
        """Adds a step.

        Args:
            end: when it ended (s).
            seconds: its duration.
            shape: of its batch.
            decodes: the part of the shape that decodes.
        """
        self._ends.append(end)
        self._steps.append(_Step(seconds, shape, decodes))
        if len(self._steps) > 2 * MIN_REMEMBERED_STEPS:
            del self._steps[:MIN_REMEMBERED_STEPS], self._ends[:MIN_REMEMBERED_STEPS]

    def cause(self, seq: VllmSeq) -> Cause | None:
        """Returns the cause that cost a request most until its first late token."""
        delays = self.delays(seq)
        return max(delays.items(), key=lambda item: item[1])[0] if delays else None

    def delays(self, seq: VllmSeq) -> dict[Cause, float]:
        """Returns the seconds lost to each cause until the first late token."""
        delays: dict[Cause, float] = {}
        times, late = seq.times_of_stage(), _first_late(seq)
        waits = [*seq.wait_spans, (inf, inf, "queue")]  # after its last wait it runs to its end
        # After each wait it runs until the next one: a prefill until its next token, then decodes.
        for at, (begin, until, cause) in enumerate(waits[:-1]):
            add_delay(delays, cause, min(until, late) - begin)
            runs_until = min(waits[at + 1][0], late)
            tokens_before = bisect_right(times, until)
            token_at = min(times[tokens_before] if tokens_before < len(times) else inf, runs_until)
            self._prefill(delays, until, token_at, seq.request.prompt - seq.cached_at_start, is_restart=at > 0)
            self._decode(delays, token_at, runs_until)
        return delays

    def _between(self, begin: float, end: float) -> list[_Step]:
        return self._steps[bisect_right(self._ends, begin) : bisect_right(self._ends, end)]

    def _prefill(self, delays: dict[Cause, float], begin: float, end: float, tokens: int, *, is_restart: bool) -> None:
        """Adds the loss in steps from a start to the next token, beyond a batch of this prompt alone.

        Args:
            delays: seconds lost by cause; changed.
            begin: when the request started (s).
            end: when the next token came (s).
            tokens: of the prompt to prefill.
            is_restart: after a preemption, which then costs the whole prefill.
        """
        steps = self._between(begin, end)
        seconds = sum(step.seconds for step in steps)
        isolated_seconds = min(seconds, self._latency.step_time(Shape.prefill(max(1, tokens))))
        decode_seconds = sum(self._latency.step_time(step.decodes) for step in steps if step.decodes.seqs)
        by_decode = min(seconds - isolated_seconds, decode_seconds)
        add_delay(delays, "preemption", isolated_seconds if is_restart else 0.0)
        add_delay(delays, "prefill interference", seconds - isolated_seconds - by_decode)
        add_delay(delays, "decode interference", by_decode)

    def _decode(self, delays: dict[Cause, float], begin: float, end: float) -> None:
        """Adds the loss in steps between two times (s), in which the request decodes."""
        for step in self._between(begin, end):
            if step.shares is None:
                step.shares = self._seconds_lost(step)
            add_delay(delays, "prefill interference", step.shares[0])
            add_delay(delays, "decode interference", step.shares[1])

    def _seconds_lost(self, step: _Step) -> Shares:
        """Returns the seconds that a decode lost in a step to prefill, and to other decodes: all of a step without
        decodes, which passed it over."""
        if not step.decodes.seqs:
            return step.seconds, 0.0
        predicted = self._latency.step_time(step.shape)
        by_prefill, by_decode = decode_interference(self._latency, predicted, step.decodes)
        scale = step.seconds / predicted
        return max(by_prefill * scale, 0.0), max(by_decode * scale, 0.0)


def _first_late(seq: VllmSeq) -> float:
    """Returns the time of the first late token; of the last token if none was late."""
    times = seq.times_of_stage()
    if not times:
        return inf
    late = seq.deadlines.are_late(times)
    return float(times[int(np.argmax(late))]) if late.any() else float(times[-1])
