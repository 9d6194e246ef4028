"""Reads the fields of a body only as far as admission needs; values stay the client's bytes.

A prompt of megabytes is neither decoded nor encoded again, so that reading a body takes little more memory than the
body itself, and a server gets exactly what the client wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from rubato.frontdoor.errors import ApiError, invalid

OUTPUT_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MAX_PARTS = 65_536  # lists, objects and fields of a body: decoding each takes some 100 bytes and 1 us
MAX_FIELDS = 256  # at the top of a body: each is kept as long as its request
MAX_SMALL_BYTES = 65_536  # of a field that is decoded
MAX_INTEGER = 1 << 31
CHUNK_BYTES = 1 << 16  # of a body scanned at a time
TRUE_WORDS = ("1", "on", "t", "true", "y", "yes")
BOM = b"\xef\xbb\xbf"
FIRST_ITEM = re.compile(rb'\[[ \t\r\n]*(["\[])')  # in a list of texts, or of lists
OPENS, CLOSES, COMMA = list(b"{["), list(b"}]"), ord(",")
LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])")

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyFields:
    """Keeps the fields of one body by name, each as JSON; the last of several with one name, as in vLLM."""

    __slots__ = ("_fields", "raw")

    def __init__(self, fields: Mapping[str, Any], raw: bytes = b"") -> None:
        """Takes the JSON text of each field (bytes, or `msgspec.Raw`) by name, and the body that they come from."""
        self._fields = fields
        self.raw = raw

    @classmethod
    def parse(cls, raw: bytes, max_items: int) -> BodyFields:
        """Reads a body.

        Args:
            raw: the body; a byte order mark is skipped.
            max_items: how many items its lists may have in all.

        Raises:
            ApiError: 400 unless it is a JSON object that takes little more memory than its bytes.
        """
        _check_parts(raw, max_items)
        raw = raw.removeprefix(BOM)
        _check_fields(raw)
        try:
            return cls(_decoder.decode(raw), raw)
        except RecursionError:
            raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
        except msgspec.ValidationError:
            raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            half = LONE_SURROGATE.search(raw)  # the parser reports it in other words
            why = f"{half[0].decode()} is one half of a surrogate pair" if half else str(error)
            raise ApiError(400, f"The body is not valid JSON: {why}.", code="invalid_json") from None

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __iter__(self) -> Any:
        return iter(self._fields)

    def json(self, name: str) -> bytes:
        """Returns the JSON text of a field; empty where it is missing or null."""
        value = self._fields.get(name)
        text = b"" if value is None else bytes(value)
        return b"" if text == b"null" else text

    def value(self, name: str) -> Any:
        """Returns the value of a small field; None where it is missing. Raises ApiError 400 for a large field."""
        text = self.json(name)
        if len(text) > MAX_SMALL_BYTES:
            raise invalid(name, f"it has {len(text)} bytes; give at most {MAX_SMALL_BYTES}.")
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as error:  # a lone surrogate, or bytes that are no UTF-8
            raise invalid(name, f"it is not valid JSON: {error}.") from None

    def flag(self, name: str) -> bool:
        """Returns whether a field is true, read as leniently as vLLM does."""
        value = self.value(name)
        return (value.lower() in TRUE_WORDS) if isinstance(value, str) else value in (True, 1)

    def with_fields(self, **values: Any) -> BodyFields:
        """Returns a copy with these values set; None removes a field."""
        kept = {name: value for name, value in self._fields.items() if name not in values}
        return BodyFields({**kept, **{name: orjson.dumps(v) for name, v in values.items() if v is not None}})

    def to_json(self) -> bytes:
        """Returns the body for a server: each name once, with the client's values."""
        pairs = [b"%b:%b" % (orjson.dumps(name), bytes(value)) for name, value in self._fields.items()]
        return b"{" + b",".join(pairs) + b"}"

    # ----------------------------------------------------------------- prompts and limits

    @property
    def n(self) -> int:
        """Returns the choices of each prompt."""
        return max(1, read_integer(self.value("n")))

    @property
    def prompts(self) -> int:
        """Returns how many prompts `prompt` has, which may be a list of them."""
        prompt = self.json("prompt")
        first = FIRST_ITEM.match(prompt)
        if first is None:
            return 1
        return int(_count_outside_texts(prompt)[ord(",")]) + 1 if first[1] == b'"' else prompt.count(b"[") - 1

    @property
    def prompt_ids(self) -> int:
        """Returns how many token ids `prompt` has, of all prompts; 0 where it is text."""
        prompt = self.json("prompt")
        if not prompt.startswith(b"[") or b'"' in prompt:
            return 0
        return prompt.count(b",") + any(byte in prompt for byte in b"0123456789")

    def max_tokens(self, unstated: int) -> int:
        """Returns the output tokens that one choice may have: the largest limit, since servers differ in theirs.

        Args:
            unstated: tokens, where the body has no limit.
        """
        stated = [read_integer(value) for name in OUTPUT_LIMIT_FIELDS if (value := self.value(name)) is not None]
        return max(stated, default=unstated)


def read_integer(value: Any) -> int:
    """Returns a number, read as leniently as vLLM does; 0 for anything else."""
    try:
        return max(0, min(int(float(value)), MAX_INTEGER))
    except (TypeError, ValueError, OverflowError):
        return 0


def _check_parts(raw: bytes, max_items: int) -> None:
    """Raises ApiError 400 for a body with too many parts."""
    parts, items = sum(map(raw.count, (b":", b"[", b"{"))), raw.count(b",")
    if parts > MAX_PARTS or items > max_items:  # maybe within its texts
        counts = _count_outside_texts(raw)
        parts, items = int(sum(counts[list(b":[{")])), int(counts[ord(",")])
    if parts > MAX_PARTS:
        message = f"The body has {parts} lists, objects and fields; this server reads at most {MAX_PARTS}."
        raise ApiError(400, message, code="invalid_value")
    if items > max_items:
        message = f"The body has {items} items in its lists and objects; this server reads at most {max_items}."
        raise ApiError(400, message, code="invalid_value")


def _check_fields(raw: bytes) -> None:
    """Raises ApiError 400 for a body with too many fields, before they are parsed: each takes some 400 bytes."""
    if raw.count(b":") <= MAX_FIELDS:
        return
    fields, depth = 1, 0
    for part in _outside_texts(raw):
        depth_changes = np.isin(part, OPENS).astype(np.int32) - np.isin(part, CLOSES)
        depths = depth + np.cumsum(depth_changes, dtype=np.int32)
        fields += int(np.count_nonzero((part == COMMA) & (depths == 1)))
        depth = int(depths[-1]) if depths.size else depth
    if fields > MAX_FIELDS:
        message = f"The body has {fields} fields; at most {MAX_FIELDS} are taken."
        raise ApiError(400, message, code="too_many_fields")


def _count_outside_texts(json: bytes) -> NDArray[np.int64]:
    """Returns counts of each byte value outside strings."""
    counts = np.zeros(256, np.int64)
    for part in _outside_texts(json):
        counts += np.bincount(part, minlength=256)
    return counts


def _outside_texts(json: bytes) -> Iterator[NDArray[np.uint8]]:
    """Returns the bytes that stand outside strings."""
    if b"\\" in json:
        json = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    in_text = 0
    for begin in range(0, len(json), CHUNK_BYTES):
        part = np.frombuffer(json, np.uint8, min(CHUNK_BYTES, len(json) - begin), begin)
        inside = (np.cumsum(part == ord('"'), dtype=np.uint8) + np.uint8(in_text)) & 1
        yield part[inside == 0]
        in_text = int(inside[-1])
