"""Earliest deadline first, by the step: chunks end before the next token is due; late requests become best effort.

For tiers with TTFTs and TPOTs near and beyond capacity, output lengths unknown. docs/policies/edf.md says when to take
it, and where it loses.

Each step takes every strict decode and then prefill in order of deadline, as much as ends before the tightest token
that is due, less a lead. The waiting prefills to try are chosen by Moore and Hodgson's rule (`prefill_jobs`), with
tiers that lag protected. All others are best effort: they get what is left of each step, and the oldest gets a turn.
"""

from rubato.policies.edf.scheduler import Scheduler

__all__ = ["SOURCE", "Scheduler"]

SOURCE = "ours; EDF (Liu and Layland 1973) for the order, Moore (1968) for which prefills to set aside"
