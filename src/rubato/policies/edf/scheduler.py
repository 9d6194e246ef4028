"""Plans a step by deadline: decodes, then prefills that can be in time, then best effort in what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policies.edf.requests import FIRST_WAITING_PLACE, Requests, StrictDecodes
from rubato.policy_kit.batch_builder import BatchBuilder, make_room
from rubato.policy_kit.prefill_jobs import (
    DecodeCapacity,
    PrefillJob,
    PrefillRate,
    arrival_of,
    feasible,
    index_of,
    insertable_jobs,
    schedulable,
    seq_of,
    tpot_of,
)  # fmt: skip
from rubato.policy_kit.refusals import refusals

# Times as long as its decodes a step may always be, whatever the tightest TTFT: half of it is prefill.
MIN_STEP_IN_DECODE_TIMES = 2.0
LEAD_FLOOR_TOKENS = 1.0  # lead that decodes keep while they lend the rest of it to a protected prefill
ARRIVAL = attrgetter("request.arrival")


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
    _requests: Requests = field(default_factory=Requests, init=False)

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
        self._requests.observe(events)

    def plan(self, view: View) -> Plan:
        tried = self._choose(view)
        losses = self._requests.losses
        for seq in tried.declined:
            losses.count(seq.id, lost=True)  # now, not when it ends: set aside, it may take long
        if losses.set_aside:
            for seq in [s for s in map(seq_of, [*tried.back, *tried.prefills]) if s.id in losses.set_aside]:
                losses.count(seq.id, lost=False)  # it has come back
        drop = refusals(tried.declined, view)
        best_effort = _BestEffort(view, self._requests, tried, drop)
        builder = BatchBuilder(view)
        self._give_turn(builder, best_effort, tried)
        limits = self._add_decodes(builder, tried, best_effort)
        self._add_prefills(builder, tried, best_effort, limits)
        self._fill_with_best_effort(builder, best_effort, limits[0])
        if not (builder.work or builder.decode):
            strict = tried.find_jobs()
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

    def _choose(self, view: View) -> _Tried:
        """Divides requests into those to try now and the others: best effort, late, or set aside so that others are in
        time."""
        found, now = self._requests.sort(view), view.now
        decodes, fresh, demoted = found.decodes, found.fresh, found.demoted
        on_time, back = list[PrefillJob](), list[PrefillJob]()
        if fresh or demoted:
            # A decode's time to spare: what it lends to prefill.
            spare = self._lendable(decodes.tightest, now, self.decode_lead)
            rate = PrefillRate(view, decodes.shape, spare, min(decodes.tightest, default=inf), 1.0 + self.safety_margin)
            able, reserve = feasible(view, fresh, rate) if found.may_refuse else fresh, self.deadline_reserve
            on_time = schedulable(able, rate, now, reserve, self._requests.losses.behind(self.fairness))
            if back := insertable_jobs(on_time, demoted, rate, now, reserve):
                on_time = sorted(on_time + back)
        left_out = found.late
        if len(on_time) - len(back) < len(fresh):
            places = set(map(index_of, on_time))
            left_out = sorted(left_out + [job for job in fresh if index_of(job) not in places], key=index_of)
        declined = [seq for seq in map(seq_of, left_out) if not seq.demoted]
        if not decodes.are_same:
            back += [job for job in decodes.find_jobs() if job[4].demoted]
        return _Tried(decodes, on_time, [*left_out, *demoted], declined, back)

    # ----------------------------------------------------------------- what they get

    def _add_decodes(self, builder: BatchBuilder, tried: _Tried, best_effort: _BestEffort) -> tuple[float, float]:
        """Adds every strict decode, tightest first. Returns the longest step in seconds, and the longest for a
        protected prefill."""
        view, decodes, tightest = builder.view, tried.decodes, tried.decodes.tightest
        if builder.work or decodes.others is None or not builder.decode_all(but=decodes.others):
            tightest = self._add_each_decode(builder, [*map(seq_of, decodes.find_jobs())], best_effort, tightest)
        lends = self._lendable(tightest, view.now, self.decode_lead)
        lends_protected = self._lendable(tightest, view.now, min(LEAD_FLOOR_TOKENS, self.decode_lead))
        safe = 1.0 + self.safety_margin
        cap = self.max_ttft_share * min(self._requests.ttfts, default=inf) / safe
        cap = max(
            cap, MIN_STEP_IN_DECODE_TIMES * view.latency.step_time(builder.shape.plus(1, 0))
        )  # plus 1: of no decodes too
        return min(lends / safe, cap), min(lends_protected / safe, cap)

    def _add_each_decode(
        self, builder: BatchBuilder, order: Sequence[SeqView], best_effort: _BestEffort, tightest: Mapping[float, float]
    ) -> Mapping[float, float]:
        """Adds decodes in this order, preempting best effort and the last of them where KV or a slot is missing.
        Returns `tightest` of those added."""
        if not order or (not builder.preempted and builder.add_decodes(order)):
            return tightest
        tightest = {}
        for seq in order:
            if builder.lacks(seq, 1):
                make_room(builder, seq, 1, [*best_effort.younger(), *order[::-1]])
            if seq in builder.preempted or builder.tokens_that_fit(seq) == 0:
                continue
            builder.add(seq, 1)
            tpot = tpot_of(seq)
            tightest[tpot] = min(tightest.get(tpot, inf), seq.due)
        return tightest

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
        self, builder: BatchBuilder, tried: _Tried, best_effort: _BestEffort, limits: tuple[float, float]
    ) -> None:
        """Adds prefills by deadline until no token fits. A prefill that gets no token preempts no request either."""
        prefills, view, running = tried.prefills, builder.view, builder.running
        victims = [v for v in best_effort.younger()[::-1] if v.own_blocks and v not in builder.preempted]
        if builder.slots_left < 1 and not victims:  # nothing can start
            prefills = [] if tried.decodes.are_same else [job for job in prefills if job[4].id in running]
        if not prefills:
            return
        step_limit, protected_step_limit = limits
        block, behind = view.limits.block_size, self._requests.losses.behind(self.fairness)
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
                    present = [s for s in map(seq_of, tried.find_jobs()) if s.id in running]
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

    def _give_turn(self, builder: BatchBuilder, best_effort: _BestEffort, tried: _Tried) -> None:
        """In one step of `turn_every`, gives the oldest best effort some tokens first, with KV from any other
        request."""
        self._turn += 1
        if self._turn >= self.turn_every and (oldest := best_effort.oldest()) is not None:
            self._turn = 0
            self._force(builder, oldest, [*best_effort.younger(), *_latest(tried.find_jobs())], self.turn_tokens)

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
class _Tried:
    """The requests to try in one plan, and those that are set aside.

    Args:
        decodes: all that are strict
        prefills: by deadline
        set_aside: those not tried that may be another time, and maybe some of `back`
        declined: newly set aside
        back: those tried that were demoted
    """

    decodes: StrictDecodes
    prefills: list[PrefillJob]
    set_aside: list[PrefillJob]
    declined: list[SeqView]
    back: list[PrefillJob]

    def find_jobs(self) -> list[PrefillJob]:
        """Returns decodes, then prefills."""
        return [*self.decodes.find_jobs(), *self.prefills]


class _BestEffort:
    """Requests served as best effort, but for those to `drop`. Waiting ones, maybe thousands, are looked up on
    demand."""

    def __init__(self, view: View, requests: Requests, tried: _Tried, drop: Mapping[str, str]) -> None:
        self._view, self._requests, self._tried, self._drop = view, requests, tried, drop
        self._set_aside: set[str] | None = None  # not looked up yet
        decodes = tried.decodes  # if nothing else runs, those that are not strict are best effort
        own = decodes.others or () if decodes.are_same else self._best_effort_of(view.running)
        self.running = sorted(own, key=ARRIVAL)  # oldest first

    def _best_effort_of(self, seqs: Iterable[SeqView]) -> list[SeqView]:
        if (set_aside := self._set_aside) is None:
            back = [seq.id for seq in map(seq_of, self._tried.back)]
            ids = {seq.id for seq in map(seq_of, self._tried.set_aside)}
            set_aside = self._set_aside = ids.difference(self._drop, back)
        best_effort = self._requests.best_effort
        return [s for s in seqs if s.id in best_effort or s.id in set_aside]

    def up_to(self, pending: int, running: Sequence[SeqView] | None = None, since: float = -inf) -> list[SeqView]:
        """Returns `running` (default: all that run), and waiting requests that arrived at `since` or later with at most
        `pending` tokens; oldest first."""
        own = self.running if running is None else running
        if pending < 1:
            return list(own)
        short = self._best_effort_of([s for s in self._view.waiting if s.pending <= pending])
        if since > -inf:
            short = [s for s in short if s.request.arrival >= since]
        return sorted([*own, *short], key=ARRIVAL)

    def oldest(self) -> SeqView | None:
        """Returns the oldest one, running or waiting. All that wait are looked at only if one set aside may be it."""
        waiting = self._view.waiting
        running, queued = self.running[:1], self._requests.oldest_best_effort(waiting)
        found = min(running if queued is None else [*running, queued], key=ARRIVAL, default=None)
        waiting_aside = [job for job in self._tried.set_aside if index_of(job) >= FIRST_WAITING_PLACE]
        if found is not None and found.request.arrival < min(map(arrival_of, waiting_aside), default=inf):
            return found
        return min([*running, *self._best_effort_of(waiting)], key=ARRIVAL, default=None)

    def younger(self) -> Sequence[SeqView]:
        """Returns the requests that may lose their KV, latest first: all but the oldest, which needs it for its
        turns."""
        oldest = self.oldest() if self.running else None
        return [s for s in self.running[::-1] if s is not oldest]


def _latest(jobs: Iterable[PrefillJob]) -> list[SeqView]:
    """Returns the requests of these jobs, latest deadline first."""
    return [*map(seq_of, sorted(jobs, key=lambda job: (-job[0], -job[1], job[2])))]
