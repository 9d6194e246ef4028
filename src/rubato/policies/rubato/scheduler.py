"""One replica's step: which prompts can be in time and have room, and which tokens the step computes.

1. Time. Prompts are jobs of one machine, by deadline. What is left for them up to a deadline is the time until then,
   less the steps that must start in it, less a token of each decode as often as one falls due. A decode that is ahead
   of its deadlines needs nothing meanwhile, so a step may leave it out. When not all prompts can be in time, the
   heaviest are left until the others are (Moore and Hodgson), for several lengths of a step; the shortest one that
   leaves fewest is taken.
2. Room. A prompt begins when the KV that all are expected to hold together never exceeds what there is
   (`KVSurvival`).
3. The step (`batch`).

No request is given up before it is sure: one that could not be in time even alone, or was late, is best effort from
then on. The oldest of these has memory kept for it and gets a turn, so that none starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import numpy as np

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan, Shape
from rubato.policies.rubato.batch import StepBatch
from rubato.policies.rubato.drafts import Drafts
from rubato.policies.rubato.requests import Requests, has_e2e
from rubato.policies.rubato.supply import LADDER, Array, DecodeSteps, Job, StepErrors, left_out
from rubato.policies.rubato_pd.prefill_step import prefill_step
from rubato.policy_kit.batch_builder import decodes_only
from rubato.policy_kit.kv_survival import KVSurvival, OutputRatios
from rubato.policy_kit.refusals import refusals

AVERAGE = 0.5  # of `risk`: over the many steps up to a deadline errors cancel out
AHEAD = 0.75  # of the time that decodes are ahead, which a step may take when all prompts have time
# Memory left free by a prompt that costs twice what others do, or more, where every request is lost; with fewer losses
# less: ChatBot gains 2 points by it, others nothing.
PRICE = 0.3
DECIDED = 128  # prompts looked at in one plan: those due first


@dataclass
class Scheduler:
    """Plans each step by deadline, within time and memory.

    Args:
        risk ([0, inf)): standard deviations of a step's time, as predictions have been off of late, that are kept
            before a deadline
        deadline_reserve ([0, inf)): seconds kept there too, for delivery
        patience ((0, inf)): seconds in which a prompt without a TTFT is due, and after which the oldest best effort has
            turns
        fairness ([0, inf)): how strongly a tier that lost more is favoured when prompts are left out; 0: not
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    uses: ClassVar[frozenset[str]] = frozenset({"draft", "tree", "handoff", "kv_transfer"})
    risk: float = 3.0
    deadline_reserve: float = 0.001
    patience: float = 4.0
    fairness: float = 5.0
    _requests: Requests = field(init=False, repr=False)
    _errors: StepErrors = field(default_factory=StepErrors, init=False, repr=False)
    _drafts: Drafts = field(default_factory=Drafts, init=False, repr=False)
    _ratios: OutputRatios = field(default_factory=OutputRatios, init=False, repr=False)
    _turn: int = field(default=0, init=False)  # steps since the oldest best effort had one

    def __post_init__(self) -> None:
        if min(self.risk, self.deadline_reserve, self.fairness) < 0.0 or not self.patience > 0.0:
            raise ValueError(
                f"risk {self.risk}, deadline_reserve {self.deadline_reserve}, fairness {self.fairness} must be 0 or "
                f"more, patience {self.patience} above 0"
            )
        self._requests = Requests(self.patience, self.fairness)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff):
                finished = isinstance(event, Finished)
                kind, expected = self._requests.left(event.id, finished)
                if expected and isinstance(event, Finished) and event.outcome == "completed":
                    self._ratios.add(kind, event.output / expected)

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return prefill_step(view)
        if view.role.phase == "decode":
            return decodes_only(view)
        self._errors.learn(view)
        doubt = self.risk * self._errors.spread(view.latency.spread)
        self._requests.steps_take(self._errors.slower * view.latency.step_time(Shape(1, 1, 1)), self._errors.usual)
        parts = self._requests.parts(view)
        entry = self._drafts.entry(view, parts.decodes)
        parts.in_order(view.now, self._errors.lead, doubt, self.deadline_reserve, entry)
        steps = DecodeSteps(view, parts.decodes, doubt, self.deadline_reserve, self._errors.slower, entry)
        drop = refusals(parts.late, view)
        if drop:
            parts.queued = [s for s in parts.queued if s.id not in drop]
            parts.held = [s for s in parts.held if s.id not in drop]
        oldest = self._requests.oldest(view, parts)
        tiers = self._requests.losses.weights()
        kept, longest, laxity = self._in_time(view, steps, parts.prompts, tiers)
        kept = self._with_room(view, steps.decodes, kept, oldest, tiers)
        floor = steps.shortest() if self._errors.lead else 0.0
        batch = StepBatch(view, steps, parts, kept, oldest, floor)
        self._turn = 0 if batch.fill(longest, laxity, self._turn + 1) else self._turn + 1
        self._errors.planned(view.now, batch.seconds())
        return batch.plan(demote=[s.id for s in parts.late if s.id not in drop and not s.demoted], drop=drop)

    # ----------------------------------------------------------------- time

    def _in_time(
        self, view: View, steps: DecodeSteps, prompts: Sequence[Job], tiers: Mapping[str, float]
    ) -> tuple[list[Job], float, float]:
        """The prompts that can be in time together; the longest step for that; seconds that all of them can spare.
        tiers: what their prompts weigh (`TierLosses`).

        By deadline, but the shortest that has an e2e goes first, as far as those due before it can wait, and have a
        place even so: what it leaves of its deadline is its session's next turn's."""
        ladder = [steps.unit * rung for rung in LADDER]
        if not prompts:
            return [], ladder[0], inf
        prompts = prompts[:DECIDED]
        seconds = [steps.seconds_more(job) for job in prompts]
        weights = [s * tiers.get(job.seq.request.tier, 1.0) for s, job in zip(seconds, prompts, strict=True)]
        gone, longest, room = self._fewest_left_out(steps, ladder, prompts, seconds, weights)
        hopeless = len(gone) == len(prompts)
        if hopeless:  # nothing is promised, but it may yet be that the lightest ends in time
            gone.discard(min(gone, key=lambda i: seconds[i]))
        if hopeless or not gone:  # nothing else is there to do: prefill as much as decodes can bear
            longest = max(longest, min(ladder[-1], AHEAD * (steps.first_due() - steps.now)))
        kept: list[Job] = []
        most, running = view.limits.max_running, view.running_ids
        places = inf if most is None else most - len(running)
        total, laxity, first, least = 0.0, inf, 0, inf
        for i, job in enumerate(prompts):
            if i not in gone:
                places -= job.id not in running
                if places >= 0 and has_e2e(job.seq) and seconds[i] < min(least, laxity):
                    first, least = len(kept), seconds[i]
                total += seconds[i]
                laxity = min(laxity, float(room[i]) - total)
                kept.append(job)
        kept.insert(0, kept.pop(first))
        return kept, longest, laxity

    def _fewest_left_out(
        self, steps: DecodeSteps, ladder: Sequence[float], prompts: Sequence[Job], seconds: Sequence[float],
        weights: Sequence[float],
    ) -> tuple[set[int], float, Array]:  # fmt: skip
        """The prompts left out at the first length of a step that leaves out fewest; that length; and the seconds that
        there are for prompts up to each one's deadline."""
        span = np.array([job.due for job in prompts]) - steps.now
        owed, tokens = steps.owed(span)
        supply = span - steps.reserve - tokens * steps.each
        errors = AVERAGE * steps.doubt * np.sqrt(np.maximum(span, 0.0))
        best: tuple[set[int], float, Array] | None = None
        for longest in ladder:
            count = np.maximum(owed, np.where(span > longest, span / longest + 1.0, 1.0))
            room = supply - count * steps.base - errors * longest**0.5
            gone = left_out(seconds, weights, room)
            if best is None or len(gone) < len(best[0]):
                best = gone, longest, room
            if not gone:
                break
        assert best is not None
        return best

    # ----------------------------------------------------------------- room

    def _with_room(
        self, view: View, decodes: Sequence[Job], kept: list[Job], oldest: SeqView | None, tiers: Mapping[str, float]
    ) -> list[Job]:
        """Of these prompts, those that have begun, and those that may: what holds least KV for least time first."""
        running = view.running_ids
        fresh = [job for job in kept if job.id not in running]
        if not fresh:
            return kept
        begun = [*decodes, *(job for job in kept if job.id in running)]
        held = [job.seq for job in begun] + ([oldest] if oldest is not None else [])
        resident = self._requests.resident
        residents = [resident(seq) for seq in held] + [resident(job.seq) for job in fresh]
        forecast = KVSurvival(view, self._ratios, residents)
        forecast.add(slice(0, len(held)))
        costs = [forecast.cost(i) for i in range(len(residents))]
        mean = sum(costs) / len(costs)
        lost = self._requests.losses.share()
        weights = {
            i: costs[i] * tiers.get(fresh[i - len(held)].seq.request.tier, 1.0)
            for i in range(len(held), len(residents))
        }
        fit = set()
        for i in sorted(weights, key=lambda i: weights[i]):
            job = fresh[i - len(held)]
            kept_free = PRICE * min(1.0, lost * max(0.0, weights[i] / mean - 1.0))
            if forecast.fits(i, 1.0 - kept_free):
                forecast.add(slice(i, i + 1))
                fit.add(job.id)
        return [job for job in kept if job.id in running or job.id in fit]
