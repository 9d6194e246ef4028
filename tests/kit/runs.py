"""Simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.core.request import NOTHING
from rubato.fleet.cluster_options import PolicyChoice
from rubato.simulation.run_spec import Hardware, RunSpec


def run_spec(
    model: LatencyModel, limits: Limits, policy: str, settings: Mapping[str, object] = NOTHING, router: str = "auto",
    router_settings: Mapping[str, object] = NOTHING, *, learns: bool = True, **changes: Any,
) -> RunSpec:  # fmt: skip
    """A simulation of replicas with these step times; schedulers learn them, as live, unless told otherwise."""
    choice = PolicyChoice(policy, settings, router, router_settings)
    return RunSpec(Hardware("test", model, limits), choice, learns=learns, **changes)


def changed(spec: RunSpec, **changes: Any) -> RunSpec:
    """With other fields: its own, or those of its policy and router."""
    of_choice = {name: changes.pop(name) for name in set(changes) & {"policy", "settings", "router", "router_settings"}}
    return replace(spec, choice=replace(spec.choice, **of_choice), **changes)
