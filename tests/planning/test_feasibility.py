"""What an idle replica cannot attain: as the simulator itself judges one request at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.infeasible import StageLengths, find_infeasible
from rubato.core.request import SLO
from rubato.core.slo import SLO_RULES
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning import feasibility
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload
from tests.kit import Linear
from tests.planning.machine import MACHINE


def one(prompt: int, output: int, slo: SLO) -> Workload:
    return Workload("one", 0, 1.0, 1.0, {"only": slo}, (Arrival("a", 0.0, "only", "", prompt, output),))


@given(
    prompt=st.sampled_from([1, 100, 512, 513, 3000]),
    output=st.sampled_from([1, 2, 11, 12, 60]),
    ttft=st.sampled_from([None, 0.0105, 0.02, 0.1, 0.5]),
    tpot=st.sampled_from([None, 0.01, 0.0101, 0.0103, 0.0106, 0.02]),
    e2e=st.sampled_from([None, 0.1, 1.0]),
    slo_rule=st.sampled_from(SLO_RULES),
)
def test_as_the_simulator_judges_a_request_alone(
    prompt: int, output: int, ttft: float | None, tpot: float | None, e2e: float | None, slo_rule: str
) -> None:
    load = one(prompt, output, SLO(ttft, tpot, e2e))
    (record,) = simulate(load, RunSpec(MACHINE, PolicyChoice("vllm"), slo_rule=slo_rule)).records
    assert feasibility.assess(load, MACHINE, slo_rule).count == (not record.verdict.met)


SLOS = st.builds(
    SLO,
    ttft=st.sampled_from([None, 0.02, 0.1, 0.5]),
    tpot=st.sampled_from([None, 0.0101, 0.0103, 0.0106, 0.02]),
    e2e=st.sampled_from([None, 0.3, 1.0]),
)
FIRST = st.builds(OfferedStage, st.sampled_from([1, 100, 513]), st.sampled_from([1, 2, 11]), SLOS, st.just("</think>"))
LATER = st.builds(OfferedStage, st.sampled_from([0, 0, 1, 100, 600]), st.sampled_from([1, 2, 12, 25]), SLOS)


@given(parts=st.tuples(FIRST, LATER), slo_rule=st.sampled_from(SLO_RULES))
def test_as_the_simulator_judges_each_stage(parts: tuple[OfferedStage, ...], slo_rule: str) -> None:
    lengths = (sum(p.prompt for p in parts), sum(p.output for p in parts))
    staged = Workload("one", 0, 1.0, 1.0, {"only": SLO()}, (Arrival("a", 0.0, "only", "", *lengths, parts=parts),))
    (record,) = simulate(staged, RunSpec(MACHINE, PolicyChoice("vllm"), slo_rule=slo_rule)).records
    assert record.outcome == "completed"
    assert feasibility.assess(staged, MACHINE, slo_rule).count == (not record.verdict.met)


def test_a_requests_own_slo_goes_before_its_tiers() -> None:
    arrivals = (Arrival("a", 0.0, "only", "", 512, 2), Arrival("b", 1.0, "only", "", 512, 2, slo=SLO(ttft=0.001)))
    found = feasibility.assess(Workload("two", 0, 1.0, 1.0, {"only": SLO(ttft=1.0)}, arrivals), MACHINE)
    assert (found.count, found.example[:1]) == (1, "b")


def test_it_says_how_many_of_which_tier_and_why() -> None:
    tiers = {"tight": SLO(ttft=0.05), "loose": SLO(ttft=5.0)}
    rows = [("tight", 2000), ("tight", 100), ("loose", 2000), ("tight", 2000), ("loose", 5000)]
    arrivals = tuple(Arrival(f"q{i}", float(i), tier, "", prompt, 2) for i, (tier, prompt) in enumerate(rows))
    load = Workload("some", 0, 1.0, 4.0, tiers, arrivals)
    found = feasibility.assess(load, MACHINE)
    assert found.infeasible == {"tight": 2, "loose": 1}
    assert "3 of 5 requests (2 of tight, 1 of loose)" in found.text
    assert "q0 (tier tight): the prompt of 2000 tokens takes 4" in found.text
    with pytest.raises(ValueError, match=r"no number of replicas attains 90 %: 3 of 5 requests"):
        found.check(0.9)
    found.check(0.4)
    left = feasibility.feasible_only(load, MACHINE)
    assert [a.id for a in left.arrivals] == ["q1", "q2"]
    assert feasibility.assess(left, MACHINE).count == 0
    with pytest.raises(ValueError, match="cannot be attained even alone"):
        feasibility.feasible_only(one(2000, 1, SLO(ttft=0.01)), MACHINE)


def test_what_does_not_fit_is_infeasible_without_any_slo() -> None:
    assert "is 4100 tokens long and 4096 fit" in feasibility.assess(one(4000, 100, SLO()), MACHINE).text


def test_prompt_of_a_later_stage_is_prefilled_with_the_token_before_it() -> None:
    stages = [StageLengths(10, SLO(), 5, 5), StageLengths(20, SLO(ttft=0.001), 1, 1)]
    assert (find_infeasible(stages, Linear(), 64) or "").startswith("the prompt of 21 tokens takes ")
