"""Plans the step of a prefill replica, and sets the deadlines of prompts there; the router uses the same rules."""

from __future__ import annotations

from math import inf

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.prefill_queue import nearest_due_first

# Longer steps make a nearer deadline wait, shorter ones read the weights more often: 4,096 loses 8 points on splitwise.
PREFILL_STEP_TOKENS = 2048
# Seconds before its first token is due that a prompt is through at the earliest: its second token waits.
MAX_PROMPT_LEAD_S = 0.05
TRANSFER_PER_PREFILL_TIME = 0.1  # share of the time in which KV was computed that its transfer is taken to last
PATIENCE_S = 5.0  # seconds after which what has no deadline is treated as if it were due


def prefill_step(view: View) -> Plan:
    """Plans prompts, nearest deadline first, in chunks of `PREFILL_STEP_TOKENS` tokens.

    A prompt that has begun gives way to one that is due earlier. A prompt that would be late otherwise, the transfer of
    its KV included, runs in as few steps as possible.
    """
    transfer_per_token = TRANSFER_PER_PREFILL_TIME * seconds_in_turns(view.latency, 1)
    return nearest_due_first(
        view,
        PREFILL_STEP_TOKENS,
        due=lambda seq: prompt_due(seq) - transfer_per_token * seq.length,
        order=lambda seq: inf if seq.due < view.now else prompt_due(seq),
    )


def prompt_due(seq: SeqView) -> float:
    """Returns when a prompt has to be through, without the transfer of its KV, in seconds of the view's clock: a TPOT
    before its first token is due, since the second one waits for the end of a step where it decodes; inf for best
    effort."""
    if seq.best_effort:
        return inf
    due = seq.due
    if due == inf:
        return seq.stage_start + PATIENCE_S
    return due - min(seq.slo.tpot or 0.0, MAX_PROMPT_LEAD_S)


def seconds_in_turns(latency: LatencyModel, tokens: int) -> float:
    """Returns the seconds of a prompt in chunks of `PREFILL_STEP_TOKENS`; of a shorter one its part of a step that it
    shares with others."""
    if tokens < PREFILL_STEP_TOKENS:
        return prefill_time(latency, PREFILL_STEP_TOKENS, 0, PREFILL_STEP_TOKENS) * tokens / PREFILL_STEP_TOKENS
    return prefill_time(latency, tokens, 0, PREFILL_STEP_TOKENS)
