"""Earliest deadline first, by the step: chunks end before the next token is due; late requests become best effort.

docs/edf.md says when to use it, why it decides as it does, and where it loses.

Each step takes every strict decode and then prefill in order of deadline, as much as ends before the tightest token
that is due, less a lead. The waiting prefills to try are chosen by Moore and Hodgson's rule (`_prefill_jobs`), with
tiers that lag protected. All others are best effort: they get what is left of each step, and the oldest gets a turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View, nothing_sent
from rubato.core.plan import Plan, Shape
from rubato.policy_kit.batch_builder import BatchBuilder, make_room
from rubato.policy_kit.prefill_jobs import DecodesToBe, Job, PrefillRate, fitting_beside, schedulable, tpot_of

SOURCE = "ours; EDF (Liu and Layland 1973) for the order, Moore (1968) for whom to set aside"
DECODES = 2.0  # times as long as its decodes a step may always be, whatever the tightest TTFT: half of it is prefill
DIP = 1.0  # of a token: the lead decodes keep while they lend the rest to a protected prefill
MEMORY = 256  # requests of all tiers, over which losses are counted: one clock, however rare a tier is
FORGOTTEN = 0.05  # a tier offered less than this, after fading, is dropped: its last request was 767 requests ago
RECENT = 64  # requests that the tightest TTFT is remembered over
ARRIVAL = attrgetter("request.arrival")


@dataclass
class Scheduler:
    """safety_margin: predicted times count this much more. deadline_reserve: seconds kept before each deadline, for
    delivery. max_ttft_share: a step takes at most this share of the tightest TTFT seen lately, so that the next arrival
    is in time, but may always take twice as long as its decodes: a TTFT shorter than they are cannot be kept by leaving
    prefill out. turn_every, turn_tokens: one step in `turn_every` gives the oldest request set aside at least
    `turn_tokens` tokens. decode_share: decodes together may take this share of the tightest TPOT; the rest is
    prefill's, and what builds a lead. decode_lead: tokens that a decode stays ahead of its deadlines, if it can,
    whatever prefill would like. fairness: how far (in attainment, 0 to 1) a tier may fall behind the average of all
    before its requests are protected from being set aside; 1 = never.
    """

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
    _given_up: set[str] = field(default_factory=set, init=False)  # ids that are best effort to their end
    _ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)

    def __post_init__(self) -> None:
        if self.safety_margin < 0 or self.deadline_reserve < 0 or self.fairness < 0 or self.max_ttft_share <= 0:
            raise ValueError(
                f"safety_margin {self.safety_margin}, deadline_reserve {self.deadline_reserve}, fairness "
                f"{self.fairness} must be 0 or more, "
                f"max_ttft_share {self.max_ttft_share} above 0"
            )
        if not 0.0 < self.decode_share <= 1.0 or self.decode_lead < 0:
            raise ValueError(
                f"decode_share {self.decode_share}, decode_lead {self.decode_lead}: give a share above 0, up to 1, and "
                "tokens, 0 or more"
            )
        if self.turn_every < 2 or self.turn_tokens < 1:
            raise ValueError(
                f"turn_every {self.turn_every} must be at least 2, turn_tokens {self.turn_tokens} at least 1"
            )

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self._given_up.discard(event.id)
                tier = self._tiers.pop(event.id, None)
                if tier is not None:
                    # what its client cancelled is no loss
                    self._book(event.id, tier, lost=not event.verdict.met and event.outcome != "cancelled")
                    self._counted.discard(event.id)
            elif isinstance(event, HandedOff):  # it ends elsewhere; what it counts for here stays
                self._tiers.pop(event.id, None)
                self._counted.discard(event.id)
                self._given_up.discard(event.id)

    def plan(self, view: View) -> Plan:
        running = view.running
        parts = self._part(view, running)
        strict = [*parts.decodes, *parts.jobs]
        for seq in parts.declined:
            self._book(seq.id, seq.request.tier, lost=True)  # now, not when it ends: set aside, it may take long
        for seq in [job[4] for job in strict if job[4].id in self._counted] if self._counted else ():
            self._book(seq.id, seq.request.tier, lost=False)  # it has come back
        drop = {s.id: "rejected-slo-infeasible" for s in parts.declined if _refusable(s)}
        rest = _Rest(view, running, self._given_up, parts.aside - drop.keys())
        builder = BatchBuilder(view)
        self._give_turn(builder, rest, strict)
        bound, deep = self._decodes(builder, parts, rest)
        self._prefills(builder, parts, rest, bound, deep)
        self._leftover(builder, rest, bound)
        if not builder.work:
            able = [job[4] for job in sorted(strict)] or rest.up_to(view.limits.max_model_len)
            able = [s for s in able if s not in builder.preempted]
            if able:
                self._force(
                    builder, able[0], [*rest.running[::-1], *_latest(strict)], view.limits.max_num_batched_tokens
                )
        builder.fold_decodes()
        return builder.plan(
            demote=[s.id for s in parts.declined if s.id not in drop],
            promote=[job[4].id for job in sorted([job for job in strict if job[4].demoted], key=_place)],
            drop=drop,
        )

    # ----------------------------------------------------------------- what is tried

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

    def _count_offered(self, seq: SeqView) -> None:
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

    def _part(self, view: View, running: Sequence[SeqView]) -> _Parts:
        """The requests tried now, and those not: best effort by wish, late already, or set aside for the others' sake.

        A late one misses, and stays so: once demoted for it, as if it asked for no more, it is not looked at again,
        however many such wait."""
        now, tiers, given_up = view.now, self._tiers, self._given_up
        decodes: list[Job] = []
        fresh: list[Job] = []
        demoted: list[Job] = []
        late: list[Job] = []
        kv = 0
        here = [s for s in running if s.id not in given_up] + [s for s in view.waiting if s.id not in given_up]
        for place, seq in enumerate(here):
            if seq.id not in tiers:
                if seq.request.best_effort:
                    given_up.add(seq.id)
                    continue
                self._count_offered(seq)
            due = seq.due
            if due < now or seq.missed:
                late.append((due, 0.0, place, 0, seq))
                if seq.demoted:
                    given_up.add(seq.id)
                continue
            pending = seq.pending
            job = (due, seq.request.arrival, place, pending, seq)
            if pending == 1:
                decodes.append(job)
                kv += seq.cached + 1
            elif seq.demoted:
                demoted.append(job)
            else:
                fresh.append(job)
        decodes.sort()
        tightest = {tpot_of(job[4]): job[0] for job in decodes[::-1]}
        kept: list[Job] = []
        if fresh or demoted:
            # A decode's time to spare: what it lends to prefill.
            spare = self._lendable(tightest, now, self.decode_lead)
            shape = Shape(len(decodes), len(decodes), kv)
            rate = PrefillRate(view, shape, spare, min(tightest, default=inf), 1.0 + self.safety_margin)
            able, reserve = self._paced(view, sorted(fresh), rate), self.deadline_reserve
            kept = schedulable(able, rate, now, reserve, self._behind())
            if back := fitting_beside(kept, demoted, rate, now, reserve):
                kept = sorted(kept + back)
        aside = late
        if len(kept) < len(fresh) + len(demoted):
            places = {job[2] for job in kept}
            aside = sorted(late + [job for job in fresh + demoted if job[2] not in places], key=_place)
        declined = [job[4] for job in aside if not job[4].demoted]
        return _Parts(decodes, kept, {job[4].id for job in aside}, declined, tightest)

    def _behind(self) -> set[str]:
        """Tiers that losing one more would put further behind the average than they may be (never so a lone tier):
        their requests are protected."""
        offered, lost = self._offered, self._lost
        if len(offered) < 2:
            return set()
        most = (sum(lost.values()) + 1.0) / sum(offered.values()) + self.fairness
        return {tier for tier, count in offered.items() if (lost[tier] + 1.0) / count > most}

    def _paced(self, view: View, jobs: Sequence[Job], rate: PrefillRate) -> Sequence[Job]:
        """Without those that are to be refused rather than late, and could not keep their pace if they were alone:
        their TPOT, and their e2e as far as their length can be predicted."""
        refusable = [job for job in jobs if _refusable(job[4])]
        longest: dict[float, int] = {}  # by TPOT: a step of the longest takes longest, and mostly says enough of all
        for job in refusable:
            tpot, length = tpot_of(job[4]), job[4].length
            longest[tpot] = max(longest.get(tpot, 0), length)
        steps = {tpot: view.latency.step_time(Shape(1, 1, length)) for tpot, length in longest.items()}
        slow = set()
        for _, arrival, place, pending, seq in refusable:
            tpot, e2e = tpot_of(seq), seq.request.stages[seq.stage].slo.e2e
            predicted = None if e2e is None else seq.predicted
            step = steps[tpot]
            if step > tpot or predicted is not None:
                step = view.latency.step_time(Shape(1, 1, seq.length))
            late = step > tpot
            if e2e is not None and predicted is not None:
                end = view.now + rate.seconds_alone(pending) + (predicted - 1.0) * step
                late = late or end > arrival + seq.away + e2e
            if late:
                slow.add(place)
        return [job for job in jobs if job[2] not in slow] if slow else jobs

    # ----------------------------------------------------------------- what they get

    def _decodes(self, builder: BatchBuilder, parts: _Parts, rest: _Rest) -> tuple[float, float]:
        """Every strict decode, tightest first; returns the seconds this step may take, and those it may take for a
        protected prefill."""
        view = builder.view
        tightest = parts.tightest
        order = [job[4] for job in parts.decodes]
        if order and (builder.preempted or not builder.add_decodes(order)):
            tightest = {}
            for seq in order:
                if builder.lacks(seq, 1):
                    make_room(builder, seq, 1, [*rest.younger(), *order[::-1]])
                if seq in builder.preempted or builder.room(seq) == 0:
                    continue
                builder.add(seq, 1)
                tpot = tpot_of(seq)
                tightest[tpot] = min(tightest.get(tpot, inf), seq.due)
        bound = self._lendable(tightest, view.now, self.decode_lead)
        deep = self._lendable(tightest, view.now, min(DIP, self.decode_lead))
        safe = 1.0 + self.safety_margin
        cap = self.max_ttft_share * min(self._ttfts, default=inf) / safe
        cap = max(cap, DECODES * view.latency.step_time(builder.shape.plus(1, 0)))  # plus 1: of no decodes too
        return min(bound / safe, cap), min(deep / safe, cap)

    def _lendable(self, tightest: Mapping[float, float], now: float, cushion: float) -> float:
        """Seconds that a step with these decodes (TPOT -> due first) may take: what each is ahead of its deadline, less
        a cushion of some tokens that absorbs a slow step; with less than that ahead, a pace at which the cushion grows
        again."""
        least = inf
        for tpot, due in tightest.items():
            ahead = due - now - self.deadline_reserve
            lends = ahead if tpot == inf else max(min(ahead, self.decode_share * tpot), ahead - cushion * tpot)
            least = min(least, lends)
        return least

    def _prefills(self, builder: BatchBuilder, parts: _Parts, rest: _Rest, bound: float, deep: float) -> None:
        """By deadline, until not even a token fits. One that gets none now preempts none either."""
        view, running = builder.view, builder.running
        block = view.limits.block_size
        behind = self._behind() if parts.jobs else set()
        together: DecodesToBe | None = None
        victims: list[SeqView] | None = None
        shut = _shut(builder, bound, deep) if parts.jobs else -inf
        for _, _, _, pending, seq in parts.jobs:
            limit = deep if behind and seq.request.tier in behind else bound
            if limit <= shut:
                if deep <= shut or not behind:
                    return
                continue
            if pending < 1 or seq in builder.preempted:
                continue
            if seq.id not in running:
                need = pending + block * (len(running) + 1)  # and a block for each to grow
                lacking = builder.lacking(seq, need)
                lacks = lacking > 0 or builder.slots_left < 1
                if lacks and victims is None:
                    victims = [v for v in rest.younger()[::-1] if v.own_blocks and v not in builder.preempted]
                    reclaimable = sum([v.own_blocks for v in victims])
                if lacks and (not victims or lacking > reclaimable):
                    continue
                if together is None:
                    here = [job[4] for job in (*parts.decodes, *parts.jobs) if job[4].id in running]
                    together = DecodesToBe(view, here, 1.0 + self.safety_margin, self.decode_share)
                if not together.sustain(seq):
                    continue
                while victims and builder.lacks(seq, need):
                    victim = victims.pop()
                    reclaimable -= victim.own_blocks
                    builder.preempt(victim)
            if self._chunk(builder, seq, limit):
                if seq.id not in running and together is not None:
                    together.add(seq)
                shut = _shut(builder, bound, deep)

    def _leftover(self, builder: BatchBuilder, rest: _Rest, bound: float) -> None:
        """Best effort, oldest first: what is left of the step, the engine and the KV; never another's SLO. One that
        waits starts where there is KV for its prompt, and a block for each to grow."""
        view, running = builder.view, builder.running
        block = view.limits.block_size
        shut = _shut(builder, bound, bound) >= bound

        def room() -> int:
            """The longest that can still start, in tokens pending."""
            return 0 if shut or builder.slots_left < 1 else (builder.kv_left - len(builder.work) - 1) * block

        todo = rest.up_to(room())[::-1]
        if not shut and self._leading_decodes(builder, todo, bound):
            shut = _shut(builder, bound, bound) >= bound
        while todo:
            seq = todo.pop()
            if seq.id in builder.work or seq in builder.preempted:
                continue
            if seq.id in running:
                if builder.lacks(seq, 1):
                    left = [s for s in todo if s.id in running]
                    gone = len(builder.preempted)
                    if make_room(builder, seq, 1, left) and len(builder.preempted) > gone:  # one waiting may fit now
                        todo = rest.up_to(room(), left[::-1], seq.request.arrival)[::-1]
            elif seq.pending > room() or builder.lacks(seq, seq.pending + block * (len(builder.work) + 1)):
                continue
            if not shut and self._chunk(builder, seq, bound):
                shut = _shut(builder, bound, bound) >= bound
                if shut:  # none starts any more
                    todo = [s for s in todo if s.id in running]

    def _leading_decodes(self, builder: BatchBuilder, todo: list[SeqView], bound: float) -> bool:
        """Give the decodes that come first (at the end of `todo`) a token each, if all can have one."""
        running, work, decodes = builder.running, builder.work, []
        for seq in reversed(todo):
            if seq.id not in running or seq.pending != 1 or seq.id in work or seq in builder.preempted:
                break
            decodes.append(seq)
        shape, count = builder.shape, len(decodes)
        kv = shape.kv + sum([s.cached for s in decodes]) + count
        together = shape._replace(tokens=shape.tokens + count, seqs=shape.seqs + count, kv=kv)
        if not decodes or builder.view.latency.step_time(together) > bound or not builder.add_decodes(decodes):
            return False
        del todo[-count:]
        return True

    def _give_turn(self, builder: BatchBuilder, rest: _Rest, strict: Iterable[Job]) -> None:
        """One step in `turn_every`: the oldest set aside gets some tokens first, and the KV for them from whomever."""
        self._turn += 1
        if self._turn >= self.turn_every and (oldest := rest.oldest()) is not None:
            self._turn = 0
            self._force(builder, oldest, [*rest.younger(), *_latest(strict)], self.turn_tokens)

    def _force(self, builder: BatchBuilder, seq: SeqView, victims: Sequence[SeqView], most: int) -> None:
        tokens = min(seq.pending, most)
        make_room(builder, seq, tokens, victims)
        tokens = min(tokens, builder.room(seq))
        if tokens:
            builder.add(seq, tokens)

    def _chunk(self, builder: BatchBuilder, seq: SeqView, bound: float) -> int:
        """As many tokens of it as fit; how many these are."""
        tokens = builder.room(seq)
        if tokens and bound < inf:
            tokens = builder.view.latency.largest_chunk(bound, builder.shape, seq.cached, tokens)
        if tokens:
            builder.add(seq, tokens)
        return tokens


@dataclass(slots=True)
class _Parts:
    """decodes, jobs: those tried, by deadline; aside: ids of those that are not, but for those long given up; declined:
    of these, those newly so; tightest: TPOT -> when the first of the decodes that has it is due."""

    decodes: list[Job]
    jobs: list[Job]
    aside: set[str]
    declined: list[SeqView]
    tightest: dict[float, float]


class _Rest:
    """Best effort. Those that wait, maybe thousands, are looked up on demand."""

    def __init__(self, view: View, running: Sequence[SeqView], given_up: Container[str], aside: Container[str]) -> None:
        self._view, self._given_up, self._aside = view, given_up, aside
        self.running = sorted(self._of(running), key=ARRIVAL)  # oldest first

    def _of(self, seqs: Iterable[SeqView]) -> list[SeqView]:
        given_up, aside = self._given_up, self._aside
        return [s for s in seqs if s.id in given_up or s.id in aside]

    def up_to(self, pending: int, running: Sequence[SeqView] | None = None, since: float = -inf) -> list[SeqView]:
        """These that run (or all), and those that wait with at most so many tokens pending and came no sooner; oldest
        first."""
        held = self.running if running is None else running
        if pending < 1:
            return list(held)
        short = self._of([s for s in self._view.waiting if s.pending <= pending])
        if since > -inf:
            short = [s for s in short if s.request.arrival >= since]
        return sorted([*held, *short], key=ARRIVAL)

    def oldest(self) -> SeqView | None:
        return min([*self.running[:1], *self._of(self._view.waiting)], key=ARRIVAL, default=None)

    def younger(self) -> Sequence[SeqView]:
        """Those that may lose their KV, latest first: all but the oldest, whose turns would else be in vain."""
        oldest = self.oldest() if self.running else None
        return [s for s in self.running[::-1] if s is not oldest]


def _shut(builder: BatchBuilder, bound: float, deep: float) -> float:
    """The longest of these seconds in which not one token more fits, -inf if even one fits in the shorter: of all
    entries one token on top of none takes least."""
    if builder.tokens_left == 0 or builder.seqs_left == 0:
        return deep
    if bound == inf:
        return -inf
    least = builder.view.latency.step_time(builder.shape.plus(1, 0))
    return deep if least > deep else bound if least > bound else -inf


def _latest(jobs: Iterable[Job]) -> list[SeqView]:
    """Latest deadline first."""
    return [job[4] for job in sorted(jobs, key=lambda job: (-job[0], -job[1], job[2]))]


def _place(job: Job) -> int:
    return job[2]


def _refusable(seq: SeqView) -> bool:
    return seq.request.on_decline == "refuse" and nothing_sent(seq)
