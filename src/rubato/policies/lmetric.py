"""LMetric: each request to the replica with the least (prefill tokens there, its own included) × (batch size).

For prompts that share long prefixes, on several replicas, with nothing to tune. docs/policies/lmetric.md has the rest.

The paper: an instance's score is one product, of the new prefill tokens if the request is routed to it, which its
prefix cache makes fewer, and of its current batch size; the least is taken, and there is nothing to tune, for weights
of the two factors cancel in the comparison. The first factor is here as in the authors' router (blitz-router,
`lmetric-q`): tokens queued for prefill at the instance, and those of the request that are not cached there. So is the
second: requests there, running and waiting, and one more, so that idle instances differ by their prefill.

Ours: what is cached is what `policy_kit.prefix_index` takes for cached, by placements, where the authors mirror each
instance's KV cache. At least one token of a request counts as new, so that no product is 0. Requests placed together
count for each other; ties go to the first replica. Not here: finding out beforehand where multiplication would fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.greedy_router import GreedyRouter
from rubato.policy_kit.prefix_index import PrefixIndex

SOURCE = "LMetric: Simple is Better, Multiplication May Be All You Need for LLM Request Scheduling (arXiv 2603.15202)"


@dataclass
class Router(GreedyRouter):
    """Places each request by the product of prefill tokens and batch size; it has no settings."""

    _prefixes: PrefixIndex = field(default_factory=PrefixIndex, init=False, repr=False, compare=False)
    _prefill: list[int] = field(default_factory=list, init=False, repr=False)  # of each replica, in this dispatch
    _count: list[int] = field(default_factory=list, init=False, repr=False)

    def observe(self, events: Sequence[Event]) -> None:
        self._prefixes.observe(events)

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        self._prefixes.begin(held, fleet)
        self._prefill = [view.pending - view.decodes.seqs for view in fleet]  # a decode has one token pending
        self._count = [view.count for view in fleet]

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        prefixes, prefill, count = self._prefixes, self._prefill, self._count
        new = [seq.pending - (0 if seq.cached else prefixes.cached(seq, view.id)) for view in fleet]
        score = [(prefill[i] + new[i]) * (count[i] + 1) for i in range(len(fleet))]
        least = score.index(min(score))
        prefixes.expect(seq, fleet[least].id)
        prefill[least] += new[least]
        count[least] += 1
        return least
