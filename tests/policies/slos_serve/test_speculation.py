"""Lengths to verify: against all of them, and where the answer is known."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.plan import Shape
from rubato.latency.roofline import Model
from rubato.policies.slos_serve.speculation import DecodeTier, best_lengths, expected

# Memory-bound up to 20 ms, then 0.1 ms a token; 1 ms a draft step.
MODEL = Model(k1=(0.0, 1e-4), k2=(1e-3, 1e-3), b=(0.02, 0.002))


def time2bs(seconds: float, draft_steps: int = 0) -> int:
    return MODEL.largest_chunk(seconds, Shape(spec_steps=draft_steps), 0, 10**6)


def test_expected_tokens() -> None:
    assert expected(0.0, 5) == 1.0
    assert expected(1.0, 5) == 5.0
    assert expected(0.5, 3) == 1.75


def test_nothing_is_drafted_where_nothing_is_accepted() -> None:
    found = best_lengths([DecodeTier(0.03, 10, 0.0)], time2bs)
    assert found is not None
    assert found == ((1,), 0.03, pytest.approx(270 / 0.03))


def test_a_tight_tier_is_held_by_drafts_alone() -> None:
    """No batch ends within 15 ms; at an acceptance of 0.8, 3 tokens a verification allow 36 ms."""
    found = best_lengths([DecodeTier(0.015, 10, 0.8)], time2bs)
    assert found is not None
    assert found.verified[0] >= 2
    assert time2bs(0.015) == 0


def test_a_loose_tier_takes_the_smallest_length_that_keeps_up() -> None:
    found = best_lengths([DecodeTier(0.03, 5, 0.9), DecodeTier(0.2, 20, 0.9)], time2bs)
    assert found is not None
    assert found.verified[1] == 1
    assert found.seconds <= 0.2


def test_decodes_that_do_not_fit() -> None:
    assert best_lengths([DecodeTier(0.025, 2000, 0.0)], time2bs) is None
    assert best_lengths([], time2bs) is None


tiers = st.builds(
    DecodeTier,
    st.sampled_from([0.012, 0.03, 0.05, 0.1]),
    st.sampled_from([1, 10, 40, 200]),
    st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)


@given(st.lists(tiers, min_size=1, max_size=3))
def test_no_lengths_are_better(tiers: list[DecodeTier]) -> None:
    most = 4
    found = best_lengths(tiers, time2bs, most)
    best = -1.0
    for lengths in product(range(1, most + 1), repeat=len(tiers)):
        seconds = min(t.tpot * expected(t.acceptance, n) for t, n in zip(tiers, lengths, strict=True))
        cost = sum(t.requests * n for t, n in zip(tiers, lengths, strict=True))
        left = time2bs(seconds, max(lengths) - 1) - cost
        if left >= 0:
            best = max(best, left / seconds)
    assert (found is None) == (best < 0.0)
    if found is not None:
        assert found.throughput == pytest.approx(best)
