"""What a replica has still to do: in seconds of prefill, and in tokens."""

from __future__ import annotations

from rubato.core.interfaces import View
from rubato.core.plan import Shape

DECODE_TO_COME_TOKENS = 64  # tokens that a request counts for beside its pending ones: its decode to come


def load(view: View, per_request: int = DECODE_TO_COME_TOKENS) -> int:
    """Pending tokens of all that are at a replica, and their decodes to come."""
    return view.pending + per_request * view.count


def prefill_seconds(view: View, prompt: int) -> float:
    """Expected until a replica, as it is now, has prefilled what waits and then `prompt` tokens more: full batches,
    decodes going on beside them. What is predicted of a request in the moment it is placed."""
    decodes = sum(seq.pending == 1 for seq in view.running)
    kv = sum(seq.length for seq in view.running)
    pending = prompt + sum(seq.pending for seq in view.waiting)
    pending += sum(seq.pending for seq in view.running if seq.pending > 1)
    chunk = max(1, view.limits.max_num_batched_tokens - decodes)
    base = Shape(decodes, decodes, kv)
    full, rest = divmod(pending, chunk)
    seconds = max(0.0, view.busy_until - view.now)
    if full:
        seconds += full * view.latency.step_time(base.plus(chunk, 0))
    return seconds + (view.latency.step_time(base.plus(rest, 0)) if rest else 0.0)
