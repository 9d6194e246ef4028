"""The middle of a stream: one token after the other, each an event like the one before.

Most of a gateway's work is here, and most of the time that it takes is waiting for memory, since hundreds of other
streams come between two tokens of one: what a token needs is in few and small objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rubato.wire.response_stream import ResponseStream


class TokenCount:
    """Counts the tokens of one request as they come, and reports several at once to listeners.

    Args:
        id: of the request.
        now: the clock.
        emit: called when listeners are due to be told.
        emit_at: when they are (s).
    """

    __slots__ = ("_emit", "_now", "emit_at", "id", "shown_count", "times")

    def __init__(
        self, id: str, now: Callable[[], float], emit: Callable[[TokenCount], None], emit_at: float
    ) -> None:  # fmt: skip
        self.id, self.emit_at = id, emit_at
        self.times: list[float] = []  # of tokens not yet emitted
        self.shown_count = 0  # of these, tokens that the replica's view shows
        self._now, self._emit = now, emit

    def add(self) -> None:
        now = self._now()
        self.times.append(now)
        if now >= self.emit_at:
            self._emit(self)


class HasLink(Protocol):
    @property
    def is_linked(self) -> bool: ...


class ByteWriter(Protocol):
    def write(self, data: bytes) -> None: ...


class TokenPath:
    """Passes the events of one stream on, in one call if an event is like the one before.

    Args:
        fallback: takes all other events.
        keep: takes the events that have gone to the client.
    """

    __slots__ = ("_fallback", "_keep", "_reader", "_replica", "count", "passed_tokens", "writer")

    def __init__(
        self, replica: HasLink, reader: ResponseStream, fallback: Callable[[bytes], None],
        keep: Callable[[bytes], None] | None,
    ) -> None:  # fmt: skip
        self._replica, self._reader, self._fallback, self._keep = replica, reader, fallback, keep
        self.writer: ByteWriter | None = None  # of the client's connection; None: all goes otherwise
        self.count: TokenCount | None = None  # where its tokens are counted, if its server has no link
        self.passed_tokens = 0

    def take(self, data: bytes) -> None:
        writer, count = self.writer, self.count
        if writer is None or not self._reader.is_like_before(data):
            self._fallback(data)
            return
        if not self._replica.is_linked:
            if count is None:
                self._fallback(data)
                return
            count.add()
        self.passed_tokens += 1
        if self._keep is not None:
            self._keep(data)
        writer.write(data)
