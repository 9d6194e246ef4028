"""The steps that a counted replica has run: when each ended, for verdicts, and its batch, for the cause of a miss."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import LatencyModel
from rubato.core.miss_cause import Shares, of_decode
from rubato.simulation.repeated_steps import RepeatedSteps

LEAST = 1024  # runs kept before anybody asks which are still wanted


class StepLog:
    """causes: keep the runs, so that misses can be explained; latency: by which."""

    def __init__(self, latency: LatencyModel, causes: bool) -> None:
        self.causes = causes
        self._latency = latency
        self._ends = array("d")  # of every step so far, and of those of the last run that may not come to be
        self._runs: list[RepeatedSteps] = []
        self._most = LEAST
        self._shares: NDArray[np.float64] = np.zeros((2, 1024))
        self._until = 0  # the step from which on no shares are worked out yet

    def keep(self, run: RepeatedSteps) -> None:
        """A run that begins; it may still be cut."""
        if len(self._ends) > run.tick:
            del self._ends[run.tick :]
        self._ends.fromlist(run.ends)
        if self.causes:
            self._runs.append(run)

    @property
    def long(self) -> bool:
        """Whether it is time to `forget`."""
        return len(self._runs) > self._most

    def forget(self, before: int) -> None:
        """The runs that ended before this step."""
        del self._runs[: max(0, bisect_right(self._runs, before, key=_tick) - 1)]
        self._most = 2 * len(self._runs) + LEAST

    def clear(self) -> None:
        self._runs.clear()

    def times(self, spans: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        """When the tokens of these steps came out."""
        if len(spans) == 1 or (len(spans) == 2 and spans[0][1] == spans[1][0]):
            return np.frombuffer(self._ends[spans[0][0] : spans[-1][1]])
        parts = [np.frombuffer(self._ends[a:b]) for a, b in spans]
        return np.concatenate(parts) if parts else np.zeros(0)

    def at(self, tick: int) -> RepeatedSteps:
        """The run with this step."""
        return self._runs[bisect_right(self._runs, tick, key=_tick) - 1]

    def seconds(self, run: RepeatedSteps, i: int) -> float:
        """That the i-th step of a run took."""
        at = run.tick + i
        return self._ends[at] - (self._ends[at - 1] if i else run.begin)

    def shares(self, first: int, end: int) -> NDArray[np.float64]:
        """(2, end - first): seconds that each step cost each that decoded in it, the same for all, lost to prefill and
        to decodes of others; none below 0. Worked out once, when wanted."""
        while self._shares.shape[1] < end:
            self._shares = np.concatenate([self._shares, np.zeros_like(self._shares)], axis=1)
        at = bisect_right(self._runs, self._until, key=_tick) - 1
        while self._until < end:
            run = self._runs[max(at, 0)]
            ticks = range(max(self._until, run.tick), min(run.tick + run.steps, end))
            for tick in ticks:
                self._shares[:, tick] = self._step(run, tick - run.tick)
            self._until = max(self._until, ticks.stop)
            at += 1
        return self._shares[:, first:end]

    def _step(self, run: RepeatedSteps, i: int) -> Shares:
        decodes = run.all_decodes(i)
        if not decodes.seqs:
            return 0.0, 0.0
        predicted = self._latency.step_time(run.shape(i))
        scale = self.seconds(run, i) / predicted if predicted > 0.0 else 0.0
        by_prefill, by_decode = of_decode(self._latency, predicted, decodes)
        return max(by_prefill * scale, 0.0), max(by_decode * scale, 0.0)


def _tick(run: RepeatedSteps) -> int:
    return run.tick
