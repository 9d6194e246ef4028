"""Server-sent events by the standard (HTML, section 9.2): cut out of a stream as they are, and read where asked.

A line ends with LF, CR or both; an empty one ends an event. Of an event `data` lines are joined by LF, lines that begin
with a colon are comments, and one blank after the first colon of a line is no part of the value.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_EVENT_BYTES = 1 << 20
# Two line ends in a row. Atomic groups: else a CRLF would be taken for two.
EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
BOM = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """Holds the fields of one event.

    Args:
        name: value of its `event` field; empty without one.
        data: values of its `data` fields; None without one, as in a comment.
    """

    name: bytes
    data: bytes | None


def read_event(raw: bytes) -> SseEvent:
    """Returns the fields of one event, with or without the empty line that ends it."""
    if raw.startswith(b"data: ") and raw.find(b"\n") >= len(raw) - 2 and b"\r" not in raw:  # as most are
        return SseEvent(b"", raw[6:].rstrip(b"\n"))
    name, data = b"", None
    for line in raw.removeprefix(BOM).splitlines():
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data = value if data is None else data + b"\n" + value
        elif field == b"event":
            name = value
    return SseEvent(name, data)


def with_data(raw: bytes, data: bytes) -> bytes:
    """Returns an event with its data replaced by this JSON, in one line; its other lines stay."""
    lines = [line for line in raw.removeprefix(BOM).splitlines() if line and line.partition(b":")[0] != b"data"]
    return b"\n".join([*lines, b"data: " + data.replace(b"\n", b" "), b"", b""])


class EventSplitter:
    """Cuts a stream, in whatever parts it comes, into events.

    Args:
        max_bytes: of an event; a longer one comes in several parts.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts = bytearray()  # the beginning of an event of which the end has not come
        self._searched = 0  # bytes of it in which there is no end

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the events that are complete now."""
        if not self._parts and len(data) > 2 and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            return [data]  # one whole event, as a server sends it
        self._parts += data
        events, begin = [], 0
        for end in EVENT_END.finditer(self._parts, self._searched):
            events.append(bytes(self._parts[begin : end.end()]))
            begin = end.end()
        del self._parts[:begin]
        if len(self._parts) > self._max_bytes:
            events.append(bytes(self._parts))
            self._parts.clear()
        self._searched = max(0, len(self._parts) - 3)  # an end may be cut in two
        return events

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come of an event that has not ended."""
        return not self._parts

    @property
    def rest(self) -> bytes:
        """What has come of an event that has not ended."""
        return bytes(self._parts)
