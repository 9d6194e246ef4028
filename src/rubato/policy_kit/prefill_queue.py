"""Prompts of one replica that prefills, nearest deadline first: its next step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import NO_BATCH, Shape
from rubato.policy_kit.batch_builder import prefill_time


class Prompt(NamedTuple):
    """A prompt to be computed: when it has to be through, in seconds, and its tokens pending and in KV."""

    due: float
    pending: int
    cached: int


def _first_chunk(prompt: Prompt, at: float, budget: int, most: int, latency: LatencyModel) -> int:
    """Dynamic (§4.7), unless the prompt would be late so: then as much of it as a batch may have."""
    tokens = min(dynamic_chunk(prompt.pending, budget), most)
    if tokens < prompt.pending and at + prefill_time(latency, prompt.pending, prompt.cached, budget) > prompt.due:
        tokens = min(prompt.pending, most)
    return tokens


def prefill_chunks(
    prompts: Sequence[Prompt], at: float, budget: int, most: int, latency: LatencyModel
) -> tuple[list[int], Shape]:
    """Tokens of each prompt (the nearest deadline first; those at the end may get none) in a step that begins at `at`,
    and its shape. The first gets a dynamic chunk (§4.7), others what is left of the budget, unless the step would last
    beyond the time at which one that it completes has to be through. most: tokens that a batch may have."""
    due = inf
    for limited in (False, True):  # limits are seldom needed, and dear to ask for
        chunks: list[int] = []
        shape, left, due = NO_BATCH, budget, inf
        for prompt in prompts:
            tokens = min(prompt.pending, left) if chunks else _first_chunk(prompt, at, budget, most, latency)
            if limited and chunks and due < inf:
                tokens = latency.largest_chunk(due - at, shape, prompt.cached, tokens)
            if tokens < 1:
                break
            shape = shape.plus(tokens, prompt.cached)
            chunks.append(tokens)
            left -= tokens
            if tokens == prompt.pending and at < prompt.due < due:
                due = prompt.due
        if len(chunks) < 2 or due == inf or at + latency.step_time(shape) <= due:
            break
    return chunks, shape


def dynamic_chunk(left: int, budget: int) -> int:
    """Tokens of a prompt's next chunk: all of them, where less than two budgets are left."""
    return left if left < 2 * budget else budget
