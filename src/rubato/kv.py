"""KV block accounting: which of an engine's blocks are free. Block ids index the engine's own KV memory."""

from __future__ import annotations


def blocks_for(tokens: int, block: int) -> int:
    """Blocks that `tokens` tokens of KV take, `block` tokens to a block."""
    return -(-tokens // block)


class KVBlocks:
    """A free list of `total` blocks. Last freed is first reused: its memory is the likeliest to be in a cache."""

    def __init__(self, total: int, block: int) -> None:
        if total < 1 or block < 1:
            raise ValueError(f"KV memory of {total} blocks of {block} tokens: both must be at least 1")
        self.total = total
        self.block = block
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, held: list[int], tokens: int) -> None:
        """Make `held` long enough for `tokens` tokens. Raises MemoryError when too few blocks are free."""
        need = blocks_for(tokens, self.block) - len(held)
        if need > len(self._free):
            raise MemoryError(f"{need} KV blocks needed, {len(self._free)} of {self.total} free")
        for _ in range(need):
            held.append(self._free.pop())

    def release(self, held: list[int]) -> None:
        """Take back all of `held`, which is empty afterwards."""
        self._free.extend(reversed(held))
        held.clear()
