"""Plans drafted tokens: a decode's entry verifies some of them and yields more than one token on average.

As in AdaServe, each decode has a candidate tree of the depth with the most tokens per second, cut by the tokens that
its request needs and then by likelihood (`policy_kit.draft_tree`). `supply` counts with the average cost and yield of
an entry; `batch` chooses the nodes that a step verifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from rubato.core.interfaces import View
from rubato.policies.rubato.supply import PLAIN_DECODE, DecodeEntry, Task
from rubato.policy_kit.acceptance import TreeChances
from rubato.policy_kit.draft_tree import MAX_DEPTH, MAX_DRAFT_TOKENS, MAX_WIDTH, adaptive, select
from rubato.policy_kit.draft_value import drafting, find_fastest_nodes, find_paying_depth


class DraftPlanner:
    """Learns how likely drafted tokens are, and sizes the trees."""

    def __init__(self) -> None:
        self._chances = TreeChances()

    def entry(self, view: View, decodes: Sequence[Task]) -> DecodeEntry:
        """Returns the average entry of these decodes; a plain one if drafts would not make them faster."""
        if "draft" not in view.supports:
            return PLAIN_DECODE
        for job in decodes:
            if job.seq.draft is not None:
                self._chances.add_tree(job.seq.request, job.seq.draft)
        n = max(1, len(decodes))
        kv = sum([job.cached for job in decodes])
        width = adaptive(n, n, MAX_DRAFT_TOKENS, 0, 0, 1, MAX_DEPTH, MAX_WIDTH if "tree" in view.supports else 1)[1]
        chances = [self._chances.chances(job.seq.request, MAX_DEPTH) for job in decodes]
        depth = find_paying_depth(view.latency, n, kv, chances, width, 1, MAX_DEPTH)
        if not depth:
            return PLAIN_DECODE
        draft, trees = (depth, width), [tree for job in decodes if (tree := job.seq.draft) is not None]
        likely = sorted([f for tree in trees for f in tree.paths], reverse=True)
        nodes, drafted = 0, len(trees) or 1
        if trees:
            nodes = find_fastest_nodes(view.latency, drafting(draft, drafted), drafted, kv * drafted // n, likely).nodes
        entry = DecodeEntry(draft, nodes / drafted, 1.0 + sum(likely[:nodes]) / drafted)
        return entry._replace(seconds=view.latency.step_time(entry.shape(n, kv + n)))


def nodes_to_verify(decodes: Sequence[Task], end: float, budget: int) -> Mapping[str, tuple[int, ...]]:
    """Chooses the nodes that a step verifies: first for decodes whose next token would be due before `end`, then by
    likelihood.

    Args:
        decodes: the decodes of the step
        end: seconds, when a decode can be in a step again
        budget: nodes in all

    Returns:
        nodes by request id
    """
    trees = [job.seq.draft for job in decodes]
    if budget < 1 or all(tree is None for tree in trees):
        return {}
    needed = [1.0 + max(0.0, floor((end - job.due) / job.tpot)) if job.due < end else 0.0 for job in decodes]
    # A need beyond what the whole budget brings would get nothing: of it as much as that counts.
    brings = [1.0 + (sum(sorted(tree.paths)[-budget:]) if tree is not None else 0.0) for tree in trees]
    needed = [min(need, whole) for need, whole in zip(needed, brings, strict=True)]
    selection = select(trees, needed, len(decodes) + budget, MAX_DEPTH * MAX_WIDTH + 1)
    return {job.id: nodes for job, nodes in zip(decodes, selection, strict=True) if nodes}
