"""What the figures of our own policy have in common: SLOs-Serve's scenarios on one replica, under what a server knows.

Output lengths are learnt while running (`conditional_mean`, or what a policy names) and `max_tokens` says nothing of
them, steps are off by 5 % and latency models go on learning. Every system serves the same requests, seed by seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments._rate_search import RateSearch, shares_of
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.records import Record
from rubato.planning.request_source import ScenarioSource
from rubato.policies import default_lengths
from rubato.simulation.run_spec import Hardware, Lengths, RunSpec, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios

NOISE = 0.05
MOST_TOKENS = {"reasoning": 12_000}  # that every request may have
USUALLY, CONTEXT = 2048, 32_768  # for others; models' contexts are stretched, so that none is refused for that
GRID, BRACKET = 1.04, 0.05


class ScenarioTried(RateSearch):
    """Runs of one of SLOs-Serve's scenarios on one replica, or on several. Rates are those of all replicas."""

    def __init__(self, scenario: str, seed: int, count: int, replicas: int = 1) -> None:
        super().__init__(GRID, BRACKET)
        self.scenario, self.seed, self.replicas = scenario, seed, replicas
        self._load = ScenarioSource(f"slos-serve-{scenario}", hardware(scenario), count=count).make(seed)

    def run(self, choice: str, rate: float) -> dict[str, float]:
        return shares_of(served(self._load.rescaled(rate), self.scenario, choice, self.seed, self.replicas))


def served(load: Workload, scenario: str, choice: str, seed: int, replicas: int = 1) -> Sequence[Record]:
    """These requests of a scenario on so many replicas."""
    chosen = PolicyChoice.parse(choice)
    spec = RunSpec(
        hardware(scenario), chosen, replicas, lengths=learnt_lengths(chosen), learns=True, noise=NOISE,
        stated_max_tokens=MOST_TOKENS.get(scenario, USUALLY),
    )  # fmt: skip
    return simulate(load, spec, seed, causes=False).records


def learnt_lengths(choice: PolicyChoice) -> Lengths | None:
    """`conditional_mean`; None, for its own, of a policy that names its predictor."""
    return None if default_lengths(choice.policy, choice.router) else conditional_mean


def recorded(figure: str) -> list[Any]:
    """What the jobs of another figure returned in its last full run."""
    path = Path(__file__).parents[1] / "docs" / "figures" / f"{figure}.json"
    found: list[Any] = json.loads(path.read_bytes())["data"]
    return found


@cache
def hardware(scenario: str) -> Hardware:
    return packaged_hardware(scenarios.get(f"slos-serve-{scenario}").profile, max_model_len=CONTEXT)
