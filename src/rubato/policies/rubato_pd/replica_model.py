"""The router's account of a replica: its prompts and residents, and whether one more fits."""

from __future__ import annotations

from math import inf

from rubato.core.interfaces import View
from rubato.policies.rubato_pd.prompt import PromptPlan
from rubato.policy_kit.step_table import StepTable
from rubato.policy_kit.tier_fleet import BookedReplica

# Lateness of steps that a waiting prompt must survive: half a step of 2,048 tokens.
MAX_STEP_DELAY_S = 0.02
# A prompt is sent to a replica only if it can begin there within this time. Until then it may still go elsewhere, and
# prompts that are due earlier may overtake it; 0.05 and 0.2 hold as much.
MAX_PREFILL_WAIT_S = 0.1


class FleetReplica(BookedReplica):
    """A replica with the prompts that it computes for others. pace: how many times the seconds of the fastest replica a
    prompt takes."""

    prompts: dict[str, PromptPlan]

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        super().__init__(view, index, tiers, steps)
        self.role = view.role
        self.pace = 1.0

    @property
    def others(self) -> int:
        """Residents of no tier."""
        return len(self.forecast) - sum(self.residents)

    def show(self, view: View) -> None:
        super().show(view)
        self.best_effort_tokens = 0  # tokens of best effort placed here since it last showed its view
        self._line = None
        self.steps.renew(view.now)
        if self.predict_overdue(view.steps):
            self._rank = None

    def wait(self) -> float:
        """Seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - self.view.now)

    # ----------------------------------------------------------------- decodes

    def has_slot(self, length: int, left: float, tpot: float = inf) -> bool:
        """Returns whether one more request of `length` tokens, with `left` to come, always has KV and steps within
        `tpot` seconds."""
        count = len(self.forecast) + 1
        if count > self.view.limits.max_num_seqs:
            return False
        peak = int(length + left)
        if count > 1:
            peak = self.forecast.peak_with(length, left, self.view.steps)
        return peak <= self.capacity and self.steps.decodes(count, peak) <= tpot

    def fullness(self, tpot: float) -> float:
        """Returns the used share of the scarcest resource with steps of `tpot` seconds: step time, KV or places."""
        count = len(self.forecast)
        if not count:
            return 0.0
        least = self.steps.decodes(1, 1)
        step = (self.load - least) / max(0.001, tpot - least)
        kv = self.forecast.peak(self.view.steps) / self.capacity
        return max(step, kv, count / self.view.limits.max_num_seqs)

    def share(self, length: float, left: float, tpot: float) -> float:
        """Returns the share of this replica that one resident takes among others of its tier: of step time or KV."""
        steps, limits = self.steps, self.view.limits
        least, some = steps.decodes(1, 1), steps.decodes(64, 4096)
        room = max(0.001, tpot - least)
        each = max((some - least) / 64 / room, 1.0 / limits.max_num_seqs)
        token = max((steps.decodes(64, 208896) - some) / 204800 / room, 1.0 / self.capacity)
        return each + token * (length + left / 2.0)

    # ----------------------------------------------------------------- prompts

    def seconds_before(self, prompt: PromptPlan) -> float | None:
        """Returns the seconds of work before a prompt here; None if it could not begin soon, or if it or a prompt here
        would become late. A prompt that is late already does not count."""
        now, by = self.view.now, prompt.order if prompt.until < inf else inf
        at = begins = now + self.wait()
        own, is_in_line = prompt.work * self.pace, False
        for order, due, seconds, least in self._waiting_line():
            if not is_in_line and order > by:
                begins, is_in_line = at, True
                at += own
            at += seconds if at + seconds <= due else least  # in few steps, where it is urgent
            if at + MAX_STEP_DELAY_S > due >= at - own * is_in_line:
                return None
        if not is_in_line:
            begins = at
        slack = MAX_STEP_DELAY_S if self._line else 0.0
        late = prompt.until < inf and begins + prompt.isolated_seconds * self.pace + slack > prompt.due
        return None if late or begins - now > MAX_PREFILL_WAIT_S else at - own * is_in_line - now

    def _waiting_line(self) -> list[tuple[float, float, float, float]]:
        """Returns the prompts here in order, as (order, due, remaining seconds, least seconds), without the step in
        flight. Best effort runs last but counts as first: nothing more is sent until it is done."""
        if self._line is None:
            known, line = self.view.known, []
            for id, prompt in self.prompts.items():
                seq = known.get(id)
                left = prompt.tokens if seq is None else max(0, seq.pending - seq.in_flight)
                if left > 1 or seq is None:
                    order, due = (prompt.order, prompt.due) if prompt.until < inf else (-inf, inf)
                    part = self.pace * left / prompt.tokens
                    line.append((order, due, prompt.work * part, prompt.isolated_seconds * part))
            line.sort()
            self._line = line
        return self._line
