"""How often drafts are right is learned by class, and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Finished, Tokens, Verdict
from rubato.core.plan import Tree
from rubato.engines.simulated.acceptance import Acceptance
from rubato.policy_kit.acceptance import MEMORY_TRIES, PRIOR, PRIOR_TRIES, AcceptanceRates, TreeChances
from tests.kit import Seq, request


def tried(id: str, right: int, of: int) -> Tokens:
    return Tokens(0.0, id, right + 1, tried=of)


def test_acceptance_is_counted_by_application_or_tier() -> None:
    counts = AcceptanceRates(0.5)
    a, b = request("a", tier="gold"), replace(request("b", tier="gold"), app="code")
    counts.follow([Seq(a), Seq(b)])
    for event in (tried("a", 3, 3), tried("b", 0, 1), tried("c", 9, 9)):
        counts.observe(event)
    assert counts.mean(a) == (3 + 0.5 * PRIOR_TRIES) / (3 + PRIOR_TRIES)
    assert counts.mean(b) == 0.5 * PRIOR_TRIES / (1 + PRIOR_TRIES)
    assert counts.mean(request("d")) == 0.5
    counts.observe(Finished(1.0, "a", "completed", "eos", Verdict(True, "deadline")))
    counts.observe(tried("a", 0, 9))
    assert counts.mean(a) == (3 + 0.5 * PRIOR_TRIES) / (3 + PRIOR_TRIES)


def test_who_was_here_before_counts_with_what_it_shows() -> None:
    counts = AcceptanceRates(0.5)
    seq = Seq(request("a"), tried=30, acceptance=0.9)
    counts.follow([seq])
    counts.follow([seq])
    assert counts.mean(seq.request) == (27 + 0.5 * PRIOR_TRIES) / (30 + PRIOR_TRIES)


def test_it_forgets() -> None:
    counts = AcceptanceRates(0.5)
    seq = Seq(request("a"))
    counts.follow([seq])
    for _ in range(1000):
        counts.observe(tried("a", 9, 9))
    for _ in range(3 * int(MEMORY_TRIES)):
        counts.observe(tried("a", 0, 1))
    assert counts.mean(seq.request) < 0.1


@given(st.sampled_from([0.1, 0.5, 0.8]), st.integers(0, 5))
def test_it_comes_to_the_chance_there_is(alpha: float, seed: int) -> None:
    process = Acceptance(alpha, seed=seed).of(request("a"))
    counts = AcceptanceRates()
    counts.follow([Seq(request("a"))])
    position = 0
    for _ in range(1000):
        accepted, of = process.accept(position, process.draft(position, 3, 1), (0, 1, 2))
        counts.observe(tried("a", len(accepted), of))
        position += len(accepted) + 1
    assert counts.mean(request("a")) == pytest.approx(alpha, abs=0.06)


def test_what_trees_offer_is_learned_by_class_and_depth_from_all_of_their_nodes() -> None:
    offered, code, chat = TreeChances(), request("a", tier="code"), request("b", tier="chat")
    assert offered.chances(code, 2) == pytest.approx([PRIOR, PRIOR**2])
    offered.add_tree(code, Tree((-1, -1, 0), (0.6, 0.2, 0.4)))
    offered.add_tree(code, Tree((-1,), (0.4,)))
    # 0.8 and 0.4 at depth 1, 0.4 at depth 2, beside what is reckoned with before; deeper it falls as from 1 to 2
    first, second = (
        (PRIOR_TRIES * PRIOR + 0.8 + 0.4) / (PRIOR_TRIES + 2),
        (PRIOR_TRIES * PRIOR**2 + 0.4) / (PRIOR_TRIES + 1),
    )
    third = second**2 / first
    assert offered.chances(code, 4) == pytest.approx([first, second, third, third * second / first])
    assert offered.chances(code, 1) == pytest.approx([first])
    assert offered.chances(chat, 1) == [PRIOR]
    offered.add_tree(code, Tree((-1, 0, 1), (0.8, 0.8, 0.8)))
    first, second = (
        (first * (PRIOR_TRIES + 2) + 0.8) / (PRIOR_TRIES + 3),
        (second * (PRIOR_TRIES + 1) + 0.8) / (PRIOR_TRIES + 2),
    )
    assert offered.chances(code, 3) == pytest.approx([first, second, (PRIOR_TRIES * third + 0.8) / (PRIOR_TRIES + 1)])
    offered.add_tree(chat, Tree((), ()))
    assert offered.chances(chat, 1) == [PRIOR]


def test_one_unlucky_tree_says_little_and_many_say_it_all() -> None:
    offered, one = TreeChances(), request("a")
    offered.add_tree(one, Tree((-1,), (0.0,)))
    assert offered.chances(one, 1)[0] == pytest.approx(PRIOR * PRIOR_TRIES / (PRIOR_TRIES + 1))
    for _ in range(1000):
        offered.add_tree(one, Tree((-1,), (0.0,)))
    assert offered.chances(one, 1)[0] < 0.01


def test_trees_of_long_ago_are_forgotten() -> None:
    offered, one = TreeChances(), request("a")
    for path in [0.9] * 2000 + [0.1] * 2000:
        offered.add_tree(one, Tree((-1,), (path,)))
    assert offered.chances(one, 1)[0] == pytest.approx(0.1, abs=0.02)
