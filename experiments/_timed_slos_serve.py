"""SLOs-Serve whose plans are timed, for `slos_serve_planning`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rubato.core.clock import measure_cost
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policies import slos_serve

SOURCE = "ours, to measure planning by"


class Planned(NamedTuple):
    """One plan. running: requests with a promise; new: requests that waited for one; seconds: of CPU."""

    at: float
    running: int
    new: int
    seconds: float


@dataclass
class Scheduler(slos_serve.Scheduler):
    """log: where each plan is written down."""

    log: list[Planned] | None = None

    def plan(self, view: View) -> Plan:
        promised = self.promised_ids
        running = len(promised)
        new = sum(s.id not in promised and not s.best_effort for s in view.waiting)
        plan, cost = measure_cost(partial(super().plan, view))
        if self.log is not None:
            self.log.append(Planned(view.now, running, new, cost.cpu))
        return plan
