"""Simulated engines that fail, for servers under test: `engine: {kind: tests.processes.failing, ...}`."""

from __future__ import annotations

from typing import Any

from rubato.core.clock import Clock
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Batch, Limits, StepResult
from rubato.engines import simulated


class Engine(simulated.Engine):
    """Fails in step number `first` (from 1) and the `times` - 1 steps after it."""

    def __init__(self, latency: LatencyModel, limits: Limits, clock: Clock, *, first: int, times: int) -> None:
        super().__init__(latency, limits, clock)
        self._bad = range(first, first + times)
        self._step = 0

    async def execute(self, batch: Batch) -> StepResult:
        self._step += 1
        result: Any = await super().execute(batch)
        if self._step in self._bad:
            raise RuntimeError(f"injected failure in step {self._step}")
        return result
