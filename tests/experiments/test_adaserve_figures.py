"""AdaServe's figures: the compared point between rates, ratios of violations, places of fixed depths and widths."""

from __future__ import annotations

from typing import Any

import pytest

from experiments._adaserve_runs import OURS, PAPER, TUNED, fewer, up_to
from experiments.adaserve_control import rank
from experiments.adaserve_rate import point


def at(rate: float, **shares: float) -> dict[str, Any]:
    names = {"ours": OURS, "spec": "vllm_spec(4)", "two": "vllm_spec(2)", "sarathi": "sarathi"}
    systems = {names[name]: {"share": share, "goodput": 1000 * share} for name, share in shares.items()}
    return {"rate": rate, "requests": 100, "systems": systems}


def test_the_compared_point_lies_between_rates() -> None:
    runs = [
        at(4.0, ours=1.0, spec=0.9, two=0.95, sarathi=0.4),
        at(5.0, ours=0.9, spec=0.61, two=0.8, sarathi=0.4),
        at(6.0, ours=0.7, spec=0.21, two=0.5, sarathi=0.4),
    ]
    found = point(runs, PAPER)
    # the best is 0.61, then Sarathi's 0.40; two points above 0.41 are near enough
    assert found["rate"] == pytest.approx(5.0 + 0.18 / 0.21)
    assert found["best"] == pytest.approx(0.43)
    assert found["ours"] == pytest.approx(0.9 - 0.2 * 0.18 / 0.21)
    assert found["best_goodput"] == pytest.approx(430.0)
    # chains of 2 never fall to 0.41: two points more than the least that they attain
    assert point(runs[::-1], TUNED)["rate"] == pytest.approx(5.0 + 0.28 / 0.3)
    assert point(runs[:1], PAPER)["rate"] == 4.0


def test_ratios_of_violations() -> None:
    assert fewer(0.9, 0.6, 100) == pytest.approx(4.0)
    assert fewer(1.0, 1.0, 100) == 1.0
    assert fewer(1.0, 0.9, 100) == pytest.approx(10.0)  # over one request
    runs = [{"x": x, "seed": seed, "r": r} for x, r in ((1, 2.0), (2, 8.0)) for seed in (1, 2)]
    best = up_to(runs, "x", lambda v: v["r"])
    assert (best.value, best.low) == (pytest.approx(8.0), pytest.approx(8.0))


def test_rank_is_among_the_fixed_ones() -> None:
    shares = {OURS: 0.8, "equations 8 and 9": 0.99, "1 x 1": 0.9, "2 x 1": 0.8, "4 x 3": 0.7}
    assert rank(shares, OURS) == 2.0
    assert rank(shares, "equations 8 and 9") == 1.0
