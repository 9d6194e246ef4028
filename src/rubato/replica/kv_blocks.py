"""Accounts for KV blocks: which of an engine's blocks are free, and which have a prefix that another request can use.

Block ids index the engine's own KV memory. A full block may be named by a key that stands for everything up to its end
(`next_key`); a sequence that begins alike then takes the block instead of computing it. Such blocks are shared, never
written again, and outlive their users until the memory is needed: least recently used goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from rubato.core.plan import blocks_for


def first_key(salt: str) -> bytes:
    """Returns the start of a chain of keys. Requests with different salts never share: tenants stay apart."""
    return blake2b(salt.encode(), digest_size=16).digest()


def next_key(before: bytes, ids: Sequence[int]) -> bytes:
    """Returns the key of the block with `ids`, after the tokens that the key `before` stands for."""
    return blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


class KVBlocks:
    """The KV blocks of one engine.

    The unnamed block freed last is reused first: its memory is most likely in a CPU's cache.

    Args:
        total: number of blocks.
        block_size: tokens of a block.
        keep: named blocks stay findable after their last user has gone.
    """

    def __init__(self, total: int, block_size: int, *, keep: bool = False) -> None:
        self.total = total
        self.block_size = block_size
        self.version = 0  # changes whenever `find` may answer differently
        self._keep = keep
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and without users, in order of reuse
        self._users = [0] * total
        self._key: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Returns the number of blocks without users, findable or not."""
        return len(self._free) + len(self._idle)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest run of `keys`, from the first on, that is in memory."""
        blocks = []
        for key in keys:
            block = self._named.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shared(self, blocks: Iterable[int]) -> int:
        """Counts the blocks with two users or more, which stay when one user is preempted."""
        return sum(self._users[b] > 1 for b in blocks)

    def own(self, owned: Iterable[int]) -> int:
        """Counts the blocks with one user, which a release would free."""
        return sum(self._users[b] == 1 for b in owned)

    def take(self, owned: list[int], blocks: Sequence[int]) -> None:
        """Adds blocks that `find` just returned to `owned`."""
        for b in blocks:
            if not self._users[b]:
                del self._idle[b]
            self._users[b] += 1
        owned.extend(blocks)
        self.version += bool(blocks)

    def grow(self, owned: list[int], tokens: int) -> None:
        """Extends `owned` to hold `tokens` tokens. Raises MemoryError when too few blocks are free."""
        need = blocks_for(tokens, self.block_size) - len(owned)
        if need > self.free:
            raise MemoryError(f"{need} KV blocks needed, {self.free} of {self.total} free")
        for _ in range(need):
            if not self._free:
                self._forget(self._idle.popitem(last=False)[0])
            b = self._free.pop()
            self._users[b] = 1
            owned.append(b)

    def shrink(self, owned: list[int], tokens: int) -> None:
        """Releases the blocks at the end of `owned` that `tokens` tokens do not need."""
        keep = blocks_for(tokens, self.block_size)
        surplus = owned[keep:]
        del owned[keep:]
        self.release(surplus)

    def name(self, b: int, key: bytes) -> None:
        """Makes the full block `b`, which has a user, findable by `key`, unless another block is already."""
        if key not in self._named and b not in self._key:
            self._named[key] = b
            self._key[b] = key
            self.version += 1

    def release(self, owned: list[int], keep: bool = False) -> None:
        """Releases all blocks of `owned` and empties it. The end of a prefix is reused before its beginning.

        Args:
            owned: blocks of one user.
            keep: named blocks stay findable even without the option of that name.
        """
        for b in reversed(owned):
            self._users[b] -= 1
            self.version += b in self._key
            if self._users[b]:
                continue
            if (keep or self._keep) and b in self._key:
                self._idle[b] = None
            else:
                self._forget(b)
        owned.clear()

    def clear(self) -> None:
        """Forgets all named blocks, since the memory's content is lost."""
        for b in list(self._idle):
            del self._idle[b]
            self._forget(b)
        self._key.clear()
        self._named.clear()
        self.version += 1

    def _forget(self, b: int) -> None:
        """Makes a block without users free, under no name."""
        key = self._key.pop(b, None)
        if key is not None:
            del self._named[key]
            self.version += 1
        self._free.append(b)
