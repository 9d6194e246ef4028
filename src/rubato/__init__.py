"""Serve language models to stated service-level objectives.

Ask by `simulate`, `sweep`, `capacity`, `plan` and `bound`: each takes a policy, a load and a hardware profile by name
and gives a `Result`, with `table()`, `frame()` and `plot()`. Write a policy with the other names. The modules `events`,
`extend`, `workloads` and `profiles` have the rest of what is public; everything else may change between releases.
`rubato.policies.NAME` holds a packaged policy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rubato.core.interfaces import Dispatch, Router, Scheduler, SeqView, View
from rubato.core.plan import Plan, Work
from rubato.core.request import SLO, Request
from rubato.policies import PolicyError
from rubato.policies import load as load_policy
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, decode_first, run_in_order

if TYPE_CHECKING:
    from rubato import events, extend, workloads
    from rubato.latency import profiles
    from rubato.measure.result import Result
    from rubato.planning.questions import bound, capacity, plan, simulate, sweep
    from rubato.simulation.run_spec import Hardware, packaged_hardware
    from rubato.workloads.request_kinds import Kind

__version__ = "0.1.0"

LATER = {  # imported when first asked for: `import rubato` takes none of them
    "Hardware": ("rubato.simulation.run_spec", "Hardware"),
    "Kind": ("rubato.workloads.request_kinds", "Kind"),
    "Result": ("rubato.measure.result", "Result"),
    "bound": ("rubato.planning.questions", "bound"),
    "capacity": ("rubato.planning.questions", "capacity"),
    "events": ("rubato.events", ""),
    "extend": ("rubato.extend", ""),
    "packaged_hardware": ("rubato.simulation.run_spec", "packaged_hardware"),
    "plan": ("rubato.planning.questions", "plan"),
    "profiles": ("rubato.latency.profiles", ""),
    "simulate": ("rubato.planning.questions", "simulate"),
    "sweep": ("rubato.planning.questions", "sweep"),
    "workloads": ("rubato.workloads", ""),
}

__all__ = [
    "SLO",
    "BatchBuilder",
    "Dispatch",
    "Hardware",
    "Kind",
    "Plan",
    "PolicyError",
    "Request",
    "Result",
    "Router",
    "Scheduler",
    "SeqView",
    "View",
    "Work",
    "admit_in_order",
    "bound",
    "capacity",
    "decode_first",
    "events",
    "extend",
    "load_policy",
    "packaged_hardware",
    "plan",
    "profiles",
    "run_in_order",
    "simulate",
    "sweep",
    "workloads",
]


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'rubato' has no attribute {name!r}")
    module, attribute = LATER[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
