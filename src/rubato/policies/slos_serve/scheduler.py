"""One replica's scheduler: which requests it admits, and what the next batch holds; the package says when and why."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import ClassVar, NamedTuple

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View, nothing_sent
from rubato.core.plan import Plan, Shape
from rubato.core.request import SATURATED
from rubato.core.slo import TOLERANCE
from rubato.policies.slos_serve.admission import AdmissionLimits, Admitted, admit, admit_first, first_grid
from rubato.policies.slos_serve.batch import BatchFiller
from rubato.policies.slos_serve.batch_order import BatchOrder
from rubato.policies.slos_serve.demand import (
    BatchCapacity,
    DemandReader,
    catch_up,
    demand_after_current_batch,
    prefill_token_weight,
    prompt_stage,
    seconds_at_full_speed,
    tightest_tpot,
)
from rubato.policies.slos_serve.dynamic_program import EPS
from rubato.policies.slos_serve.plan_state import PlanState
from rubato.policies.slos_serve.speculation import LONGEST, PLAIN, Drafts, SpeculationPlan
from rubato.policies.slos_serve.starvation import BEST_EFFORT_PATIENCE, OldestBestEffort, arrival
from rubato.policies.slos_serve.token_budget import Demand, Grid, room
from rubato.policy_kit.batch_builder import blocks_at_end
from rubato.policy_kit.compiled import warn_if_plain

DECLINED = "rejected-slo-infeasible"
ASKED = 16  # requests decided in one admission; the others, due later, in the next step
RETRIED = 8  # declined requests looked at again in one admission


class LastToken(NamedTuple):
    """How many tokens a decode has had, and since when."""

    output: int
    at: float


def _worth(admitted: Admitted | None) -> float:
    return -1.0 if admitted is None else admitted.value


@dataclass
class Scheduler:
    """decision_threshold: decide when so many requests are new, or have finished since the last decision.
    decision_interval: or after so many seconds. safety_margin: predicted times count this much more; None: as much as
    the latency model has been off of late (root mean square; none where it is exact, or does not learn).
    max_batch_seconds: seconds of a batch that no TPOT bounds. steady_tokens: decodes that are ahead of their
    deadlines get a token every TPOT all the same, for readers and SLO rules that see a pause where a deadline is still
    kept, as far as all promises allow; batches are shorter for it, also where drafts would allow longer ones, and fewer
    requests are admitted. tier_values: what attaining a request of a tier is worth, 1 if not named. tier_reserve: share
    of memory, places and batches that is kept for requests worth most. max_waiting: requests without a promise that may
    wait for their first batch, any number if None; more are refused, so that they do not fill the queue that those that
    could be promised must pass. Those in the next batch do not wait. max_draft: tokens drafted for an entry at most,
    where the engine drafts (0: none).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    decision_threshold: int = 1
    decision_interval: float = 0.1
    safety_margin: float | None = None
    max_batch_seconds: float = 0.2
    steady_tokens: bool = False
    tier_values: Mapping[str, float] = field(default_factory=dict)
    tier_reserve: float = 0.0
    max_waiting: int | None = None
    max_draft: int = LONGEST - 1
    _promised: dict[str, int] = field(default_factory=dict, init=False)  # id -> the round the promise is for
    _undecided: frozenset[str] = field(default=frozenset(), init=False)
    _grid: Grid | None = field(default=None, init=False)
    _decided: float = field(default=-inf, init=False)
    _finished: int = field(default=0, init=False)
    _oldest: OldestBestEffort = field(default_factory=OldestBestEffort, init=False)
    _prefill_weight: float = field(default=1.0, init=False)
    _came: dict[str, LastToken] = field(default_factory=dict, init=False)
    _skipped_decodes: list[str] = field(default_factory=list, init=False)  # left out of the last batches, in turn
    _drafts: Drafts = field(init=False)

    def __post_init__(self) -> None:
        warn_if_plain("slos_serve", "a few times slower")
        if self.decision_threshold < 1 or not 0.0 <= self.decision_interval < inf:
            raise ValueError(
                f"decision_threshold {self.decision_threshold}, decision_interval {self.decision_interval}: "
                f"give at least 1 request, and seconds, 0 or more"
            )
        if self.safety_margin is not None and not (_is_number(self.safety_margin) and 0.0 <= self.safety_margin < inf):
            raise ValueError(f"safety_margin is {self.safety_margin!r}: give a share like 0.1, 0 or more, or none")
        if not 0.0 < self.max_batch_seconds < inf:
            raise ValueError(f"max_batch_seconds {self.max_batch_seconds}: give seconds, more than 0")
        if not 0.0 <= self.tier_reserve < 1.0:
            raise ValueError(f"tier_reserve is {self.tier_reserve}: give a share, in [0, 1)")
        if self.max_waiting is not None and (type(self.max_waiting) is not int or self.max_waiting < 0):
            raise ValueError(
                f"max_waiting is {self.max_waiting!r}: give a whole number of requests, 0 or more, or none"
            )
        if not isinstance(self.tier_values, Mapping):
            raise ValueError(f"tier_values is {self.tier_values!r}: give numbers by tier, like {{gold: 4}}")
        if wrong := [v for v in self.tier_values.values() if not (_is_number(v) and 0.0 < v < inf)]:
            raise ValueError(f"tier_values has {wrong[0]!r}: give each tier a number above 0")
        if not 0 <= self.max_draft < LONGEST:
            raise ValueError(f"max_draft {self.max_draft}: give 0 to {LONGEST - 1} tokens")
        self._drafts = Drafts(self.max_draft)

    @property
    def uses(self) -> frozenset[str]:
        """What it makes use of, and can do without."""
        return frozenset({"draft"}) if self.max_draft else frozenset()

    @property
    def tier_names(self) -> Collection[str]:
        """Tiers that its settings name; a server checks that it has them."""
        return self.tier_values.keys()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            self._finished += isinstance(event, Finished)
            if isinstance(event, Finished | HandedOff):  # it is here no longer
                self._promised.pop(event.id, None)
        self.learn(events)

    def learn(self, events: Sequence[Event]) -> None:
        """How many drafted tokens were right."""
        for event in events if self._drafts.able else ():
            self._drafts.observe(event)

    def plan(self, view: View) -> Plan:
        if self.steady_tokens:
            self._note_last_tokens(view)
        state = self._classify(view)
        if state.reader.prefill_weight != self._prefill_weight:  # the grid counts tokens as they were
            self._prefill_weight, self._grid = state.reader.prefill_weight, None
        unbound = (s for s in state.admitted if s.due == inf and tightest_tpot(s) == inf)
        state.oldest = self._oldest.find([*state.best_effort, *unbound], state.now)
        demands = self._tighten_late_decodes(view, [state.reader.demand(s) for s in state.admitted])
        state.demands = {d.id: d for d in demands}
        grid, entries = self._grid, self._drafts.entries(demands)
        if grid is None or self._is_time(state) or any(0.0 < d.due < grid.phases[0].seconds for d in entries):
            self._decide(state, demands)
            grid = self._grid
            assert grid is not None, "deciding lays a grid"
        if self.steady_tokens and room(grid, [state.demands[s.id] for s in state.admitted]).min(initial=inf) < -EPS:
            self._fall_back_to_deadlines(state)
        self._undecided = frozenset(s.id for s in state.undecided)
        self._give_up(state)
        plan = self._filled(state, grid)
        if plan.work or plan.decode_all:
            self._grid = grid.step()
        return plan

    def _fall_back_to_deadlines(self, state: PlanState) -> list[Demand]:
        """Go by deadlines alone, as promised: there is no time to pace decodes evenly, since prompts done early decode
        early."""
        state.reader = replace(state.reader, since={})
        demands = self._tighten_late_decodes(state.view, [state.reader.demand(s) for s in state.admitted])
        state.demands.update((d.id, d) for d in demands)
        return demands

    def _note_last_tokens(self, view: View) -> None:
        """Since when each decode has had as many tokens as it has."""
        before = self._came
        self._came = {
            s.id: had
            if (had := before.get(s.id)) is not None and had.output == s.output
            else LastToken(s.output, view.now)
            for s in view.running
            if s.output
        }

    def admits(self, view: View, seq: SeqView, placed: Sequence[SeqView]) -> bool:
        """Whether it would promise this one, beside those that run there with a promise and `placed`, which wait there
        or are on their way. Changes nothing, and goes by what the replica shows and has told of drafts, so a controller
        may ask."""
        reader = self._reader(view)
        running = [s for s in view.running if not s.best_effort]
        if self.steady_tokens:  # when each had its last token is unknown here: as if just now
            reader = replace(reader, since={s.id: view.now for s in running if s.output})
        demands = [reader.demand(s) for s in running]
        if view.busy_until > view.now:
            demands = demand_after_current_batch(view, running, demands, reader.prefill_weight)
        forced = self._tighten_late_decodes(view, [*demands, *map(reader.demand, placed)])
        new = [reader.demand(seq)]
        capacity = BatchCapacity(
            view, [*running, *placed, seq], [*forced, *new], self._margin(view), reader.prefill_weight
        )
        found, _ = self._choose(view, capacity, forced, new)
        return found is not None and bool(found.accepted)

    # ----------------------------------------------------------------- what is promised

    def _reader(self, view: View) -> DemandReader:
        now = max(view.now, view.busy_until)
        since = {id: token.at for id, token in self._came.items()}
        self._drafts.look(view)
        return DemandReader(
            now,
            view.limits.block_size,
            BEST_EFFORT_PATIENCE,
            self.tier_values,
            since,
            prefill_token_weight(view),
            self._drafts.chance,
        )

    def _margin(self, view: View) -> float:
        return view.latency.spread if self.safety_margin is None else self.safety_margin

    def _tighten_late_decodes(self, view: View, demands: list[Demand]) -> list[Demand]:
        """Decodes behind, whose token is due before a batch of that decode alone would end, count as tighter."""
        decodes = view.decodes
        alone = Shape(1, 1, decodes.kv // decodes.seqs) if decodes.seqs else Shape()
        soonest = view.latency.step_time(alone) * (1.0 + self._margin(view)) if decodes.seqs else 0.0
        return catch_up(demands, soonest)

    @property
    def promised(self) -> Collection[str]:
        """Ids of those here that it has admitted."""
        return self._promised.keys()

    def _classify(self, view: View) -> PlanState:
        """The admitted, those still to be decided, and best effort."""
        state = PlanState(view, self._reader(view))
        before, self._promised = self._promised, {}
        for seqs, runs in ((view.running, True), (view.waiting, False)):
            for seq in seqs:
                round_ = prompt_stage(seq)
                # one that runs though none is recorded comes from elsewhere, admitted there
                known = before.get(seq.id, round_ if runs and seq.id not in self._undecided else None)
                if seq.best_effort:
                    state.best_effort.append(seq)
                elif known == round_:
                    self._promised[seq.id] = round_
                    state.admitted.append(seq)
                else:  # new, or back from a tool
                    state.undecided.append(seq)
        return state

    def _is_time(self, state: PlanState) -> bool:
        """Whether to decide now: enough is new or has finished, the last time is long ago, or there is nothing else."""
        return (
            max(len(state.undecided), self._finished) >= self.decision_threshold
            or state.now - self._decided >= self.decision_interval
            or not (state.admitted or state.best_effort)
        )

    def _decide(self, state: PlanState, demands: Sequence[Demand]) -> None:
        """Admit those that can be in time beside the admitted, and lay the grid for all of them."""
        again = self._declined_before(state)
        forced = self._with_oldest(state, demands)
        state.demands.update((s.id, state.reader.demand(s)) for s in [*state.undecided, *again])
        asked = heapq.nsmallest(
            ASKED, [*state.undecided, *again], key=lambda s: (-state.demands[s.id].value, s.due, arrival(s))
        )
        asked.sort(key=lambda s: (s.due, arrival(s)))
        new = [state.demands[s.id] for s in asked]
        margin, prefill_weight = self._margin(state.view), state.reader.prefill_weight
        capacity = BatchCapacity(state.view, [*state.admitted, *asked], [*forced, *new], margin, prefill_weight)
        ids = {s.id for s in asked}
        others = [
            Demand(s.id, inf, 0.0, inf, s.blocks) for s in state.undecided_running if s.id not in ids
        ]  # keep KV and place
        held = sum(d.memory for d in [*forced, *others])
        fits = len(forced) == len(demands) or held <= self._memory(state.view)
        found, speculation = self._choose(state.view, capacity, [*forced, *others], new) if fits else (None, PLAIN)
        if not fits or (found is None and len(forced) > len(demands)):
            self._oldest.due = inf  # it has to wait until others end; none is added meanwhile
            found, speculation = self._choose(state.view, capacity, demands, [])
        if found is None and self.steady_tokens:
            found, speculation = self._choose(state.view, capacity, self._fall_back_to_deadlines(state), [])
        if found is not None:
            self._grid, self._drafts.in_force = found.grid, speculation
        elif self._grid is None:
            limits = self._limits(state.view, capacity, demands, 1.0, PLAIN)
            self._grid, self._drafts.in_force = first_grid(demands, limits), PLAIN
        accepted = {asked[i].id for i in found.accepted} if found is not None else set()
        self._answer(state, asked, accepted)
        self._decided, self._finished = state.now, 0

    def _choose(
        self, view: View, capacity: BatchCapacity, forced: Sequence[Demand], new: Sequence[Demand]
    ) -> tuple[Admitted | None, SpeculationPlan]:
        """Which of the new to admit beside the forced, and with which drafts."""
        plans: Iterable[SpeculationPlan] = [PLAIN]
        if not self.steady_tokens:
            plans = self._drafts.candidates([*forced, *new], capacity, self._unbound(capacity))
        best, chosen = None, PLAIN
        for speculation in plans:
            entries = partial(self._drafts.entries, plan=speculation)
            found = self._admit(view, capacity, entries(forced), entries(new), speculation)
            if _worth(found) > _worth(best) + EPS:
                best, chosen = found, speculation
            if _worth(best) >= sum(d.value for d in new) - EPS:
                break
        return best, chosen

    def _admit(
        self, view: View, capacity: BatchCapacity, forced: Sequence[Demand], new: Sequence[Demand],
        speculation: SpeculationPlan,
    ) -> Admitted | None:  # fmt: skip
        limits = self._limits(view, capacity, forced, 1.0, speculation)
        most = max([1.0, *self.tier_values.values()])  # what a request can be worth
        if self.tier_reserve and any(d.value < most for d in new):
            others = self._limits(view, capacity, forced, 1.0 - self.tier_reserve, speculation)
            return admit_first(forced, new, limits, others, most)
        return admit(forced, new, limits)

    def _limits(
        self, view: View, capacity: BatchCapacity, forced: Sequence[Demand], share: float, speculation: SpeculationPlan
    ) -> AdmissionLimits:
        """What there is for new ones when a share of memory, places and batches is used in all."""
        most = view.limits.max_num_seqs
        seats = min(most, view.limits.max_running or most)
        held = sum(d.memory for d in forced)
        return AdmissionLimits(
            longest=min(self._unbound(capacity), capacity.full(speculation.steps)),
            capacity=lambda seconds: int(share * capacity.tokens(seconds, speculation.steps)),
            beside=lambda seconds, decodes: share * capacity.beside(seconds, decodes, speculation.steps),
            memory=self._memory(view, share) - held,
            seats=int(share * seats) - len(forced),
        )

    def _memory(self, view: View, share: float = 1.0) -> int:
        """KV blocks, to be promised up to this share of all."""
        return int(share * view.kv_total) - sum(s.blocks for s in view.moving)

    def _unbound(self, capacity: BatchCapacity) -> float:
        """Seconds of a batch that neither a TPOT nor the engine bounds."""
        return max(self.max_batch_seconds, 2.0 * capacity.seconds(1))

    def _with_oldest(self, state: PlanState, demands: Sequence[Demand]) -> list[Demand]:
        """The forced, and the oldest best-effort one as if it were."""
        oldest = state.oldest
        if oldest is None:
            return list(demands)
        if self._oldest.due == inf:
            self._oldest.due = state.now + 0.5 * BEST_EFFORT_PATIENCE
        return [*(d for d in demands if d.id != oldest.id), self._oldest.demand(oldest, state.reader)]

    def _declined_before(self, state: PlanState) -> list[SeqView]:
        """Declined requests that could still be in time: those with the least left to prefill."""
        able = [
            s
            for s in state.best_effort
            if s.demoted and s is not state.oldest and not s.missed and state.now < s.due < inf
        ]
        return heapq.nsmallest(RETRIED, able, key=lambda s: (s.pending, arrival(s)))

    def _answer(self, state: PlanState, asked: Sequence[SeqView], accepted: Collection[str]) -> None:
        """Take up the admitted, and answer the declined."""
        for seq in asked:
            if seq.id in accepted and seq.demoted:
                state.promote(seq)
            elif seq.id in accepted:
                state.admitted.append(seq)
            elif seq.demoted:
                continue
            elif seq.request.on_decline == "refuse" and nothing_sent(seq):
                state.drop[seq.id] = DECLINED
            else:
                state.demote(seq)
        decided = {s.id for s in asked}
        state.undecided = [s for s in state.undecided if s.id not in decided]
        self._promised.update((s.id, prompt_stage(s)) for s in asked if s.id in accepted)

    def _give_up(self, state: PlanState) -> None:
        """Demote, or refuse as its client asked, each whose prompt cannot be done in time any more, even alone."""
        prefills = [s for s in state.admitted if state.demands[s.id].tokens > 1]
        now, view = state.now, state.view
        for seq in [s for s in prefills if all(s.due + TOLERANCE < now + t for t in seconds_at_full_speed(view, s))]:
            state.admitted.remove(seq)
            self._promised.pop(seq.id, None)
            if seq.request.on_decline == "refuse" and nothing_sent(seq) and seq.id not in state.view.running_ids:
                state.drop[seq.id] = DECLINED
            else:
                state.demote(seq)

    def _shed(self, state: PlanState, work: Collection[str]) -> None:
        """Refuse the youngest without a promise that neither have begun nor are in the batch, beyond the backlog."""
        if self.max_waiting is None:
            return
        begun = {*state.view.running_ids, *work}
        fresh = [s for s in state.best_effort if nothing_sent(s) and s.id not in begun]
        for seq in heapq.nlargest(len(fresh) - self.max_waiting, fresh, key=arrival):
            state.drop[seq.id] = SATURATED
        state.demoted = [id for id in state.demoted if id not in state.drop]

    # ----------------------------------------------------------------- what the next batch holds

    def _filled(self, state: PlanState, grid: Grid) -> Plan:
        view, oldest, block = state.view, state.oldest, state.view.limits.block_size
        kept, rest, demands = state.admitted, state.best_effort, state.demands
        if oldest is not None and self._oldest.due < inf:
            demands[oldest.id] = self._oldest.demand(oldest, state.reader)
            kept = [*(s for s in kept if s is not oldest), oldest]
            rest = [s for s in rest if s is not oldest]
        rest = sorted(rest, key=arrival)
        running = view.running_ids if rest else ()
        holders = [s for s in rest if s.id in running]
        undecided = state.undecided_running
        margin, prefill_weight = self._margin(view), state.reader.prefill_weight
        next_batch = BatchOrder(
            view, grid, kept, [demands[s.id] for s in kept], self._drafts, margin, prefill_weight, self._skipped_decodes
        )
        bound, most = next_batch.bounds()
        drafts, late = self._drafts.to_draft(view, next_batch.order, most, grid.phases[0].tokens, bound, prefill_weight)
        order, verified = next_batch.in_order()
        filler = BatchFiller(view, bound / (1.0 + margin) - late, [*undecided, *holders], verified, drafts)
        if holders or state.undecided or not filler.decodes(order):
            filler.fill(order)
        if rest:
            needs = [
                demands[s.id].memory if s.id in demands else blocks_at_end(s, block) for s in [*kept, *state.undecided]
            ]
            held = sum(needs) + sum(blocks_at_end(s, block) for s in holders) + sum(s.blocks for s in view.moving)
            filler.add_best_effort(rest, view.kv_total - held, block)
        if filler.empty:  # for lack of memory: the admitted first, the oldest after them, then the undecided
            first = sorted(next_batch.order, key=lambda s: s is oldest)
            able = [s for s in [*first, *undecided, *rest] if s not in filler.builder.preempted]
            if able:
                running = view.running_ids
                filler.run_at_least(able[0], [s for s in able[1:] if s.id in running])
        self._skipped_decodes = filler.left_out([s for s in order if s is not oldest], self._skipped_decodes)
        self._shed(state, filler.builder.work)
        self._drafts.remember(filler.builder.work.values(), view)
        return filler.builder.plan(demote=state.demoted, promote=state.promoted, drop=state.drop)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
