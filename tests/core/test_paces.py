"""Who can go on together, against brute force over all numbers of verified nodes; what SLOs ask of a step's end."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from rubato.policy_kit.draft_value import drafting, with_nodes
from rubato.policy_kit.paces import JointPace, pace_of, time_for, tokens_needed
from tests.kit import Linear, Seq
from tests.kit.plans import decode


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.05, 0.1, inf]), min_size=1, max_size=6),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    st.sampled_from([0.001, 0.01, 0.02]),
    st.sampled_from([0.0, 0.001, 0.004]),
    st.sampled_from([1.0, 1.3]),
)
def test_against_all_numbers_of_nodes(
    paces: list[float], tree: list[float], fixed: float, per_token: float, stretch: float
) -> None:
    """A step with so many nodes is long enough for what it asks for, or none is: each sequence whose tokens may take p
    seconds needs s / p of them of a step of s seconds, and gets the first of its nodes."""
    tree.sort(reverse=True)
    latency, n = Linear(fixed, per_token), len(paces)
    seqs = [decode(f"r{i}") for i in range(n)]
    kv = sum(seq.length for seq in seqs)

    def asked(seconds: float) -> int | None:
        """Nodes of all; None where a whole tree is not enough."""
        nodes = 0
        for pace in paces:
            brings, taken = 1.0, 0
            while brings < seconds / (pace + 1e-9) - 1e-9 and taken < len(tree):
                brings, taken = brings + tree[taken], taken + 1
            if brings < seconds / (pace + 1e-9) - 1e-9:
                return None
            nodes += taken
        return nodes

    base = drafting((len(tree), 1), n)
    can = False
    for nodes in range(n * len(tree) + 1):
        found = asked(latency.step_time(with_nodes(base, n, kv, nodes)) * stretch)
        can = can or (found is not None and found <= nodes)
    event(f"together: {can}")
    together = JointPace(latency, (len(tree), 1), [tree] * n, stretch)
    assert together.can_keep(seqs, paces) == can
    order = sorted(paces, reverse=True)
    most = together.count_that_can(seqs, order)
    assert most == max([1, *(k for k in range(1, n + 1) if together.can_keep(seqs[:k], order[:k]))])


def test_without_drafts_a_step_brings_a_token() -> None:
    one = [decode("r")]
    assert JointPace(Linear(0.01, 0.0), None, [[0.9, 0.8]], 1.0).can_keep(one, [0.01])
    assert not JointPace(Linear(0.01, 0.0), None, [[0.9, 0.8]], 1.0).can_keep(one, [0.009])
    # with no tree yet, chains of the drafter's prior: 1.7 tokens of 10 ms
    assert JointPace(Linear(0.01, 0.0), (1, 1), [], 1.0).can_keep(one, [0.006])
    assert not JointPace(Linear(0.01, 0.0), (1, 1), [], 1.0).can_keep(one, [0.006], 1.1)


def begun(**slo: float) -> Seq:
    """A decode with 11 tokens out, ten after the first, which came at 1.0; 10 to come."""
    seq = decode("r", **slo)
    seq.first_token_at, seq.output, seq.predicted = 1.0, 11, 10.0
    return seq


def test_when_a_step_must_have_ended() -> None:
    seq = begun(tpot=0.02)
    for tokens in (1.0, 2.5):
        assert tokens_needed(seq, time_for(seq, tokens, 1.1), 1.1) == pytest.approx(tokens)
    seq = begun(e2e=3.0)
    assert tokens_needed(seq, time_for(seq, 2.0, 1.5), 1.5) == pytest.approx(2.0)
    seq.demoted = True
    assert time_for(seq, 1.0, 1.5) == inf


def test_the_pace_spreads_a_lag_over_what_is_to_come() -> None:
    assert pace_of(begun(tpot=0.02), 1.2) == pytest.approx(0.02)  # even
    assert pace_of(begun(tpot=0.02), 1.3) == pytest.approx(0.01)  # 0.1 s behind, 10 tokens to come
    assert pace_of(begun(tpot=0.02), 1.5) == 0.0
    assert pace_of(begun(e2e=3.0), 1.0) == pytest.approx(0.2)
    assert pace_of(begun(), 1.0) == inf
    waiting = decode("w", tpot=0.02)
    assert pace_of(waiting, 5.0) == pytest.approx(0.02)
