"""SLOs-Serve that records which requests it admits, for `slos_serve_margin`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policies import slos_serve

SOURCE = "ours, to count promises by"


@dataclass
class PromiseLog:
    """promised: ids of all requests ever promised, also where that was given up; margins: of each plan."""

    promised: set[str] = field(default_factory=set)
    margins: list[float] = field(default_factory=list)


@dataclass
class Scheduler(slos_serve.Scheduler):
    """log: where it is written."""

    log: PromiseLog | None = None

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        if self.log is not None:
            self.log.promised.update(self.promised)
            self.log.margins.append(self._margin(view))
        return plan
