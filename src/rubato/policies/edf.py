"""Earliest deadline first, by the step: chunks end before the next token is due; late requests become best effort.

For tiers with TTFTs and TPOTs near and beyond capacity, output lengths unknown. docs/policies/edf.md says when to take
it, and where it loses.

Each step takes every strict decode and then prefill in order of deadline, as much as ends before the tightest token
that is due, less a lead. The waiting prefills to try are chosen by Moore and Hodgson's rule (`prefill_jobs`), with
tiers that lag protected. All others are best effort: they get what is left of each step, and the oldest gets a turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import add, attrgetter
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan, Shape
from rubato.policy_kit.batch_builder import BatchBuilder, make_room
from rubato.policy_kit.prefill_jobs import (
    DecodeCapacity,
    PrefillJob,
    PrefillRate,
    feasible,
    index_of,
    insertable_jobs,
    schedulable,
    seq_of,
    tpot_of,
)  # fmt: skip
from rubato.policy_kit.refusals import refusals

SOURCE = "ours; EDF (Liu and Layland 1973) for the order, Moore (1968) for which prefills to set aside"
# Times as long as its decodes a step may always be, whatever the tightest TTFT: half of it is prefill.
MIN_STEP_IN_DECODE_TIMES = 2.0
LEAD_FLOOR_TOKENS = 1.0  # lead that decodes keep while they lend the rest of it to a protected prefill
LOSS_MEMORY_REQUESTS = 256  # requests of all tiers, over which losses are counted: one clock, however rare a tier is
# A tier offered less than this, after fading, is dropped: its last request was 767 requests ago.
MIN_OFFERED_REQUESTS = 0.05
RECENT_REQUESTS = 64  # requests among which the tightest TTFT counts
ARRIVAL = attrgetter("request.arrival")
FIRST_WAITING_PLACE = 1 << 30  # behind all that run
_Sorted = tuple[list[PrefillJob], list[PrefillJob], list[PrefillJob], list[PrefillJob]]


@dataclass
class Scheduler:
    """Plans each step by deadline.

    Args:
        safety_margin ([0, inf)): predicted step times count this share longer
        deadline_reserve ([0, inf)): seconds kept free before each deadline, for delivery
        max_ttft_share ((0, inf)): longest step, as a share of the tightest TTFT of the last 64 requests; a step may
            always take twice as long as its decodes, since a shorter TTFT cannot be kept by leaving prompts out
        turn_every ([2, inf)): steps from one turn of best effort to the next
        turn_tokens ([1, inf)): tokens of that turn, at least
        fairness ([0, inf)): attainment (0 to 1) that a tier may be behind the average before it is protected; 1: never
            protected
        decode_lead ([0, inf)): tokens that a decode stays ahead of its deadlines, if it can
        decode_share ((0, 1]): largest share of the tightest TPOT that decodes take together; prompts get the rest
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    can_skip_tokens: ClassVar[bool] = True
    safety_margin: float = 0.1
    deadline_reserve: float = 0.01
    max_ttft_share: float = 0.3
    turn_every: int = 16
    turn_tokens: int = 16
    fairness: float = 0.03
    decode_lead: float = 3.0
    decode_share: float = 0.9
    _turn: int = field(default=0, init=False)
    _tiers: dict[str, str] = field(default_factory=dict, init=False)
    _offered_by_tier: dict[str, float] = field(default_factory=dict, init=False)  # by tier, fading
    _lost_by_tier: dict[str, float] = field(default_factory=dict, init=False)  # of these: set aside, or missed
    _counted: set[str] = field(default_factory=set, init=False)  # ids that are in _lost_by_tier now
    _permanently_best_effort: set[str] = field(default_factory=set, init=False)  # ids that are best effort to their end
    _ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS), init=False)
    # Waiting requests as last sorted, and until when that is right.
    _kept: tuple[Sequence[SeqView], float, _Sorted] = field(default=((), 0.0, ([], [], [], [])), init=False)

    def __post_init__(self) -> None:
        if min(self.safety_margin, self.deadline_reserve, self.fairness, self.decode_lead) < 0:
            raise ValueError(
                f"safety_margin {self.safety_margin}, deadline_reserve {self.deadline_reserve}, fairness "
                f"{self.fairness}, decode_lead {self.decode_lead} must be 0 or more"
            )
        if self.max_ttft_share <= 0.0 or not 0.0 < self.decode_share <= 1.0:
            raise ValueError(
                f"max_ttft_share {self.max_ttft_share} must be above 0, decode_share {self.decode_share} in (0, 1]"
            )
        if self.turn_every < 2 or self.turn_tokens < 1:
            raise ValueError(
                f"turn_every {self.turn_every} must be at least 2, turn_tokens {self.turn_tokens} at least 1"
            )

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff):
                tier = self._tiers.pop(event.id, None)
                if tier is not None and isinstance(event, Finished):  # what is handed off counts for what it did here
                    # what its client cancelled is no loss
                    self._count_lost(event.id, tier, event.verdict.missed and event.outcome != "cancelled")
                self._counted.discard(event.id)
                self._permanently_best_effort.discard(event.id)

    def plan(self, view: View) -> Plan:
        running = view.running
        tried = self._classify(view, running)
        strict = [*tried.decodes, *tried.prefills]
        for seq in tried.declined:
            self._count_lost(seq.id, seq.request.tier, True)  # now, not when it ends: set aside, it may take long
        for seq in [s for s in map(seq_of, strict) if s.id in self._counted] if self._counted else ():
            self._count_lost(seq.id, seq.request.tier, False)  # it has come back
        drop = refusals(tried.declined, view)
        best_effort = _BestEffort(view, running, self._permanently_best_effort, tried.set_aside - drop.keys())
        builder = BatchBuilder(view)
        self._give_turn(builder, best_effort, strict)
        limits = self._add_decodes(builder, tried, best_effort)
        self._add_prefills(builder, tried, best_effort, limits)
        self._fill_with_best_effort(builder, best_effort, limits[0])
        if not (builder.work or builder.decode):
            able = [*map(seq_of, sorted(strict))] or best_effort.up_to(view.limits.max_model_len)
            able = [s for s in able if s not in builder.preempted]
            if able:
                victims = [*best_effort.running[::-1], *_latest(strict)]
                self._force(builder, able[0], victims, view.limits.max_num_batched_tokens)
        builder.fold_decodes()
        return builder.plan(
            demote=[s.id for s in tried.declined if s.id not in drop],
            promote=[seq_of(job).id for job in sorted(tried.back, key=index_of)],
            drop=drop,
        )

    # ----------------------------------------------------------------- what is tried

    def _count_lost(self, id: str, tier: str, lost: bool) -> None:
        """Counts a request as lost, or no longer so: once, however often it is set aside and comes back."""
        if lost == (id in self._counted):
            return
        self._counted ^= {id}
        if tier in self._lost_by_tier:  # it may have been dropped while this request was in flight
            self._lost_by_tier[tier] = max(
                0.0, self._lost_by_tier[tier] + (1.0 if lost else -1.0)
            )  # what was counted fades

    def _count_offered(self, seq: SeqView) -> None:
        tier = self._tiers[seq.id] = seq.request.tier
        for counts in (self._offered_by_tier, self._lost_by_tier):
            for name in counts:
                counts[name] *= 1.0 - 1.0 / LOSS_MEMORY_REQUESTS
        self._offered_by_tier[tier] = self._offered_by_tier.get(tier, 0.0) + 1.0
        self._lost_by_tier.setdefault(tier, 0.0)
        # A tier may be a client's free text (inside vLLM), so the names kept must be bounded.
        for name in [name for name, count in self._offered_by_tier.items() if count < MIN_OFFERED_REQUESTS]:
            del self._offered_by_tier[name], self._lost_by_tier[name]
        ttft = seq.request.stages[0].slo.ttft
        if ttft is not None:
            self._ttfts.append(ttft)

    def _classify(self, view: View, running: Sequence[SeqView]) -> _Candidates:
        """Divides requests into those to try now and the others: best effort, late, or set aside so that others are in
        time.

        A late request has missed for good: once demoted it is best effort to its end and not considered again."""
        now = view.now
        here, queued = self._sort(running, 0, now), self._sort_waiting(view.waiting, now)
        decodes, fresh, demoted, late = [*map(add, here, queued)]
        decodes.sort()
        tightest: dict[float, float] = {}
        for job, tpot in zip(decodes, [s.request.stages[s.stage].slo.tpot for _, _, _, _, s in decodes], strict=True):
            if (key := inf if tpot is None else tpot) not in tightest:
                tightest[key] = job[0]
        on_time, back = list[PrefillJob](), list[PrefillJob]()
        if fresh or demoted:
            # A decode's time to spare: what it lends to prefill.
            spare = self._lendable(tightest, now, self.decode_lead)
            shape = Shape.decodes(len(decodes), sum([seq.cached for _, _, _, _, seq in decodes]) + len(decodes))
            rate = PrefillRate(view, shape, spare, min(tightest, default=inf), 1.0 + self.safety_margin)
            able, reserve = feasible(view, sorted(fresh), rate), self.deadline_reserve
            on_time = schedulable(able, rate, now, reserve, self._behind())
            if back := insertable_jobs(on_time, demoted, rate, now, reserve):
                on_time = sorted(on_time + back)
        set_aside = late
        if len(on_time) < len(fresh) + len(demoted):
            places = set(map(index_of, on_time))
            set_aside = sorted(late + [job for job in fresh + demoted if index_of(job) not in places], key=index_of)
        declined = [seq for seq in map(seq_of, set_aside) if not seq.demoted]
        back += [job for job in decodes if job[4].demoted]
        return _Candidates(decodes, on_time, {seq.id for seq in map(seq_of, set_aside)}, declined, back, tightest)

    def _sort(self, seqs: Sequence[SeqView], place: int, now: float) -> _Sorted:
        """Sorts requests that are not best effort for good into decodes, prefills that were never demoted, prefills
        that were, and late requests; `place` is the place of the first in the queue."""
        sorted_: _Sorted = ([], [], [], [])
        decodes, fresh, demoted, late = sorted_
        tiers, permanently_best_effort = self._tiers, self._permanently_best_effort
        for at, seq in enumerate([s for s in seqs if s.id not in permanently_best_effort], place):
            if seq.id not in tiers:
                if seq.request.best_effort:
                    permanently_best_effort.add(seq.id)
                    continue
                self._count_offered(seq)
            due = seq.due
            if due < now or seq.missed:
                late.append((due, 0.0, at, 0, seq))
                if seq.demoted:
                    permanently_best_effort.add(seq.id)
                continue
            pending = seq.pending
            job = (due, seq.request.arrival, at, pending, seq)
            if pending == 1:
                decodes.append(job)
            elif seq.demoted:
                demoted.append(job)
            else:
                fresh.append(job)
        return sorted_

    def _sort_waiting(self, waiting: Sequence[SeqView], now: float) -> _Sorted:
        """Sorts waiting requests, anew only if one of them has changed (`View.waiting`) or is late now."""
        if waiting is self._kept[0] and now <= self._kept[1]:
            return self._kept[2]
        sorted_ = self._sort(waiting, FIRST_WAITING_PLACE, now)
        for group in sorted_[:3]:
            group.sort()
        if isinstance(waiting, tuple) and not sorted_[-1]:
            due = min([group[0][0] for group in sorted_ if group], default=inf)
            self._kept = waiting, due, sorted_
        return sorted_

    def _behind(self) -> set[str]:
        """Returns the protected tiers: one more loss would put them further behind the average than `fairness` allows.
        A lone tier is never protected."""
        offered, lost = self._offered_by_tier, self._lost_by_tier
        if len(offered) < 2:
            return set()
        most = (sum(lost.values()) + 1.0) / sum(offered.values()) + self.fairness
        return {tier for tier, count in offered.items() if (lost[tier] + 1.0) / count > most}

    # ----------------------------------------------------------------- what they get

    def _add_decodes(self, builder: BatchBuilder, tried: _Candidates, best_effort: _BestEffort) -> tuple[float, float]:
        """Adds every strict decode, tightest first. Returns the longest step in seconds, and the longest for a
        protected prefill."""
        view, tightest = builder.view, tried.tightest
        order = [*map(seq_of, tried.decodes)]
        are_all = len(order) == builder.decodes.seqs and all(seq.id in builder.running for seq in order)
        are_all = are_all and not builder.work
        if order and not (are_all and builder.decode_all()) and (builder.preempted or not builder.add_decodes(order)):
            tightest = {}
            for seq in order:
                if builder.lacks(seq, 1):
                    make_room(builder, seq, 1, [*best_effort.younger(), *order[::-1]])
                if seq in builder.preempted or builder.tokens_that_fit(seq) == 0:
                    continue
                builder.add(seq, 1)
                tpot = tpot_of(seq)
                tightest[tpot] = min(tightest.get(tpot, inf), seq.due)
        lends = self._lendable(tightest, view.now, self.decode_lead)
        lends_protected = self._lendable(tightest, view.now, min(LEAD_FLOOR_TOKENS, self.decode_lead))
        safe = 1.0 + self.safety_margin
        cap = self.max_ttft_share * min(self._ttfts, default=inf) / safe
        cap = max(
            cap, MIN_STEP_IN_DECODE_TIMES * view.latency.step_time(builder.shape.plus(1, 0))
        )  # plus 1: of no decodes too
        return min(lends / safe, cap), min(lends_protected / safe, cap)

    def _lendable(self, tightest: Mapping[float, float], now: float, cushion: float) -> float:
        """Returns the seconds that a step may take for these decodes (TPOT -> when its first one is due): how far each
        is ahead of its deadline, less a cushion of some tokens that absorbs a slow step; if it is less far ahead, a
        pace at which the cushion grows again."""
        least = inf
        for tpot, due in tightest.items():
            ahead = due - now - self.deadline_reserve
            lends = ahead if tpot == inf else max(min(ahead, self.decode_share * tpot), ahead - cushion * tpot)
            least = min(least, lends)
        return least

    def _add_prefills(
        self, builder: BatchBuilder, tried: _Candidates, best_effort: _BestEffort, limits: tuple[float, float]
    ) -> None:
        """Adds prefills by deadline until no token fits. A prefill that gets no token preempts no request either."""
        prefills, view, running = tried.prefills, builder.view, builder.running
        victims = [v for v in best_effort.younger()[::-1] if v.own_blocks and v not in builder.preempted]
        if builder.slots_left < 1 and not victims:  # nothing can start
            prefills = [job for job in prefills if job[4].id in running]
        if not prefills:
            return
        step_limit, protected_step_limit = limits
        block, behind = view.limits.block_size, self._behind()
        together: DecodeCapacity | None = None
        reclaimable = sum([v.own_blocks for v in victims])
        full = builder.is_full(step_limit)
        full_for_all = full and (not behind or builder.is_full(protected_step_limit))
        for _, _, _, pending, seq in prefills:
            if full_for_all:
                return
            protected = bool(behind) and seq.request.tier in behind
            if (full and not protected) or pending < 1 or seq in builder.preempted:
                continue
            if seq.id not in running:
                need = pending + block * (len(running) + 1)  # and a block for each to grow
                lacking = builder.missing_blocks(seq, need)
                if (lacking > 0 or builder.slots_left < 1) and (not victims or lacking > reclaimable):
                    continue
                if together is None:
                    present = [s for s in map(seq_of, (*tried.decodes, *tried.prefills)) if s.id in running]
                    together = DecodeCapacity(view, present, 1.0 + self.safety_margin, self.decode_share)
                if not together.can_add(seq):
                    continue
                while victims and builder.lacks(seq, need):
                    victim = victims.pop()
                    reclaimable -= victim.own_blocks
                    builder.preempt(victim)
            if self._add_chunk(builder, seq, protected_step_limit if protected else step_limit):
                if seq.id not in running and together is not None:
                    together.add(seq)
                full = builder.is_full(step_limit)
                full_for_all = full and (not behind or builder.is_full(protected_step_limit))

    def _fill_with_best_effort(self, builder: BatchBuilder, best_effort: _BestEffort, step_limit: float) -> None:
        """Adds best effort, oldest first, in what is left of the step, the engine and the KV. A waiting request starts
        if there is KV for its prompt and a block for each request to grow."""
        view, running = builder.view, builder.running
        block = view.limits.block_size
        full = builder.is_full(step_limit)

        def room() -> int:
            """Returns the most pending tokens with which a request can still start."""
            return 0 if full or builder.slots_left < 1 else (builder.kv_left - builder.seqs - 1) * block

        todo = best_effort.up_to(room())[::-1]
        if not full and self._leading_decodes(builder, todo, step_limit):
            full = builder.is_full(step_limit)
        while todo:
            seq = todo.pop()
            if seq.id in builder.work or seq in builder.preempted:
                continue
            if seq.id in running:
                if builder.lacks(seq, 1):
                    left = [s for s in todo if s.id in running]
                    preempted = len(builder.preempted)
                    if make_room(builder, seq, 1, left) and len(builder.preempted) > preempted:
                        # one that waits may fit now
                        todo = best_effort.up_to(room(), left[::-1], seq.request.arrival)[::-1]
            elif seq.pending > room() or builder.lacks(seq, seq.pending + block * (builder.seqs + 1)):
                continue
            if not full and self._add_chunk(builder, seq, step_limit):
                full = builder.is_full(step_limit)
                if full:  # none starts any more
                    todo = [s for s in todo if s.id in running]

    def _leading_decodes(self, builder: BatchBuilder, todo: list[SeqView], step_limit: float) -> bool:
        """Gives the decodes that come first (at the end of `todo`) a token each, if all fit; returns whether they
        do."""
        running, work, decodes = builder.running, builder.work, []
        for seq in reversed(todo):
            if seq.id not in running or seq.pending != 1 or seq.id in work or seq in builder.preempted:
                break
            decodes.append(seq)
        shape, count = builder.shape, len(decodes)
        kv = shape.kv + sum([s.cached for s in decodes]) + count
        together = shape._replace(tokens=shape.tokens + count, seqs=shape.seqs + count, kv=kv)
        if not decodes or builder.view.latency.step_time(together) > step_limit or not builder.add_decodes(decodes):
            return False
        del todo[-count:]
        return True

    def _give_turn(self, builder: BatchBuilder, best_effort: _BestEffort, strict: Iterable[PrefillJob]) -> None:
        """In one step of `turn_every`, gives the oldest best effort some tokens first, with KV from any other
        request."""
        self._turn += 1
        if self._turn >= self.turn_every and (oldest := best_effort.oldest()) is not None:
            self._turn = 0
            self._force(builder, oldest, [*best_effort.younger(), *_latest(strict)], self.turn_tokens)

    def _force(self, builder: BatchBuilder, seq: SeqView, victims: Sequence[SeqView], most: int) -> None:
        tokens = min(seq.pending, most)
        make_room(builder, seq, tokens, victims)
        tokens = min(tokens, builder.tokens_that_fit(seq))
        if tokens:
            builder.add(seq, tokens)

    def _add_chunk(self, builder: BatchBuilder, seq: SeqView, step_limit: float) -> int:
        """Adds as many of its tokens as fit; returns how many."""
        tokens = builder.tokens_that_fit(seq)
        if tokens and step_limit < inf:
            tokens = builder.view.latency.largest_chunk(step_limit, builder.shape, seq.cached, tokens)
        if tokens:
            builder.add(seq, tokens)
        return tokens


@dataclass(slots=True)
class _Candidates:
    """The requests to try in one plan, by deadline, and those that are set aside."""

    decodes: list[PrefillJob]
    prefills: list[PrefillJob]
    set_aside: set[str]  # ids of all that are not tried, without the permanently best effort
    declined: list[SeqView]  # newly set aside
    back: list[PrefillJob]  # those to try that were demoted
    tightest: dict[float, float]  # TPOT -> time at which its first decode is due


class _BestEffort:
    """Requests served as best effort. Waiting ones, maybe thousands, are looked up on demand."""

    def __init__(
        self, view: View, running: Sequence[SeqView], permanently_best_effort: Container[str], set_aside: Container[str]
    ) -> None:
        self._view, self._permanently_best_effort, self._set_aside = view, permanently_best_effort, set_aside
        self.running = sorted(self._of(running), key=ARRIVAL)  # oldest first

    def _of(self, seqs: Iterable[SeqView]) -> list[SeqView]:
        permanently_best_effort, set_aside = self._permanently_best_effort, self._set_aside
        return [s for s in seqs if s.id in permanently_best_effort or s.id in set_aside]

    def up_to(self, pending: int, running: Sequence[SeqView] | None = None, since: float = -inf) -> list[SeqView]:
        """Returns `running` (default: all that run), and waiting requests that arrived at `since` or later with at most
        `pending` tokens; oldest first."""
        own = self.running if running is None else running
        if pending < 1:
            return list(own)
        short = self._of([s for s in self._view.waiting if s.pending <= pending])
        if since > -inf:
            short = [s for s in short if s.request.arrival >= since]
        return sorted([*own, *short], key=ARRIVAL)

    def oldest(self) -> SeqView | None:
        return min([*self.running[:1], *self._of(self._view.waiting)], key=ARRIVAL, default=None)

    def younger(self) -> Sequence[SeqView]:
        """Returns the requests that may lose their KV, latest first: all but the oldest, which needs it for its
        turns."""
        oldest = self.oldest() if self.running else None
        return [s for s in self.running[::-1] if s is not oldest]


def _latest(jobs: Iterable[PrefillJob]) -> list[SeqView]:
    """Returns the requests of these jobs, latest deadline first."""
    return [*map(seq_of, sorted(jobs, key=lambda job: (-job[0], -job[1], job[2])))]
