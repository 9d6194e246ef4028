"""Serve language models to stated service-level objectives.

The names here are the public ones: what a policy, a router or a latency model of one's own is written with, and what
makes workloads and simulates them. Everything else may change between releases. `rubato.policies.NAME` holds a packaged
policy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rubato.core.events import (
    Assigned,
    Demoted,
    Draining,
    Event,
    Finished,
    HandedOff,
    Joined,
    Left,
    Lost,
    Offered,
    Placed,
    Preempted,
    Promoted,
    Started,
    Stepped,
    Tokens,
    ToolCallFinished,
    Transferred,
)
from rubato.core.interfaces import (
    Autoscaler,
    Dispatch,
    Engine,
    LatencyModel,
    LengthPredictor,
    Router,
    Scaling,
    Scheduler,
    SeqView,
    View,
)
from rubato.core.plan import Limits, Plan, Role, Sample, Shape, Tree, Work
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies import PolicyError, load, load_router
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, decode_first, run_in_order

if TYPE_CHECKING:
    from rubato.fleet.cluster_options import PolicyChoice
    from rubato.latency import profiles
    from rubato.latency.bilinear import Model as BilinearModel
    from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware
    from rubato.simulation.simulate import simulate
    from rubato.workloads import scenarios
    from rubato.workloads.generate import make as make_workload
    from rubato.workloads.lengths import fixed, log_normal
    from rubato.workloads.request_kinds import FollowUp, Kind, MixChange

__version__ = "0.1.0"

LATER = {  # imported when first asked for: `import rubato` takes none of them
    "BilinearModel": ("rubato.latency.bilinear", "Model"),
    "FollowUp": ("rubato.workloads.request_kinds", "FollowUp"),
    "Hardware": ("rubato.simulation.run_spec", "Hardware"),
    "Kind": ("rubato.workloads.request_kinds", "Kind"),
    "MixChange": ("rubato.workloads.request_kinds", "MixChange"),
    "PolicyChoice": ("rubato.fleet.cluster_options", "PolicyChoice"),
    "RunSpec": ("rubato.simulation.run_spec", "RunSpec"),
    "fixed": ("rubato.workloads.lengths", "fixed"),
    "log_normal": ("rubato.workloads.lengths", "log_normal"),
    "make_workload": ("rubato.workloads.generate", "make"),
    "packaged_hardware": ("rubato.simulation.run_spec", "packaged_hardware"),
    "profiles": ("rubato.latency.profiles", ""),
    "scenarios": ("rubato.workloads.scenarios", ""),
    "simulate": ("rubato.simulation.simulate", "simulate"),
}

__all__ = [
    "SLO",
    "Assigned",
    "Autoscaler",
    "BatchBuilder",
    "BilinearModel",
    "Demoted",
    "Dispatch",
    "Draining",
    "Engine",
    "Event",
    "Finished",
    "FollowUp",
    "HandedOff",
    "Hardware",
    "Joined",
    "Kind",
    "LatencyModel",
    "Left",
    "LengthPredictor",
    "Limits",
    "Lost",
    "MixChange",
    "Offered",
    "Placed",
    "Plan",
    "PolicyChoice",
    "PolicyError",
    "Preempted",
    "Promoted",
    "Request",
    "Role",
    "Router",
    "RunSpec",
    "Sample",
    "Sampling",
    "Scaling",
    "Scheduler",
    "SeqView",
    "Shape",
    "Stage",
    "Started",
    "Stepped",
    "Tokens",
    "ToolCallFinished",
    "Transferred",
    "Tree",
    "View",
    "Work",
    "admit_in_order",
    "decode_first",
    "fixed",
    "load",
    "load_router",
    "log_normal",
    "make_workload",
    "packaged_hardware",
    "profiles",
    "run_in_order",
    "scenarios",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'rubato' has no attribute {name!r}")
    module, attribute = LATER[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
