"""What hangs, for servers under test: `engine: {kind: tests.processes.hanging}`, `policy: tests.processes.hanging`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.core.clock import Clock
from rubato.core.events import Event
from rubato.core.interfaces import LatencyModel, View
from rubato.core.plan import Batch, Limits, Plan, StepResult, Work
from rubato.engines import simulated

SOURCE = "nothing that is published"


class Engine(simulated.Engine):
    """Its first step never ends, in a thread; with `loads` not even its start does."""

    def __init__(self, latency: LatencyModel, limits: Limits, clock: Clock, *, loads: bool = False) -> None:
        super().__init__(latency, limits, clock)
        self._loads = loads

    async def start(self) -> None:
        if self._loads:
            await asyncio.Event().wait()

    async def execute(self, batch: Batch) -> StepResult:
        await asyncio.to_thread(time.sleep, 3600)
        return await super().execute(batch)


@dataclass
class Scheduler:
    """Computes `seconds` on its first plan, and holds the event loop up meanwhile; then serves first come, first
    served, a request at a time."""

    seconds: float = 3600.0
    needs: ClassVar[frozenset[str]] = frozenset({"chunked"})

    def observe(self, events: Sequence[Event]) -> None:
        """Nothing is kept."""

    def plan(self, view: View) -> Plan:
        until, self.seconds = time.monotonic() + self.seconds, 0.0
        while time.monotonic() < until:
            pass
        first = next(iter([*view.running, *view.waiting]))
        return Plan(work=(Work(first.id, first.pending),))
