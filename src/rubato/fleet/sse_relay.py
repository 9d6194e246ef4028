"""Server-sent events on their way through: counted, not read. The last chunk is held back, for what is added to it."""

from __future__ import annotations

import re
from collections.abc import Sequence

END = b"\n\n"
DONE = b"data: [DONE]"
EMPTY = re.compile(rb'"(?:content|text)":\s*""|"delta":\s*\{\s*\}')  # of a chunk that brings no text
INDEX = re.compile(rb'"index":\s*(\d+)')
FINISH = re.compile(rb'"finish_reason":\s*"')
NO_CHOICE = re.compile(rb'"choices":\s*\[\s*\]')
USAGE = re.compile(rb'"usage":\s*\{')
# Of streams of named events, as /v1/responses and /v1/messages have them: the last ones, and those that bring text.
LAST_EVENTS = tuple(
    END + b"event: " + name
    for name in (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error")
)
TEXT_EVENTS = (b"event: content_block_delta\n", b".delta\n")


def may_be_last(chunk: bytes) -> bool:
    """A chunk with a finish reason, or without a choice (`usage`). In a text the quotes would be escaped."""
    return FINISH.search(chunk) is not None or NO_CHOICE.search(chunk) is not None


def is_usage(chunk: bytes) -> bool:
    """A chunk that brings nothing but a stream's counts, as OpenAI's `include_usage` has it."""
    return NO_CHOICE.search(chunk) is not None and USAGE.search(chunk) is not None


class StreamRelay:
    """One response. choices: how many it has; of several each chunk says which one it is of. events: it is one of named
    events, of which none is held back."""

    def __init__(self, choices: int = 1, *, events: bool = False) -> None:
        self._several = choices > 1
        self._events = events
        self._cut = b""  # the beginning of a chunk of which the end has not come
        self._held: list[bytes] = []  # chunks from the one on that may be the last
        self.ended = False  # it came to its end, by its own word
        self.usage = b""  # the last event that counts tokens, as JSON

    def feed(self, data: bytes) -> tuple[bytes, Sequence[int]]:
        """What has come: what of it, and of what was held, may be passed on, and the choice of each chunk that brings
        something of one."""
        if self._cut:
            data = self._cut + data
            self._cut = b""
        if not data.endswith(END):
            whole, found, self._cut = data.rpartition(END)
            data = whole + found
            if not data:
                return b"", ()
        if self._events:
            self.ended = self.ended or any(words in END + data for words in LAST_EVENTS)
            self._look_for_usage(data)
            return data, (0,) * sum([data.count(words) for words in TEXT_EVENTS])
        self._look_for_usage(data)
        if not self._held and not may_be_last(data) and DONE not in data:
            return data, self._choices(data)
        passed: list[bytes] = []
        counted: list[int] = []
        for chunk in data.split(END)[:-1]:
            counted += self._choices(chunk + END)
            if chunk.startswith(DONE):
                self.ended = True
                self._held.append(chunk + END)
            elif may_be_last(chunk) and not (self._held and is_usage(chunk)):
                passed += self._held
                self._held = [chunk + END]
            elif self._held:
                self._held.append(chunk + END)
            else:
                passed.append(chunk + END)
        return b"".join(passed), counted

    def _look_for_usage(self, data: bytes) -> None:
        for found in USAGE.finditer(data):
            if (begin := data.rfind(b"data: {", 0, found.start())) >= 0:
                self.usage = data[begin + 6 :].partition(b"\n")[0]

    def rest(self) -> bytes:
        """What was held back, and a chunk that was cut short."""
        return b"".join(self._held) + self._cut

    def _choices(self, data: bytes) -> Sequence[int]:
        """One number for each chunk that brings something of a choice, that choice's."""
        if not self._several:
            empty = len(NO_CHOICE.findall(data)) + len(EMPTY.findall(data))
            return (0,) * max(0, data.count(b"data: {") - empty)
        found = []
        for chunk in data.split(END):
            if (index := INDEX.search(chunk)) is not None and EMPTY.search(chunk) is None:
                found.append(int(index[1]))
        return found
