"""AdaServe's figures: tuning, the compared point between rates, ratios of violations, places of fixed depths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from experiments._adaserve_runs import (
    ACCEPTANCE,
    JUDGES,
    OURS,
    PAPER,
    REAL,
    TOP_K,
    TUNED,
    Lookup,
    ahead,
    below,
    best_baseline,
    cell,
    fewer,
    tuned,
    up_to,
    winners,
)
from experiments.adaserve_rate import point
from rubato.core.plan import Shape


def summary(share: float) -> dict[str, Any]:
    return {"share": dict.fromkeys(JUDGES, share), "goodput": dict.fromkeys(JUDGES, 1000 * share)}


def at(rate: float, ours: float, paper: float, all_: float) -> dict[str, Any]:
    systems = {OURS: summary(ours), "four": summary(paper), "two": summary(all_)}
    baselines = {"four": "chains of 4", "two": "chains of 2"}
    return {"rate": rate, "requests": 100, "baselines": baselines, "runs": [{"seed": 1, "systems": systems}]}


def test_the_compared_point_lies_between_rates() -> None:
    cells = [at(4.0, 1.0, 0.9, 0.95), at(5.0, 0.9, 0.61, 0.8), at(6.0, 0.7, 0.21, 0.5)]
    found = point(cells, "paper", 1)
    assert found["rate"] == pytest.approx(5.0 + 0.18 / 0.40)  # two points above 0.41 are near enough
    assert found["best"] == pytest.approx(0.43)
    assert found["ours"] == pytest.approx(0.9 - 0.2 * 0.18 / 0.40)
    assert found["best_goodput"] == pytest.approx(430.0)
    # the best of all never falls to 0.41: two points more than the least that it attains
    assert point(cells[::-1], "all", 1)["rate"] == pytest.approx(5.0 + 0.28 / 0.3)
    assert point(cells[:1], "paper", 1)["rate"] == 4.0


def test_ratios_of_violations() -> None:
    assert fewer(0.9, 0.6, 100) == pytest.approx(4.0)
    assert fewer(1.0, 1.0, 100) == 1.0
    assert fewer(1.0, 0.9, 100) == pytest.approx(10.0)  # over one request
    best = up_to([np.log([2.0, 2.0]).tolist(), np.log([8.0, 8.0]).tolist()])
    assert (best.value, best.low) == (pytest.approx(8.0), pytest.approx(8.0))


def test_baselines_are_tuned_by_judge_on_seed_0_and_judged_on_others() -> None:
    """A small budget wins by TPOT, a large one with a TTFT; chains of 6 and 8 run with the budgets of chains of 4. Of
    two loads of seed 0 the mean counts."""
    asked: list[tuple[int, str]] = []

    def runs(seed: int, better: float = 0.0) -> Any:
        def run(policy: str) -> Mapping[str, Any]:
            asked.append((seed, policy))
            budget, two = int(policy.rpartition("=")[2]) if "=" in policy else 0, ":n=2," in policy
            large = budget == 2048
            share = {"2 s": 0.2 + 0.3 * large + 0.1 * two, "5 s": 0.5, "TPOT": 0.8 - budget / 1e4 + better * two}
            return summary(0.6 + 0.1 * (policy == "edf")) if seed else {"share": share}

        return run

    tuning = tuned([runs(0), runs(0, 0.1)])
    small, large = "vllm:budget=256", "vllm:budget=2048"
    assert tuning["families"]["vllm"] == {"2 s": large, "5 s": large, "TPOT": small}  # of equals the larger budget
    assert tuning["tried"]["vllm_spec:n=2,budget=256"]["TPOT"] == pytest.approx(0.8244)
    assert set(tuning["families"]) == set(TUNED)
    assert {p for _, p in asked if ":n=8," in p} == {"vllm_spec:n=8,budget=256", "vllm_spec:n=8,budget=2048"}
    run_on = winners(tuning)
    assert run_on["vllm_spec:n=2,budget=2048"] == run_on["vllm_spec:n=2,budget=256"] == "chains of 2"
    assert {"edf", large, "sarathi", "vllm_spec:n=4,budget=2048", "smart_spec:budget=2048"} <= set(run_on)
    asked.clear()
    of = cell(runs, tuning, (OURS,), "mine.py", (1, 2))
    assert {(seed, policy) for seed, policy in asked} == {(s, p) for s in (1, 2) for p in (OURS, "mine.py", *run_on)}
    assert (best_baseline(of, "all"), best_baseline(of, "paper") in PAPER) == ("edf", False)
    assert run_on[best_baseline(of, "paper")] in PAPER
    assert (ahead(of).value, below([of]).value) == (pytest.approx(-10.0), 1.0)


def test_unequal_acceptance_ranks_the_target_as_published() -> None:
    """P(the target's token is not among the k likeliest) = E[(1 - c)^k], c of a Beta distribution."""
    [alpha], certainty = {row[0] for row in [np.mean(list(TOP_K.values()), axis=0)]}, ACCEPTANCE[REAL]["certainty"]
    missed, inside = 1.0, []
    for k in range(5):
        missed *= ((1.0 - alpha) * certainty + k) / (certainty + k)
        inside.append(1.0 - missed)
    assert inside == pytest.approx(np.mean(list(TOP_K.values()), axis=0), abs=0.004)


def test_the_suffix_drafter_takes_what_was_measured() -> None:
    chain, tree = Shape(tokens=1, seqs=1), Shape(tokens=3, seqs=1)
    assert 8 * Lookup().step_time(chain) == pytest.approx(0.04e-3, rel=0.01)
    assert 8 * Lookup().step_time(tree) == pytest.approx(0.2e-3, rel=0.01)
