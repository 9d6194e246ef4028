"""The sequences that decode, as counts: what a step of one token for each of them reads, and the KV blocks it takes."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.replica.sequence import Seq, StepEnds


class DecodePool:
    """count: sequences that the next step of all decodes advances; kv: tokens they have in KV. block: tokens of a KV
    block. known: keep the sequences, for `filling`."""

    def __init__(self, steps: StepEnds, block: int, known: bool) -> None:
        self.count = 0
        self.kv = 0
        self.steps = steps
        self._block = block
        self._wants = [0] * (2 * block)  # how many need another block at steps that leave this remainder; twice over
        self._by_remainder: list[dict[str, Seq]] | None = [{} for _ in range(block)] if known else None

    def join(self, seq: Seq) -> None:
        """From the next step on it decodes."""
        self.count += 1
        self.kv += seq._cached
        seq.decode()
        self._want(seq, 1)

    def leave(self, seq: Seq) -> None:
        """From the next step on it does not."""
        self.count -= 1
        self._want(seq, -1)
        seq.halt()
        self.kv -= seq._cached

    def accept(self, seq: Seq, tokens: int, at: float) -> None:
        """So many tokens more than the one of its step came, then; their KV is there."""
        self._want(seq, -1)
        seq.got_beside(tokens, at)
        self._want(seq, 1)
        self.kv += tokens

    def _want(self, seq: Seq, more: int) -> None:
        at = -seq._cached % self._block
        self._wants[at] += more
        self._wants[at + self._block] += more
        if self._by_remainder is not None:
            if more > 0:
                self._by_remainder[at][seq.id] = seq
            else:
                del self._by_remainder[at][seq.id]

    def blocks(self) -> int:
        """KV blocks that the next step of all decodes takes."""
        return self._wants[self.steps.tick % self._block]

    def blocks_until(self, steps: int, first: int) -> int:
        """KV blocks that so many steps of all decodes take from step `first` on."""
        block = self._block
        at = first % block
        if steps <= block:
            return sum(self._wants[at : at + steps])
        whole, rest = divmod(steps, block)
        return whole * self.count + sum(self._wants[at : at + rest])

    def filling(self) -> Iterable[Seq]:
        """Whose KV fills its last block to the end: those that need one more in the next step."""
        assert self._by_remainder is not None
        return self._by_remainder[self.steps.tick % self._block].values()
