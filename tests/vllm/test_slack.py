"""While every SLO has room a step is vLLM's own; else, and where a policy decides more than an order, it is planned."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.engines.vllm.slack import STABLE_STEPS, SlackCheck
from tests.vllm.harness import Harness, harness

LOOSE = {"slo_ttft_ms": 100_000, "slo_tpot_ms": 10_000, "slo_e2e_ms": 10_000_000}


def made(model: Path, policy: str, stand_aside: bool = True, **more: Any) -> Harness:
    settings = {"blocks": 200, "rubato": {"stand_aside": stand_aside}, **more}
    own = harness(model, policy, **settings)
    own.exact = False  # of steps without a plan there is nothing to compare with
    return own


def loaded(own: Harness, seed: int, requests: int = 30, **slo: Any) -> Harness:
    own.serve(random.Random(seed), requests, 6, slo=lambda: slo)
    return own


@pytest.mark.parametrize("policy", ["edf", "sarathi", "slos_serve"])
@pytest.mark.parametrize("seed", range(3))
def test_with_room_each_batch_is_the_one_that_stock_makes(model: Path, policy: str, seed: int) -> None:
    stock = loaded(harness(model, "", blocks=200, seqs=40), seed)
    own = loaded(made(model, policy, seqs=40), seed, **LOOSE)
    assert own.scheduled == stock.scheduled
    assert own.scheduler.rubato.guard.stood_aside == own.scheduler.rubato.guard.steps
    assert own.out == stock.out
    assert not own.policy.plans


@pytest.mark.parametrize(
    ("slo", "more"),
    [
        ({"slo_ttft_ms": 300}, {}),  # 0.3 of it is less than a step of 64 tokens takes
        ({"slo_tpot_ms": 15}, {}),
        ({"slo_e2e_ms": 500}, {}),
        (LOOSE, {"blocks": 20}),
        (LOOSE, {"seqs": 2}),
        (LOOSE, {"rubato": {"stand_aside": False}}),
    ],
)
def test_without_room_the_policy_plans(model: Path, slo: dict[str, Any], more: dict[str, Any]) -> None:
    own = made(model, "edf", **{"seqs": 40, **more})
    for i in range(8):
        own.add(f"r{i}", [i] * 60, 20, **slo)
    for _ in range(30):
        own.step()
    assert len(own.policy.plans) >= 5


def test_blocks_that_unlooked_steps_and_prompts_part_way_will_take_are_counted(model: Path) -> None:
    """Ten decodes, each to grow by STABLE_STEPS tokens, and a half-prefilled prompt: KV for them is there or not."""
    own = made(model, "edf", seqs=40)
    for i in range(10):
        own.add(f"r{i}", [i] * 10, 60, **LOOSE)
    own.step()
    own.add("long", list(range(150)), 5, **LOOSE)
    own.step()
    own.step()
    view, room = own.scheduler.view(), own.scheduler.rubato.slack
    (long,) = view.prefilling
    assert long.pending > 1
    limits = view.limits
    needed = len(view.running) * (1 + limits.blocks(STABLE_STEPS)) + limits.blocks(150)
    assert not room.all_within_slo(replace(view, kv_free=needed - 1))
    assert room.all_within_slo(replace(view, kv_free=needed))
    few = replace(limits, max_num_seqs=len(view.running) - 1)  # more run than vLLM's batch has room for
    assert not room.all_within_slo(replace(view, limits=few, kv_free=needed))
    drafting = SlackCheck(max_decode_tokens=4)
    assert not drafting.all_within_slo(replace(view, kv_free=needed))


def test_drafts_are_always_planned(model: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    own = made(model, "smart_spec", seqs=40, speculative=ngram)
    loaded(own, 1, requests=3, **LOOSE)
    assert own.scheduler.rubato.guard.stood_aside == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_steps_of_both_kinds_in_turns(model: Path, asynchronous: bool, seed: int) -> None:
    """Now and then no room, scarce KV: nothing is lost, and each request has the tokens it should have."""
    own = made(model, "edf", blocks=40, seqs=6, asynchronous=asynchronous)
    rng = random.Random(seed)

    def slo() -> dict[str, Any]:
        tight = {"slo_ttft_ms": rng.choice([50, 400, 5_000]), "slo_tpot_ms": rng.choice([15, 100])}
        return rng.choice([tight, {}, LOOSE])

    own.serve(rng, 60, 9, aborts=0.1, slo=slo)
    own.step()
    driver = own.scheduler.rubato
    assert 0 < driver.guard.stood_aside < driver.guard.steps
    assert not driver.guard.faults
    assert not driver.guard.deviations
    assert driver.guard.fallbacks == 0
    ends = [e.id for e in own.policy.events if isinstance(e, Finished)]
    assert sorted(ends) == sorted(f"r{i}" for i in range(60))
    assert max(own.ended.values()) == 1


def test_a_fault_of_the_check_costs_nothing_but_the_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = made(model, "edf", seqs=40)
    monkeypatch.setattr(own.scheduler.rubato.slack, "all_within_slo", lambda view: 1 / 0)
    loaded(own, 1, **LOOSE)
    driver = own.scheduler.rubato
    assert driver.guard.has_given_up
    assert driver.guard.faults == {"observe": 10}
    assert driver.guard.fallbacks == driver.guard.steps
    assert set(own.ended.values()) == {1}


def test_what_no_view_shows_yet_is_looked_for_at_each_step(model: Path) -> None:
    """A request that waits for its grammar: it may be ready in any step."""
    own = made(model, "edf", seqs=40)
    own.add("decodes", [1] * 10, 40, **LOOSE)
    for _ in range(3):
        own.step()
    driver = own.scheduler.rubato
    assert driver.slack.stable_steps > 0
    own.add("hidden", [2] * 10, 5, **LOOSE)
    view = own.scheduler.view()
    hidden = driver.requests.seqs["hidden"]
    assert driver.observe(replace(view, waiting=[seq for seq in view.waiting if seq is not hidden]))
    assert driver.slack.stable_steps == 0
