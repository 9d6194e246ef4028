"""Drafted tokens in the same supply: an entry of a decode verifies some of them, and brings more than one token.

The candidates are AdaServe's: a tree for each decode, of the depth with the most tokens per second, cut by what each
needs and then by what is likeliest (`policy_kit.draft_tree`). What such an entry takes and brings on average is what
`supply` reckons with; which nodes a step verifies, `batch` asks at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from rubato.core.interfaces import View
from rubato.policies.rubato.supply import PLAIN, Entry, Job
from rubato.policy_kit.acceptance import Offered
from rubato.policy_kit.draft_tree import DEPTH, DRAFT_TOKENS, WIDTH, adaptive, select
from rubato.policy_kit.draft_value import depth_that_pays, drafting, fastest


class Drafts:
    """What is drafted, and learned of it."""

    def __init__(self) -> None:
        self._offered = Offered()

    def entry(self, view: View, decodes: Sequence[Job]) -> Entry:
        """What an entry of these decodes verifies and brings from now on, as far as that makes them faster."""
        if "draft" not in view.supports:
            return PLAIN
        for job in decodes:
            if job.seq.draft is not None:
                self._offered.see(job.seq.request, job.seq.draft)
        n = max(1, len(decodes))
        kv = sum([job.cached for job in decodes])
        width = adaptive(n, n, DRAFT_TOKENS, 0, 0, 1, DEPTH, WIDTH if "tree" in view.supports else 1)[1]
        chances = [self._offered.chances(job.seq.request, DEPTH) for job in decodes]
        depth = depth_that_pays(view.latency, n, kv, chances, width, 1, DEPTH)
        if not depth:
            return PLAIN
        draft, trees = (depth, width), [tree for job in decodes if (tree := job.seq.draft) is not None]
        likely = sorted([f for tree in trees for f in tree.paths], reverse=True)
        nodes, drafted = 0, len(trees) or 1
        if trees:
            nodes = fastest(view.latency, drafting(draft, drafted), drafted, kv * drafted // n, likely).nodes
        entry = Entry(draft, nodes / drafted, 1.0 + sum(likely[:nodes]) / drafted)
        return entry._replace(seconds=view.latency.step_time(entry.shape(n, kv + n)))


def nodes_to_verify(decodes: Sequence[Job], end: float, budget: int) -> Mapping[str, tuple[int, ...]]:
    """Of each of these decodes the nodes that a step verifies, `budget` in all: of which it needs so many tokens that
    the next one is due after `end`, when it can be in a step again; then the likeliest."""
    trees = [job.seq.draft for job in decodes]
    if budget < 1 or all(tree is None for tree in trees):
        return {}
    needed = [1.0 + max(0.0, floor((end - job.due) / job.tpot)) if job.due < end else 0.0 for job in decodes]
    # A need beyond what the whole budget brings would get nothing: of it as much as that counts.
    brings = [1.0 + (sum(sorted(tree.paths)[-budget:]) if tree is not None else 0.0) for tree in trees]
    needed = [min(need, whole) for need, whole in zip(needed, brings, strict=True)]
    found = select(trees, needed, len(decodes) + budget, DEPTH * WIDTH + 1)
    return {job.id: nodes for job, nodes in zip(decodes, found, strict=True) if nodes}
