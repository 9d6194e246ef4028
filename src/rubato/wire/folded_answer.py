"""The chunks of a stream of OpenAI's API, folded into the one answer that the server would have given at once.

By the rule of OpenAI's own clients: what a delta says of a text goes behind what was said before, objects are merged,
items of lists that have an `index` are merged by it and others follow each other; of everything else the last word that
is not null counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

import orjson

from rubato.wire.response_stream import loads
from rubato.wire.sse_stream import EventSplitter, read_event

# Fields of a body whose answer a stream does not bring, or which servers refuse beside `stream` (vLLM 0.32): log
# probabilities, text and ids of the prompt, experts, several sequences at once. `stream_options` without `stream` is
# for the server to refuse.
NOT_IN_STREAMS = (
    "prompt_logprobs", "echo", "best_of", "return_token_ids", "return_prompt_text",
    "routed_experts_prompt_start", "ec_transfer_params", "stream_options",
)  # fmt: skip
WHOLE_TEXTS = frozenset({"role", "id", "type", "name"})  # texts of a delta that are never cut into pieces
MAX_MERGE_DEPTH = 4  # deeper objects of a chunk are taken as they are
FIELD_BYTES = 64  # that keeping a field, or a part of a list, takes beside what is in it


class _Items(list[bytes]):
    """Items of one list, as JSON: read, they would take several times as much."""


class _Indexed(dict[int, dict[str, Any]]):
    """Items of one list by their `index`."""


class FoldedAnswer:
    """Takes the events of one stream, and makes the answer.

    Args:
        is_chat: the answer is one of /v1/chat/completions, not of /v1/completions.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._splitter = EventSplitter()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.bytes = 0  # that it takes, about
        self.is_broken = False  # something that came is no chunk: the answer may lack it

    @property
    def has_choices(self) -> bool:
        return bool(self._choices)

    def add(self, data: bytes) -> None:
        """Adds bytes of the stream that are whole events."""
        for event in self._splitter.feed(data):
            payload = (read_event(event).data or b"").strip()
            fields = loads(payload)
            if not isinstance(fields, dict):
                self.is_broken = self.is_broken or payload not in (b"", b"[DONE]")
                continue
            choices = fields.pop("choices", None)
            self._merge(self._head, fields, _never)
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict):
                    self._add_choice(choice)

    def to_json(self) -> bytes:
        choices = [self._choice_json(index, self._choices[index]) for index in sorted(self._choices)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        head = {name: _json(value) for name, value in self._head.items()}
        head |= {"object": _json(kind), "choices": b"[" + b",".join(choices) + b"]"}
        return _object({**head, "system_fingerprint": head.get("system_fingerprint", b"null")})

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice.pop("index", 0), choice.pop("delta", None)
        into = self._choices.setdefault(index if type(index) is int else 0, {})
        if isinstance(delta, dict):
            self._merge(into.setdefault("message", {}), delta, _joins_in_delta)
        self._merge(into, choice, _joins_in_choice)

    def _choice_json(self, index: int, choice: dict[str, Any]) -> bytes:
        fields = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        if self._is_chat:
            message = {"role": "assistant", "content": None, "refusal": None, **choice.get("message", {})}
            others = [value for name, value in message.items() if name not in ("role", "content")]
            if any(map(_has_content, others)) and not _has_content(message["content"]):  # "" that came with the role
                message["content"] = None
            fields["message"] = message
        else:
            fields.setdefault("text", "")
        return _json(fields)

    def _merge(
        self, into: dict[str, Any], fields: Mapping[str, Any], joins: Callable[[str], bool],
        depth: int = MAX_MERGE_DEPTH,
    ) -> None:  # fmt: skip
        """Merges the fields of a chunk into those of earlier chunks.

        Args:
            into: fields of earlier chunks; changed.
            fields: of this chunk.
            joins: whether texts of a field of this name are pieces of one text.
            depth: levels of objects that are still merged.
        """
        for name, value in fields.items():
            before = into.get(name)
            if value is None:
                into.setdefault(name, None)
            elif type(value) is str and joins(name):
                if type(before) is not StringIO:
                    before = into[name] = StringIO()
                    self.bytes += FIELD_BYTES
                before.write(value)
                self.bytes += len(value)
            elif value == before:
                pass  # as what each chunk says of the model
            elif type(value) is list:
                self._extend(into, name, value, joins, depth)
            elif type(value) is dict and depth:
                if type(before) is not dict:
                    before = into[name] = {}
                self._merge(before, value, joins, depth - 1)
            elif value != "" or before is None:
                into[name] = value
                self.bytes += max(0, len(_dumped(value)) - (-FIELD_BYTES if before is None else len(_json(before))))

    def _extend(
        self, into: dict[str, Any], name: str, items: list[Any], joins: Callable[[str], bool], depth: int
    ) -> None:  # fmt: skip
        before = into.get(name)
        if depth and items and all(type(item) is dict and type(item.get("index")) is int for item in items):
            if type(before) is not _Indexed:
                before = into[name] = _Indexed()
            for item in items:
                self._merge(before.setdefault(item.pop("index"), {}), item, joins, depth - 1)
            return
        if type(before) is not _Items:
            before = into[name] = _Items()
        if items:
            before.append(_dumped(items)[1:-1].strip())
            self.bytes += len(before[-1]) + FIELD_BYTES


def _never(name: str) -> bool:
    return False


def _joins_in_choice(name: str) -> bool:
    return name == "text"


def _joins_in_delta(name: str) -> bool:
    return name not in WHOLE_TEXTS


def _has_content(value: Any) -> bool:
    """Returns whether a value says something; 0 does, an empty text does not."""
    return bool(value.tell()) if type(value) is StringIO else value not in (None, "", [], {})


def _json(value: Any) -> bytes:
    if type(value) is StringIO:
        return _dumped(value.getvalue())
    if type(value) is _Items:
        return b"[" + b",".join(value) + b"]"
    if type(value) is _Indexed:
        return b"[" + b",".join([_json(value[index]) for index in sorted(value)]) + b"]"
    if type(value) is dict:
        return _object({name: _json(member) for name, member in value.items()})
    return _dumped(value)


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join([_dumped(name) + b":" + value for name, value in members.items()]) + b"}"


def _dumped(value: Any) -> bytes:
    """Writes a value as JSON. A server may cut a surrogate pair in two: orjson refuses a half, json writes it, and both
    halves side by side are whole again."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()
