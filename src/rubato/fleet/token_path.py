"""The middle of a stream: one token after the other, each an event like the one before.

Most of a gateway's work is here, and most of the time that it takes is waiting for memory, since hundreds of other
streams come between two tokens of one: what a token needs is in few and small objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rubato.wire.response_stream import ResponseStream


class TokenCount:
    """Tokens of one request, counted as they come; listeners are told of several at once.

    Args:
        now: the clock.
        tell: called when it is time to tell of what has come.
        tell_at: when that is.
    """

    __slots__ = ("_now", "_tell", "id", "settled", "tell_at", "times")

    def __init__(
        self, id: str, now: Callable[[], float], tell: Callable[[TokenCount], None], tell_at: float
    ) -> None:  # fmt: skip
        self.id, self.tell_at = id, tell_at
        self.times: list[float] = []  # of those that nobody is told of yet
        self.settled = 0  # of these, those that the view of the replica shows
        self._now, self._tell = now, tell

    def add(self) -> None:
        now = self._now()
        self.times.append(now)
        if now >= self.tell_at:
            self._tell(self)


class HasLink(Protocol):
    @property
    def linked(self) -> bool: ...


class ByteWriter(Protocol):
    def write(self, data: bytes) -> None: ...


class TokenPath:
    """Passes on what the events of one stream bring, in one call where they are like those before.

    Args:
        otherwise: takes what is not so.
        keep: is given what has gone to the client.
    """

    __slots__ = ("_keep", "_otherwise", "_reader", "_replica", "count", "passed", "writer")

    def __init__(
        self, replica: HasLink, reader: ResponseStream, otherwise: Callable[[bytes], None],
        keep: Callable[[bytes], None] | None,
    ) -> None:  # fmt: skip
        self._replica, self._reader, self._otherwise, self._keep = replica, reader, otherwise, keep
        self.writer: ByteWriter | None = None  # of the client's connection; None: all goes otherwise
        self.count: TokenCount | None = None  # where its tokens are counted, if its server has no link
        self.passed = 0  # tokens

    def take(self, data: bytes) -> None:
        writer, count = self.writer, self.count
        if writer is None or not self._reader.is_like_before(data):
            self._otherwise(data)
            return
        if not self._replica.linked:
            if count is None:
                self._otherwise(data)
                return
            count.add()
        self.passed += 1
        if self._keep is not None:
            self._keep(data)
        writer.write(data)
