"""AdaServe: each request's draft tree is cut to what its TPOT needs; the rest of the budget goes where it is likeliest.

For requests with TPOTs where the engine drafts, near and beyond capacity. docs/policies/adaserve.md has the rest.

Reproduced (AdaServe, sections 3 to 5.2): a step verifies B tokens, of all decodes. Beam search drafts a tree for
each, whose depth and width fall with the number of requests (equations 8 and 9). From the trees, a step takes the nodes
that each request's TPOT needs by the step's end, then the most probable of all (`policy_kit.draft_tree`, Algorithm 2).
Prompts run beside, in chunks.

Ours, where the paper is silent. B ("determined based on hardware profiling"): as many nodes as bring the most tokens
per second by the latency model: below its knee, where a node costs nothing, all that were drafted, and none where none
pays. Equation 8 knows neither what a draft step costs nor what a token is worth: trees get the depth with the most
tokens per second, if they are as good as those so far, or are left out.

Ours in place of the paper's order of needs: those that lack the fewest nodes first, which keeps the most requests where
not all can be kept; one that needs more than its whole tree will likely bring is counted as needing nothing.

Overload, ours too: who runs goes by paces (`policy_kit.paced_admission`), root and all; chains behind the same
admission gain most of what this gains.

With `verify_tokens` B, depth and who runs are the paper's. n_max is the depth and the root; c1 and c2 are 0. On an
engine that verifies chains only, as vLLM does, trees are of width 1. Nodes take only KV that is free. A request with an
end-to-end SLO needs tokens at the even pace that meets it; best effort needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.acceptance import TreeChances
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order
from rubato.policy_kit.draft_tree import MAX_DEPTH, MAX_DRAFT_TOKENS, MAX_WIDTH, adaptive, select
from rubato.policy_kit.draft_value import (
    count_paying_nodes,
    drafting,
    find_fastest_nodes,
    find_paying_depth,
    with_nodes,
)
from rubato.policy_kit.paced_admission import AdmittedLoad, Draft, PacedAdmission, everyone
from rubato.policy_kit.paces import tokens_needed
from rubato.policy_kit.stateless import Stateless

SOURCE = "AdaServe: SLO-customized speculative decoding (2025)"


@dataclass
class Scheduler(Stateless):
    """Plans steps of decodes with draft trees, and of prompts.

    Args:
        verify_tokens ([0, inf)): tokens that a step verifies, last tokens included (B and B1); 0: as many as pay. With
            it budget, depth and which requests run are the paper's
        draft_tokens ([1, inf)): tokens of a drafter's step, which bounds the width (B2, equation 9)
        min_depth ([1, inf)): least depth of a tree
        max_depth ([1, inf)): largest depth, not below `min_depth`
        max_width ([1, inf)): candidates kept in each layer
        prefill_chunk ([1, inf)): prompt tokens of a step
    """

    needs = frozenset({"chunked", "preempt", "mixed", "draft"})
    uses: ClassVar[frozenset[str]] = frozenset({"tree"})
    verify_tokens: int = 0
    draft_tokens: int = MAX_DRAFT_TOKENS
    min_depth: int = 1
    max_depth: int = MAX_DEPTH
    max_width: int = MAX_WIDTH
    prefill_chunk: int = 256
    _chances: TreeChances = field(default_factory=TreeChances, init=False, repr=False)
    _admission: PacedAdmission = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.draft_tokens, self.min_depth, self.max_width, self.prefill_chunk) < 1 or self.verify_tokens < 0:
            raise ValueError(
                f"draft_tokens {self.draft_tokens}, min_depth {self.min_depth}, max_width {self.max_width}, "
                f"prefill_chunk {self.prefill_chunk}, verify_tokens {self.verify_tokens}: give 1 or more of each, "
                "verify_tokens 0 for what pays"
            )
        if self.max_depth < self.min_depth:
            raise ValueError(f"depths from {self.min_depth} to {self.max_depth}: give the smaller one first")
        self._admission = PacedAdmission(self.prefill_chunk)

    def plan(self, view: View) -> Plan:
        for seq in view.running:
            if seq.draft is not None and seq.pending == 1:
                self._chances.add_tree(seq.request, seq.draft)
        load = self._load(view)
        draft = self._choose_draft(view, load.decodes)
        chosen = self._choose_nodes(view, load.decodes, [*load.prompts, *load.starting], draft) if load.decodes else {}
        builder = BatchBuilder(view, len(load.decodes) + sum(map(len, chosen.values())) + self.prefill_chunk)
        self._admission.make_room(builder, load, chosen)
        run_in_order(builder, [*load.decodes, *load.prompts], lambda seq: chosen.get(seq.id, ()), draft)
        admit_in_order(builder, load.starting, draft)
        self._admission.follow(builder, load.decodes, chosen, draft)
        self._admission.fill(builder, load, chosen, draft)
        return builder.plan(demote=load.demote_ids, drop=load.refusal_reasons)

    def _load(self, view: View) -> AdmittedLoad:
        return everyone(view) if self.verify_tokens else self._admission.load(view)

    # ----------------------------------------------------------------- what it drafts and verifies

    def _choose_draft(self, view: View, decodes: Sequence[SeqView]) -> Draft | None:
        """Returns (depth, width) of the next trees, None to draft nothing. It tries the last depth and its neighbours;
        all depths if nothing was drafted last."""
        n = max(1, len(decodes))
        verify = self.verify_tokens or n * (self.max_depth + 1)  # or whatever any tree may need
        bounds = self.min_depth, self.max_depth, self.max_width if "tree" in view.supports else 1
        depth, width = adaptive(n, verify, self.draft_tokens, 0, 0, *bounds)
        if self.verify_tokens:
            return (depth, width) if verify > n else None
        least, kv = self.min_depth, sum([s.cached for s in decodes])
        drafted = self._admission.last_draft
        if drafted is not None:
            least, depth = max(least, min(depth, drafted[0]) - 1), min(depth, drafted[0] + 1)
        chances = [self._chances.chances(s.request, depth) for s in decodes]
        best = find_paying_depth(view.latency, n, kv, chances, width, least, depth)
        return (best, width) if best else None

    def _choose_nodes(
        self, view: View, decodes: Sequence[SeqView], prompts: Sequence[SeqView], draft: Draft | None
    ) -> Mapping[str, tuple[int, ...]]:
        """Chooses the nodes of each request to verify, by id."""
        trees, n = [s.draft for s in decodes], len(decodes)
        drafts, kv = drafting(draft, n), sum([s.cached for s in decodes])
        chunk, kv_free = self._find_chunk(view, prompts)
        beside = drafts.plus(chunk, 0) if chunk else drafts
        likely = sorted((f for tree in trees if tree is not None for f in tree.paths), reverse=True)
        likely = likely[: max(0, view.limits.max_num_batched_tokens - n)]
        if self.verify_tokens:
            nodes = min(self.verify_tokens - n, len(likely))
        else:
            nodes, token = find_fastest_nodes(view.latency, drafts, n, kv, likely)
            if chunk:
                nodes = count_paying_nodes(view.latency, beside, n, kv, likely, token)
        if nodes < 1:
            return {}
        end = view.now + view.latency.step_time(with_nodes(beside, n, kv, nodes))
        needed = self._needed(decodes, end, view.now)
        deepest = max([max(tree.depths, default=0) for tree in trees if tree is not None], default=0)
        selection = select(trees, needed, n + nodes, deepest + 1)
        return _cut_to_free_kv(view, decodes, selection, kv_free)

    def _needed(self, decodes: Sequence[SeqView], end: float, now: float) -> list[float]:
        """Returns the tokens that each decode needs from the step that ends at `end`."""
        return [tokens_needed(s, end, now) for s in decodes]

    def _find_chunk(self, view: View, prompts: Sequence[SeqView]) -> tuple[int, int]:
        """Returns the prompt tokens of this step, and the KV blocks left after them and the decodes' next tokens."""
        chunk, free = 0, view.kv_free - view.decode_blocks
        for seq in prompts:
            tokens = min(seq.pending, self.prefill_chunk - chunk)
            blocks = max(0, view.limits.blocks(seq.cached + tokens) - seq.blocks)
            if not tokens or blocks > free:
                break
            chunk, free = chunk + tokens, free - blocks
        return chunk, max(0, free)


def _cut_to_free_kv(
    view: View, decodes: Sequence[SeqView], selection: Sequence[tuple[int, ...]], kv_free: int
) -> dict[str, tuple[int, ...]]:
    """Returns as many of each request's nodes, the first ones, as fit in its last block and the free ones; requests
    that started first are served first."""
    chosen = {}
    for seq, nodes in zip(decodes, selection, strict=True):
        own_blocks = max(seq.blocks, view.limits.blocks(seq.cached + 1))
        room = (own_blocks + kv_free) * view.limits.block_size - seq.cached - 1
        chosen[seq.id] = nodes[:room] if room < len(nodes) else nodes
        kv_free -= max(0, view.limits.blocks(seq.cached + 1 + len(chosen[seq.id])) - own_blocks)
    return chosen
