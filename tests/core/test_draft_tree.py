"""AdaServe's selection of drafted tokens against brute force over all sets of nodes that are trees."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from rubato.core.plan import Tree
from rubato.policy_kit.draft_tree import adaptive, select
from tests.core.exhaustive_selection import NOTHING, UNBOUND, brute_force, is_tree, met, optimal, total


@st.composite
def tree_of(draw: st.DrawFn, most: int = 5) -> Tree:
    """Any tree, with eighths as chances so that sums are exact, many of them equal and some of them 1."""
    parents: list[int] = []
    paths: list[float] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        parents.append(parent)
        paths.append((paths[parent] if parent >= 0 else 1.0) * draw(st.integers(0, 8)) / 8.0)
    return Tree(tuple(parents), tuple(paths))


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Tree], list[float], int]:
    """Candidates of up to three requests, what they need and a budget, which may be below their roots."""
    trees = draw(st.lists(tree_of(), min_size=1, max_size=3))
    needed = [draw(st.integers(0, 24)) / 8.0 for _ in trees]
    return trees, needed, draw(st.integers(0, len(trees) + 10))


# --------------------------------------------------------------------------- properties


@given(forests(), st.integers(1, 6))
def test_against_brute_force(case: tuple[list[Tree], list[float], int], most_nodes: int) -> None:
    trees, needed, budget = case
    best, any_, most = brute_force(trees, needed, budget)
    found = optimal(trees, needed, budget)
    chosen = select(trees, needed, budget, UNBOUND)
    assert (found is None) == (best == NOTHING)
    if found is None:
        event("infeasible")
        if len(trees) <= budget:
            event(f"infeasible: expected tokens {(any_ - total(trees, chosen)) / any_:.0%} below the most")
            assert met(trees, chosen, needed) >= most
    else:
        event("feasible")
        assert total(trees, found) == total(trees, chosen) == best
        assert met(trees, chosen, needed) == len(trees)
        assert found == chosen
    bound = select(trees, needed, budget, most_nodes)
    if found is not None and bound != chosen:
        event(f"n_max binds: needs met of {len(trees) - met(trees, bound, needed)} requests fewer than can be")
        event(f"n_max binds: expected tokens {(best - total(trees, bound)) / best:.0%} below the best that meets all")
    for nodes in (chosen, bound, found or []):
        assert all(is_tree(tree, n) for tree, n in zip(trees, nodes, strict=False))
        spent = len(trees) + sum(map(len, nodes))
        room = max(0, budget - len(trees))
        assert nodes == [] or spent - len(trees) == min(room, sum(len(t.parents) for t in trees))


# --------------------------------------------------------------------------- tables


def chain(*paths: float) -> Tree:
    return Tree(tuple(range(-1, len(paths) - 1)), paths)


def test_the_toy_of_figure_5() -> None:
    """B = 8, two requests, three steps of width 2. r0 needs 0.6 beyond its root and takes t1 (0.7); r1 needs 0.8 and
    takes t1 and t2 (0.5 + 0.4); the last 3 of the budget go to t3 and t5 of r0 and t3 of r1. The paper gives no
    probabilities of those: the figure's order is what they are made for."""
    r0 = Tree((-1, -1, 0, 0, 2, 2), (0.7, 0.2, 0.42, 0.21, 0.336, 0.05))
    r1 = Tree((-1, -1, 0, 1, 2, 3), (0.5, 0.4, 0.35, 0.2, 0.1, 0.1))
    assert select([r0, r1], [1.6, 1.8], 8, UNBOUND) == [(0, 2, 4), (0, 1, 2)]
    assert optimal([r0, r1], [1.6, 1.8], 8) == [(0, 2, 4), (0, 1, 2)]
    assert select([r0, r1], [1.6, 1.8], 5, UNBOUND) == [(0,), (0, 1)]
    assert optimal([r0, r1], [1.6, 1.8], 5) == [(0,), (0, 1)]
    assert select([r0, r1], [1.6, 1.8], 4, UNBOUND) == [(0,), (0,)]  # r0 lacks fewer nodes, and r1's two do not fit
    assert optimal([r0, r1], [1.6, 1.8], 4) is None


@pytest.mark.parametrize(
    ("trees", "needed", "budget", "most_nodes", "chosen"),
    [
        # of equal f the one nearer to the root, then the request that comes first, then the lower id
        ([chain(0.5, 0.5), chain(0.5, 0.5)], [1.0, 1.0], 3, 9, [(0,), ()]),
        ([chain(0.5, 0.5), chain(0.5, 0.5)], [1.0, 1.0], 4, 9, [(0,), (0,)]),
        ([chain(0.5, 0.5), chain(0.5, 0.5)], [1.0, 1.0], 5, 9, [(0, 1), (0,)]),
        ([Tree((-1, 0, -1), (0.5, 0.5, 0.5))], [1.0], 3, 9, [(0, 2)]),
        ([chain(1.0, 1.0, 1.0)], [1.0], 3, 9, [(0, 1)]),
        # of equally many lacking nodes the request that comes first
        ([chain(0.5), chain(0.9)], [1.5, 1.5], 3, 9, [(0,), ()]),
        ([chain(0.5), chain(0.9)], [1.5, 1.6], 3, 9, [(0,), ()]),
        # roots are paid first; with more requests than budget nothing is drafted
        ([chain(0.9), chain(0.9)], [2.0, 2.0], 2, 9, [(), ()]),
        ([chain(0.9), chain(0.9)], [2.0, 2.0], 1, 9, [(), ()]),
        ([], [], 5, 9, []),
        ([None, chain(0.9)], [2.0, 1.0], 5, 9, [(), (0,)]),
        # n_max counts the root, in the first selection alone
        ([chain(0.5, 0.4, 0.3), chain(0.2), chain(0.9)], [2.1, 1.0, 1.0], 5, 2, [(0,), (), (0,)]),
        ([chain(0.5, 0.4, 0.3), chain(0.2), chain(0.9)], [2.1, 1.0, 1.0], 5, 9, [(0,), (), (0,)]),
        ([chain(0.5, 0.4, 0.3), chain(0.2), chain(0.9)], [2.1, 1.0, 1.0], 6, 2, [(0, 1), (), (0,)]),
        ([chain(0.5, 0.4, 0.3), chain(0.2), chain(0.9)], [2.1, 1.0, 1.0], 6, 9, [(0, 1, 2), (), ()]),
        # the fewest lacking nodes first, whoever needs most; what a whole tree cannot bring takes none
        ([chain(0.9, 0.8, 0.7), chain(0.2)], [2.5, 1.2], 4, 9, [(0,), (0,)]),
        ([chain(0.2, 0.1), chain(0.9, 0.8)], [9.0, 1.0], 4, 9, [(), (0, 1)]),
    ],
)
def test_ties_and_limits(
    trees: list[Tree | None], needed: list[float], budget: int, most_nodes: int, chosen: list[tuple[int, ...]]
) -> None:
    assert select(trees, needed, budget, most_nodes) == chosen


def test_a_path_counts_by_its_product() -> None:
    """Two tokens, each right with 0.6 after the one before: 1 + 0.6 + 0.36. By last factors it would be 2.2."""
    assert select([chain(0.6, 0.36, 0.216), chain(0.1)], [2.0, 1.0], 5, 9) == [(0, 1, 2), ()]


def test_infeasible() -> None:
    assert optimal([chain(0.5), chain(0.5)], [1.0, 1.0], 1) is None
    assert optimal([chain(0.5)], [1.6], 9) is None
    assert optimal([chain(0.5)], [1.5], 1) is None
    assert optimal([chain(0.5)], [1.5], 2) == [(0,)]
    assert optimal([None], [1.0], 1) == [()]


def test_impossible() -> None:
    with pytest.raises(ValueError, match="2 trees and 1 requests' needs"):
        select([None, None], [1.0], 4, 2)
    with pytest.raises(ValueError, match="1 trees and 0 requests' needs"):
        optimal([None], [], 4)
    with pytest.raises(ValueError, match="most_nodes 0"):
        select([None], [1.0], 4, 0)
    for n, c1 in ((0, 0), (2, -2)):
        with pytest.raises(ValueError, match="n \\+ c1 divides a budget"):
            adaptive(n, 512, 96, c1, 0, 4, 8, 3)
    for d_min, d_max, w_max in ((0, 8, 3), (5, 4, 3), (4, 8, 0)):
        with pytest.raises(ValueError, match="1 <= d_min <= d_max"):
            adaptive(1, 512, 96, 0, 0, d_min, d_max, w_max)


def test_adaptive_control() -> None:
    """The authors' artifact with Llama-3.1-70B: depths 4 to 8, widths to 3, B1 512, B2 96, up to 64 requests."""
    drafts = {n: adaptive(n, 512, 96, 0, 0, 4, 8, 3) for n in (1, 32, 33, 48, 56, 57, 64, 100, 600)}
    assert drafts == {
        1: (8, 3), 32: (8, 3), 33: (8, 2), 48: (8, 2), 56: (8, 1), 57: (7, 1), 64: (7, 1), 100: (4, 1), 600: (4, 1),
    }  # fmt: skip
    assert adaptive(32, 512, 96, 32, 0, 4, 8, 3) == (7, 3)
    assert adaptive(64, 512, 96, 0, 1, 4, 8, 3) == (7, 2)
