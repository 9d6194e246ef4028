"""How often drafts are right is learned by class, and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Finished, Tokens, Verdict
from rubato.core.plan import Tree
from rubato.engines.simulated.acceptance import Acceptance
from rubato.policy_kit.acceptance import MEMORY, PRIOR, WEIGHT, Accepted, Offered
from tests.doubles import Seq, request


def tried(id: str, right: int, of: int) -> Tokens:
    return Tokens(0.0, id, right + 1, tried=of)


def test_acceptance_is_counted_by_application_or_tier() -> None:
    counts = Accepted(0.5)
    a, b = request("a", tier="gold"), replace(request("b", tier="gold"), app="code")
    counts.follow([Seq(a), Seq(b)])
    for event in (tried("a", 3, 3), tried("b", 0, 1), tried("c", 9, 9)):
        counts.observe(event)
    assert counts.mean(a) == (3 + 0.5 * WEIGHT) / (3 + WEIGHT)
    assert counts.mean(b) == 0.5 * WEIGHT / (1 + WEIGHT)
    assert counts.mean(request("d")) == 0.5
    counts.observe(Finished(1.0, "a", "completed", "eos", Verdict(True, "deadline")))
    counts.observe(tried("a", 0, 9))
    assert counts.mean(a) == (3 + 0.5 * WEIGHT) / (3 + WEIGHT)


def test_who_was_here_before_counts_with_what_it_shows() -> None:
    counts = Accepted(0.5)
    seq = Seq(request("a"), tried=30, acceptance=0.9)
    counts.follow([seq])
    counts.follow([seq])
    assert counts.mean(seq.request) == (27 + 0.5 * WEIGHT) / (30 + WEIGHT)


def test_it_forgets() -> None:
    counts = Accepted(0.5)
    seq = Seq(request("a"))
    counts.follow([seq])
    for _ in range(1000):
        counts.observe(tried("a", 9, 9))
    for _ in range(3 * int(MEMORY)):
        counts.observe(tried("a", 0, 1))
    assert counts.mean(seq.request) < 0.1


@given(st.sampled_from([0.1, 0.5, 0.8]), st.integers(0, 5))
def test_it_comes_to_the_chance_there_is(alpha: float, seed: int) -> None:
    process = Acceptance(alpha, seed=seed).of(request("a"))
    counts = Accepted()
    counts.follow([Seq(request("a"))])
    position = 0
    for _ in range(1000):
        accepted, of = process.accept(position, process.draft(position, 3, 1), (0, 1, 2))
        counts.observe(tried("a", len(accepted), of))
        position += len(accepted) + 1
    assert counts.mean(request("a")) == pytest.approx(alpha, abs=0.06)


def test_what_trees_offer_is_learned_by_class_and_depth_from_all_of_their_nodes() -> None:
    offered, code, chat = Offered(), request("a", tier="code"), request("b", tier="chat")
    assert offered.chances(code, 2) == pytest.approx([PRIOR, PRIOR**2])
    offered.see(code, Tree((-1, -1, 0), (0.6, 0.2, 0.4)))
    offered.see(code, Tree((-1,), (0.4,)))
    # 0.8 and 0.4 at depth 1, 0.4 at depth 2, beside what is reckoned with before; deeper it falls as from 1 to 2
    first, second = (WEIGHT * PRIOR + 0.8 + 0.4) / (WEIGHT + 2), (WEIGHT * PRIOR**2 + 0.4) / (WEIGHT + 1)
    third = second**2 / first
    assert offered.chances(code, 4) == pytest.approx([first, second, third, third * second / first])
    assert offered.chances(code, 1) == pytest.approx([first])
    assert offered.chances(chat, 1) == [PRIOR]
    offered.see(code, Tree((-1, 0, 1), (0.8, 0.8, 0.8)))
    first, second = (first * (WEIGHT + 2) + 0.8) / (WEIGHT + 3), (second * (WEIGHT + 1) + 0.8) / (WEIGHT + 2)
    assert offered.chances(code, 3) == pytest.approx([first, second, (WEIGHT * third + 0.8) / (WEIGHT + 1)])
    offered.see(chat, Tree((), ()))
    assert offered.chances(chat, 1) == [PRIOR]


def test_one_unlucky_tree_says_little_and_many_say_it_all() -> None:
    offered, one = Offered(), request("a")
    offered.see(one, Tree((-1,), (0.0,)))
    assert offered.chances(one, 1)[0] == pytest.approx(PRIOR * WEIGHT / (WEIGHT + 1))
    for _ in range(1000):
        offered.see(one, Tree((-1,), (0.0,)))
    assert offered.chances(one, 1)[0] < 0.01


def test_trees_of_long_ago_are_forgotten() -> None:
    offered, one = Offered(), request("a")
    for path in [0.9] * 2000 + [0.1] * 2000:
        offered.see(one, Tree((-1,), (path,)))
    assert offered.chances(one, 1)[0] == pytest.approx(0.1, abs=0.02)
