"""Plans a prompt: its deadline, and the seconds that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policies.rubato_pd.prefill_step import prompt_due, seconds_in_turns
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.tier_fleet import tier_and_due


@dataclass(slots=True)
class PromptPlan:
    """A request whose prompt is to be computed. order: sort key at prefill replicas (`prompt_due`); due: when
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
    isolated_seconds: float
    work: float


def plan_prompt(
    seq: SeqView, tiers: Sequence[float], fleet: Sequence[View], now: float, token_moves: float
) -> PromptPlan | None:
    """Plans the prompt of a request with an SLO.

    Args:
        seq: the request
        tiers: TPOTs in seconds, ascending
        fleet: all replicas
        now: seconds
        token_moves: seconds that the KV of one token takes to its decode replica

    Returns:
        None for a TPOT that no tier, or no replica, keeps
    """
    slo, left = seq.slo, remaining_output(seq)
    kinds = {(id(view.latency), view.limits.max_num_batched_tokens): view for view in fleet}
    isolated_seconds = min([prefill_time(view.latency, seq.pending, 0, most) for (_, most), view in kinds.items()])
    tier, last = tier_and_due(seq, tiers, left, isolated_seconds, now)
    decode = min([view.latency.step_time(Shape.decodes(1, int(seq.length + left))) for view in kinds.values()])
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
        due = last - max(0.0, min(last - ideal, 0.5 * (last - now - isolated_seconds)))
        until = due - isolated_seconds
    work = min([seconds_in_turns(view.latency, seq.pending) for view in kinds.values()])
    return PromptPlan(seq, tier, order, due, until, seq.pending, left, isolated_seconds, work)


def plan_best_effort_prompt(seq: SeqView, tiers: Sequence[float], view: View) -> PromptPlan:
    """Plans the prompt of a best-effort or late request, which goes before all others."""
    work, left = seconds_in_turns(view.latency, seq.pending), remaining_output(seq)
    return PromptPlan(seq, len(tiers) - 1, -inf, -inf, inf, seq.pending, left, work, work)
