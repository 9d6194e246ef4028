"""The router's account of a replica that serves one TPOT: admitted work, and whether one more request fits."""

from __future__ import annotations

from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.policies.rubato.supply import SLACK_SHARE
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.step_table import StepTable


class ReplicaLoad:
    """A replica and its requests during one dispatch.

    Args:
        view: the replica
        tpot: the tightest TPOT that it serves, in seconds
        steps: its step times

    `prompts` are (due, remaining seconds). `others` counts best effort, `other_prompts` best effort before its first
    token.
    """

    def __init__(self, view: View, tpot: float, steps: StepTable) -> None:
        self.view, self.tpot, self.steps = view, tpot, steps
        self.count = self.kv = self.decodes = self.decodes_kv = self.others = self.other_prompts = 0
        self.first_due = inf
        self.prompts: list[tuple[float, float]] = []
        for seq in view.known.values():
            self.add(seq)

    def add(self, seq: SeqView) -> None:
        if seq.best_effort:
            self.others += 1
            self.other_prompts += seq.pending > 1
            return
        self.count += 1
        self.kv += seq.length
        if seq.pending > 1:
            # Without the fixed cost of a step, which it shares.
            seconds = self.steps.isolated_seconds(seq.pending - seq.in_flight) - self.steps.decodes(1, 1)
            self.prompts.append((seq.due, max(0.0, seconds)))
            return
        self.decodes += 1
        self.decodes_kv += seq.length
        due = seq.due + ((seq.slo.tpot or inf) if seq.in_flight else 0.0)
        if due >= self.view.now:
            self.first_due = min(self.first_due, due)

    @property
    def load(self) -> float:
        """Returns the seconds of a step with a token of every request here, and of their prompts."""
        step = self.steps.decodes(self.count, self.kv) if self.count else 0.0
        return step + sum([seconds for _, seconds in self.prompts])

    def can_keep(self, seq: SeqView, tpot: float, now: float) -> bool:
        """Returns whether one more request fits: its KV, steps within its TPOT and the replica's, and time for its
        prompt and for prompts due later. Prompts get all the time until the first decode is due, then the part of each
        TPOT that decodes leave."""
        tpot, limits, output_left = min(tpot, self.tpot), self.view.limits, remaining_output(seq)
        if (
            self.count >= limits.max_num_seqs
            or self.kv + seq.length + output_left > self.view.kv_total * limits.block_size
        ):
            return False
        if self.steps.decodes(self.count + 1, int(self.kv + seq.length + output_left / 2)) > tpot:
            return False
        at = max(now, self.view.busy_until)
        ahead = max(0.0, self.first_due - tpot - at)
        decodes = self.steps.decodes(self.decodes, self.decodes_kv) if self.decodes else 0.0
        rest = max(1e-3, 1.0 - decodes / tpot)

        def end(seconds: float) -> float:
            return at + min(seconds, ahead) + max(0.0, seconds - ahead) / rest

        # Steps are off by a little, for which the replica's scheduler keeps as much slack.
        own = (1.0 + SLACK_SHARE) * self.steps.isolated_seconds(seq.pending)
        total = sum([seconds for due, seconds in self.prompts if due <= seq.due])
        if end(total + own) > seq.due:
            return False
        for due, seconds in sorted([prompt for prompt in self.prompts if prompt[0] > seq.due]):
            total += seconds
            if end(total) <= due < end(total + own):
                return False
        return True
