"""A run's records are the same on either driver, stages and causes of misses included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubato.core.request import SLO
from rubato.engines.simulated import Drafter
from rubato.simulation.simulate import SimulationSetup, simulated_run
from rubato.workloads import Workload
from rubato.workloads.generate import make
from rubato.workloads.lengths import Normal
from rubato.workloads.request_kinds import FollowUp, Kind
from tests.planning.machine import MACHINE, mix, spec
from tests.simulation.test_equal import SCHEDULERS


def setup(policy: str) -> SimulationSetup:
    return SimulationSetup(lambda: MACHINE.model, MACHINE.limits, policy, replicas=2, noise=0.1, seed=2, learns=False)


def same(load: Workload, policy: str) -> None:
    fast = simulated_run(load, setup(policy))
    assert fast.records == simulated_run(load, setup(policy), plain=True).records
    without = simulated_run(load, setup(policy), times=False).records
    assert without == tuple(replace(record, times=(), tokens=()) for record in fast.records)


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("rate", [3.0, 80.0])
def test_of_a_mix(policy: str, rate: float) -> None:
    same(mix().make(1).rescaled(rate), policy)


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_of_requests_with_stages(policy: str) -> None:
    """Thinking and an answer, or up to five rounds with a tool and a last word."""
    think = Kind("think", SLO(0.2, 0.02), (50, 400), (10, 60), then=(FollowUp((5, 30), slo=SLO(tpot=0.04)),))
    last = FollowUp((5, 30), (20, 90), SLO(0.4, 0.03))
    tools = Kind("tools", SLO(0.3, 0.03), (50, 900), (5, 30), rounds=Normal(2.0, 1.0, most=5), then=(last,))
    load = make("stages", [think, tools], 12.0, count=40, seed=1, texts=False)
    assert max(len(load.parts(one)) for one in load.arrivals) > 2
    same(load, policy)


@pytest.mark.parametrize("policy", ["vllm_spec", "adaserve", "slos_serve"])
def test_with_drafts(policy: str) -> None:
    load, drafts = mix().make(1).rescaled(20.0), replace(setup(policy), drafter=Drafter(latency=MACHINE.model))
    assert simulated_run(load, drafts).records == simulated_run(load, drafts, plain=True).records


def test_a_drafter_that_nobody_asks_changes_nothing() -> None:
    load, drafter = mix().make(1).rescaled(80.0), Drafter(latency=MACHINE.model)
    one = simulated_run(load, setup("sarathi")).records
    assert simulated_run(load, replace(setup("sarathi"), drafter=drafter)).records == one
    assert simulated_run(load, replace(setup("sarathi"), drafter=drafter), plain=True).records == one


def test_an_experiment_whose_schedulers_learn() -> None:
    load = mix().make(0).rescaled(10.0)
    own, learning = spec("edf").run(load), spec("edf", learns=True).run(load)
    assert [r.output for r in learning.records] == [r.output for r in own.records] != []
    assert spec("edf").describe() != spec("edf", learns=True).describe()
