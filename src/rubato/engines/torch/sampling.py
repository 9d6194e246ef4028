"""Choosing one token per row of logits: greedy rows all at once, the others by their own settings and random numbers.

What a row draws depends on its own logits, settings and generator alone, never on its batch mates: a seed reproduces.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rubato.types import Sampling

NUCLEUS = 1024  # tokens looked at first for top-p: a sort of the whole vocabulary is needed only by very flat rows


@dataclass(frozen=True, slots=True)
class Choice:
    """How one sequence samples: its settings, and the generator that gives it one number in [0, 1) per token."""

    sampling: Sampling
    generator: random.Random

    @classmethod
    def of(cls, sampling: Sampling) -> Choice:
        """Raises ValueError for settings out of range. Without a seed the generator is seeded by the system."""
        if not 0.0 <= sampling.temperature < float("inf"):
            raise ValueError(f"temperature is {sampling.temperature}: give 0 (greedy) or more")
        if not 0.0 < sampling.top_p <= 1.0:
            raise ValueError(f"top_p is {sampling.top_p}: give a number above 0, at most 1 (off)")
        if sampling.top_k < 0:
            raise ValueError(f"top_k is {sampling.top_k}: give 0 (off) or more")
        return cls(sampling, random.Random(sampling.seed))

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0.0 or self.sampling.top_k == 1


def choose(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """One token id per row of `logits` (rows, vocab)."""
    if all(choice.greedy for choice in choices):
        return _ints(logits.argmax(-1))
    picked = _ints(logits.argmax(-1))
    plain: list[int] = []
    cut: list[int] = []
    for row, choice in enumerate(choices):
        if not choice.greedy:
            (cut if choice.sampling.top_p < 1.0 or choice.sampling.top_k else plain).append(row)
    for rows, draw in ((plain, _draw_plain), (cut, _draw_cut)):
        if rows:
            temperature = torch.tensor([choices[row].sampling.temperature for row in rows], device=logits.device)
            uniform = torch.tensor([choices[row].generator.random() for row in rows], device=logits.device)
            scaled = logits[rows].float()
            scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]
            for row, token in zip(rows, draw(scaled, uniform, [choices[row].sampling for row in rows]), strict=True):
                picked[row] = token
    return picked


def _ints(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.tolist()
    return values


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Per row the index at which the running sum of `weights` (any scale) passes `uniform` of the whole."""
    total = weights.cumsum(-1)
    at = torch.searchsorted(total, uniform[:, None].to(total.dtype) * total[:, -1:], right=True)[:, 0]
    # float32 rounding may put the target at the very end: the last index of positive weight is meant
    last = (weights > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(at, last)


def _draw_plain(scaled: Tensor, uniform: Tensor, _: Sequence[Sampling]) -> list[int]:
    return _ints(_invert(scaled.softmax(-1), uniform))


def _draw_cut(scaled: Tensor, uniform: Tensor, settings: Sequence[Sampling]) -> list[int]:
    """Top-k, then top-p of what that leaves (the order of transformers and vLLM), on descending probabilities."""
    vocab = scaled.shape[1]
    seen = min(vocab, max([NUCLEUS, *(s.top_k for s in settings)]))
    values, ids = scaled.topk(seen, -1)
    k = torch.tensor([min(s.top_k or vocab, vocab) for s in settings], device=scaled.device)
    p = torch.tensor([s.top_p for s in settings], device=scaled.device)
    whole = torch.where(k >= vocab, scaled.logsumexp(-1), _first(values, k).logsumexp(-1))
    probabilities = (_first(values, k) - whole[:, None]).exp()
    short = (k > seen) & (probabilities.sum(-1) < p)
    if seen < vocab and bool(short.any()):
        values, ids = scaled.sort(-1, descending=True)
        probabilities = (_first(values, k) - whole[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept = torch.where(before < p[:, None], probabilities, 0.0)
    return _ints(ids.gather(-1, _invert(kept, uniform)[:, None])[:, 0])


def _first(values: Tensor, k: Tensor) -> Tensor:
    """Descending `values` with what comes after each row's first k put to -inf."""
    beyond = torch.arange(values.shape[-1], device=values.device) >= k[:, None]
    return values.masked_fill(beyond, float("-inf"))
