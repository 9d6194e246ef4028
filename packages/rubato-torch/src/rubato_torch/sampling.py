"""Choosing one token per row of logits: greedy rows all at once, the others by their own settings and random numbers.

What a row draws depends on its own logits, settings, tokens and generator alone, never on its batch mates: a seed
reproduces. Order as vLLM's: penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rubato.core.plan import Logprob
from rubato.core.request import Sampling

NUCLEUS = 1024  # tokens looked at first for top-p: a sort of the whole vocabulary is needed only by very flat rows
MOST_LOGPROBS = 20  # OpenAI's bound
LEAST_TEMPERATURE = 1e-5  # below it (vLLM's bound) the likeliest token is all there is; far below float32 has only 0
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0  # beyond these a logit over it leaves float32
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no number for (OpenAI's value)


class Seen:
    """The distinct tokens of one sequence, and how often each came out: what penalties look at."""

    __slots__ = ("_at", "counts", "ids")

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self.ids = array("q")
        self.counts = array("f")

    def add(self, ids: Iterable[int], *, output: bool) -> None:
        for id in ids:
            at = self._at.setdefault(id, len(self.ids))
            if at == len(self.ids):
                self.ids.append(id)
                self.counts.append(0.0)
            self.counts[at] += output


@dataclass(frozen=True, slots=True)
class Choice:
    """How one sequence samples: its settings, the generator that gives it one number in [0, 1) per token, and what
    its penalties need to know (None: it has none). plain: the likeliest token, whatever came before."""

    sampling: Sampling
    generator: random.Random
    seen: Seen | None
    plain: bool

    @classmethod
    def of(cls, sampling: Sampling) -> Choice:
        """Raises ValueError for settings out of range. Without a seed the generator is seeded by the system."""
        _check(sampling)
        seed = sampling.seed
        # Random takes the absolute value of a seed: without the wrap, -1 and 1 would draw the same
        generator = random.Random(seed if seed is None or seed >= 0 else seed + 2**64)
        penalised = (
            sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0
        )
        return cls(sampling, generator, Seen() if penalised else None, _greedy(sampling) and not penalised)

    @property
    def greedy(self) -> bool:
        return _greedy(self.sampling)

    def saw(self, ids: Iterable[int], *, output: bool) -> None:
        """These tokens are in the sequence now: prompt, or output."""
        if self.seen is not None:
            self.seen.add(ids, output=output)

    def skip(self) -> None:
        """A token was sampled elsewhere: go past the number that it took."""
        if not self.greedy:
            self.generator.random()


def choose(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """One token id per row of `logits` (rows, vocab), which are left as they are."""
    if all(choice.plain for choice in choices):
        return _likeliest(logits)
    logits = _penalised(logits, choices)
    picked = _likeliest(logits)
    plain: list[int] = []
    cut: list[int] = []
    for row, choice in enumerate(choices):
        if not choice.greedy:
            (cut if choice.sampling.top_p < 1.0 or choice.sampling.top_k else plain).append(row)
    for rows, draw in ((plain, _draw_plain), (cut, _draw_cut)):
        if rows:
            settings = [choices[row].sampling for row in rows]
            temperature = torch.tensor([s.temperature for s in settings], device=logits.device)
            uniform = torch.tensor([choices[row].generator.random() for row in rows], device=logits.device)
            scaled = logits[rows].float()
            scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]
            scaled = _above_min_p(scaled, settings)
            for row, token in zip(rows, draw(scaled, uniform, settings), strict=True):
                picked[row] = token
    return picked


def logprobs(logits: Tensor, chosen: Sequence[int], settings: Sequence[Sampling]) -> list[tuple[Logprob, ...]]:
    """Per row the chosen token's log probability and those of the likeliest, by the model itself: before penalties,
    temperature and cuts; empty for a row that asks for none."""
    found: list[tuple[Logprob, ...]] = [()] * len(chosen)
    rows = [row for row, s in enumerate(settings) if s.logprobs is not None]
    if not rows:
        return found
    all_of = logits[rows].float().log_softmax(-1)
    ids = torch.tensor([chosen[row] for row in rows], device=logits.device)
    own: list[float] = all_of.gather(-1, ids[:, None])[:, 0].tolist()
    top: list[list[tuple[int, float]]] = [[]] * len(rows)
    if any(s.logprobs for s in settings):
        # always as many, whatever the rows of this batch want: equal logits must not change places for a batch mate
        values, tokens = all_of.topk(min(MOST_LOGPROBS, all_of.shape[-1]), -1)
        top = [list(zip(*each, strict=True)) for each in zip(tokens.tolist(), values.tolist(), strict=True)]
    for row, value, likely in zip(rows, own, top, strict=True):
        best = tuple((id, max(v, LEAST_LOGPROB)) for id, v in likely[: settings[row].logprobs])
        found[row] = (Logprob(chosen[row], max(value, LEAST_LOGPROB), best),)
    return found


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature < LEAST_TEMPERATURE or sampling.top_k == 1


def _check(s: Sampling) -> None:
    """Raises ValueError for the first setting out of range."""
    if not 0.0 <= s.temperature < math.inf:
        raise ValueError(f"temperature is {s.temperature}: give 0 (greedy) or more")
    if not 0.0 < s.top_p <= 1.0:
        raise ValueError(f"top_p is {s.top_p}: give a number above 0, at most 1 (off)")
    if s.top_k < 0:
        raise ValueError(f"top_k is {s.top_k}: give 0 (off) or more")
    if not 0.0 <= s.min_p <= 1.0:
        raise ValueError(f"min_p is {s.min_p}: give a number from 0 (off) to 1")
    for name, value in (("presence_penalty", s.presence_penalty), ("frequency_penalty", s.frequency_penalty)):
        if not -2.0 <= value <= 2.0:
            raise ValueError(f"{name} is {value}: give a number from -2 to 2, 0 being off")
    if not LEAST_REPETITION <= s.repetition_penalty <= MOST_REPETITION:
        raise ValueError(
            f"repetition_penalty is {s.repetition_penalty}: give a number from {LEAST_REPETITION:g} to "
            f"{MOST_REPETITION:g}, 1 being off"
        )
    if s.logprobs is not None and not 0 <= s.logprobs <= MOST_LOGPROBS:
        raise ValueError(f"logprobs is {s.logprobs}: give a whole number from 0 to {MOST_LOGPROBS}, or none")
    if any(id < 0 for id in s.stop_ids):
        raise ValueError(f"stop_ids holds {min(s.stop_ids)}: token ids are 0 or more")


def _penalised(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Logits less the penalties of the rows that have any: only what a sequence holds already is touched, all rows'
    such tokens together. Repetition: a positive logit is divided, a negative one multiplied (Hugging Face, vLLM)."""
    rows = [(row, c.sampling, c.seen) for row, c in enumerate(choices) if c.seen is not None and c.seen.ids]
    if not rows:
        return logits
    sizes = [len(seen.ids) for _, _, seen in rows]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    at = torch.from_numpy(np.repeat(np.array([row for row, _, _ in rows]), sizes)).to(logits.device)
    ids = torch.from_numpy(np.concatenate([np.frombuffer(s.ids, np.int64) for _, _, s in rows])).to(logits.device)
    counts = torch.from_numpy(np.concatenate([np.frombuffer(s.counts, np.float32) for _, _, s in rows]))
    counts = counts.to(logits.device)
    logits = logits.to(torch.float32, copy=True)
    value = logits[at, ids]
    repetition = spread([s.repetition_penalty for _, s, _ in rows])
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= spread([s.frequency_penalty for _, s, _ in rows]) * counts
    value -= spread([s.presence_penalty for _, s, _ in rows]) * (counts > 0)
    logits[at, ids] = value
    return logits


def _above_min_p(scaled: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """`scaled`, whose rows' largest is 0, with what is less likely than `min_p` of the likeliest put to -inf."""
    if not any(s.min_p for s in settings):
        return scaled
    least = [math.log(s.min_p) if s.min_p else -math.inf for s in settings]
    return scaled.masked_fill(scaled < torch.tensor(least, device=scaled.device)[:, None], -math.inf)


def _likeliest(logits: Tensor) -> list[int]:
    # on CPU bfloat16 has no vectorised argmax: 9 ms for 32 rows of 49,152 on one core, 1 ms by way of float32
    return _ints((logits.float() if logits.device.type == "cpu" else logits).argmax(-1))


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
