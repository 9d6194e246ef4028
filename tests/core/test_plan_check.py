"""Impossible plans, one a row: what the error must say."""

from dataclasses import replace

import pytest

from rubato.core.plan_check import PlanError, check
from rubato.core.types import Limits, Plan, Work
from tests.doubles import Seq, request, view

LIMITS = Limits(max_seqs=2, max_tokens=20, max_length=100, kv_blocks=4, block=8)


def example() -> object:
    waiting = [Seq(request("w", 40), length=40), Seq(request("d", refuse=True), demoted=True, length=5)]
    running = [Seq(request("r", ttft=1.0), length=10, cached=9, blocks=2), Seq(request("s", ttft=1.0), 17, 16, 2)]
    return view(waiting, running, kv_free=0, kv_total=4, limits=LIMITS)


CASES = [
    (Plan((Work("x", 1),)), "names 'x', which is neither waiting nor running"),
    (Plan((Work("r", 1), Work("r", 1))), "names 'r' twice"),
    (Plan((Work("r", 2),)), "gives 'r' 2 tokens, and it has 1 pending"),
    (Plan((Work("r", 0),)), "gives 'r' 0 tokens"),
    (Plan((Work("s", 1),)), "1 new KV blocks needed, 0 of 4 free"),
    (Plan((Work("r", 1), Work("s", 1), Work("d", 1))), "3 sequences in a batch, the engine takes 2"),
    (Plan((Work("w", 21),)), "21 tokens in a batch, the engine takes 20"),
    (Plan((Work("r", 1),), preempt=("r",)), "which the same plan preempts"),
    (Plan(preempt=("w",)), "preempt names 'w', which holds no KV"),
    (Plan(drop={"r": "why"}), "drop names 'r', whose client asked for best effort"),
    (Plan(drop={"r": "rejected-saturated"}), "before it has begun"),
    (Plan(demote=("d",)), "demote names 'd', which is best effort already"),
    (Plan(promote=("r",)), "promote names 'r', which was not demoted"),
    (Plan(), "nothing planned though 4 requests are here"),
    (Plan(wake_at=0.0), "it would spin"),
    (Plan(wake_at=float("nan")), "or never wake"),
    (Plan(wake_at=float("inf")), "or never wake"),
]


@pytest.mark.parametrize(("plan", "says"), CASES)
def test_impossible(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=f"policy 'mine', replica 'r0', t=0.000000: .*{says}"):
        check(plan, example(), "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        Plan((Work("r", 1),)),
        Plan((Work("s", 1),), preempt=("r",)),  # the plan's own preemption frees the block
        Plan((Work("w", 16),), preempt=("r",)),
        Plan(drop={"d": "rejected-slo-infeasible"}),
        Plan(wake_at=1.0),
    ],
)
def test_possible(plan: Plan) -> None:
    check(plan, example(), "mine")  # type: ignore[arg-type]


def test_an_engine_with_few_slots_holds_no_more_sequences() -> None:
    here = example()
    here = replace(here, limits=replace(here.limits, max_running=len(here.running)))
    with pytest.raises(PlanError, match=f"1 started beside {len(here.running)} that run on, the engine holds"):
        check(Plan((Work("w", 1),)), here, "mine")
    check(Plan((Work("w", 16),), preempt=("r",)), here, "mine")
