"""Plans the steps of a prefill replica, nearest deadline first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import NO_BATCH, Plan, Shape
from rubato.core.request import HandoffReason
from rubato.policy_kit.batch_builder import BatchBuilder


class QueuedPrompt(NamedTuple):
    """A prompt to compute: its deadline in seconds, and its tokens pending and in KV."""

    due: float
    pending: int
    cached: int


def _first_chunk(prompt: QueuedPrompt, at: float, budget: int, most: int, latency: LatencyModel) -> int:
    """Returns the tokens of the first prompt: dynamic (§4.7), unless it would be late so, then as many as a batch may
    have.
    """
    tokens = min(dynamic_chunk(prompt.pending, budget), most)
    if tokens < prompt.pending and at + prefill_time(latency, prompt.pending, prompt.cached, budget) > prompt.due:
        tokens = min(prompt.pending, most)
    return tokens


def prefill_chunks(
    prompts: Sequence[QueuedPrompt], at: float, budget: int, most: int, latency: LatencyModel
) -> tuple[list[int], Shape]:
    """Divides a step between prompts: the first gets a dynamic chunk (§4.7), others the remaining budget, unless the
    step would then end after the deadline of a prompt that it completes.

    Args:
        prompts: nearest deadline first
        at: when the step begins, seconds
        budget: tokens of a chunk
        most: tokens that a batch may have
        latency: predicts step times

    Returns:
        tokens of each prompt, fewer entries if the last get none, and the shape of the step
    """
    due = inf
    for limited in (False, True):  # limits are seldom needed, and dear to ask for
        chunks: list[int] = []
        shape, budget_left, due = NO_BATCH, budget, inf
        for prompt in prompts:
            tokens = min(prompt.pending, budget_left) if chunks else _first_chunk(prompt, at, budget, most, latency)
            if limited and chunks and due < inf:
                tokens = latency.largest_chunk(due - at, shape, prompt.cached, tokens)
            if tokens < 1:
                break
            shape = shape.plus(tokens, prompt.cached)
            chunks.append(tokens)
            budget_left -= tokens
            if tokens == prompt.pending and at < prompt.due < due:
                due = prompt.due
        if len(chunks) < 2 or due == inf or at + latency.step_time(shape) <= due:
            break
    return chunks, shape


def dynamic_chunk(tokens: int, budget: int) -> int:
    """Returns the tokens of a prompt's next chunk: all of them if less than two budgets are left."""
    return tokens if tokens < 2 * budget else budget


def dynamic_prefill_time(latency: LatencyModel, tokens: int, cached: int, budget: int, most: int) -> float:
    """Returns the seconds of the last `tokens` of a prompt, alone and in dynamic chunks."""
    head = max(0, tokens // budget - 1) * budget
    seconds = prefill_time(latency, head, cached, min(budget, most))
    return seconds + prefill_time(latency, tokens - head, cached + head, most)


def nearest_due_first(
    view: View, budget: int, due: Callable[[SeqView], float], order: Callable[[SeqView], float]
) -> Plan:
    """Plans a step of a replica that prefills what others decode: prompts in an order, begun or not (`prefill_chunks`).

    One that has not begun starts only if the KV of all of it is free beside what the begun ones have still to take.

    Args:
        view: of the replica.
        budget: tokens of a chunk.
        due: returns when a prompt has to be through, in seconds.
        order: returns a sort key, the least runs first; ties go by arrival.
    """
    builder, limits = BatchBuilder(view), view.limits
    ready: dict[str, HandoffReason] = {s.id: "prefilled" for s in view.running if s.pending == 1}
    prefilling = view.prefilling
    missing = sum(limits.blocks(s.length) - s.blocks for s in prefilling)

    def key(seq: SeqView) -> tuple[float, float]:
        return (order(seq), seq.request.arrival)

    seqs = sorted((*prefilling, *view.waiting), key=key)
    prompts = [QueuedPrompt(due(s), s.pending, s.cached) for s in seqs]
    chunks, _ = prefill_chunks(prompts, view.now, budget, limits.max_num_batched_tokens, view.latency)
    for seq, tokens in zip(seqs, chunks, strict=False):
        new = seq.id not in builder.running
        if builder.tokens_that_fit(seq) < tokens or (new and builder.missing_blocks(seq, seq.pending) + missing > 0):
            break
        builder.add(seq, tokens)
    if not builder.work and prefilling:  # none may start, and the nearest deadline is of one that has not begun
        seq = min(prefilling, key=key)
        if tokens := min(dynamic_chunk(seq.pending, budget), builder.tokens_that_fit(seq)):
            builder.add(seq, tokens)
    return builder.plan(handoff=ready)
