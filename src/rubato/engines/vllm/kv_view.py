"""vLLM's KV memory in the terms of a View: free blocks, blocks of a sequence, what the prefix cache would save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import ceil
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rubato.core.plan import blocks_for
from rubato.engines.vllm.sequence import Hit, VllmSeq

# Of hits: the hashes with which they would be longer, and the last block of each with its hash.
HitEnds = tuple[Collection[Any], Sequence[tuple[Any, Any]]]


class KVView:
    """Counts blocks of `block_size` tokens.

    `is_exact`: the model's KV is one group of full attention, so that a block of vLLM is one of the View's. Otherwise
    (sliding windows, Mamba, several groups) a token takes another number of vLLM's blocks, which changes as it ages:
    vLLM's own figure of how many tokens fit, the one in its log, is then taken for the whole memory, and what is free
    or held is that share of it. Plans made on such a view may not fit; vLLM then preempts by its own rule, which is
    counted.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self.block_size: int = scheduler.block_size
        self._scheduler = scheduler
        self._manager = manager
        self._pool = manager.block_pool
        self._tables: list[Mapping[str, Sequence[Any]]] = [
            m.req_to_blocks for m in manager.coordinator.single_type_managers
        ]
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        physical = int(self._pool.num_gpu_blocks) - 1  # one is vLLM's null block
        self.is_exact = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
        self.total: int = physical
        if specs and not self.is_exact:
            tokens, _ = get_kv_cache_capacity(scheduler.vllm_config, scheduler.kv_cache_config)
            self.total = max(tokens, scheduler.max_model_len) // self.block_size or 1
        self._scale: float = self.total / physical
        # Whether a hit can be kept from view to view, until a block after it is named or its last one is another's.
        self.can_keep_hits: bool = (
            self.is_exact
            and scheduler.kv_cache_manager.enable_caching
            and scheduler.hash_block_size == self.block_size
            and not scheduler.use_eagle_block_drop
        )
        self._named: Mapping[Any, Any] = self._pool.cached_block_hash_to_block._cache
        # A drafter with KV of its own writes this many tokens ahead of the scheduled ones. No plan has blocks for that,
        # so a view shows a request with as many blocks fewer as it may take for them.
        self.lookahead_tokens: int = scheduler.num_lookahead_tokens
        self._max_verified_tokens: int = scheduler.num_spec_tokens

    def free(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        return free if self.is_exact else int(free * self._scale)

    def blocks_of(self, seq: VllmSeq) -> int:
        """Returns the KV blocks of a sequence; below 0 if it holds none and its drafter will need some."""
        if seq.waiting and not (seq.arriving and seq.vllm_request.num_computed_tokens):
            # blocks that no single preemption frees, as `Replica` counts them
            hit = self.look_up(seq)
            block_count = len(hit.blocks) if hit.computed is None else sum(b.ref_cnt > 1 for b in hit.blocks)
        elif self.is_exact:
            block_count = len(self._tables[0].get(seq.id, ()))
        else:
            block_count = max(
                [ceil(self._scale * len(self._blocks(seq))), *(len(t.get(seq.id, ())) for t in self._tables)]
            )
        return block_count - self._blocks_ahead(seq) if self.lookahead_tokens else block_count

    def _blocks_ahead(self, seq: VllmSeq) -> int:
        """Returns the most blocks that the drafter's tokens take beyond the request's own, for any chunk."""
        if seq.pending > 1:
            return blocks_for(self.lookahead_tokens, self.block_size)
        ends = range(seq.cached + 1, seq.cached + 2 + self._max_verified_tokens)
        return max(
            blocks_for(end + self.lookahead_tokens, self.block_size) - blocks_for(end, self.block_size) for end in ends
        )

    def own_blocks_of(self, seq: VllmSeq) -> int:
        if seq.waiting or not self._scheduler._request_blocks_can_be_freed(seq.vllm_request):
            return 0
        unshared = sum(b.ref_cnt == 1 for b in self._blocks(seq))
        return unshared if self.is_exact else int(self._scale * unshared)

    def look_up(self, seq: VllmSeq) -> Hit:
        """Returns the cached prefix of a waiting request, as of this step's view."""
        return seq.hit or self.refresh_hit(seq)

    def refresh_hit(self, seq: VllmSeq) -> Hit:
        """Looks the cached prefix of a waiting request up again."""
        vllm_request = seq.vllm_request
        if vllm_request.num_computed_tokens:
            seq.hit = Hit(vllm_request.num_computed_tokens, self._blocks(seq), None)
            return seq.hit
        computed = self._manager.get_computed_blocks(vllm_request)
        blocks = computed[0].blocks[0] if self.is_exact else ()
        keys = [b.block_hash for b in blocks]
        longer = None
        # From 0.33 on there are fewer hashes than full blocks, where a hash covers tokens after its block.
        hashed = len(vllm_request.block_hashes)
        if self.can_keep_hits and len(blocks) < min(hashed, (vllm_request.num_tokens - 1) // self.block_size):
            longer = make_block_hash_with_group_id(vllm_request.block_hashes[len(blocks)], 0)
        seq.hit = Hit(computed[1] + self._elsewhere(vllm_request, computed[1]), blocks, computed, keys, longer)
        return seq.hit

    def _elsewhere(self, vllm_request: Any, local_tokens: int) -> int:
        """Returns the tokens beyond those found here that a KV connector loads in the step that starts the request."""
        more, is_async = self._connector_has(vllm_request, local_tokens)
        return 0 if is_async else max(0, more - local_tokens % self.block_size)

    def comes_later(self, seq: VllmSeq) -> bool:
        """Returns whether vLLM would wait for a request's KV before it schedules the request."""
        more, is_async = self._connector_has(seq.vllm_request, self.refresh_hit(seq).tokens)
        return more > 0 and is_async

    def _connector_has(self, vllm_request: Any, local_tokens: int) -> tuple[int, bool]:
        """Returns the tokens that a KV connector has beyond the whole blocks here, and whether they arrive in a later
        step."""
        connector = self._scheduler.connector
        if connector is None or vllm_request.skip_reading_prefix_cache:
            return 0, False
        more, is_async = connector.get_num_new_matched_tokens(
            vllm_request, local_tokens - local_tokens % self.block_size
        )
        return more or 0, bool(is_async)

    def is_current(self, hit: Hit) -> bool:
        """Returns whether vLLM would find the same hit. A prefix loses its last block first, so only that is
        checked."""
        if (
            not self.can_keep_hits
            or self._scheduler.connector is not None
            or hit.computed is None
            or hit.longer in self._named
        ):
            return False
        return not hit.keys or hit.blocks[-1].block_hash == hit.keys[-1]

    def hit_ends(self, hits: Sequence[Hit]) -> HitEnds | None:
        """Returns what tells whether these hits are current; None if they cannot be kept."""
        if not self.can_keep_hits or self._scheduler.connector is not None or any(h.computed is None for h in hits):
            return None
        longer = {hit.longer for hit in hits if hit.longer is not None}
        return longer, [(hit.blocks[-1], hit.keys[-1]) for hit in hits if hit.keys]

    def are_current(self, ends: HitEnds) -> bool:
        """Returns whether many hits are current, at once."""
        longer, last_blocks = ends
        return self._named.keys().isdisjoint(longer) and all(b.block_hash == key for b, key in last_blocks)

    def _blocks(self, seq: VllmSeq) -> Sequence[Any]:
        # vLLM's own lists; its get_blocks() would wrap them thrice, and policies ask some five times a step.
        if self.is_exact:
            return self._tables[0].get(seq.id, ())
        return [b for b in chain(*(t.get(seq.id, ()) for t in self._tables)) if not b.is_null]
