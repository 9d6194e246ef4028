"""Selects the drafted tokens to verify: AdaServe, SLO-customised speculative decoding (sections 4 and 5.2).

Each of n requests has a tree of candidates after its last token, the root, which every step runs anyway. A node v is
right with probability f(v), the product along its path, so verifying a set of nodes with all their parents gives
1 + Σ f tokens on average. A step verifies B nodes in all, roots included.

Nodes are ranked by (f desc, depth asc, order of requests, node id). f never rises along a path: a parent precedes
its children: the first k nodes of a request in the ranking are a tree for every k, and only k is to be chosen.

The printed pseudocode has slips, corrected here: Algorithm 2 adds the path's product to what is expected, not the last
factor (line 15); both stop when B is spent (`B >= 0` would overspend by one). Algorithm 1, which knows f, is among the
experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from rubato.core.plan import Tree

# The paper's bounds (its artifact, Llama-70B) of trees' depth and width, and of the tokens of a drafter's step.
MAX_DEPTH, MAX_WIDTH, MAX_DRAFT_TOKENS = 8, 3, 96

Node = tuple[float, int, int]  # f, index of the request, id in its tree


def select(
    trees: Sequence[Tree | None], needed: Sequence[float], budget: int, most_nodes: int
) -> list[tuple[int, ...]]:
    """Selects, of each request, the ids of the nodes to verify, parents before their children (Algorithm 2).

    First come the needs (SLO-customised selection): requests that lack the fewest nodes first, each takes nodes until 1
    + Σ f reaches what it needs, as long as the budget brings it there. Where not all needs can be met, this meets the
    most; the paper takes the largest need first (line 9), which meets fewer there and the same where all can be met. A
    request that needs more than its whole tree brings takes none. What is left of the budget goes to the most probable
    nodes of all (throughput-optimised selection). With more requests than budget each keeps its root, and nothing is
    verified.

    f may be wrong, then so are the expected tokens; but if it rises along a path, a node is chosen without its parent.

    Args:
        trees: the candidates of each request; None: it has none.
        needed: A, tokens that each request needs from this step, its root's included.
        budget: B, in nodes, roots included.
        most_nodes: n_max, nodes that one may hold by need, root included; with n_max the depth and the root, A_cap
            would stop none earlier.

    Raises:
        ValueError: there are not as many `needed` as trees, or `most_nodes` is below 1.
    """
    check_needs(trees, needed)
    if most_nodes < 1:
        raise ValueError(f"most_nodes {most_nodes}: a request holds its root at least, give 1 or more")
    ranking, own = rank_nodes(trees)
    nodes_left = budget - len(trees)
    chosen = [0] * len(trees)
    lacking = [count_needed_nodes(nodes, tokens) for nodes, tokens in zip(own, needed, strict=True)]
    for at in sorted(range(len(trees)), key=lacking.__getitem__):
        if lacking[at] <= len(own[at]):
            count = min(most_nodes - 1, lacking[at])
            if count > nodes_left:
                break
            chosen[at] = count
            nodes_left -= count
    return add_most_probable(ranking, own, chosen, nodes_left)


def adaptive(n: int, b1: int, b2: int, c1: int, c2: int, d_min: int, d_max: int, w_max: int) -> tuple[int, int]:
    """Returns (depth, width) of the trees to draft for each of n requests: equations 8 and 9 (section 5.2, adaptive
    control).

    Args:
        n: number of requests.
        b1: tokens per step for the verifier.
        b2: tokens per step for the drafter.
        c1: found by search in the paper, not published.
        c2: found by search in the paper, not published.
        d_min: the least depth.
        d_max: the greatest depth.
        w_max: the greatest width.

    Raises:
        ValueError: there are no requests, or the bounds are empty.
    """
    if n < 1 or n + c1 < 1:
        raise ValueError(f"{n} requests, c1 {c1}: drafts are for 1 or more, and n + c1 divides a budget")
    if not 1 <= d_min <= d_max or w_max < 1:
        raise ValueError(f"depths in [{d_min}, {d_max}], widths up to {w_max}: give 1 <= d_min <= d_max, 1 <= w_max")
    depth = b1 // (n + c1) - 1
    width = b2 // n + c2
    return max(d_min, min(d_max, depth)), max(1, min(w_max, width))


def check_needs(trees: Sequence[Tree | None], needed: Sequence[float]) -> None:
    """Checks that there is one need for each tree. Raises ValueError."""
    if len(trees) != len(needed):
        raise ValueError(f"{len(trees)} trees and {len(needed)} requests' needs: give one of each per request")


def rank_nodes(trees: Sequence[Tree | None]) -> tuple[list[Node], list[list[Node]]]:
    """Returns all nodes, the most probable first, and the nodes of each request in the same order."""
    layers: list[list[Node]] = []
    for at, tree in enumerate(trees):
        if tree is None:
            continue
        for id, (depth, f) in enumerate(zip(tree.depths, tree.paths, strict=True)):
            if depth > len(layers):
                layers.append([])
            layers[depth - 1].append((f, at, id))
    ranking = [node for layer in layers for node in layer]
    ranking.sort(key=itemgetter(0), reverse=True)  # stable: of equal f, by depth, then request, then id
    own: list[list[Node]] = [[] for _ in trees]
    for node in ranking:
        own[node[1]].append(node)
    return ranking, own


def count_needed_nodes(nodes: Sequence[Node], tokens: float) -> int:
    """Returns how many of its nodes a request needs for `tokens` expected tokens; one more than it has if all yield
    less."""
    expected = 1.0
    for count, (f, _, _) in enumerate(nodes):
        if expected >= tokens:
            return count
        expected += f
    return len(nodes) if expected >= tokens else len(nodes) + 1


def add_most_probable(
    ranking: Sequence[Node], own: Sequence[Sequence[Node]], chosen: list[int], more: int
) -> list[tuple[int, ...]]:
    """Returns the first `chosen` nodes of each request, plus the `more` most probable of all others."""
    passed = [0] * len(chosen)
    for _, at, _ in ranking if more > 0 else ():
        passed[at] += 1
        if passed[at] > chosen[at]:
            chosen[at] += 1
            more -= 1
            if more == 0:
                break
    return [tuple([id for _, _, id in nodes[:count]]) for nodes, count in zip(own, chosen, strict=True)]
