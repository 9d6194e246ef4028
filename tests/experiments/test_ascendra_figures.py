"""Ascendra's figures: what drops in an overload, capacity between the rates tried, and jobs of one system each."""

from __future__ import annotations

import pytest

import experiments
from experiments.ascendra_capacity import CASES, SEEDS, Searched
from experiments.ascendra_parts import DROPPING, HELD, PAIRS, SYSTEMS, VARIANTS, tightest
from rubato import policies
from rubato.core.request import SATURATED
from rubato.fleet.cluster_options import PolicyChoice
from rubato.replica.plan_check import check, spelled_out
from tests.kit import Seq, request, view


@pytest.mark.parametrize("of", ["prefill_first", "sarathi", "edf"])
def test_what_waits_beyond_its_ttft_is_dropped_and_nothing_else(of: str) -> None:
    late = Seq(request("late", 10, ttft=1.0), 10)
    begun = Seq(request("begun", 10, ttft=1.0), 12, output=2, first_token_at=0.5)  # preempted
    fresh = Seq(request("fresh", 10, ttft=1.0, arrival=1.5), 10, stage_start=1.5)
    free = Seq(request("free", 10), 10)
    shown = view([late, begun, fresh, free], now=2.0)
    plan = policies.load("experiments._dropping", {"of": of}).plan(shown)
    check(plan, shown, "under test")
    assert dict(plan.drop) == {"late": SATURATED}
    assert "fresh" in {w.seq for w in spelled_out(plan, shown).work}


def test_without_late_ones_it_plans_as_its_policy() -> None:
    waiting = [Seq(request(id, 900), 900) for id in "abc"]
    for budget in (512, 2048):
        plan = policies.load("experiments._dropping", {"of": "sarathi", "budget": budget}).plan(view(waiting))
        assert plan == policies.load("sarathi", {"budget": budget}).plan(view(waiting))


def test_capacity_lies_between_the_rates_tried_on_either_side() -> None:
    search = Searched(CASES["mistral"], 1, 10.0, 0.04)
    search.known = {("a", 7.0): 1.0, ("a", 8.0): 0.94, ("a", 8.4): 0.86, ("a", 9.0): 0.1, ("b", 8.1): 0.5}
    assert search.between("a", 8.2) == pytest.approx(8.2)
    search.known["a", 8.4] = 0.88
    assert search.between("a", 8.2) == pytest.approx(8.0 + 0.4 * 4 / 6)
    assert search.between("a", 0.0) == 0.0  # attained at no rate


def test_the_tightest_scale_is_where_shares_cross() -> None:
    assert tightest((1.0, 4.0), (0.8, 1.0)) == pytest.approx(2.0)
    assert tightest((1.0, 4.0), (0.95, 1.0)) == 1.0
    assert tightest((1.0, 4.0), (0.1, 0.2)) == 4.0


@pytest.mark.parametrize("figure", ["ascendra-capacity", "ascendra-parts"])
def test_a_job_is_of_one_system_and_one_seed(figure: str) -> None:
    jobs = experiments.load(figure).jobs(False)
    assert len({job.key for job in jobs}) == len(jobs)
    assert all(sum(f"seed={seed} " in job.key for seed in SEEDS) == 1 for job in jobs)


def test_rates_and_policies_of_the_parts_are_there() -> None:
    assert HELD.keys() == CASES.keys()
    assert not PAIRS.keys() & CASES.keys()
    for choice in {*VARIANTS.values(), *DROPPING.values(), *SYSTEMS.values()}:
        parsed = PolicyChoice.parse(choice)
        policies.load(parsed.policy, parsed.settings)
