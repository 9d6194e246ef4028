"""What a replica that prefills for others runs in a step, and when a prompt there has to be through: the router plans
with the same rules."""

from __future__ import annotations

from math import inf

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.prefill_queue import nearest_due_first

# Tokens of a prefill step. Longer steps leave less room for a nearer deadline that comes in between, shorter ones read
# the weights more often: 4,096 loses 8 points on splitwise.
BUDGET = 2048
LEAD = 0.05  # seconds before its first token is due that a prompt is through at the earliest: its second token waits
MOVES = 0.1  # seconds that KV is taken to be on its way, of those that it took to be computed
PATIENCE = 5.0  # seconds after which what has no deadline is treated as if it were due


def prefill_step(view: View) -> Plan:
    """The nearest due first, begun or not, in chunks of `BUDGET` tokens, so that a prompt which has begun gives way to
    one that is due earlier; in as few steps as possible where it would be late otherwise, its KV's way included."""
    moves = MOVES * seconds_in_turns(view.latency, 1)
    return nearest_due_first(
        view,
        BUDGET,
        due=lambda seq: prompt_due(seq) - moves * seq.length,
        order=lambda seq: inf if seq.due < view.now else prompt_due(seq),
    )


def prompt_due(seq: SeqView) -> float:
    """When a prompt has to be through, in seconds of the view's clock, its KV's way apart: a token before its first one
    is due, since the second waits for the end of a step where it decodes. inf for best effort."""
    if seq.best_effort:
        return inf
    due = seq.due
    if due == inf:
        return seq.stage_start + PATIENCE
    return due - min(seq.request.stages[seq.stage].slo.tpot or 0.0, LEAD)


def seconds_in_turns(latency: LatencyModel, tokens: int) -> float:
    """Of a prompt in chunks of `BUDGET`; of a shorter one its part of a step that it shares."""
    if tokens < BUDGET:
        return prefill_time(latency, BUDGET, 0, BUDGET) * tokens / BUDGET
    return prefill_time(latency, tokens, 0, BUDGET)
