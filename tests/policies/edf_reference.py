"""`edf` as it was first written, by the loops its rules are read from: what it decides is held against this.

Its time grows with the square of the queue. One thing is not as it was (`FORMER`): a sequence without a token
in this step takes no KV from others, and no place among those that decode together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan, Shape
from rubato.policy_kit.batch_builder import BatchBuilder
from rubato.policy_kit.refusals import known_output, refusable, refusals, why_infeasible

PROBE = 256  # tokens of prefill whose marginal time stands for all
DECODES = 2.0  # times as long as its decodes a step may always be, whatever the tightest TTFT: half of it is prefill
DIP = 1.0  # of a token: the lead decodes keep while they lend the rest to a protected prefill
MEMORY = 256  # requests of all tiers, over which losses are counted: one clock, however rare a tier is
FORGOTTEN = 0.05  # a tier offered less than this, after fading, is dropped: its last request was 767 requests ago
RECENT = 64  # requests that the tightest TTFT is remembered over
FORMER = False  # True: as it was


@dataclass
class Scheduler:
    """Settings as in `rubato.policies.edf`."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
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
    _offered: dict[str, float] = field(default_factory=dict, init=False)  # by tier, fading
    _lost: dict[str, float] = field(default_factory=dict, init=False)  # of these: set aside, or missed
    _counted: set[str] = field(default_factory=set, init=False)  # ids that are in _lost now
    _ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                tier = self._tiers.pop(event.id, None)
                if tier is not None:
                    # what a client took back is no loss
                    self._book(event.id, tier, lost=not event.verdict.met and event.outcome != "cancelled")
                    self._counted.discard(event.id)
            elif isinstance(event, HandedOff):  # it ends elsewhere; what it counts for here stays
                self._tiers.pop(event.id, None)
                self._counted.discard(event.id)

    def plan(self, view: View) -> Plan:
        here = [*view.running, *view.waiting]
        self._count_offered(here)
        aside = self._set_aside(view, here)
        strict = [s for s in here if s.id not in aside]
        declined = [s for s in here if s.id in aside and not s.best_effort]
        for seq in declined:
            self._book(seq.id, seq.request.tier, lost=True)  # now, not when it ends: set aside, it may take long
        for seq in strict:
            self._book(seq.id, seq.request.tier, lost=False)  # it may have come back
        drop = refusals(declined, view)
        rest = sorted((s for s in here if s.id in aside and s.id not in drop), key=_arrival)
        builder = BatchBuilder(view)
        self._give_turn(builder, rest, strict)
        bound, deep = self._decodes(builder, strict, rest)
        self._prefills(builder, strict, rest, bound, deep)
        self._leftover(builder, rest, bound)
        able = [s for s in (sorted(strict, key=_due) or rest) if s not in builder.preempted]
        if not builder.work and able:
            first = able[0]
            self._force(
                builder,
                first,
                [*rest[::-1], *sorted(strict, key=_due, reverse=True)],
                view.limits.max_num_batched_tokens,
            )
        return builder.plan(
            demote=[s.id for s in declined if s.id not in drop], promote=[s.id for s in strict if s.demoted], drop=drop
        )

    # ----------------------------------------------------------------- which requests are tried

    def _book(self, id: str, tier: str, *, lost: bool) -> None:
        """Count a request as lost, or as lost no more: once, however often it is set aside and comes back."""
        known = tier in self._lost  # not when the tier has been dropped while this request was in flight
        if lost and id not in self._counted:
            self._counted.add(id)
            if known:
                self._lost[tier] += 1.0
        elif not lost and id in self._counted:
            self._counted.remove(id)
            if known:
                self._lost[tier] = max(0.0, self._lost[tier] - 1.0)  # what was counted has faded since

    def _count_offered(self, here: Iterable[SeqView]) -> None:
        for seq in here:
            if seq.id not in self._tiers and not seq.request.best_effort:
                tier = self._tiers[seq.id] = seq.request.tier
                for counts in (self._offered, self._lost):
                    for name in counts:
                        counts[name] *= 1.0 - 1.0 / MEMORY
                self._offered[tier] = self._offered.get(tier, 0.0) + 1.0
                self._lost.setdefault(tier, 0.0)
                # A tier may be a client's free text (inside vLLM), so the names kept must be bounded.
                for name in [name for name, count in self._offered.items() if count < FORGOTTEN]:
                    del self._offered[name], self._lost[name]
                ttft = seq.request.stages[0].slo.ttft
                if ttft is not None:
                    self._ttfts.append(ttft)

    def _set_aside(self, view: View, here: Sequence[SeqView]) -> set[str]:
        """Ids of those not to be tried now: best effort by wish, late already, or set aside for the others' sake."""
        aside = set()
        decodes = Shape()
        spare = inf  # the tightest decode's time to spare
        tpot = inf
        jobs = []
        for seq in here:
            if seq.request.best_effort or seq.missed or seq.due < view.now:
                aside.add(seq.id)
            elif seq.pending == 1:
                decodes = decodes.plus(1, seq.cached)
                spare = min(spare, self._lendable(seq, view.now, self.decode_lead))
                tpot = min(tpot, _tpot(seq))
            else:
                jobs.append(seq)
        rate = _Rate(view, decodes, spare, tpot, 1.0 + self.safety_margin)
        fresh = sorted((s for s in jobs if not s.demoted), key=_due)
        able = [s for s in fresh if not refusable(s) or self._pace(view, s, rate)]
        # A protected one may count on decodes that end meanwhile: others are not started at its expense.
        safe = {s.id for s in able if self._protected(s) and view.now + rate.seconds_at_full_speed(s.pending) <= s.due}
        kept = self._schedulable(able, rate, view.now, safe)
        aside.update(s.id for s in fresh if s not in kept)
        # Set-aside ones come back when they fit beside all that are kept, by a margin, cheapest first.
        for seq in sorted((s for s in jobs if s.demoted), key=lambda s: s.pending):
            trial = sorted([*kept, seq], key=_due)
            if rate.seconds(int(seq.pending * 1.2)) <= seq.due - view.now and self._all_in_time(trial, rate, view.now):
                kept = trial
            else:
                aside.add(seq.id)
        return aside

    def _protected(self, seq: SeqView) -> bool:
        """Would losing this one put its tier further behind the average than it may be? (Never so for a lone tier.)"""
        tier = seq.request.tier
        if tier not in self._offered:
            return False
        average = (sum(self._lost.values()) + 1.0) / sum(self._offered.values())
        return (self._lost[tier] + 1.0) / self._offered[tier] > average + self.fairness

    def _schedulable(self, jobs: Sequence[SeqView], rate: _Rate, now: float, safe: set[str]) -> list[SeqView]:
        """Moore-Hodgson: go through the jobs by deadline; whenever one is late, set aside the longest so far that is
        not safe."""
        kept: list[SeqView] = []
        tokens = 0
        for seq in jobs:
            kept.append(seq)
            tokens += seq.pending
            while kept and now + rate.seconds(tokens) > seq.due - self.deadline_reserve:
                longest = max((s for s in kept if s.id not in safe), key=lambda s: s.pending, default=None)
                if longest is None:
                    break
                kept.remove(longest)
                tokens -= longest.pending
        return kept

    def _all_in_time(self, jobs: Iterable[SeqView], rate: _Rate, now: float) -> bool:
        tokens = 0
        for seq in jobs:
            tokens += seq.pending
            if now + rate.seconds(tokens) > seq.due - self.deadline_reserve:
                return False
        return True

    def _pace(self, view: View, seq: SeqView, rate: _Rate) -> bool:
        """Could it keep its TPOT, and its e2e as far as its length is known, if it were alone?"""
        step = view.latency.step_time(Shape(1, 1, seq.length))
        slo = seq.request.stages[seq.stage].slo
        if slo.tpot is not None and step > slo.tpot and why_infeasible(seq, view):
            return False
        if slo.e2e is None or (known := known_output(seq)) is None:
            return True
        end = view.now + rate.seconds_at_full_speed(seq.pending) + (known - 1.0) * step
        return end <= seq.request.arrival + seq.tool_seconds + slo.e2e

    # ----------------------------------------------------------------- what they get

    def _decodes(
        self, builder: BatchBuilder, strict: Sequence[SeqView], rest: Sequence[SeqView]
    ) -> tuple[float, float]:
        """Every strict decode, tightest first; returns the seconds this step may take, and those it may take for a
        protected prefill."""
        view = builder.view
        bound = deep = inf
        order = sorted((s for s in strict if s.pending == 1), key=_due)
        for seq in order:
            if builder.lacks(seq, 1):
                self._make_room(builder, seq, 1, [*_younger(rest), *order[::-1]])
            if seq in builder.preempted or builder.tokens_that_fit(seq) == 0:
                continue
            builder.add(seq, 1)
            bound = min(bound, self._lendable(seq, view.now, self.decode_lead))
            deep = min(deep, self._lendable(seq, view.now, min(DIP, self.decode_lead)))
        safe = 1.0 + self.safety_margin
        cap = self.max_ttft_share * min(self._ttfts, default=inf) / safe
        cap = max(cap, DECODES * view.latency.step_time(builder.shape.plus(1, 0)))  # plus 1: of no decodes too
        return min(bound / safe, cap), min(deep / safe, cap)

    def _lendable(self, seq: SeqView, now: float, cushion: float) -> float:
        """Seconds that a step with this decode may take: what it is ahead of its deadline, less a cushion of some
        tokens that absorbs a slow step; with less than that ahead, a pace at which the cushion grows again."""
        ahead = seq.due - now - self.deadline_reserve
        tpot = _tpot(seq)
        if tpot == inf:
            return ahead
        return max(min(ahead, self.decode_share * tpot), ahead - cushion * tpot)

    def _prefills(
        self, builder: BatchBuilder, strict: Sequence[SeqView], rest: Sequence[SeqView], bound: float, deep: float
    ) -> None:
        view = builder.view
        active = [s for s in strict if s.id in builder.running]
        jobs = [s for s in strict if s.pending > 1]
        for seq in sorted(jobs, key=_due):
            limit = deep if self._protected(seq) else bound
            if seq in builder.preempted or (not FORMER and self._full(builder, limit)):
                continue
            if seq.id not in builder.running:
                if not self._sustainable(view, active, seq):
                    continue
                need = seq.pending + view.limits.block_size * (
                    len(view.running) + 1
                )  # and a block for everyone to grow
                if builder.lacks(seq, need) and not self._make_room(builder, seq, need, _younger(rest)):
                    continue
            self._chunk(builder, seq, limit)
            if seq.id not in builder.running and (seq.id in builder.work or FORMER):
                active.append(seq)

    def _full(self, builder: BatchBuilder, limit: float) -> bool:
        """Not a token more of anybody fits."""
        if builder.tokens_left == 0 or builder.seqs_left == 0:
            return True
        return limit < inf and builder.view.latency.step_time(builder.shape.plus(1, 0)) > limit

    def _leftover(self, builder: BatchBuilder, rest: Sequence[SeqView], bound: float) -> None:
        """Best effort, oldest first: what is left of the step, the engine and the KV; never another's SLO."""
        for at, seq in enumerate(rest):
            if seq in builder.preempted or seq.id in builder.work:
                continue
            if seq.id in builder.running:
                if builder.lacks(seq, 1):
                    self._make_room(builder, seq, 1, rest[:at:-1])
                self._chunk(builder, seq, bound)
            elif not builder.lacks(seq, seq.pending + builder.view.limits.block_size * (len(builder.work) + 1)):
                self._chunk(builder, seq, bound)

    def _give_turn(self, builder: BatchBuilder, rest: Sequence[SeqView], strict: Sequence[SeqView]) -> None:
        """One step in `turn_every`: the oldest set aside gets some tokens first, and the KV for them from whomever."""
        self._turn += 1
        if rest and self._turn >= self.turn_every:
            self._turn = 0
            victims = [*_younger(rest), *sorted(strict, key=_due, reverse=True)]
            self._force(builder, rest[0], victims, self.turn_tokens)

    def _force(self, builder: BatchBuilder, seq: SeqView, victims: Sequence[SeqView], most: int) -> None:
        tokens = min(seq.pending, most)
        self._make_room(builder, seq, tokens, victims)
        tokens = min(tokens, builder.tokens_that_fit(seq))
        if tokens:
            builder.add(seq, tokens)

    def _chunk(self, builder: BatchBuilder, seq: SeqView, bound: float) -> None:
        most = builder.tokens_that_fit(seq)
        if most:
            tokens = most
            if bound < inf:
                tokens = builder.view.latency.largest_chunk(bound, builder.shape, seq.cached, most)
            if tokens:
                builder.add(seq, tokens)

    def _make_room(self, builder: BatchBuilder, seq: SeqView, tokens: int, victims: Iterable[SeqView]) -> bool:
        """Preempt `victims`, in their order, until `tokens` of `seq` fit in KV; none if even all would not do."""
        able = [v for v in victims if v.own_blocks and v is not seq and v not in builder.preempted]
        lacking = builder.view.limits.blocks(seq.cached + tokens) - seq.blocks - builder.kv_left
        if lacking > sum(v.own_blocks for v in able) or (builder.lacks_slot(seq) and not able):
            return False
        for victim in able:
            if not builder.lacks(seq, tokens):
                break
            builder.preempt(victim)
        return True

    def _sustainable(self, view: View, active: Sequence[SeqView], more: SeqView) -> bool:
        """Could all of them decode together within the tightest TPOT? (The first always may.)"""
        together = [*active, more]
        tpot = min(map(_tpot, together))
        shape = Shape(len(together), len(together), sum(s.length for s in together))
        return not active or view.latency.step_time(shape) * (1.0 + self.safety_margin) <= self.decode_share * tpot


class _Rate:
    """How fast prefill can go beside the decodes: at full speed while they have time to spare, then at what each TPOT
    leaves after a token for everyone."""

    def __init__(self, view: View, decodes: Shape, spare: float, tpot: float, safety: float) -> None:
        latency = view.latency
        alone = latency.step_time(decodes) * safety if decodes.seqs else 0.0
        self._first = latency.step_time(decodes.plus(1, 0)) * safety
        self._token = (latency.step_time(decodes.plus(PROBE, 0)) * safety - self._first) / (PROBE - 1)
        self._sprint = max(0.0, spare - self._first)
        self._share = max(0.02, 1.0 - alone / tpot) if tpot < inf else 1.0

    def seconds_at_full_speed(self, tokens: int) -> float:
        """As if nothing were decoded meanwhile: no sooner than this."""
        return self._first + tokens * self._token

    def seconds(self, tokens: int) -> float:
        """Seconds until `tokens` tokens of prefill are done."""
        work = tokens * self._token
        late = max(0.0, work - self._sprint)
        return self._first + work - late + late / self._share


def _due(seq: SeqView) -> tuple[float, float]:
    return (seq.due, seq.request.arrival)


def _younger(rest: Sequence[SeqView]) -> Sequence[SeqView]:
    """Those set aside that may lose their KV, latest first: all but the oldest, whose turns would else be in vain."""
    return rest[:0:-1]


def _arrival(seq: SeqView) -> float:
    return seq.request.arrival


def _tpot(seq: SeqView) -> float:
    tpot = seq.request.stages[seq.stage].slo.tpot
    return inf if tpot is None else tpot
