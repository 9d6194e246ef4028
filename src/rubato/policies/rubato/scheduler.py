"""Plans one replica's steps: chooses the prompts that can be in time and have room, and fills the step.

1. Time. Prompts are jobs of one machine, by deadline. What is left for them up to a deadline is the time until then,
   less the steps that must start in it, less a token of each decode as often as one falls due. A decode that is ahead
   of its deadlines needs nothing meanwhile, so a step may leave it out. When not all prompts can be in time, the
   heaviest are omitted until the others are (Moore and Hodgson). This is tried for several step lengths; the shortest
   that omits fewest is taken.
2. Room. A prompt begins when the expected KV of all requests together never exceeds the memory (`KVSurvival`).
3. The step (`batch`).

Where decodes have all slots and are all ahead, the step is known without these (`full_engine`).

A request becomes best effort only when it was late, or could not be in time even alone. The oldest best effort has
reserved memory and gets turns, so that none starves.
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
from rubato.policies.rubato.drafts import DraftPlanner
from rubato.policies.rubato.full_engine import FullEngine
from rubato.policies.rubato.requests import RequestBook, has_e2e
from rubato.policies.rubato.supply import STEP_LENGTHS, Array, DecodeSteps, StepErrors, Task, find_omitted
from rubato.policies.rubato_pd.prefill_step import prefill_step
from rubato.policy_kit.batch_builder import decodes_only
from rubato.policy_kit.kv_survival import KVSurvival, OutputRatios
from rubato.policy_kit.refusals import refusals

RISK_DISCOUNT = 0.5  # of `risk`: errors of the many steps up to a deadline cancel out
MAX_LEAD_SHARE = 0.75  # share of the decodes' lead that a step may take when all prompts have time
# Share of KV that a prompt which costs twice the average or more must leave free if all requests are lost, less with
# fewer losses: ChatBot gains 2 points by it, other loads nothing.
FREE_KV_SHARE = 0.3
MAX_PROMPTS = 128  # prompts considered in one plan, by deadline


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
    can_skip_tokens: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"draft", "tree", "handoff", "kv_transfer"})
    risk: float = 3.0
    deadline_reserve: float = 0.001
    patience: float = 4.0
    fairness: float = 5.0
    _requests: RequestBook = field(init=False, repr=False)
    _full: FullEngine = field(init=False, repr=False)
    _errors: StepErrors = field(default_factory=StepErrors, init=False, repr=False)
    _drafts: DraftPlanner = field(default_factory=DraftPlanner, init=False, repr=False)
    _ratios: OutputRatios = field(default_factory=OutputRatios, init=False, repr=False)
    _turn: int = field(default=0, init=False)  # steps since the oldest best effort had one

    def __post_init__(self) -> None:
        if min(self.risk, self.deadline_reserve, self.fairness) < 0.0 or not self.patience > 0.0:
            raise ValueError(
                f"risk {self.risk}, deadline_reserve {self.deadline_reserve}, fairness {self.fairness} must be 0 or "
                f"more, patience {self.patience} above 0"
            )
        self._requests = RequestBook(self.patience, self.fairness)
        self._full = FullEngine(self.deadline_reserve)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff):
                kind, expected = self._requests.forget_request(event.id, isinstance(event, Finished))
                if expected and isinstance(event, Finished) and event.outcome == "completed":
                    self._ratios.add(kind, event.output / expected)

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return prefill_step(view)
        if view.role.phase == "decode":
            return decodes_only(view)
        self._errors.learn(view)
        doubt = self.risk * self._errors.spread(view.latency.spread)
        self._requests.set_step_seconds(
            self._errors.slower * view.latency.step_time(Shape.decodes(1, 1)), self._errors.usual
        )
        if (full := self._full.find_batch(view, self._errors, doubt)) is not None:
            self._turn += 1
            self._errors.record_plan(view.now, view.latency.step_time(full.shape))
            return full.plan()
        candidates = self._requests.find_candidates(view)
        decodes = candidates.decodes
        entry = self._drafts.entry(view, candidates.decodes)
        candidates.sort_by_deadline(view.now, self._errors.lead, doubt, self.deadline_reserve, entry)
        steps = DecodeSteps(view, candidates.decodes, doubt, self.deadline_reserve, self._errors.slower, entry)
        drop = refusals(candidates.late, view)
        if drop:
            candidates.best_effort_waiting = [s for s in candidates.best_effort_waiting if s.id not in drop]
            candidates.best_effort_running = [s for s in candidates.best_effort_running if s.id not in drop]
        oldest = self._requests.find_oldest(view, candidates)
        self._full.remember(view, decodes, candidates, self._requests, oldest)
        tiers = self._requests.losses.weights()
        on_time, longest, laxity = self._choose_on_time(view, steps, candidates.prompts, tiers)
        on_time = self._choose_with_room(view, steps.decodes, on_time, oldest, tiers)
        shortest = steps.shortest() if self._errors.lead else 0.0
        batch = StepBatch(view, steps, candidates, on_time, oldest, shortest)
        self._turn = 0 if batch.fill(longest, laxity, self._turn + 1) else self._turn + 1
        self._errors.record_plan(view.now, batch.seconds())
        return batch.plan(demote=[s.id for s in candidates.late if s.id not in drop and not s.demoted], drop=drop)

    # ----------------------------------------------------------------- time

    def _choose_on_time(
        self, view: View, steps: DecodeSteps, prompts: Sequence[Task], tiers: Mapping[str, float]
    ) -> tuple[list[Task], float, float]:
        """Chooses the prompts that can be in time together.

        They go by deadline, except that the shortest with an e2e goes first if the prompts due before it can wait and
        still have a place: the time that it saves is for its session's next turn.

        Args:
            tiers: weights of tiers (`TierLosses`)

        Returns:
            the prompts, the longest step for them and the time that all of them can spare, both in seconds
        """
        ladder = [steps.unit * rung for rung in STEP_LENGTHS]
        if not prompts:
            return [], ladder[0], inf
        prompts = prompts[:MAX_PROMPTS]
        seconds = [steps.seconds_more(job) for job in prompts]
        weights = [s * tiers.get(job.seq.request.tier, 1.0) for s, job in zip(seconds, prompts, strict=True)]
        omitted, longest, room = self._omit_fewest(steps, ladder, prompts, seconds, weights)
        omits_all = len(omitted) == len(prompts)
        if omits_all:  # nothing is promised, but the shortest may still end in time
            omitted.discard(min(omitted, key=lambda i: seconds[i]))
        if omits_all or not omitted:  # no prompt to save by short steps: prefill as much as decodes can bear
            longest = max(longest, min(ladder[-1], MAX_LEAD_SHARE * (steps.first_due() - steps.now)))
        on_time: list[Task] = []
        most, running = view.limits.max_running, view.running_ids
        places = inf if most is None else most - len(running)
        total, laxity, first, shortest = 0.0, inf, 0, inf  # `first`: place of the one that goes first
        for i, job in enumerate(prompts):
            if i not in omitted:
                places -= job.id not in running
                if places >= 0 and has_e2e(job.seq) and seconds[i] < min(shortest, laxity):
                    first, shortest = len(on_time), seconds[i]
                total += seconds[i]
                laxity = min(laxity, float(room[i]) - total)
                on_time.append(job)
        on_time.insert(0, on_time.pop(first))
        return on_time, longest, laxity

    def _omit_fewest(
        self, steps: DecodeSteps, ladder: Sequence[float], prompts: Sequence[Task], seconds: Sequence[float],
        weights: Sequence[float],
    ) -> tuple[set[int], float, Array]:  # fmt: skip
        """Returns the omitted prompts at the shortest step length that omits fewest, that length, and the seconds
        available for prompts up to each deadline."""
        span = np.array([job.due for job in prompts]) - steps.now
        needed_steps, tokens = steps.entries_owed(span)
        supply = span - steps.reserve - tokens * steps.each
        errors = RISK_DISCOUNT * steps.doubt * np.sqrt(np.maximum(span, 0.0))
        best: tuple[set[int], float, Array] | None = None
        for longest in ladder:
            count = np.maximum(needed_steps, np.where(span > longest, span / longest + 1.0, 1.0))
            room = supply - count * steps.base - errors * longest**0.5
            omitted = find_omitted(seconds, weights, room)
            if best is None or len(omitted) < len(best[0]):
                best = omitted, longest, room
            if not omitted:
                break
        assert best is not None
        return best

    # ----------------------------------------------------------------- room

    def _choose_with_room(
        self,
        view: View,
        decodes: Sequence[Task],
        on_time: list[Task],
        oldest: SeqView | None,
        tiers: Mapping[str, float],
    ) -> list[Task]:
        """Returns the prompts that have begun, and those that may begin, the cheapest in KV × time first."""
        running = view.running_ids
        fresh = [job for job in on_time if job.id not in running]
        if not fresh:
            return on_time
        with_kv = [*decodes, *(job for job in on_time if job.id in running)]
        holders = [job.seq for job in with_kv] + ([oldest] if oldest is not None else [])
        as_resident = self._requests.as_resident
        residents = [as_resident(seq) for seq in holders] + [as_resident(job.seq) for job in fresh]
        forecast = KVSurvival(view, self._ratios, residents)
        forecast.add(slice(0, len(holders)))
        costs = forecast.costs()
        mean = sum(costs) / len(costs)
        lost = self._requests.losses.lost_share()
        weights = {
            i: costs[i] * tiers.get(fresh[i - len(holders)].seq.request.tier, 1.0)
            for i in range(len(holders), len(residents))
        }
        fit = set()
        for i in sorted(weights, key=lambda i: weights[i]):
            job = fresh[i - len(holders)]
            free_share = FREE_KV_SHARE * min(1.0, lost * max(0.0, weights[i] / mean - 1.0))
            if forecast.fits(i, 1.0 - free_share):
                forecast.add(slice(i, i + 1))
                fit.add(job.id)
        return [job for job in on_time if job.id in running or job.id in fit]
