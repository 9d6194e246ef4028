"""Plans a PolyServe replica's steps: prompts by deadline, decodes alone, or chunks with decodes within the TPOT."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import ClassVar

from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Plan, Shape
from rubato.policy_kit.batch_builder import decode_first, decodes_only
from rubato.policy_kit.prefill_queue import nearest_due_first
from rubato.policy_kit.stateless import Stateless

PREFILL_BATCH_TOKENS = 2048  # tokens of a prefill batch, by which the router prices prompts, too


@dataclass
class Scheduler(Stateless):
    """Plans the steps of a replica in the role that the router gives it.

    Args:
        budget ([1, inf)): tokens of a batch of a prefill replica, and of the pool (§4.7); a prompt with less than twice
            as many left runs in one step
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    uses: ClassVar[frozenset[str]] = frozenset({"handoff", "kv_transfer"})
    budget: int = PREFILL_BATCH_TOKENS

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget is {self.budget}: give the tokens of a prefill batch, at least 1")

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return nearest_due_first(view, self.budget, prompt_due, lambda seq: by_deadline(seq, view.now)[0])
        if view.role.phase == "decode":
            return decodes_only(view)
        return self._mixed(view)

    def _mixed(self, view: View) -> Plan:
        """Plans every decode, and a chunk that keeps the step within the TPOT even at the prompt's end (continuous
        chunked-prefill prediction): so the chunk stays the same for all of the prompt.

        Where that leaves some of the prompts for later, decodes that are ahead of their deadlines lend their lead, all
        but a TPOT of it: the step may last that much longer, unless a prompt is due before.
        """
        tpot = float(view.role.tier) if view.role.tier else inf
        decodes = view.decodes
        first = next(iter(view.prefilling), None) or next(iter(view.waiting), None)
        budget = self.budget if tpot == inf else view.limits.max_num_batched_tokens
        takes_all = True
        if first is not None and tpot < inf:
            most = budget - decodes.seqs
            chunk = min(first.pending, most)
            if decodes.seqs:
                chunk = steady_chunk(view.latency, tpot, decodes, first, most)
            wanted = min(most, view.pending - decodes.seqs)
            if chunk < wanted:
                takes_all = False
                chunk = max(chunk, _chunk_in_lead(view, tpot, decodes, wanted))
            budget = decodes.seqs + chunk
        builder = decode_first(view, budget)
        return builder.plan(repeat_steps=builder.repeat_steps() if takes_all else 0)  # the lead changes with each step


def by_deadline(seq: SeqView, now: float) -> tuple[float, float]:
    """Returns a sort key: by deadline, late requests and best effort last; ties in order of arrival."""
    due = seq.due
    return (inf if seq.best_effort or due < now else due, seq.request.arrival)


def prompt_due(seq: SeqView) -> float:
    """Returns when a prompt that decodes elsewhere has to be through, without the time to move its KV: a TPOT before
    its first token is due, since the second one waits for the end of a step there; inf for best effort."""
    return inf if seq.best_effort else seq.due - (seq.slo.tpot or 0.0)


def first_prompt_due(view: View) -> float:
    """Returns when the first prompt here is due that is not late."""
    now = view.now
    return min([due for s in (*view.prefilling, *view.waiting) if (due := s.due) > now], default=inf)


def _chunk_in_lead(view: View, tpot: float, decodes: Shape, most: int) -> int:
    """Returns the tokens of prompts, up to `most`, for a step that ends a TPOT before the first decode is due. If the
    step goes on after it completes a prompt, it ends a TPOT before that prompt is due, too."""
    tokens, until = 0, view.first_decode_due - tpot
    for seq in (*view.prefilling, *view.waiting):
        wanted = min(tokens + seq.pending, most)
        room = view.latency.largest_chunk(until - view.now, decodes, seq.cached, wanted)
        if room < wanted or wanted == most:
            return max(tokens, room)
        tokens = room
        if seq.due > view.now:
            until = min(until, seq.due - tpot)
    return tokens


def steady_chunk(latency: LatencyModel, tpot: float, decodes: Shape, seq: SeqView, most: int) -> int:
    """Returns the tokens of prompts that each step can take until this prompt is through, while each decode grows by a
    token a step; at least 1, or it would never end."""
    chunk = max(1, latency.largest_chunk(tpot, decodes, seq.cached, most))
    rounds = ceil(seq.pending / chunk)
    if rounds == 1:
        return chunk
    grown = decodes._replace(kv=decodes.kv + decodes.seqs * rounds)
    return max(1, latency.largest_chunk(tpot, grown, seq.length - chunk, most))
