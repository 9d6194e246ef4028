"""A run's records are the same on either driver, stages and causes of misses included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments._timelines import timelines
from rubato.core.request import SLO, Request
from rubato.core.timeline import Timeline
from rubato.engines.simulated import Drafter
from rubato.measure.records import BenchResult
from rubato.simulation.run_spec import RunSpec, Truth
from rubato.simulation.simulate import Pauses, simulate, simulate_events
from rubato.workloads import Workload
from rubato.workloads.generate import make
from rubato.workloads.lengths import Normal
from rubato.workloads.request_kinds import FollowUp, Kind
from tests.kit import run_spec
from tests.planning.machine import MACHINE, mix, spec
from tests.simulation.test_equal import SCHEDULERS

SEED = 2  # of the noise


def noisy(policy: str) -> RunSpec:
    return run_spec(MACHINE.model, MACHINE.limits, policy, replicas=2, noise=0.1, learns=False)


def on_event_loop(load: Workload, spec: RunSpec) -> BenchResult:
    """Token by token."""

    def lines(
        requests: Sequence[Request], truth: Truth, spec: RunSpec, seed: int, *, pauses: Pauses, **_: object
    ) -> dict[str, Timeline]:
        events = simulate_events(requests, truth, spec, seed, pauses=pauses)
        return {line.request.id: line for line in timelines(events)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.simulation.simulate.simulate_requests", lines)
        return simulate(load, spec, SEED)


def same(load: Workload, policy: str) -> None:
    fast = simulate(load, noisy(policy), SEED)
    assert fast.records == on_event_loop(load, noisy(policy)).records
    without = simulate(load, noisy(policy), SEED, times=False).records
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
    load, drafts = mix().make(1).rescaled(20.0), replace(noisy(policy), drafter=Drafter(latency=MACHINE.model))
    assert simulate(load, drafts, SEED).records == on_event_loop(load, drafts).records


def test_a_drafter_that_no_policy_asks_changes_nothing() -> None:
    load, drafter = mix().make(1).rescaled(80.0), Drafter(latency=MACHINE.model)
    one = simulate(load, noisy("sarathi"), SEED).records
    assert simulate(load, replace(noisy("sarathi"), drafter=drafter), SEED).records == one
    assert on_event_loop(load, replace(noisy("sarathi"), drafter=drafter)).records == one


def test_an_experiment_whose_schedulers_learn() -> None:
    load = mix().make(0).rescaled(10.0)
    own, learning = simulate(load, spec("edf")), simulate(load, spec("edf", learns=True))
    assert [r.output for r in learning.records] == [r.output for r in own.records] != []
    assert spec("edf").describe() != spec("edf", learns=True).describe()
