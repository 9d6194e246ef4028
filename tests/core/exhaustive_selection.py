"""What AdaServe's selection is held against: Algorithm 1, and every set of drafted nodes that is a tree, of every
request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from rubato.core.plan import Tree
from rubato.policy_kit import draft_tree

UNBOUND = 1 << 30  # n_max that never binds
NOTHING = -1.0  # expected tokens where there is no such set
Chosen = Sequence[Sequence[int]]


def is_tree(tree: Tree | None, nodes: Sequence[int]) -> bool:
    """Each once, after its parent."""
    seen = {-1}
    for node in nodes:
        if tree is None or node in seen or tree.parents[node] not in seen:
            return False
        seen.add(node)
    return True


def expected(tree: Tree | None, nodes: Sequence[int]) -> float:
    return 1.0 + (sum(tree.paths[node] for node in nodes) if tree is not None else 0.0)


def total(trees: Sequence[Tree | None], chosen: Chosen) -> float:
    return sum(expected(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True))


def met(trees: Sequence[Tree | None], chosen: Chosen, needed: Sequence[float]) -> int:
    return sum(expected(t, nodes) >= need for t, nodes, need in zip(trees, chosen, needed, strict=True))


def most_by_size(tree: Tree) -> list[float]:
    """The most tokens that a subtree of 0, 1, ... drafted nodes can bring, by looking at each of them."""
    nodes = range(len(tree.parents))
    return [max(expected(tree, s) for s in combinations(nodes, n) if is_tree(tree, s)) for n in range(len(nodes) + 1)]


def brute_force(trees: Sequence[Tree], needed: Sequence[float], budget: int) -> tuple[float, float, int]:
    """The most tokens in all with every need met (NOTHING if they cannot be), the most whatever needs are missed,
    and the most requests whose needs can be met at once."""
    sizes = [most_by_size(tree) for tree in trees]
    best, any_, most = NOTHING, NOTHING, 0
    for counts in product(*(range(len(s)) for s in sizes)):
        if len(trees) + sum(counts) > budget:
            continue
        got = [s[n] for s, n in zip(sizes, counts, strict=True)]
        enough = sum(tokens >= need for tokens, need in zip(got, needed, strict=True))
        any_, most = max(any_, sum(got)), max(most, enough)
        if enough == len(trees):
            best = max(best, sum(got))
    return best, any_, most


def optimal(trees: Sequence[Tree | None], needed: Sequence[float], budget: int) -> list[tuple[int, ...]] | None:
    """Algorithm 1, which knows f: the nodes with which the most tokens are expected of all sets that give each request
    what it needs. None (INVALID) where no set does. Parameters, order and errors are those of `select`.

    `select` gives the same where this is not None and `most_nodes` does not bind.
    """
    draft_tree.check_needs(trees, needed)
    ranking, own = draft_tree.rank_nodes(trees)
    left = budget - len(trees)
    if left < 0:
        return None
    chosen: list[int] = []
    for nodes, tokens in zip(own, needed, strict=True):
        count = draft_tree.count_needed_nodes(nodes, tokens)
        if count > min(left, len(nodes)):
            return None
        chosen.append(count)
        left -= count
    return draft_tree.add_most_probable(ranking, own, chosen, left)
