"""Weighs the cost of verifying drafted tokens against their yield, in seconds of a latency model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape, later_draft_tokens
from rubato.policy_kit.acceptance import PRIOR


class BestNodes(NamedTuple):
    """The number of nodes with the most tokens per second.

    Args:
        nodes: number to verify, the most probable first.
        token: average seconds of step time for each output token.
    """

    nodes: int
    token: float


def drafting(draft: tuple[int, int] | None, sequences: int) -> Shape:
    """Returns the shape that drafting trees of this (depth, width) for `sequences` adds to a step."""
    if draft is None:
        return Shape()
    return Shape(spec_steps=draft[0], draft_tokens=sequences * later_draft_tokens(draft))


def with_nodes(base: Shape, decodes: int, kv: int, nodes: int) -> Shape:
    """Returns `base` plus decodes that hold `kv` tokens together and verify `nodes` drafted tokens, spread evenly."""
    each, more = divmod(nodes, decodes)
    cached, run = kv // decodes, decodes + nodes
    read = decodes * cached + run
    tokens, seqs, all_kv, context, square, steps, chunks, chunk_kv, drafts = base
    if each:  # in place of `Shape.plus`, which is asked too often here
        context += run * cached
        square += (decodes - more) * (1 + each) ** 2 + more * (2 + each) ** 2
        chunks, chunk_kv = chunks + decodes, chunk_kv + read
    elif more:
        context, square = context + 2 * more * cached, square + 4 * more
        chunks, chunk_kv = chunks + more, chunk_kv + more * (cached + 2)
    return Shape(tokens + run, seqs + decodes, all_kv + read, context, square, steps, chunks, chunk_kv, drafts)


def find_fastest_nodes(latency: LatencyModel, base: Shape, decodes: int, kv: int, likely: Sequence[float]) -> BestNodes:
    """Finds the number of nodes with the most tokens per second, among numbers that grow by a quarter.

    Args:
        latency: predicts step times
        base: other work of the step, draft steps included
        decodes: sequences, at least 1
        kv: tokens in KV of all sequences together
        likely: probability of each node, descending
    """
    best, lowest, step_time = 0, inf, latency.step_time
    for nodes, tokens in _grid(decodes, likely):
        token = step_time(with_nodes(base, decodes, kv, nodes)) / tokens
        if token < lowest:
            best, lowest = nodes, token
    return BestNodes(best, lowest)


def count_paying_nodes(
    latency: LatencyModel, base: Shape, decodes: int, kv: int, likely: Sequence[float], token: float
) -> int:
    """Returns how many of the `likely` nodes pay in a step that runs other work, too: the number for which step time,
    less the worth of the tokens that it brings, is least.

    Args:
        latency: as `find_fastest_nodes`'s.
        base: as `find_fastest_nodes`'s.
        decodes: as `find_fastest_nodes`'s.
        kv: as `find_fastest_nodes`'s.
        likely: as `find_fastest_nodes`'s.
        token: what an output token is worth, in seconds.
    """
    tried = (
        (latency.step_time(with_nodes(base, decodes, kv, nodes)) - token * tokens, nodes)
        for nodes, tokens in _grid(decodes, likely)
    )
    return min(tried)[1]


def find_paying_depth(
    latency: LatencyModel, decodes: int, kv: int, chances: Sequence[Sequence[float]], width: int, least: int, most: int
) -> int:
    """Returns the depth of trees with the most tokens per second; `most` if drafting costs nothing, 0 if no drafts pay.

    Args:
        latency: predicts step times.
        decodes: sequences, at least 1.
        kv: tokens in KV of all sequences together.
        chances: of each sequence, the chance by depth that one of a tree's nodes there comes out
            (`acceptance.TreeChances`); without any sequence, an unknown one is assumed.
        width: of the trees.
        least: the least depth.
        most: the greatest depth.
    """
    chances = chances or [[PRIOR**depth for depth in range(1, most + 1)]]
    plain = latency.step_time(with_nodes(Shape(), decodes, kv, 0))
    if latency.step_time(with_nodes(drafting((most, width), decodes), decodes, kv, 0)) <= plain:
        return most
    best, lowest = 0, plain / decodes
    likely: list[float] = []
    for depth in range(1, most + 1):
        likely += [own[depth - 1] for own in chances]
        likely.sort(reverse=True)
        if depth < least:
            continue
        token = find_fastest_nodes(latency, drafting((depth, width), decodes), decodes, kv, likely).token
        if token <= lowest:
            best, lowest = depth, token
    return best


def _grid(decodes: int, likely: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yields numbers of nodes, from 0 to all, with the expected tokens of each."""
    nodes, tokens = 0, float(decodes)
    yield nodes, tokens
    while nodes < len(likely):
        more = min(len(likely), nodes + 1 + nodes // 4)
        tokens += sum(likely[nodes:more])
        nodes = more
        yield nodes, tokens
