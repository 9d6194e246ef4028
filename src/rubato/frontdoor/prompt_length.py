"""How many tokens a prompt has, and how it begins, as far as that is seen without the model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from rubato.core.request import PREFIX_BLOCK

BYTES = 4.0  # a token, until something is known
WEIGHT = 0.05  # of one more prompt, in the mean
MOST_KEYS = 4096  # of a prompt
TEXTS = ("messages", "prompt", "input", "system", "tools", "instructions")  # fields of a body that become a prompt


class PromptSize:
    """Bytes of a prompt's text that one token stands for: a mean over the prompts whose length servers have told."""

    def __init__(self) -> None:
        self._bytes = BYTES

    def learn(self, size: int, tokens: int) -> None:
        """A prompt of `size` bytes turned out to have so many tokens."""
        if size and tokens:
            self._bytes += WEIGHT * (min(max(size / tokens, 0.5), 16.0) - self._bytes)

    def tokens(self, size: int) -> int:
        """Of a prompt of so many bytes."""
        return max(1, round(size / self._bytes))

    def prefix(self, text: bytes) -> tuple[int, ...]:
        """A key for each full block's worth of text, for the whole text up to its end (`Request.prefix`)."""
        block, key, keys = int(PREFIX_BLOCK * BYTES), 0, []
        for end in range(block, min(len(text), block * MOST_KEYS) + 1, block):
            key = hash((key, text[end - block : end]))
            keys.append(key)
        return tuple(keys)


def token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a prompt that is given so; empty for one that is text."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        return tuple(prompt)
    return ()


def text_of(fields: Mapping[str, Any]) -> bytes:
    """What of a body becomes the prompt: texts as they are, all else as JSON. Images count nothing."""
    return b"\n".join(_texts([fields[name] for name in TEXTS if fields.get(name)]))


def _texts(value: Any) -> Iterator[bytes]:
    if isinstance(value, str):
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        if "content" in value and "role" in value:
            yield str(value["role"]).encode("utf-8", "surrogatepass")
            yield from _texts(value["content"])
        elif isinstance(value.get("text"), str):
            yield value["text"].encode("utf-8", "surrogatepass")
        elif not any(name in value for name in ("image_url", "input_audio", "video_url", "image", "file")):
            yield orjson.dumps(value)
