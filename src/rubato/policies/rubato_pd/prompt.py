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

MAX_RESERVE_SHARE = 0.5  # of the time left beyond the prefill alone, which a prompt gives up to be early


@dataclass(slots=True)
class PromptPlan:
    """A request whose prompt is to be computed. All times are in seconds.

    Args:
        seq: the request
        tier: its tier
        order: sort key at prefill replicas (`prompt_due`)
        due: time by which the prompt has to be through
        until: time at which it is given up; inf: nothing is promised to it
        tokens: of the prompt
        output_left: output tokens to come, as predicted
        isolated_seconds: that the prompt takes at best, alone on the fastest replica
        work: seconds that it takes in the chunks of prefill replicas, on the fastest one
    """

    seq: SeqView
    tier: int
    order: float
    due: float
    until: float
    tokens: int
    output_left: float
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
        the plan; None for a TPOT that no tier, or no replica, keeps
    """
    slo, output_left = seq.slo, remaining_output(seq)
    kinds = {(id(view.latency), view.limits.max_num_batched_tokens): view for view in fleet}
    isolated_seconds = min([prefill_time(view.latency, seq.pending, 0, most) for (_, most), view in kinds.items()])
    tier, token_due = tier_and_due(seq, tiers, output_left, isolated_seconds, now)
    decode = min([view.latency.step_time(Shape.decodes(1, int(seq.length + output_left))) for view in kinds.values()])
    if tier < 0 or decode > tiers[tier]:
        return None
    order = due = prompt_due(seq)
    until = inf
    if token_due < inf:
        transfer = seq.length * token_moves
        # Ideally the prompt ends a TPOT (`prompt_due`) and the transfer of its KV before its token is due.
        ideal = token_due - (seq.due - order) - transfer
        # At the latest, the second token is still in time, which waits for a step and takes one.
        latest = min(token_due, token_due + (slo.tpot or inf) - transfer - 2.0 * decode)
        reserve = max(0.0, min(latest - ideal, MAX_RESERVE_SHARE * (latest - now - isolated_seconds)))
        due = latest - reserve
        until = due - isolated_seconds
    work = min([seconds_in_turns(view.latency, seq.pending) for view in kinds.values()])
    return PromptPlan(seq, tier, order, due, until, seq.pending, output_left, isolated_seconds, work)


def plan_best_effort_prompt(seq: SeqView, tiers: Sequence[float], view: View) -> PromptPlan:
    """Plans the prompt of a best-effort or late request, which goes before all others."""
    work, output_left = seconds_in_turns(view.latency, seq.pending), remaining_output(seq)
    return PromptPlan(seq, len(tiers) - 1, -inf, -inf, inf, seq.pending, output_left, work, work)
