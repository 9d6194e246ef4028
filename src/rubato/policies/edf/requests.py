"""Sorts a replica's requests: decodes, prefills to try, and best effort. What stays the same from step to step is kept:
waiting requests while none changes, and running ones while all decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import add, attrgetter

import numpy as np
from numpy.typing import NDArray

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.prefill_jobs import PrefillJob, seq_of, tpot_of
from rubato.policy_kit.recent_losses import RecentLosses

RECENT_REQUESTS = 64  # requests among which the tightest TTFT counts
ARRIVAL, MISSED = attrgetter("request.arrival"), attrgetter("missed")
FIRST_WAITING_PLACE = 1 << 30  # behind all that run
Groups = tuple[list[PrefillJob], list[PrefillJob], list[PrefillJob], list[PrefillJob]]


@dataclass(slots=True)
class _SameDecodes:
    """Requests that all decode, strictly or as best effort, as long as no other runs.

    Args:
        running: all of them, in order of start
        strict: those with an SLO that they keep
        others: the best effort among them
        places: of the strict ones in `running`, by TPOT
    """

    running: Sequence[SeqView]
    strict: list[SeqView]
    others: list[SeqView]
    places: dict[float, NDArray[np.intp]]


@dataclass(slots=True)
class StrictDecodes:
    """The decodes with an SLO that they keep so far.

    Args:
        shape: their batch
        tightest: TPOT (s, inf for none) -> time at which the first of them is due
        find_jobs: returns them as jobs, tightest first: few plans look at them one by one
        others: the view's decodes that are best effort; None if they are not known
        are_same: they ran in the last plan, and nothing runs but decodes
    """

    shape: Shape
    tightest: Mapping[float, float]
    find_jobs: Callable[[], list[PrefillJob]]
    others: Sequence[SeqView] | None
    are_same: bool


@dataclass(slots=True)
class _Waiting:
    """Waiting requests as sorted.

    Args:
        seqs: all of them, in the view's order
        groups: decodes, prefills that were never demoted, prefills that were, and late requests
        until: time up to which that is right, if `seqs` stay as they are
        may_refuse: some of the fresh prefills may prefer a refusal
    """

    seqs: Sequence[SeqView]
    groups: Groups
    until: float = -inf
    may_refuse: bool = True


@dataclass(slots=True)
class SortedRequests:
    """The requests of one view.

    Args:
        decodes: strict ones
        fresh: prefills that were never demoted, by deadline
        demoted: prefills that were
        late: requests that have missed, or are late now, in order of their places
        may_refuse: some of `fresh` may prefer a refusal
    """

    decodes: StrictDecodes
    fresh: list[PrefillJob]
    demoted: list[PrefillJob]
    late: list[PrefillJob]
    may_refuse: bool


class Requests:
    """The requests of a replica from step to step. `ttfts` has those of the last ones, in seconds; `best_effort` the
    ids of those that are best effort to their end; `losses` what each tier loses."""

    def __init__(self) -> None:
        self.losses = RecentLosses()
        self.best_effort: set[str] = set()
        self.ttfts: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._waiting = _Waiting((), ([], [], [], []))
        self._oldest: tuple[Sequence[SeqView], SeqView | None] = (), None  # best effort among these
        self._decoding: Sequence[SeqView] = ()  # what ran in the last plan, if all of it decoded
        self._same: _SameDecodes | None = None  # the same, once it has run in two plans

    def observe(self, events: Sequence[Event]) -> None:
        """Forgets requests that have ended or go on elsewhere."""
        for event in events:
            if isinstance(event, Finished | HandedOff):
                # what its client cancelled is no loss
                lost = event.verdict.missed and event.outcome != "cancelled" if isinstance(event, Finished) else None
                self.losses.end(event.id, lost=lost)
                self.best_effort.discard(event.id)

    def oldest_best_effort(self, waiting: Sequence[SeqView]) -> SeqView | None:
        """Returns the first to arrive of the waiting requests that are best effort to their end."""
        if waiting is not self._oldest[0] or not isinstance(waiting, tuple):
            found = [seq for seq in waiting if seq.id in self.best_effort]
            self._oldest = waiting, min(found, key=ARRIVAL, default=None)
        return self._oldest[1]

    def sort(self, view: View) -> SortedRequests:
        """Sorts the requests of a view. A late one has missed for good: once demoted it is best effort to its end."""
        running, now = view.running, view.now
        decodes = self._find_same_decodes(view, running)
        here = self._sort(running, 0, now) if decodes is None else None
        waiting = self._sort_waiting(view.waiting, now)
        queued = waiting.groups
        if decodes is not None and not queued[0]:
            return SortedRequests(decodes, *queued[1:], waiting.may_refuse)
        if here is None:  # one that waits decodes, too: a prefix cache holds all but one of its tokens
            here = self._sort(running, 0, now)
        jobs, fresh, demoted, late = [*map(add, here, queued)]  # list by list
        jobs.sort()
        tightest: dict[float, float] = {}
        for job, tpot in zip(jobs, map(tpot_of, map(seq_of, jobs)), strict=True):
            if tpot not in tightest:
                tightest[tpot] = job[0]
        self._decoding = () if any(here[1:]) or queued[0] else running
        shape = Shape.decodes(len(jobs), sum([seq.cached for _, _, _, _, seq in jobs]) + len(jobs))
        are_all = shape.seqs == view.decodes.seqs and not queued[0]
        decodes = StrictDecodes(shape, tightest, lambda: jobs, () if are_all else None, False)
        return SortedRequests(decodes, sorted(fresh), demoted, late, may_refuse=True)

    def _find_same_decodes(self, view: View, running: Sequence[SeqView]) -> StrictDecodes | None:
        """Returns the strict decodes without a look at each, if what runs is what ran in the last plan, all of it
        decoded then and does now, and no strict one is late; else None."""
        if not self._decoding or running != self._decoding or view.decodes.seqs != len(running):
            return None
        same = self._same
        if same is None or same.running is not self._decoding:
            strict, others = list[SeqView](), list[SeqView]()
            for seq in running:
                (others if seq.id in self.best_effort else strict).append(seq)
            if any(len(seq.request.stages) > 1 or seq.demoted for seq in strict):  # a stage may change the TPOT
                return None
            places: dict[float, list[int]] = {}
            for at, seq in enumerate(running):
                if seq.id not in self.best_effort:
                    places.setdefault(tpot_of(seq), []).append(at)
            arrays = {tpot: np.array(at) for tpot, at in places.items()}
            same = self._same = _SameDecodes(self._decoding, strict, others, arrays)
        dues, shape = view.dues, view.decodes
        tightest = {tpot: float(dues[at].min()) for tpot, at in same.places.items()}
        if min(tightest.values(), default=inf) < view.now or any(map(MISSED, same.strict)):
            return None
        for seq in same.others:
            shape = shape.minus(1, seq.cached)
        return StrictDecodes(
            shape, tightest, lambda: sorted(self._sort(running, 0, view.now)[0]), same.others, are_same=True
        )

    def _sort(self, seqs: Sequence[SeqView], place: int, now: float) -> Groups:
        """Sorts requests that are not best effort for good into decodes, prefills that were never demoted, prefills
        that were, and late requests; `place` is the place of the first in the queue."""
        groups: Groups = ([], [], [], [])
        decodes, fresh, demoted, late = groups
        tiers, best_effort = self.losses.tiers, self.best_effort
        for at, seq in enumerate([s for s in seqs if s.id not in best_effort], place):
            if seq.id not in tiers:
                if seq.request.best_effort:
                    best_effort.add(seq.id)
                    continue
                self.losses.offer(seq.id, seq.request.tier)
                if (ttft := seq.request.stages[0].slo.ttft) is not None:
                    self.ttfts.append(ttft)
            due = seq.due
            if due < now or seq.missed:
                late.append((due, seq.request.arrival, at, 0, seq))
                if seq.demoted:
                    best_effort.add(seq.id)
                continue
            pending = seq.pending
            job = (due, seq.request.arrival, at, pending, seq)
            if pending == 1:
                decodes.append(job)
            elif seq.demoted:
                demoted.append(job)
            else:
                fresh.append(job)
        return groups

    def _sort_waiting(self, seqs: Sequence[SeqView], now: float) -> _Waiting:
        """Sorts waiting requests, anew only if one of them has changed (`View.waiting`) or is late now."""
        if seqs is self._waiting.seqs and now <= self._waiting.until:
            return self._waiting
        groups, self._oldest = self._sort(seqs, FIRST_WAITING_PLACE, now), ((), None)
        for group in groups[:3]:
            group.sort()
        waiting = _Waiting(seqs, groups)
        if isinstance(seqs, tuple) and not groups[-1]:
            waiting.until = min([group[0][0] for group in groups if group], default=inf)
            waiting.may_refuse = any(seq.request.on_decline == "refuse" for seq in map(seq_of, groups[1]))
            self._waiting = waiting
        return waiting
