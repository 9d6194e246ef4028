"""Counts over the decoding sequences: the KV that a step of one token each reads, and the blocks that it takes."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.replica.sequence import Seq, StepEnds


class DecodePool:
    """The sequences that the next step of all decodes advances: their `count`, and the tokens that they have in `kv`.

    A sequence with c tokens in KV needs another block in the steps whose number is -c modulo `block`, where c is
    counted from the replica's first step (`Seq._cached`), so that a step costs a decoding sequence no work.

    Args:
        steps: of the replica.
        block: tokens of a KV block.
        keeps_seqs: keep the sequences, for `filling`.
    """

    def __init__(self, steps: StepEnds, block: int, keeps_seqs: bool) -> None:
        self.count = 0
        self.kv = 0
        self.steps = steps
        self._block = block
        self._blocks_by_step = [0] * (2 * block)  # new blocks, by step modulo `block`, twice over
        self._by_remainder: list[dict[str, Seq]] | None = [{} for _ in range(block)] if keeps_seqs else None

    def join(self, seq: Seq) -> None:
        """Adds a sequence, which decodes from the next step on."""
        self.count += 1
        self.kv += seq._cached
        seq.begin_decoding()
        self._count_block(seq, 1)

    def leave(self, seq: Seq) -> None:
        """Removes a sequence, which does not decode from the next step on."""
        self.count -= 1
        self._count_block(seq, -1)
        seq.stop_decoding()
        self.kv -= seq._cached

    def accept(self, seq: Seq, tokens: int, at: float) -> None:
        """Books `tokens` accepted draft tokens of the step that ended at `at`; their KV is present."""
        self._count_block(seq, -1)
        seq.add_accepted(tokens, at)
        self._count_block(seq, 1)
        self.kv += tokens

    def _count_block(self, seq: Seq, change: int) -> None:
        """Counts one sequence more (`change` 1) or less (-1) among those that need a block in its steps."""
        at = -seq._cached % self._block
        self._blocks_by_step[at] += change
        self._blocks_by_step[at + self._block] += change
        if self._by_remainder is not None:
            if change > 0:
                self._by_remainder[at][seq.id] = seq
            else:
                del self._by_remainder[at][seq.id]

    def blocks(self) -> int:
        """Returns the KV blocks that the next step of all decodes takes."""
        return self._blocks_by_step[self.steps.tick % self._block]

    def blocks_until(self, steps: int, first: int) -> int:
        """Returns the KV blocks that `steps` steps of all decodes take, from step `first` on."""
        block = self._block
        at = first % block
        if steps <= block:
            return sum(self._blocks_by_step[at : at + steps])
        whole, rest = divmod(steps, block)
        return whole * self.count + sum(self._blocks_by_step[at : at + rest])

    def filling(self) -> Iterable[Seq]:
        """Returns the sequences whose last KV block is full, so that the next step needs another."""
        assert self._by_remainder is not None
        return self._by_remainder[self.steps.tick % self._block].values()
