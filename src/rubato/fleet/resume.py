"""Continues a broken stream at another server, where OpenAI's API can express that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from rubato.wire.response_stream import loads
from rubato.wire.sse_stream import EventSplitter, read_event, with_data

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_KEPT_BYTES = 1 << 20  # of a stream, to go on from
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# Fields of a body with which an output cannot be cut in two.
NOT_RESUMABLE_FIELDS = (
    "tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "use_beam_search", "best_of",
    "return_token_ids", "continue_final_message", "kv_transfer_params",
)  # fmt: skip
# Of a chunk's choice, what may be there where it is gone on from: what else is set is no text, or not known here.
TEXT_CHOICE_FIELDS = frozenset({
    "index", "delta", "role", "content", "text", "finish_reason", "stop_reason", "matched_stop", "token_ids",
})  # fmt: skip


class NotResumableError(Exception):
    """The stream cannot continue at another server; the message says why."""


class StreamSoFar:
    """Keeps one stream of one choice, as far as the client has received it. `received` counts tokens before it broke
    off."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._events: list[bytes] | None = [] if path in (CHAT, TEXT) else None
        self._bytes = 0
        self._first: dict[str, Any] = {}  # the first chunk
        self.received = 0

    def keep(self, data: bytes) -> None:
        """Keeps whole events that went to the client."""
        if self._events is None:
            return
        self._bytes += len(data)
        if self._bytes > MAX_KEPT_BYTES:
            self._events = None
        else:
            self._events.append(data)

    def text(self) -> str:
        """Returns the text so far. Raises NotResumableError for a stream with other content."""
        if self._events is None:
            raise NotResumableError(f"a response of {self._path}, or one so long, cannot be continued elsewhere")
        parts: list[str] = []
        for event in EventSplitter().feed(b"".join(self._events)):
            if (data := read_event(event).data) is None:
                continue
            fields = loads(data)
            if not isinstance(fields, dict):
                raise NotResumableError("something came in it that is not read here")
            self._first = self._first or fields
            for choice in fields.get("choices") or ():
                parts_of_choice = {**choice, **(choice.get("delta") or {})}
                if other := [
                    name for name, value in parts_of_choice.items() if value and name not in TEXT_CHOICE_FIELDS
                ]:
                    raise NotResumableError(f"a response with {other[0]!r} stays where it is: it is more than text")
                text = parts_of_choice.get("content" if self._path == CHAT else "text") or ""
                if not isinstance(text, str):
                    raise NotResumableError("its text is not read here")
                parts.append(text)
        return "".join(parts)

    def body(self, raw: bytes, received: int, ids: tuple[int, ...], *, unasked: bool) -> bytes:
        """Returns the body that asks another server for the rest.

        Args:
            raw: the first body.
            received: number of tokens that have come.
            ids: their token ids, if known.
            unasked: the ids may still become known.

        Raises:
            NotResumableError: OpenAI's API cannot express it.
        """
        text, more = self.text(), dict[str, Any]()
        fields = json.loads(raw)
        for name in NOT_RESUMABLE_FIELDS:
            if fields.get(name) not in (None, False, []):
                raise NotResumableError(f"a response with {name} cannot be continued elsewhere")
        for name in LIMIT_FIELDS:
            if isinstance(limit := fields.get(name), int):
                if limit <= received:
                    raise NotResumableError("all its tokens had come, and only its end had not")
                fields[name] = limit - received
        if isinstance(min_tokens := fields.get("min_tokens"), int):
            fields["min_tokens"] = max(0, min_tokens - received)
        if self._path == CHAT:
            more["messages"] = [*fields["messages"], {"role": "assistant", "content": text}]
            more |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            more["prompt"] = _longer_prompt(fields.get("prompt"), text, ids, unasked)
        return json.dumps({**fields, **more}).encode()  # any text, lone surrogates too

    def rewrite(self, data: bytes) -> bytes:
        """Rewrites whole events of the second server as if the first had sent them: its id, no second role, and the sum
        of both counts."""
        return b"".join([self._rewrite_event(event) for event in EventSplitter().feed(data)])

    def _rewrite_event(self, event: bytes) -> bytes:
        fields = loads(read_event(event).data or b"")
        if not isinstance(fields, dict):
            return event
        choices = fields.get("choices") or []
        if any(_is_role_alone(choice) for choice in choices):
            return b""
        fields |= {name: self._first[name] for name in ("id", "created", "model") if name in self._first}
        usage = fields.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
            usage["prompt_tokens"] = max(0, usage["prompt_tokens"] - self.received)
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self.received
        return with_data(event, orjson.dumps(fields))


def _longer_prompt(prompt: Any, text: str, ids: tuple[int, ...], unasked: bool) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt + text
    if not isinstance(prompt, list):
        raise NotResumableError("its prompt is neither text nor token ids")
    if not ids and not unasked:
        raise NotResumableError("its prompt is token ids, and those of its output are not known")
    return [*prompt, *ids]


def _is_role_alone(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("role")) and not delta.get("content")
