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
# Steps of so many decodes, with little KV and with much more, tell what a decode and a token of KV add to a step.
PROBE_DECODES, PROBE_KV_TOKENS, PROBE_MORE_KV_TOKENS = 64, 4096, 204_800


class FleetReplica(BookedReplica):
    """A replica with the prompts that it computes for others.

    `pace` is how many times the seconds of the fastest replica a prompt takes here. `best_effort_tokens` are placed
    here since the replica last showed its view.
    """

    prompts: dict[str, PromptPlan]

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        super().__init__(view, index, tiers, steps)
        self.role = view.role
        self.pace = 1.0

    @property
    def best_effort_count(self) -> int:
        """Returns how many residents belong to no tier: best effort."""
        return len(self.forecast) - sum(self.residents)

    def show(self, view: View) -> None:
        super().show(view)
        self.best_effort_tokens = 0
        self._line = None
        self.steps.renew(view.now)
        if self.predict_overdue(view.steps):
            self._rank = None

    def wait(self) -> float:
        """Returns the seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - self.view.now)

    # ----------------------------------------------------------------- decodes

    def has_slot(self, length: int, output_left: float, tpot: float = inf) -> bool:
        """Returns whether one more request always has KV, and steps within `tpot` seconds.

        Args:
            length: tokens of the request so far
            output_left: output tokens to come
            tpot: seconds
        """
        count = len(self.forecast) + 1
        if count > self.view.limits.max_num_seqs:
            return False
        peak = int(length + output_left)
        if count > 1:
            peak = self.forecast.peak_with(length, output_left, self.view.steps)
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

    def share(self, length: float, output_left: float, tpot: float) -> float:
        """Returns the share of this replica's step time, places or KV that one resident takes among others of its tier;
        the arguments are as in `has_slot`."""
        steps, limits = self.steps, self.view.limits
        least, some = steps.decodes(1, 1), steps.decodes(PROBE_DECODES, PROBE_KV_TOKENS)
        more_kv = steps.decodes(PROBE_DECODES, PROBE_KV_TOKENS + PROBE_MORE_KV_TOKENS)
        room = max(0.001, tpot - least)
        each = max((some - least) / PROBE_DECODES / room, 1.0 / limits.max_num_seqs)
        token = max((more_kv - some) / PROBE_MORE_KV_TOKENS / room, 1.0 / self.capacity)
        return each + token * (length + output_left / 2.0)

    # ----------------------------------------------------------------- prompts

    def seconds_before(self, prompt: PromptPlan) -> float | None:
        """Returns the seconds of work before a prompt here; None if it could not begin soon, or if it or a prompt here
        would become late. A prompt that is late without it does not count."""
        now, own_order = self.view.now, prompt.order if prompt.until < inf else inf  # what is promised nothing: last
        at = begins = now + self.wait()  # when the prompts so far end, and when this one begins
        own, is_in_line = prompt.work * self.pace, False
        for order, due, seconds, least in self._waiting_line():
            if not is_in_line and order > own_order:
                begins, is_in_line = at, True
                at += own
            at += seconds if at + seconds <= due else least  # an urgent prompt runs in few steps
            without = at - own * is_in_line
            if without <= due < at + MAX_STEP_DELAY_S:  # in time without this prompt, and maybe late with it
                return None
        if not is_in_line:
            begins = at
        slack = MAX_STEP_DELAY_S if self._line else 0.0
        is_late = prompt.until < inf and begins + prompt.isolated_seconds * self.pace + slack > prompt.due
        return None if is_late or begins - now > MAX_PREFILL_WAIT_S else at - own * is_in_line - now

    def _waiting_line(self) -> list[tuple[float, float, float, float]]:
        """Returns the prompts here in order, as (order, due, remaining seconds, least seconds), without the step in
        flight. Best effort runs last but counts as first: nothing more is sent until it is done."""
        if self._line is None:
            known, line = self.view.known, []
            for id, prompt in self.prompts.items():
                seq = known.get(id)
                tokens = prompt.tokens if seq is None else max(0, seq.pending - seq.in_flight)
                if tokens > 1 or seq is None:
                    order, due = (prompt.order, prompt.due) if prompt.until < inf else (-inf, inf)
                    factor = self.pace * tokens / prompt.tokens
                    line.append((order, due, prompt.work * factor, prompt.isolated_seconds * factor))
            line.sort()
            self._line = line
        return self._line
