"""A prompt that is to be computed: when it has to be through, and how long that takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policies.rubato_pd.prefill_step import prompt_due, seconds_in_turns
from rubato.policy_kit.batch_builder import remaining_output


@dataclass(slots=True)
class Prompt:
    """A request whose prompt is to be computed. order: by which prefill replicas take it up (`prompt_due`); due: when
    it has to be through, in seconds as all times; until: when it is given up, inf for one that is promised nothing;
    tokens: of the prompt; left: of output expected; alone: seconds it takes at best, on the fastest replica; work:
    seconds in the chunks that prefill replicas run."""

    seq: SeqView
    tier: int
    order: float
    due: float
    until: float
    tokens: int
    left: float
    alone: float
    work: float


def tier_of(tpot: float, tiers: Sequence[float]) -> int:
    """The loosest tier that is no looser; -1 where none is."""
    return bisect_right(tiers, tpot * (1.0 + 1e-9)) - 1


def promised(
    seq: SeqView, tiers: Sequence[float], fleet: Sequence[View], now: float, token_moves: float
) -> Prompt | None:
    """Of a request with an SLO. None for a TPOT that no tier, or no replica, keeps. With an e2e SLO it belongs to the
    loosest tier that ends in time, and its next token is due when the rest follow at that tier's pace. tiers: TPOTs in
    seconds, ascending. token_moves: seconds that the KV of a token is on its way to where it decodes."""
    slo, last, left = seq.request.stages[seq.stage].slo, seq.due, remaining_output(seq)
    kinds = {(id(view.latency), view.limits.max_num_batched_tokens): view for view in fleet}
    alone = min([prefill_time(view.latency, seq.pending, 0, most) for (_, most), view in kinds.items()])
    tier = len(tiers) - 1
    if slo.tpot is not None:
        tier = tier_of(slo.tpot, tiers)
    if slo.e2e is not None:
        end = seq.request.arrival + slo.e2e + seq.tool_seconds
        while tier > 0 and min(last, end - left * tiers[tier]) - alone < now:
            tier -= 1
        last = min(last, end - left * tiers[tier])
    decode = min([view.latency.step_time(Shape(1, 1, int(seq.length + left))) for view in kinds.values()])
    if tier < 0 or decode > tiers[tier]:
        return None
    order = due = prompt_due(seq)
    until = inf
    if last < inf:
        due = last
        moves = seq.length * token_moves
        ideal = last - (seq.due - order) - moves
        # or the second token at least is in time, which waits for a step, and takes one
        last = min(last, last + (slo.tpot or inf) - moves - 2.0 * decode)
        due = last - max(0.0, min(last - ideal, 0.5 * (last - now - alone)))
        until = due - alone
    work = min([seconds_in_turns(view.latency, seq.pending) for view in kinds.values()])
    return Prompt(seq, tier, order, due, until, seq.pending, left, alone, work)


def unpromised(seq: SeqView, tiers: Sequence[float], view: View) -> Prompt:
    """Of best effort, and of what is too late: it comes before all others."""
    work, left = seconds_in_turns(view.latency, seq.pending), remaining_output(seq)
    return Prompt(seq, len(tiers) - 1, -inf, -inf, inf, seq.pending, left, work, work)
