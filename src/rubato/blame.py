"""Who is to blame for a step's time: what each sequence lost to others, by cause."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.interfaces import LatencyModel
from rubato.seq import Seq
from rubato.types import Batch, Cause, Shape


def blame(
    batch: Batch, seconds: float, seqs: Mapping[str, Seq], running: Mapping[str, Seq], latency: LatencyModel
) -> None:
    """Attribute a step of `seconds`, for every running sequence, to what it would not have taken alone.

    Shares come from the latency model: whole batch, the batch's decodes, this entry by itself.
    """
    whole = batch.shape
    predicted = latency.step_time(whole)
    scale = seconds / predicted if predicted > 0.0 else 0.0
    decodes = Shape()
    for entry in batch.entries:
        if entry.count == 1 or entry.count == 1 + len(entry.verify):
            decodes = decodes.plus(entry.count, entry.start)
    with_decodes = latency.step_time(decodes) if decodes.seqs else 0.0
    one = latency.step_time(Shape().plus(1, decodes.kv // decodes.seqs)) if decodes.seqs else 0.0
    for entry in batch.entries:
        seq = seqs[entry.seq]
        if entry.count == 1 or entry.count == 1 + len(entry.verify):
            by_prefill, by_decode = predicted - with_decodes, with_decodes - one
        else:
            beside = latency.step_time(decodes.plus(entry.count, entry.start))
            alone = latency.step_time(Shape().plus(entry.count, entry.start))
            by_prefill, by_decode = predicted - beside, beside - alone
            if seq.total_output:  # its prefill is the price of a preemption
                seq.lose("preemption", alone * scale)
        seq.lose("prefill interference", by_prefill * scale)
        seq.lose("decode interference", by_decode * scale)
    in_batch = {entry.seq for entry in batch.entries}
    idle: Cause = "prefill interference" if whole.tokens > 2 * decodes.tokens else "decode interference"
    for seq in running.values():
        if seq.id not in in_batch:
            seq.lose(idle, seconds)
