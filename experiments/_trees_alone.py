"""AdaServe's trees without its admission, for `adaserve_parts`: all run, and all that wait begin in order."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.core.interfaces import View
from rubato.policies import adaserve
from rubato.policy_kit.paced_admission import AdmittedLoad, everyone

SOURCE = "ours, to see what trees alone bring"


@dataclass
class Scheduler(adaserve.Scheduler):
    """As `adaserve`."""

    def _load(self, view: View) -> AdmittedLoad:
        return everyone(view)
