"""Drafted tokens between vLLM and a policy: vLLM's drafts in a View, and a plan's drafts in vLLM's terms.

vLLM verifies chains only, no trees, and drafts one length for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from rubato.core.interfaces import View
from rubato.core.plan import Plan, Tree, blocks_for
from rubato.engines.vllm.sequence import VllmSeq

PRIOR_CHANCE, PRIOR_TRIES = 0.7, 10.0  # that a drafted token is right before any was tried, worth so many tries
CHANCE_STEPS = 50  # chances are rounded to 1/50, so that few trees are made


class VllmDrafts:
    """Translates drafts between vLLM and a policy. `tried` counts drafted tokens that were verified, none behind a
    rejected one, and `right` accepted ones.

    Args:
        max_tokens: num_speculative_tokens; 0 without speculation.
        planned: the policy plans drafts. If not, they are vLLM's own, verified as far as the step has room.
        uniform: all requests of a batch have one number of drafted tokens.
    """

    def __init__(self, max_tokens: int, *, planned: bool, uniform: bool) -> None:
        self.max_tokens = max_tokens
        self.planned = planned
        self.uniform = uniform
        self.tried = self.right = 0
        self._lately_right, self._lately_tried = PRIOR_CHANCE * PRIOR_TRIES, PRIOR_TRIES

    def show(self, seqs: Iterable[VllmSeq]) -> None:
        """Shows drafts to a policy. vLLM does not report their probability, so it is estimated from the accepted share
        of the request and of all requests."""
        if not self.max_tokens or not self.planned:
            return
        mean = self._lately_right / self._lately_tried
        for seq in seqs:
            length = len(seq.vllm_request.spec_token_ids)
            chance = (seq.accepted + mean * PRIOR_TRIES) / (seq.tried + PRIOR_TRIES)
            seq.draft = _chain(length, round(chance * CHANCE_STEPS)) if length else None

    def record_verified(self, seq: VllmSeq, tried: int, right: int) -> None:
        self.tried += tried
        self.right += right
        seq.tried += tried
        seq.accepted += right
        self._lately_right, self._lately_tried = 0.999 * self._lately_right + right, 0.999 * self._lately_tried + tried

    def chunks(self, plan: Plan, view: View, seqs: Mapping[str, VllmSeq]) -> dict[str, int]:
        """Returns the tokens to run of each request, including drafted ones to verify."""
        chunks = {w.seq: w.tokens + len(w.verify) for w in plan.work}
        if self.planned and not self.uniform:
            return chunks
        limits = view.limits
        tokens_left = limits.max_num_batched_tokens - sum(chunks.values())
        kv_left = view.kv_free
        for id, tokens in chunks.items():  # what the plan itself takes
            kv_left -= max(0, blocks_for(seqs[id].cached + tokens, limits.block_size) - seqs[id].blocks)
        max_tokens = max((len(w.verify) for w in plan.work), default=0) if self.planned else self.max_tokens
        for work in plan.work:
            seq = seqs[work.seq]
            more = min(max_tokens, len(seq.vllm_request.spec_token_ids)) - len(work.verify)
            if more <= 0 or work.tokens < seq.pending:
                continue
            block_count = max(seq.blocks, blocks_for(seq.cached + chunks[work.seq], limits.block_size))
            blocks = max(0, blocks_for(seq.cached + chunks[work.seq] + more, limits.block_size) - block_count)
            if more <= tokens_left and blocks <= kv_left:
                chunks[work.seq] += more
                tokens_left, kv_left = tokens_left - more, kv_left - blocks
        return chunks

    def depths(self, plan: Plan) -> dict[str, int]:
        """Returns the number of tokens to draft for each request that the plan runs."""
        if not self.planned:
            return dict.fromkeys((w.seq for w in plan.work), self.max_tokens)
        depths = {w.seq: min(w.draft[0], self.max_tokens) if w.draft is not None else 0 for w in plan.work}
        if self.uniform:
            return dict.fromkeys(depths, max(depths.values(), default=0))
        return depths


class DraftLength:
    """Answers in place of vLLM's table of how many tokens to draft by batch size (`dynamic_sd_lookup`): by the plan.
    With such a table, vLLM also does not pad a request's first decode with drafts that no plan knows of."""

    def __init__(self, table: Any, most: int) -> None:
        self._table = table
        self._most = most
        self.planned: int | None = None  # for the step being scheduled; None: vLLM's own

    def __getitem__(self, batch_size: int) -> int:
        default = self._table[batch_size] if self._table is not None else self._most
        return int(default if self.planned is None else min(default, self.planned))


@cache
def _chain(length: int, chance: int) -> Tree:
    return Tree(tuple(range(-1, length - 1)), tuple((chance / CHANCE_STEPS) ** (i + 1) for i in range(length)))
