"""A simulated engine that fails or hangs in its next step when a file says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rubato.core.clock import Clock
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Batch, Limits, StepResult
from rubato.engines import simulated


class Engine(simulated.Engine):
    """faults: a folder; the replica that first finds the file `fail` or `hang` there removes it and does so."""

    def __init__(
        self, latency: LatencyModel, limits: Limits, clock: Clock, *, faults: str, drafter: simulated.Drafter | None
    ) -> None:
        super().__init__(latency, limits, clock, drafter=drafter)
        self._faults = Path(faults)

    async def execute(self, batch: Batch) -> StepResult:
        if self._told("hang"):
            await asyncio.Event().wait()
        if self._told("fail"):
            raise RuntimeError("injected failure")
        return await super().execute(batch)

    def _told(self, fault: str) -> bool:
        try:
            (self._faults / fault).unlink()
        except FileNotFoundError:
            return False
        return True
