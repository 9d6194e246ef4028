"""Relays one streamed response of OpenAI's API: counts its tokens, and holds its end back for the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rubato.wire.sse_stream import MAX_EVENT_BYTES, EventSplitter, read_event, with_data

DONE = b"data: [DONE]\n\n"
ONLY_CHOICE = (0,)
MAX_LEARNS = 4  # failed tries in a row: the events of some streams are all different
TEXT_NAMES = (b'"content":"', b'"text":"')
BACKSLASH = 0x5C
PLAIN_TEXT = re.compile(rb'[^"\\\n\r]+')  # without escapes
EVENT_END = b"\n\n"
MAX_QUEUED_EVENTS = 64  # behind a finish reason: usually the counts and [DONE]
# Of streams of named events, as /v1/responses and /v1/messages have them: the last ones.
LAST_NAMES = frozenset({b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error"})
FAILED_NAMES = frozenset({b"response.failed", b"error"})
USAGE_NAMES = (("prompt", "input"), ("completion", "output"))  # OpenAI's, and those of responses and messages

# Counts of a message's prompt that its `input_tokens` leave out.
CACHED_USAGE_NAMES = ("cache_creation_input_tokens", "cache_read_input_tokens")


def loads(raw: bytes) -> Any:
    """Parses JSON, with -Infinity and NaN as servers write log probabilities. Returns None for other bytes."""
    try:
        return orjson.loads(raw)
    except ValueError:
        pass
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def usage_of(raw: bytes) -> tuple[int, int]:
    """Returns the prompt and output tokens in the usage of a response or event; 0 if they are not counted."""
    return _usage(loads(raw))


def _usage(fields: Any) -> tuple[int, int]:
    try:
        usage = fields.get("usage") or (fields.get("response") or {}).get("usage") or {}
        prompt, output = (usage.get(f"{a}_tokens") or usage.get(f"{b}_tokens") or 0 for a, b in USAGE_NAMES)
        prompt += sum(usage.get(name) or 0 for name in CACHED_USAGE_NAMES)
        return max(0, int(prompt)), max(0, int(output))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return 0, 0


def with_fields(raw: bytes, more: Mapping[str, Any]) -> bytes:
    """Sets fields of a JSON object; other bytes stay as they are."""
    raw = raw.rstrip()
    if not more or not raw.endswith(b"}"):
        return raw
    if any(f'"{name}"'.encode() in raw for name in more) and isinstance(fields := loads(raw), dict):
        return orjson.dumps({**fields, **more})
    before = raw[:-1].rstrip()
    return before + (b"" if before.endswith(b"{") else b",") + orjson.dumps(more)[1:]


class ResponseStream:
    """Reads the events of a stream only as far as needed: most bring one token, and pass.

    Args:
        choices: number of choices of the response.
        is_named: the stream has named events; none of them is held back.
        with_usage: the client wants to see the counts at the end.
        max_event_bytes: longer events are not read.
    """

    __slots__ = (
        "_can_pass", "_choices", "_finished", "_is_named", "_learn_tries", "_prefix", "_queued", "_splitter",
        "_suffix", "_with_usage", "error", "has_ended", "has_failed", "usage",
    )  # fmt: skip

    def __init__(
        self, choices: int = 1, *, is_named: bool = False, with_usage: bool = True,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:  # fmt: skip
        self._choices, self._is_named, self._with_usage = choices, is_named, with_usage
        self._splitter = EventSplitter(max_event_bytes)
        self._prefix = self._suffix = b""  # around the text of an event with one token; empty: not known yet
        self._can_pass = False  # an event like the one before may be passed on as it is
        self._learn_tries = MAX_LEARNS if choices == 1 and not is_named else 0
        self._queued: list[tuple[bytes, bool]] = []  # from what may be the last event on; whether each may be it
        self._finished: set[int] = set()  # choices that have a finish reason
        self.has_ended = self.has_failed = False  # by its own word
        self.usage = (0, 0)  # tokens of prompt and output, as it last said
        self.error: bytes | None = None  # the server's error in place of an answer, as JSON

    @property
    def is_complete(self) -> bool:
        """Whether the response is complete if nothing more comes."""
        return self.has_ended or (0 < self._choices <= len(self._finished))

    @property
    def has_queued(self) -> bool:
        """Whether events are held back."""
        return bool(self._queued)

    def feed(self, data: bytes) -> tuple[bytes, Sequence[int]]:
        """Takes bytes of the stream.

        Returns:
            The bytes that may be passed on now, and the choice of each event with a token.
        """
        events = self._splitter.feed(data)
        passable: list[bytes] = []
        counted_choices: list[int] = []
        for event in events:
            may_be_last, choices = self._read(event)
            counted_choices += choices
            if (choices and not may_be_last) or len(self._queued) >= MAX_QUEUED_EVENTS:  # not the end
                passable += self._release()
            if may_be_last or self._queued:
                self._queued.append((event, may_be_last))
            else:
                passable.append(event)
                if choices:
                    self._learn(event)
        self._can_pass = bool(self._prefix) and not self._queued and self._splitter.is_empty
        return b"".join(passable), counted_choices

    def finish(self, verdict: Mapping[str, Any], end: bytes = b"") -> bytes:
        """Returns the queued bytes, with the verdict in the last event that has a finish reason or counts.

        Args:
            verdict: fields to add.
            end: bytes to append, in place of an incomplete event.
        """
        events = self._queued if self._with_usage else [e for e in self._queued if not self._has_only_usage(e[0])]
        at = max([i for i, (_, may_be_last) in enumerate(events) if may_be_last], default=None)
        out = [event for event, _ in events]
        if at is not None and verdict and (data := read_event(out[at]).data) is not None:
            out[at] = with_data(out[at], with_fields(data, verdict))
        self._queued = []
        return b"".join(out) + (end or self._splitter.rest)

    def _learn(self, event: bytes) -> None:
        """Learns the bytes around the text of an event that brings nothing but a text."""
        if not self._learn_tries:
            return
        self._learn_tries -= 1
        for name in TEXT_NAMES:
            begin = event.find(name) + len(name)
            if begin >= len(name) and (end := event.find(b'"', begin)) > begin and event[end - 1] != BACKSLASH:
                if self._brings_nothing(event[:begin] + event[end:]) and event.endswith(EVENT_END):
                    self._prefix, self._suffix = event[:begin], event[end:]
                return

    def _brings_nothing(self, event: bytes) -> bool:
        fields = loads(read_event(event).data or b"")
        choices = fields.get("choices") if isinstance(fields, dict) else None
        return isinstance(choices, list) and not any(map(_has_content, choices)) and b"\r" not in event

    def is_like_before(self, data: bytes) -> bool:
        """Returns whether the data is one whole event that differs from an earlier one only in its text, as most do. It
        then brings one token, and may be passed on without `feed`."""
        before, behind = self._prefix, self._suffix
        if not (self._can_pass and data.startswith(before) and data.endswith(behind)):
            return False
        if PLAIN_TEXT.fullmatch(data, len(before), len(data) - len(behind)) is None:
            return False
        self._learn_tries = MAX_LEARNS
        return True

    def _read(self, event: bytes) -> tuple[bool, Sequence[int]]:
        """Returns whether the event may be the last, and the choices for which it has content."""
        name, data = read_event(event)
        if data is None:
            return False, ()
        if self._is_named:
            return self._read_named(name, data)
        if data.strip() == b"[DONE]":
            self.has_ended = True
            return False, ()
        fields = loads(data)
        if not isinstance(fields, dict):
            if data.startswith(b'{"error"'):  # it may quote what no client is to see
                self.error = data
            return False, ()
        if fields.get("error"):
            self.error = data
            return False, ()
        has_usage = isinstance(fields.get("usage"), dict)
        if has_usage:
            self.usage = _usage(fields)
        choices = fields.get("choices")
        dicts = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
        choices_with_content = [self._index(choice) for choice in dicts if _has_content(choice)]
        ends = [self._index(choice) for choice in dicts if choice.get("finish_reason")]
        self._finished.update(ends)
        return bool(ends) or (has_usage and not dicts), choices_with_content

    def _read_named(self, name: bytes, data: bytes) -> tuple[bool, Sequence[int]]:
        if b'"usage"' in data and (usage := usage_of(data)) != (0, 0):
            self.usage = usage
        self.has_ended = self.has_ended or name in LAST_NAMES
        self.has_failed = self.has_failed or name in FAILED_NAMES
        return False, ONLY_CHOICE if name == b"content_block_delta" or name.endswith(b".delta") else ()

    def _index(self, choice: Mapping[str, Any]) -> int:
        index = choice.get("index", 0)
        return index if type(index) is int and 0 <= index < self._choices else 0

    def _has_only_usage(self, event: bytes) -> bool:
        fields = loads(read_event(event).data or b"")
        return isinstance(fields, dict) and not fields.get("choices") and isinstance(fields.get("usage"), dict)

    def _release(self) -> list[bytes]:
        queued, self._queued = self._queued, []
        return [event for event, _ in queued]


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Returns whether a choice of a chunk has content other than its role."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))
