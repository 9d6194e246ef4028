"""Plans the steps of a full engine in which nothing is to be chosen: at a fraction of the cost of `Scheduler.plan`,
whose plan it is.

While decodes have all slots, no prompt starts, and the choice among prompts only bounds the step: by the first decode's
and the first prompt's deadline, and by a step length, which is never below 1.25 steps of all decodes. So if a step of
all decodes ends before these deadlines, the plan is that step. This holds until a request comes, ends or becomes late,
or the oldest best effort becomes old enough for turns. Then all requests are looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import numpy as np

from rubato.core.interfaces import SeqView, View
from rubato.core.request import Request
from rubato.policies.rubato.requests import PlanCandidates, RequestBook, has_e2e
from rubato.policies.rubato.supply import MAX_LEAD_STEPS, SLACK_SHARE, Array, StepErrors, Task
from rubato.policy_kit.batch_builder import BatchBuilder

MISSED = attrgetter("missed")
ROUNDING = 1.0 + 1e-9  # the plan's own bounds are rounded otherwise


@dataclass(slots=True)
class _State:
    """Holds what a plan found.

    Args:
        waiting: the view's.
        requests: that run.
        tpots: of these (s).
        prompt_due: when the first prompt is due (s).
        until: when a waiting request becomes late, or best effort gets turns (s).
        steps: that may pass before a decode has more output than its prediction can explain.
        unpredicted: a decode of unknown length.
    """

    waiting: Sequence[SeqView]
    requests: list[Request]
    tpots: Array
    prompt_due: float
    until: float
    steps: int
    unpredicted: SeqView | None


class FullEngine:
    """Remembers the last plan of all requests; `reserve` seconds are kept before a deadline."""

    def __init__(self, reserve: float) -> None:
        self._reserve = reserve
        self._state: _State | None = None

    def remember(
        self, view: View, decodes: Sequence[Task], candidates: PlanCandidates, requests: RequestBook,
        oldest: SeqView | None,
    ) -> None:  # fmt: skip
        """Remembers what a plan of all requests found, if decodes, here in the view's order, fill the engine."""
        self._state, most = None, view.limits.max_running
        is_full = decodes and most is not None and len(decodes) == len(view.running) >= most
        if not is_full or candidates.late or view.slo_rule == "windowed" or "draft" in view.supports:
            return
        for seq in [job.seq for job in decodes]:  # what says more than its due time, or may change with a token
            request = seq.request
            if has_e2e(seq) or request.on_decline == "refuse" or len(request.stages) > 1 or not seq.output:
                return
        until = requests.find_next_change(candidates, oldest)
        if not view.now < until or not isinstance(view.waiting, tuple):
            return
        steps, unpredicted = requests.sure_steps([job.seq for job in decodes])
        self._state = _State(
            view.waiting, [s.request for s in view.running], np.array([job.tpot for job in decodes]),
            min([job.due for job in candidates.prompts], default=inf), until, steps, unpredicted,
        )  # fmt: skip

    def find_batch(self, view: View, errors: StepErrors, doubt: float) -> BatchBuilder | None:
        """Returns the batch of all decodes if that is the plan, None if all requests must be looked at."""
        state, now, running = self._state, view.now, view.running
        if state is None or view.waiting is not state.waiting or not now < state.until or not state.steps:
            return None
        if view.decodes.seqs != len(running) or [s.request for s in running] != state.requests:
            return None
        if (seq := state.unpredicted) is not None and seq.predicted is not None:
            return None
        state.steps -= 1
        due, tpots = view.dues, state.tpots
        if due.min() < now or any(map(MISSED, running)):
            return None
        # As `requests._with_lead` has it, all at once.
        ahead, soon = np.minimum(errors.lead, MAX_LEAD_STEPS * tpots), now + (1.0 - SLACK_SHARE) * tpots
        in_time = now + (due - now - self._reserve) / (1.0 + doubt)
        first = np.minimum(np.maximum(due - ahead, np.minimum(due, soon)), in_time).min()
        spare = min(first - now, (state.prompt_due - now - self._reserve) / (1.0 + doubt))
        if not errors.slower * view.latency.step_time(view.decodes) * ROUNDING <= spare:
            return None
        builder = BatchBuilder(view)
        return builder if builder.decode_all() else None
