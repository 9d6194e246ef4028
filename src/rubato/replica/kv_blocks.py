"""KV block accounting: which of an engine's blocks are free, and which hold a prefix that another request can use.

Block ids index the engine's own KV memory. A full block may be named by a key that stands for everything up to its
end (`next_key`); a sequence that begins alike then takes the block instead of computing it. Such blocks are shared,
never written again, and outlive their users until the memory is needed: least recently used goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from rubato.core.plan import blocks_for


def first_key(salt: str) -> bytes:
    """Where a chain of keys begins. Requests of different salts never share: a tenant's prompts stay its own."""
    return blake2b(salt.encode(), digest_size=16).digest()


def next_key(before: bytes, ids: Sequence[int]) -> bytes:
    """The key of the block that holds `ids` after everything that `before` stands for."""
    return blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


class KVBlocks:
    """`total` blocks of `block_size` tokens. keep: named blocks stay findable after their last user has gone.

    Of the unnamed, the last freed is first reused: its memory is the likeliest to be in a CPU's cache.
    """

    def __init__(self, total: int, block_size: int, *, keep: bool = False) -> None:
        self.total = total
        self.block_size = block_size
        self.version = 0  # changes whenever `find` may answer differently
        self._keep = keep
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and not held, next to be reused first
        self._users = [0] * total
        self._key: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that are not held, whether they can be found or not."""
        return len(self._free) + len(self._idle)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first on, that are in memory."""
        found = []
        for key in keys:
            block = self._named.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def shared(self, blocks: Iterable[int]) -> int:
        """How many of them two users or more hold: these stay when one is preempted."""
        return sum(self._users[b] > 1 for b in blocks)

    def own(self, held: Iterable[int]) -> int:
        """How many of them one user holds: what releasing them would free."""
        return sum(self._users[b] == 1 for b in held)

    def take(self, held: list[int], blocks: Sequence[int]) -> None:
        """Share blocks just found."""
        for b in blocks:
            if not self._users[b]:
                del self._idle[b]
            self._users[b] += 1
        held.extend(blocks)
        self.version += bool(blocks)

    def grow(self, held: list[int], tokens: int) -> None:
        """Make `held` long enough for `tokens` tokens. Raises MemoryError when too few blocks are free."""
        need = blocks_for(tokens, self.block_size) - len(held)
        if need > self.free:
            raise MemoryError(f"{need} KV blocks needed, {self.free} of {self.total} free")
        for _ in range(need):
            if not self._free:
                self._forget(self._idle.popitem(last=False)[0])
            b = self._free.pop()
            self._users[b] = 1
            held.append(b)

    def shrink(self, held: list[int], tokens: int) -> None:
        """Give back the blocks at the end of `held` that `tokens` tokens do not need."""
        keep = blocks_for(tokens, self.block_size)
        surplus = held[keep:]
        del held[keep:]
        self.release(surplus)

    def name(self, b: int, key: bytes) -> None:
        """`b`, full and held, can be found by `key`, unless another block can be already."""
        if key not in self._named and b not in self._key:
            self._named[key] = b
            self._key[b] = key
            self.version += 1

    def release(self, held: list[int], keep: bool = False) -> None:
        """Give up all of `held`, which is empty afterwards. The end of a prefix is reused before its beginning. keep:
        the named ones stay findable, whatever all others do."""
        for b in reversed(held):
            self._users[b] -= 1
            self.version += b in self._key
            if self._users[b]:
                continue
            if (keep or self._keep) and b in self._key:
                self._idle[b] = None
            else:
                self._forget(b)
        held.clear()

    def clear(self) -> None:
        """Nothing can be found any more: the memory's content is gone."""
        for b in list(self._idle):
            del self._idle[b]
            self._forget(b)
        self._key.clear()
        self._named.clear()
        self.version += 1

    def _forget(self, b: int) -> None:
        key = self._key.pop(b, None)
        if key is not None:
            del self._named[key]
            self.version += 1
        self._free.append(b)
