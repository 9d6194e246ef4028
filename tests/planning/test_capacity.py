"""Capacity: found where it is known, paired by seed, and errors where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning import capacity
from rubato.planning.capacity import CapacityQuestion, crossing
from rubato.planning.fleet_size_model import Faster
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.workloads import Arrival, Workload
from rubato.workloads.resample import Stretch
from tests.planning.machine import MACHINE, mix, spec


@pytest.mark.parametrize("start", [0.01, 1.0, 7.3, 500.0])
@pytest.mark.parametrize("target", [0.5, 0.9])
def test_the_crossing_of_a_known_curve(start: float, target: float) -> None:
    """Attainment 1 up to 5 requests/s, then 5 / rate."""
    found = crossing(lambda rate: min(1.0, 5.0 / rate), target, start, 0.01)
    assert found == pytest.approx(5.0 / target, rel=0.01)


def test_a_curve_that_never_crosses_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"100.0 % at 4096 requests/s and 100.0 % at 1"):
        crossing(lambda rate: 1.0, 0.9, 1.0, 0.01)
    with pytest.raises(ValueError, match=r"attainment is 10.0 %"):
        crossing(lambda rate: 0.1, 0.9, 1.0, 0.01)


class Even:
    """200 requests at even gaps, each one step of 10 ms on a machine that takes one at a time, due within 15 ms."""

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        arrivals = tuple(Arrival(f"q{i}", float(i), "all-alike", "", 8, 1) for i in range(200))
        return Workload("even", seed, 1.0, 199.0, {"all-alike": SLO(ttft=0.015)}, arrivals)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return 0.0, seconds

    def describe(self) -> dict[str, object]:
        return {}


ONE = Hardware("one", replace(MACHINE.model, k=(0.0, 0.0), b=(0.01, 0.0), a=0.0),  # type: ignore[type-var]
               replace(MACHINE.limits, max_num_seqs=1, max_running=1))  # fmt: skip


def test_the_capacity_of_a_server_with_even_arrivals_is_its_service_rate() -> None:
    """Up to 100 requests/s none waits. Above, the n-th waits n times (10 ms - gap): 90 % are within 5 ms where the
    180th is, at a gap of 10 ms - 5 ms / 180."""
    specs = (RunSpec(ONE, PolicyChoice("vllm")),)
    outcome = capacity.run(CapacityQuestion(Even(), specs, (0, 1), (0.9,), 0.0001), workers=1)
    (found,) = outcome.capacities()
    assert found.fleet.value == pytest.approx(1 / (0.01 - 0.005 / 180), rel=1e-3)
    assert found.fleet.low <= found.fleet.value <= found.fleet.high


def test_twice_the_speed_is_twice_the_capacity_seed_by_seed() -> None:
    fast = replace(ONE, name="fast", model=Faster(ONE.model, 2.0))
    load = Even()
    slow = capacity.search(load, RunSpec(ONE, PolicyChoice("vllm")), 0, (0.9,), 0.001, None)
    quick = capacity.search(load, RunSpec(fast, PolicyChoice("vllm")), 0, (0.9,), 0.001, None)
    assert quick["capacity"]["0.9"] > 1.99 * slow["capacity"]["0.9"]


def test_policies_are_paired_by_seed_and_divided_by_replicas_and_gpus() -> None:
    specs = (spec("sarathi", replicas=2), spec("sarathi@round_robin", replicas=2))
    outcome = capacity.run(CapacityQuestion(mix(80), specs, (0, 1), (0.9,), 0.1), workers=1)
    one, other = outcome.capacities()
    assert (one.ratio.value, one.ratio.low, one.ratio.high) == (1.0, 1.0, 1.0)
    assert one.replica.value == pytest.approx(one.fleet.value / 2)
    assert one.gpu.value == pytest.approx(one.fleet.value / 4)
    pairs = [[v["capacity"]["0.9"] for v in outcome.job_results.values if v["policy"] == s.choice.label] for s in specs]
    ratios = [b / a for a, b in zip(*pairs, strict=True)]
    assert other.ratio.value == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    data = outcome.to_json()
    assert data["format"] == "rubato-capacity/1"
    assert len(data["searches"]) == 4
    assert len(outcome.tables()[0].rows) == 2


def test_runs_shorter_than_their_requests_are_said() -> None:
    outcome = capacity.run(CapacityQuestion(mix(10), (spec(),), (0,), (0.9,), 0.2), workers=1)
    assert any("too short for their requests" in note for note in outcome.notes)
    assert any("one seed has no interval" in note for note in outcome.notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"targets": (1.5,)}, "give shares above 0"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"start": 0.0}, "rate is 0.0 requests/s: give a positive number"),
        ({"seeds": ()}, "at least one policy, one seed"),
    ],
)
def test_impossible_questions(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CapacityQuestion(**{"source": mix(), "specs": (spec(),), "seeds": (0,), **changes})  # type: ignore[arg-type]
