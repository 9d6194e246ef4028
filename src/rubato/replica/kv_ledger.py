"""Books the KV of each sequence of a replica: as counts, or by block where an engine or a prefix cache needs ids.

Both ledgers treat the same sequences alike. `begin` and `end` book the KV of a run of steps; in between, a sequence
outside the run may release its KV.
"""

from __future__ import annotations

from typing import Literal

from rubato.core.plan import Limits, blocks_for
from rubato.core.request import Request
from rubato.replica.decode_pool import DecodePool
from rubato.replica.kv_blocks import KVBlocks, first_key, next_key
from rubato.replica.sequence import Seq
from rubato.replica.step_log import StepRun


class KVCounts:
    """Counts KV blocks: decodes cost no work, and a run may have many steps. No prefix is shared."""

    by_block: Literal[False] = False

    def __init__(self, limits: Limits, pool: DecodePool) -> None:
        self.total = limits.kv_blocks
        self.block_size = limits.block_size
        self._free = self.total  # without the blocks of the run under way
        self._run: StepRun | None = None
        self._pool = pool

    @property
    def free(self) -> int:
        """Returns the blocks that no sequence holds and that the step under way, if any, does not take."""
        run = self._run
        if run is None:
            return self._free
        need = self.run_blocks(run, run.steps_done + self._pool.steps.under_way)
        return self._free - need - (self._verified_blocks(run) if run.speculation else 0)

    def blocks_of(self, seq: Seq) -> int:
        tokens = seq.cached
        if self._pool.steps.under_way:  # else nothing is in flight
            tokens += seq.in_flight
        return -(-tokens // self.block_size)

    own_blocks_of = blocks_of

    def run_blocks(self, run: StepRun, steps: int) -> int:
        """Returns the blocks that `steps` steps of the run take, without those released at its end."""
        need = self._pool.blocks_until(steps, run.tick)
        for chunk in run.chunks:
            need += chunk.blocks(steps, self.block_size)
        return need

    def steps_that_fit(self, run: StepRun, most: int) -> int:
        """Returns how many steps of the run the free blocks allow, at most `most`; 1 always fits."""
        spare = self._free - sum([chunk.total for chunk in run.chunks]) if run.chunks else self._free
        if self._pool.count * most > spare:  # else even one block a token would fit
            while most > 1 and self.run_blocks(run, most) > self._free:
                most -= 1
        return most

    def begin(self, run: StepRun) -> None:
        self._run = run

    def end(self, run: StepRun) -> None:
        """Books a run whose steps are over and counted in its sequences."""
        self._run = None
        self._free -= self.run_blocks(run, run.steps)

    def book_accepted(self, seq: Seq, tokens: int, *, ended: bool) -> None:
        """Books `tokens` accepted draft tokens, which the sequence counts already."""
        if tokens:
            cached = seq.cached
            self._free -= blocks_for(cached, self.block_size) - blocks_for(cached - tokens, self.block_size)

    def _verified_blocks(self, run: StepRun) -> int:
        """Returns the blocks of verified tokens beyond those of pending tokens."""
        blocks = 0
        for spec in run.speculation.values():
            end = spec.start + spec.pending
            blocks += blocks_for(end + len(spec.verify), self.block_size) - blocks_for(end, self.block_size)
        return blocks

    def reserve(self, seq: Seq, tokens: int) -> None:
        self._free -= blocks_for(tokens, self.block_size)

    def release(self, seq: Seq, keep: bool = False) -> None:
        """Releases all KV of the sequence."""
        self._free += self.blocks_of(seq)
        seq.cached = 0


class KVByBlock:
    """Books KV blocks with ids.

    Sequences that begin alike share full blocks whose token ids are known: those of one tenant with `prefix_cache`,
    else those of one group.
    """

    by_block: Literal[True] = True

    def __init__(self, id: str, limits: Limits, pool: DecodePool, prefix_cache: bool) -> None:
        self.total = limits.kv_blocks
        self.block_size = limits.block_size
        self._id = id
        self._blocks = KVBlocks(limits.kv_blocks, limits.block_size, keep=prefix_cache)
        self._prefix_cache = prefix_cache
        self._pool = pool

    @property
    def version(self) -> int:
        """Returns a number that changes whenever `look_up` may answer differently."""
        return self._blocks.version

    @property
    def free(self) -> int:
        return self._blocks.free

    def blocks_of(self, seq: Seq) -> int:
        return len(seq.block_ids) or seq.shared

    def own_blocks_of(self, seq: Seq) -> int:
        return self._blocks.own(seq.block_ids)

    def begin(self, run: StepRun) -> None:
        """Takes the blocks that a step fills. Raises MemoryError when too few are free."""
        blocks = self._blocks
        for seq in self._pool.filling():
            blocks.grow(seq.block_ids, seq.cached + 1)
        for chunk in run.chunks:
            blocks.grow(chunk.seq.block_ids, chunk.start + chunk.tokens)
        for spec in run.speculation.values():
            blocks.grow(spec.seq.block_ids, spec.start + spec.pending + len(spec.verify))

    def end(self, run: StepRun) -> None:
        """Makes the blocks that a step filled findable; the sequences count its tokens already."""
        for seq in self._pool.filling():
            if seq.keys and not seq.ended:
                self.name(seq, seq.cached - 1)
        for chunk in run.chunks:
            if not chunk.seq.ended:
                self.name(chunk.seq, chunk.start)

    def book_accepted(self, seq: Seq, tokens: int, *, ended: bool) -> None:
        """Books `tokens` accepted draft tokens, which the sequence counts already; frees the blocks of rejected ones.

        Args:
            seq: the sequence.
            tokens: that were accepted.
            ended: the sequence has ended, and all its blocks will be freed.
        """
        if not ended:
            self.name(seq, seq.cached - tokens)
            self._blocks.shrink(seq.block_ids, seq.cached)

    def reserve(self, seq: Seq, tokens: int) -> None:
        self._blocks.grow(seq.block_ids, tokens)

    def release(self, seq: Seq, keep: bool = False) -> None:
        """Releases all KV of the sequence.

        Args:
            seq: the sequence.
            keep: named blocks stay findable until the memory is needed, also full blocks of tokens whose ids are not
                known; their keys are known to the sequence only.
        """
        if keep:
            full = seq.cached // self.block_size
            if not seq.keys:
                seq.keys.append(first_key(f"{self._id}/{seq.order}"))
            while len(seq.keys) <= full:
                seq.keys.append(next_key(seq.keys[-1], (-1, seq.order)))  # no token has a negative id
            self.name(seq, 0)
        self._blocks.release(seq.block_ids, keep)
        seq.cached = 0

    def clear(self) -> None:
        self._blocks.clear()

    def register(self, seq: Seq, request: Request) -> None:
        """Begins the chain of keys of a new sequence, where others may begin with the same tokens."""
        if seq.ids is not None:
            seq.keys = [first_key(request.tenant if self._prefix_cache else f"{request.tenant}/{request.group}")]
            seq.learn_keys(self.block_size)

    def look_up(self, seq: Seq) -> None:
        """Sets what a waiting sequence need not compute: full blocks that are here, never all of its tokens."""
        seq.kv_version_seen = self.version
        found = self._blocks.find(seq.keys[1 : 1 + (seq.length - 1) // self.block_size])
        seq.cached = len(found) * self.block_size
        seq.shared = self._blocks.shared(found)

    def take_found(self, seq: Seq) -> None:
        """Gives a sequence that starts the blocks that were looked up."""
        self._blocks.take(seq.block_ids, self._blocks.find(seq.keys[1 : 1 + seq.cached // self.block_size]))
        seq.shared = 0

    def name(self, seq: Seq, before: int) -> None:
        """Makes the blocks findable that the sequence has filled since `before` of its tokens were in KV."""
        for i in range(before // self.block_size, min(seq.cached // self.block_size, len(seq.keys) - 1)):
            self._blocks.name(seq.block_ids[i], seq.keys[i + 1])
