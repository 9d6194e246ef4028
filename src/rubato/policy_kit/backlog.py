"""Measures the pending work of a replica, in seconds of prefill and in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.core.interfaces import View
from rubato.core.plan import Shape

DECODE_TO_COME_TOKENS = 64  # what the decode to come of a request counts for


def loads(fleet: Sequence[View], per_request: int = DECODE_TO_COME_TOKENS) -> list[int]:
    """Returns for each replica the pending tokens of all its requests, plus `per_request` for the decode of each."""
    return [view.pending + per_request * view.count for view in fleet]


def prefill_seconds(view: View, prompt: int) -> float:
    """Predicts the seconds until a replica has prefilled all pending prompts and `prompt` tokens more, in full batches
    with its current decodes."""
    decodes = sum(seq.pending == 1 for seq in view.running)
    kv = sum(seq.length for seq in view.running)
    pending = prompt + sum(seq.pending for seq in view.waiting)
    pending += sum(seq.pending for seq in view.running if seq.pending > 1)
    chunk = max(1, view.limits.max_num_batched_tokens - decodes)
    base = Shape.decodes(decodes, kv)
    full, rest = divmod(pending, chunk)
    seconds = max(0.0, view.busy_until - view.now)
    if full:
        seconds += full * view.latency.step_time(base.plus(chunk, 0))
    return seconds + (view.latency.step_time(base.plus(rest, 0)) if rest else 0.0)
