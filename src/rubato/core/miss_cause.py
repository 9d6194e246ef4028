"""Seconds of a step that each sequence lost to others, by cause: what a miss is put down to."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Batch, Shape, later_draft_tokens
from rubato.core.request import Cause
from rubato.core.sequence import Seq

Shares = tuple[float, float]  # seconds of a step as the model has it: lost to prefill, and to decodes, of others


def of_decode(latency: LatencyModel, predicted: float, decodes: Shape) -> Shares:
    """What a step of `predicted` seconds costs each of its decodes, beyond a step of its own."""
    together = latency.step_time(decodes)
    drafts = Shape(spec_steps=decodes.spec_steps, draft_tokens=decodes.draft_tokens // decodes.seqs)
    alone = drafts.plus(1, decodes.kv // decodes.seqs)
    return predicted - together, together - latency.step_time(alone)


def of_chunk(latency: LatencyModel, predicted: float, decodes: Shape, tokens: int, start: int) -> tuple[Shares, float]:
    """The same for a chunk of prefill; and the seconds it takes alone."""
    beside = latency.step_time(decodes.plus(tokens, start))
    alone = latency.step_time(Shape().plus(tokens, start))
    return (predicted - beside, beside - alone), alone


def of_idle(whole: Shape, decodes: Shape) -> Cause:
    """Who had the step that a running sequence had no part in."""
    return "prefill interference" if whole.tokens > 2 * decodes.tokens else "decode interference"


def delays_by_cause(
    batch: Batch, seconds: float, seqs: Mapping[str, Seq], running: Mapping[str, Seq], latency: LatencyModel
) -> None:
    """Attribute a step of `seconds`, for every running sequence, to what it would not have taken alone.

    Shares come from the latency model: whole batch, the batch's decodes, this entry by itself.
    """
    whole = batch.shape
    predicted = latency.step_time(whole)
    scale = seconds / predicted if predicted > 0.0 else 0.0
    decodes, drafted = Shape(spec_steps=whole.spec_steps), 0  # drafts are for them
    for entry in batch.entries:
        if entry.count == 1 or entry.count == 1 + len(entry.verify):
            decodes = decodes.plus(entry.count, entry.start)
            drafted += later_draft_tokens(entry.draft) if entry.draft is not None else 0
    decodes = decodes._replace(draft_tokens=drafted)
    each = of_decode(latency, predicted, decodes) if decodes.seqs else (0.0, 0.0)
    for entry in batch.entries:
        seq = seqs[entry.seq]
        if entry.count == 1 or entry.count == 1 + len(entry.verify):
            by_prefill, by_decode = each
        else:
            (by_prefill, by_decode), alone = of_chunk(latency, predicted, decodes, entry.count, entry.start)
            if seq.resumed_by_recompute:  # its prefill is the price of a preemption
                seq.book_delay("preemption", alone * scale)
        seq.book_delay("prefill interference", by_prefill * scale)
        seq.book_delay("decode interference", by_decode * scale)
    in_batch = {entry.seq for entry in batch.entries}
    idle = of_idle(whole, decodes)
    for seq in running.values():
        if seq.id not in in_batch:
            seq.book_delay(idle, seconds)
