"""What a replica of PolyServe runs: prompts by deadline, decodes alone, or chunks beside decodes within the TPOT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Plan, Shape
from rubato.core.request import HandoffReason
from rubato.policy_kit.batch_builder import BatchBuilder, decode_first, decodes_only


@dataclass
class Scheduler:
    """budget: tokens of a prefill batch, and of a co-located one that serves best effort (§4.7)."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    uses: ClassVar[frozenset[str]] = frozenset({"handoff", "kv_transfer"})
    budget: int = 2048

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return self._prefill(view)
        if view.role.phase == "decode":
            return decodes_only(view)
        return self._mixed(view)

    def _prefill(self, view: View) -> Plan:
        """Nearest deadline first. Dynamic chunking: a prompt with less than two budgets left gets all of it; others
        only what is left of one."""
        builder = BatchBuilder(view)
        ready: dict[str, HandoffReason] = {s.id: "prefilled" for s in view.running if s.pending == 1}
        left = self.budget
        for seq in (*view.prefilling, *sorted(view.waiting, key=by_deadline)):
            most = min(seq.pending, left) if builder.work else dynamic_chunk(seq.pending, self.budget)
            tokens = min(most, builder.tokens_that_fit(seq))
            if tokens < 1 or (seq.id not in builder.running and builder.lacks(seq, seq.pending)):
                break
            builder.add(seq, tokens)
            left -= tokens
        return builder.plan(handoff=ready)

    def _mixed(self, view: View) -> Plan:
        """Every decode, and a chunk that keeps the step within the TPOT even at the prompt's end (continuous
        chunked-prefill prediction): so the chunk stays the same for all of it."""
        tpot = float(view.role.tier) if view.role.tier else inf
        decodes = view.decodes
        first = next(iter(view.prefilling), None) or next(iter(view.waiting), None)
        budget = self.budget if tpot == inf else view.limits.max_num_batched_tokens
        if first is not None and decodes.seqs and tpot < inf:
            budget = decodes.seqs + _steady_chunk(view.latency, tpot, decodes, first, budget - decodes.seqs)
        builder = decode_first(view, budget)
        return builder.plan(repeat_steps=builder.repeat_steps())


def check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget is {budget}: give the tokens of a prefill batch, at least 1")


def dynamic_chunk(left: int, budget: int) -> int:
    """Tokens of a prompt's next chunk: all of them, where less than two budgets are left."""
    return left if left < 2 * budget else budget


def by_deadline(seq: SeqView) -> tuple[float, float]:
    """A key to sort by: best effort last, ties in order of arrival."""
    return (inf if seq.best_effort else seq.due, seq.request.arrival)


def _steady_chunk(latency: LatencyModel, tpot: float, decodes: Shape, seq: SeqView, most: int) -> int:
    """Tokens of prompts that each step can take until this one is through, while each decode grows by a token a step;
    at least 1, or it would never end."""
    chunk = max(1, latency.largest_chunk(tpot, decodes, seq.cached, most))
    rounds = ceil(seq.pending / chunk)
    if rounds == 1:
        return chunk
    grown = decodes._replace(kv=decodes.kv + decodes.seqs * rounds)
    return max(1, latency.largest_chunk(tpot, grown, seq.length - chunk, most))
