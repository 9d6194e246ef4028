"""Estimates a prompt's tokens and keys its prefixes without the model's tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rubato.core.request import PREFIX_BLOCK_TOKENS
from rubato.frontdoor.body_fields import BodyFields

TOKENS_PER_BYTE = 0.25  # prior
SPREAD_PER_BYTE = 0.15  # of the prior, over models and languages
TEMPLATE_TOKENS = 32.0  # prior of what a chat template adds
NOISE_TOKENS, NOISE_PER_BYTE = 8.0, 0.025  # spread of one client's prompts around the line
MIN_TOKENS_PER_BYTE, MAX_TOKENS_PER_BYTE = 1 / 16, 1.0
DECAY = 0.95  # weight of earlier prompts, at each new one
MAX_PREFIX_KEYS = 4096  # of a prompt
PROMPT_FIELDS = ("messages", "prompt", "input", "system", "tools", "instructions")  # become the prompt
# Images and sounds in these fields, which are no text. A key within a text would have its quotes escaped.
MEDIA = re.compile(rb'"(?:url|data|file_data|image_url)"\s*:\s*"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


@dataclass(slots=True)
class _Line:
    """Fits tokens of a prompt as a linear function of its bytes: a weighted ridge regression over recent prompts, with
    the chat template as intercept. Where all prompts are about as long, the priors separate the two: a short
    prompt's surplus goes to the template, a long one's to the slope."""

    weight: float = 0.0
    sizes: float = 0.0
    tokens: float = 0.0
    sizes_sizes: float = 0.0
    sizes_tokens: float = 0.0

    def learn(self, size: int, tokens: int) -> None:
        weight = 1.0 / (NOISE_TOKENS**2 + (NOISE_PER_BYTE * size) ** 2)
        for name, value in (
            ("weight", 1.0), ("sizes", size), ("tokens", tokens),
            ("sizes_sizes", size * size), ("sizes_tokens", size * tokens),
        ):  # fmt: skip
            setattr(self, name, DECAY * getattr(self, name) + weight * value)

    def estimate(self, size: int) -> float:
        # The normal equations a * template + b * slope = u, b * template + c * slope = v, priors included.
        a, b, c = self.weight + TEMPLATE_TOKENS**-2, self.sizes, self.sizes_sizes + SPREAD_PER_BYTE**-2
        u, v = self.tokens, self.sizes_tokens + TOKENS_PER_BYTE * SPREAD_PER_BYTE**-2
        slope = (a * v - b * u) / (a * c - b * b)
        slope = min(max(slope, MIN_TOKENS_PER_BYTE), MAX_TOKENS_PER_BYTE)
        return max(0.0, (u - b * slope) / a) + slope * size


class PromptLengths:
    """Estimates prompts' tokens by tenant and path, since chats and documents differ."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}

    def learn(self, tenant: str, path: str, size: int, tokens: int) -> None:
        """Learns that a prompt of `size` bytes had this many tokens."""
        if size and tokens:
            self._lines.setdefault((tenant, path), _Line()).learn(size, tokens)

    def estimate(self, tenant: str, path: str, size: int) -> int:
        """Returns the estimated tokens of a prompt of `size` bytes, 1 or more."""
        return max(1, round(self._lines.get((tenant, path), _Line()).estimate(size)))

    @staticmethod
    def text_bytes(body: BodyFields) -> int:
        """Returns the bytes of JSON that become the prompt, without images and sounds."""
        found = [body.json(name) for name in PROMPT_FIELDS]
        return sum(map(len, found)) - sum(m.end() - m.start() for text in found for m in MEDIA.finditer(text))


def prefix_keys(body: BodyFields) -> tuple[int, ...]:
    """Returns a key for each full block of the prompt, which identifies the prompt up to its end (`Request.prefix`)."""
    text = b"\n".join([found for name in PROMPT_FIELDS if (found := body.json(name))])
    block = int(PREFIX_BLOCK_TOKENS / TOKENS_PER_BYTE)
    if body.prompt_ids:  # PREFIX_BLOCK_TOKENS ids each
        commas = np.flatnonzero(np.frombuffer(text, np.uint8) == ord(","))
        ends = [int(end) for end in commas[PREFIX_BLOCK_TOKENS - 1 :: PREFIX_BLOCK_TOKENS]]
    else:
        ends = list(range(block, len(text) + 1, block))
    key, begin, keys = 0, 0, []
    for end in ends[:MAX_PREFIX_KEYS]:
        key = hash((key, text[begin:end]))
        keys.append(key)
        begin = end
    return tuple(keys)
