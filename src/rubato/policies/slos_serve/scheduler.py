"""One replica's scheduler: admits requests and fills batches. The package docstring has the method."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import ClassVar, NamedTuple

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import SeqView, View, nothing_sent
from rubato.core.plan import Plan, Shape, Work
from rubato.core.request import HandoffReason
from rubato.core.slo import TOLERANCE_S
from rubato.policies.slos_serve.admission import AdmissionLimits, Admitted, Grid, Phase, admit
from rubato.policies.slos_serve.batch import BatchFiller, BatchOrder
from rubato.policies.slos_serve.batch_capacity import BatchCapacity
from rubato.policies.slos_serve.demand import (
    PATIENCE_S,
    Demand,
    DemandReader,
    peak_kv,
    prefill_token_weight,
    prompt_stage,
)
from rubato.policies.slos_serve.dynamic_program import ROUNDING_TOKENS
from rubato.policies.slos_serve.speculation import MAX_ENTRY_TOKENS, NO_SPECULATION, SpeculationPlan, SpeculationState
from rubato.policy_kit.batch_builder import blocks_at_end
from rubato.policy_kit.compiled import warn_if_plain
from rubato.policy_kit.paces import Window, tightest_tpot, windows
from rubato.policy_kit.refusals import refusal

PROMISES = ("start", "arrival")
DECISION_TIMEOUT_S = 0.1  # admission runs at least this often (Algorithm 1)
MAX_DECISIONS = 12  # requests decided in one admission; the others, due later, wait for the next step
MAX_RETRIED = 8  # declined requests looked at again in one admission
MAX_BATCH_S, MAX_BATCH_STEPS = 0.2, 10.0  # of a batch that no TPOT bounds: seconds, or steps of one token (ours)
PATIENT_TPOT_S = PATIENCE_S / 16  # seconds a token of the oldest best-effort request, once it is behind


@dataclass
class Decisions:
    """The decisions of one plan: requests by how they are served, and what changes for them, by id."""

    view: View
    reader: DemandReader
    admitted: list[SeqView] = field(default_factory=list)
    undecided: list[SeqView] = field(default_factory=list)
    best_effort: list[SeqView] = field(default_factory=list)
    demote: list[str] = field(default_factory=list)
    promote: list[str] = field(default_factory=list)
    drop: dict[str, str] = field(default_factory=dict)
    handoff: dict[str, HandoffReason] = field(default_factory=dict)

    def decline(self, seq: SeqView, hops: int) -> None:
        """Declines a request: hands it to another replica, up to `hops` times, or refuses it if its client asked for
        that, or serves it as best effort."""
        before = seq.request.handoff
        is_fresh = seq.id not in self.view.running_ids and nothing_sent(seq)
        if is_fresh and "handoff" in self.view.supports and (before.hops if before is not None else 0) <= hops:
            self.handoff[seq.id] = "declined"
        elif is_fresh and seq.request.on_decline == "refuse":
            self.drop[seq.id] = refusal(seq, self.view)
        else:
            self.best_effort.append(seq)
            self.demote.append(seq.id)


class _Claim(NamedTuple):
    """What the oldest unpromised request is owed, a token every `PATIENT_TPOT_S`.

    Args:
        id: of the request; empty: none is behind
        length: its tokens when it was last seen
        due: time of its next token; inf: it has to wait until others end
    """

    id: str = ""
    length: int = 0
    due: float = inf


@dataclass
class Scheduler:
    """Admits requests and keeps the admitted ones in time.

    Args:
        safety_margin ([0, inf)): predicted step times count this share longer; null is the latency model's error over
            the last 128 steps (root mean square; nothing where it is exact)
        max_batch_seconds ((0, inf)): seconds of a batch while no TPOT bounds it; null is 0.2, or ten steps of one token
            if that is longer. Keep it well below the tightest TTFT
        tier_values (numbers above 0 by tier): what a request of a tier is worth in admission; a tier not named is worth
            1
        max_draft ([0, 9]): most tokens drafted for an entry, where the engine drafts; 0: none
        max_hops ([-1, inf)): further replicas that decide on a declined request before `backup`; -1: none is handed on.
            Under another router a declined request is placed anew that many times and once more, and is then best
            effort
        promise (start, arrival): when an admission is firm: with the first tokens of its prompt, until which each
            request that arrives opens it again, or at once, as in the paper
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    safety_margin: float | None = None
    max_batch_seconds: float | None = None
    tier_values: Mapping[str, float] = field(default_factory=dict)
    max_draft: int = MAX_ENTRY_TOKENS - 1
    max_hops: int = 3
    promise: str = "start"
    # id -> the stage (`prompt_stage`) that is admitted: for good, or until the next decision
    _promised_stages: dict[str, int] = field(default_factory=dict, init=False)
    _revocable_stages: dict[str, int] = field(default_factory=dict, init=False)
    _undecided: frozenset[str] = field(default=frozenset(), init=False)
    _grid: Grid | None = field(default=None, init=False)
    _decided_at: float = field(default=-inf, init=False)
    _any_finished: bool = field(default=False, init=False)
    _weight: float = field(default=1.0, init=False)
    _windows: dict[str, Window] = field(default_factory=dict, init=False)  # of decodes, if windows are judged
    _skipped: list[str] = field(default_factory=list, init=False)  # decodes left out of the last batches, in turn
    _claim: _Claim = field(default=_Claim(), init=False)
    _speculation: SpeculationState = field(init=False)

    def __post_init__(self) -> None:
        warn_if_plain("slos_serve", "a few times slower")
        if self.safety_margin is not None and not (
            type(self.safety_margin) in (int, float) and 0.0 <= self.safety_margin < inf
        ):
            raise ValueError(f"safety_margin is {self.safety_margin!r}: give a share like 0.1, 0 or more, or none")
        values = self.tier_values.values() if isinstance(self.tier_values, Mapping) else [self.tier_values]
        if wrong := [v for v in values if not (type(v) in (int, float) and 0.0 < v < inf)]:
            raise ValueError(f"tier_values has {wrong[0]!r}: give numbers above 0 by tier, like {{gold: 4}}")
        longest = MAX_BATCH_S if self.max_batch_seconds is None else self.max_batch_seconds
        if not 0.0 < longest < inf or not 0 <= self.max_draft < MAX_ENTRY_TOKENS or self.max_hops < -1:
            raise ValueError(
                f"max_batch_seconds {self.max_batch_seconds}, max_draft {self.max_draft}, max_hops {self.max_hops}: "
                f"give seconds, more than 0; 0 to {MAX_ENTRY_TOKENS - 1} tokens; 0 hops or more, or -1 for none "
                "handed on"
            )
        if self.promise not in PROMISES:
            raise ValueError(f"promise is {self.promise!r}: give one of {', '.join(PROMISES)}")
        self._speculation = SpeculationState(self.max_draft)

    @property
    def uses(self) -> frozenset[str]:
        """Optional features that it uses."""
        return frozenset({"draft"}) if self.max_draft else frozenset()

    @property
    def tier_names(self) -> Collection[str]:
        """Tiers named in its settings; a server checks that they exist."""
        return self.tier_values.keys()

    @property
    def promised_ids(self) -> Collection[str]:
        """Ids of requests here whose admission is firm."""
        return self._promised_stages.keys()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            self._any_finished |= isinstance(event, Finished)
            if isinstance(event, Finished | HandedOff):  # it is here no longer
                self._promised_stages.pop(event.id, None)
                self._revocable_stages.pop(event.id, None)
            if self._speculation.can_draft:
                self._speculation.acceptance.observe(event)
                self._speculation.lag.observe(event)

    def plan(self, view: View) -> Plan:
        step = self._classify(view)
        if step.reader.weight != self._weight:  # the grid counts tokens as they were
            self._weight, self._grid = step.reader.weight, None
        oldest = self._find_oldest(step)
        demands = self._admitted_demands(step)
        grid, entries = self._grid, self._speculation.in_force.entries(demands, self._speculation.draft_tokens)
        is_due = step.undecided or self._any_finished or view.now - self._decided_at >= DECISION_TIMEOUT_S
        if (
            grid is None or is_due or any(0.0 < d.due < grid[0].seconds for d in entries)
            or grid.room(entries) < -ROUNDING_TOKENS  # prompts that ended early decode early
        ):  # fmt: skip
            grid, demands = self._decide(step, demands, oldest)
        self._undecided = frozenset(s.id for s in step.undecided)
        self._decline_hopeless(step)
        plan = self._fill_batch(step, grid, {d.id: d for d in demands}, oldest)
        self._grid = grid.step() if plan.work or plan.decode_all else grid
        return plan

    def _classify(self, view: View) -> Decisions:
        """Divides the requests into admitted, undecided and best effort."""
        if view.slo_rule == "windowed":
            self._windows = windows(view, self._windows)
        self._speculation.update(view)
        step = Decisions(view, DemandReader(
            max(view.now, view.busy_until), view.limits.block_size, self.tier_values, self._windows,
            prefill_token_weight(view, self._weight), self._speculation.planned_acceptance,
        ))  # fmt: skip
        before, self._promised_stages = self._promised_stages, {}
        revocable, self._revocable_stages = self._revocable_stages, {}
        not_firm: list[SeqView] = []
        for seqs, runs in ((view.running, True), (view.waiting, False)):
            for seq in seqs:
                stage = prompt_stage(seq)
                # one that runs though none is recorded comes from elsewhere, admitted there
                promised_stage = before.get(seq.id, stage if runs and seq.id not in self._undecided else None)
                if seq.best_effort:
                    step.best_effort.append(seq)
                elif promised_stage == stage:
                    self._promised_stages[seq.id] = stage
                    step.admitted.append(seq)
                elif revocable.get(seq.id) == stage:
                    not_firm.append(seq)
                else:  # new, or back from a tool
                    step.undecided.append(seq)
        if any(seq.id not in self._undecided for seq in step.undecided):
            step.undecided += not_firm
        else:
            self._revocable_stages = {seq.id: revocable[seq.id] for seq in not_firm}
            step.admitted += not_firm
        return step

    def _margin(self, view: View) -> float:
        return view.latency.spread if self.safety_margin is None else self.safety_margin

    def _admitted_demands(self, step: Decisions, paced: bool = True) -> list[Demand]:
        """Returns the demands of admitted requests."""
        decodes = step.view.decodes
        alone = Shape.decodes(1, decodes.kv // decodes.seqs) if decodes.seqs else Shape()
        soonest = step.view.latency.step_time(alone) * (1.0 + self._margin(step.view)) if decodes.seqs else 0.0
        return step.reader.demands(step.admitted, soonest, paced)

    def _find_oldest(self, step: Decisions) -> SeqView | None:
        """Returns the oldest request that is best effort or has no SLO, once it is behind; the same one until it ends.
        It is planned as if admitted, so that none starves."""
        id, length, due = self._claim
        without_slo = [s for s in step.admitted if s.due == inf and tightest_tpot(s) == inf]
        unpromised = [*step.best_effort, *without_slo]
        oldest = next((s for s in unpromised if s.id == id), None)
        if oldest is None:
            now = step.reader.now
            behind = [s for s in unpromised if now > s.stage_start + PATIENCE_S + s.output * PATIENT_TPOT_S]
            oldest, length, due = min(behind, key=_arrival, default=None), 0, inf
        self._claim = _Claim()
        if oldest is not None:
            self._claim = _Claim(oldest.id, oldest.length, due + (oldest.length - length) * PATIENT_TPOT_S)
        return oldest

    def _demand_of_oldest(self, oldest: SeqView, reader: DemandReader) -> Demand:
        return reader.demand(oldest)._replace(due=max(self._claim.due - reader.now, 0.0), tpot=PATIENT_TPOT_S)

    def _find_candidates(self, step: Decisions, oldest: SeqView | None) -> list[SeqView]:
        """Returns the requests to decide on, by deadline: new ones, and some that could be in time after all."""
        demoted = [s for s in step.best_effort if s.demoted and s is not oldest]
        may_be_in_time = [s for s in demoted if not s.missed and step.reader.now < s.due < inf]
        again = heapq.nsmallest(MAX_RETRIED, may_be_in_time, key=lambda s: (s.pending, _arrival(s)))
        values = self.tier_values
        candidates = heapq.nsmallest(
            MAX_DECISIONS,
            [*step.undecided, *again],
            key=lambda s: (-values.get(s.request.tier, 1.0), s.due, _arrival(s)),
        )
        return sorted(candidates, key=lambda s: (s.due, _arrival(s)))

    def _decide(self, step: Decisions, demands: list[Demand], oldest: SeqView | None) -> tuple[Grid, list[Demand]]:
        """Admits requests that can be in time with the admitted ones, and lays a grid for all.

        Returns:
            the grid, and the demands of all admitted; without the paces of windows where these cannot be kept, too
        """
        view, reader = step.view, step.reader
        candidates = self._find_candidates(step, oldest)
        new = [reader.demand(s) for s in candidates]
        forced = demands
        if oldest is not None:
            if self._claim.due == inf:
                self._claim = self._claim._replace(due=reader.now + 0.5 * PATIENCE_S)
            forced = [*(d for d in demands if d.id != oldest.id), self._demand_of_oldest(oldest, reader)]
        capacity = BatchCapacity(
            view, [*step.admitted, *candidates], [*forced, *new], self._margin(view), reader.weight
        )
        later = [s for s in step.undecided if s not in candidates and s.id in view.running_ids]  # they keep their KV
        memory = view.kv_total - sum(s.blocks for s in [*view.moving, *later])
        choose = partial(self._choose_admitted, view, capacity, memory)
        fits = oldest is None or peak_kv(forced, view.limits.block_size).peak_with() <= memory
        best, speculation = choose(forced, new) if fits else (None, NO_SPECULATION)
        # If the forced are late on every grid, less is asked for, step by step: the oldest waits; the grid on which
        # they were admitted stays; the paces of windows are dropped; at last some will be late.
        if best is None and oldest is not None:  # it has to wait until others end; none is added meanwhile
            self._claim = self._claim._replace(due=inf)
            best, speculation = choose(demands, [])
        in_force = self._speculation.in_force
        if (
            best is None
            and self._grid
            and self._grid.room(in_force.entries(demands, self._speculation.draft_tokens)) >= -ROUNDING_TOKENS
        ):
            best, speculation = Admitted((), self._grid, 0.0), in_force  # on which they were admitted
        if best is None:
            demands = self._admitted_demands(step, paced=False)
            best, speculation = choose(demands, [])
        if best is None:
            shortest = min([d.tpot for d in demands], default=inf)
            batch = Phase(inf, seconds := min(self._unbounded_seconds(capacity), shortest), capacity.tokens(seconds))
            best = Admitted((), self._grid or Grid((batch,)), 0.0)
        else:
            self._speculation.in_force = speculation
        accepted = {new[i].id for i in best.accepted}
        step.undecided = [s for s in step.undecided if s not in candidates]
        for seq in candidates:
            if seq.id in accepted:
                is_firm = self.promise == "arrival" or seq.id in view.running_ids or not nothing_sent(seq)
                (self._promised_stages if is_firm else self._revocable_stages)[seq.id] = prompt_stage(seq)
                step.admitted.append(seq)
                if seq.demoted:
                    step.best_effort.remove(seq)
                    step.promote.append(seq.id)
            elif not seq.demoted:
                step.decline(seq, self.max_hops)
        self._decided_at, self._any_finished = view.now, False
        return best.grid, [*demands, *(d for d in new if d.id in accepted)]

    def _choose_admitted(
        self, view: View, capacity: BatchCapacity, memory: int, forced: Sequence[Demand], new: Sequence[Demand]
    ) -> tuple[Admitted | None, SpeculationPlan]:
        """Chooses which of the new to admit beside the forced, in `memory` KV blocks, and with which drafts."""
        best, chosen, value_of_all, limits = None, NO_SPECULATION, sum(d.value for d in new), view.limits
        seats = min(limits.max_num_seqs, limits.max_running or limits.max_num_seqs) - len(forced)
        longest = self._unbounded_seconds(capacity)
        for plan in self._speculation.plans_to_try([*forced, *new], capacity, longest):
            full = capacity.seconds(limits.max_num_batched_tokens, plan.draft_steps)
            tokens, beside = (partial(count, steps=plan.draft_steps) for count in (capacity.tokens, capacity.beside))
            max_seconds, draft_tokens = max(min(longest, full), TOLERANCE_S), self._speculation.draft_tokens
            resources = AdmissionLimits(max_seconds, tokens, memory, seats, beside, limits.block_size)
            admitted = admit(plan.entries(forced, draft_tokens), plan.entries(new, draft_tokens), resources)
            if admitted is not None and (best is None or admitted.value > best.value + ROUNDING_TOKENS):
                best, chosen = admitted, plan
            if best is not None and best.value >= value_of_all - ROUNDING_TOKENS:
                break
        return best, chosen

    def _unbounded_seconds(self, capacity: BatchCapacity) -> float:
        """Returns the seconds of a batch that neither a TPOT nor the engine bounds. Where a step is slow, short batches
        would consist mostly of a step's fixed cost, and hold few tokens of prefill."""
        alone = capacity.seconds(1)
        if self.max_batch_seconds is None:
            return max(MAX_BATCH_S, MAX_BATCH_STEPS * alone)
        return max(self.max_batch_seconds, 2.0 * alone)

    def _decline_hopeless(self, step: Decisions) -> None:
        """Declines admitted requests whose prompt would be late now even alone."""
        view, now, most = step.view, step.reader.now, step.view.limits.max_num_batched_tokens
        for seq in [s for s in step.admitted if s.pending > 1 and s.due < inf and s.id not in step.promote]:
            equal_chunks = -(-seq.pending // -(-seq.pending // most))  # the fastest, as step times are convex
            if seq.due + TOLERANCE_S < now + prefill_time(view.latency, seq.pending, seq.cached, equal_chunks):
                step.admitted.remove(seq)
                self._promised_stages.pop(seq.id, None)
                self._revocable_stages.pop(seq.id, None)
                step.decline(seq, -1)

    def _find_too_early(self, batch: BatchOrder, work: Mapping[str, Work]) -> set[str]:
        """Returns the ids of requests that must not begin a pace in such a batch: those due last, so many that all can
        keep their paces afterwards, on the grid in force or another."""
        too_early: set[str] = set()
        early = batch.find_early(work)
        while early and not batch.spend(sum(early.values())):
            work = {id: own for id, own in work.items() if id not in too_early}
            after = batch.demands_after(work, early)
            if batch.grid.step().room(self._speculation.in_force.entries(after, {})) >= -ROUNDING_TOKENS:
                break
            capacity = BatchCapacity(batch.view, batch.seqs, after, batch.margin, batch.weight)
            if self._choose_admitted(batch.view, capacity, batch.view.kv_total, after, [])[0] is not None:
                break
            id, _ = early.popitem()
            too_early.add(id)
        return too_early

    def _fill_batch(self, step: Decisions, grid: Grid, demands: dict[str, Demand], oldest: SeqView | None) -> Plan:
        """Fills the first batch of the grid: the admitted and the oldest, then best effort.

        Args:
            step: the decisions
            grid: of batches
            demands: of the admitted, by id
            oldest: the best-effort request that is planned as if admitted
        """
        view, block, planned_seqs = step.view, step.view.limits.block_size, step.admitted
        rest = sorted(step.best_effort, key=_arrival)
        if oldest is not None and self._claim.due < inf:
            demands[oldest.id] = self._demand_of_oldest(oldest, step.reader)
            planned_seqs = [*(s for s in planned_seqs if s is not oldest), oldest]
            rest = [s for s in rest if s is not oldest]
        undecided = [s for s in step.undecided if s.id in view.running_ids]  # they keep their KV, and wait
        holders = [*undecided, *(s for s in rest if s.id in view.running_ids)]
        margin, weight = self._margin(view), step.reader.weight
        planned_demands = [demands[s.id] for s in planned_seqs]
        batch = BatchOrder(view, grid, planned_seqs, planned_demands, self._speculation, margin, weight, self._skipped)
        batch_seconds, max_depth = batch.bounds()
        drafts, catch_up_seconds = self._speculation.plan_drafts(
            view, batch.order, max_depth, grid[0].tokens / weight, batch_seconds
        )
        order, verified = batch.choose_order()
        must_not_end: set[str] = set()
        while True:  # until no prompt or window ends so early that its next pace could not be kept
            seconds = batch_seconds / (1.0 + margin) - catch_up_seconds
            filler = BatchFiller(view, seconds, holders, verified, drafts, must_not_end)
            filler.fill(order)
            if not (too_early := self._find_too_early(batch, filler.builder.work)):
                break
            must_not_end |= too_early
        builder = filler.builder
        if rest:
            reserved = sum(demands[s.id].memory for s in planned_seqs) + sum(blocks_at_end(s, block) for s in holders)
            filler.add_best_effort(rest, view.kv_total - reserved - sum(s.blocks for s in view.moving), block)
        if not builder.work:  # for lack of memory: one request runs, with KV of those after it; the oldest comes last
            line = [*sorted(batch.order, key=lambda s: s is oldest), *undecided, *rest]
            line = [s for s in line if s not in builder.preempted]
            filler.victims, filler.unfinished = [s for s in line[1:] if s.id in view.running_ids], ()
            filler.fill(line[:1])
        for id in self._revocable_stages.keys() & builder.work.keys():
            self._promised_stages[id] = self._revocable_stages.pop(id)
        skipped = {s.id for s in order if s.pending == 1 and s is not oldest and s.id not in builder.work}
        self._skipped = [*dict.fromkeys(id for id in [*self._skipped, *(s.id for s in order)] if id in skipped)]
        self._speculation.lag.remember(builder.work.values(), batch.order)
        if not drafts and not verified:
            builder.fold_decodes()
        return builder.plan(demote=step.demote, promote=step.promote, drop=step.drop, handoff=step.handoff)


def _arrival(seq: SeqView) -> tuple[float, str]:
    return (seq.request.arrival, seq.id)
