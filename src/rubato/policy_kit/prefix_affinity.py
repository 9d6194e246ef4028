"""`prefix_affinity: true` of any router: its new requests go where their prefix is cached, if their SLO is kept there.

The router decides first. Then each request that it places for the first time goes to the replica with the longest
cached prefix of it (`policy_kit.prefix_index`), of those that have the role of the replica that the router chose and
are predicted to keep the request's SLO:

- TTFT and e2e: what is pending there and its own tokens that are not cached are prefilled by when its first token is
  due (`backlog.prefill_seconds`);
- TPOT: a step with one token of each that is there and of this one takes no longer than its TPOT.

Best effort, and a request whose first token is not due at any time, goes to a replica that has more load than the
router's choice by no more than the tokens that are not to be computed there (`backlog.loads`). Of equal prefixes the
router's choice is kept; of those of other replicas the one with less load is taken. What the router rejects, demotes,
holds or recalls stays as it is, and so do requests that were handed off, whose placement has reasons of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, Router, SeqView, View
from rubato.core.plan import Role, Shape
from rubato.policy_kit.backlog import DECODE_TO_COME_TOKENS, loads, prefill_seconds
from rubato.policy_kit.prefix_index import PrefixIndex
from rubato.policy_kit.wrapper import RouterWrapper

SETTING = "prefix_affinity"


class PrefixAffinity(RouterWrapper):
    """Wraps `inner` with prefix affinity: it has all that `inner` has, its settings too."""

    prefix_affinity = True

    def __init__(self, inner: Router) -> None:
        super().__init__(inner)
        self._index = PrefixIndex()

    def observe(self, events: Sequence[Event]) -> None:
        self._index.observe(events)
        super().observe(events)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        dispatch = self.inner.place(held, fleet, now)
        if not (isinstance(dispatch, Dispatch) and isinstance(dispatch.place, Mapping) and dispatch.place):
            return dispatch  # nothing to move, or an error that the check of each dispatch names
        self._index.begin(held, fleet)
        redirection = _Redirection(self._index, held, fleet, dispatch, now)
        why = dict(dispatch.why)
        place = {id: redirection.choose_replica(id, chosen, why) for id, chosen in dispatch.place.items()}
        return dispatch._replace(place=place, why=why)


class _Redirection:
    """Moves the placements of one dispatch, and counts, by replica, the tokens added so far (`_queued`) and the
    requests.
    """

    def __init__(
        self, index: PrefixIndex, held: Sequence[SeqView], fleet: Sequence[View], dispatch: Dispatch, now: float
    ) -> None:
        self._index = index
        self._fleet = {view.id: view for view in fleet}
        self._seqs = {seq.id: seq for seq in held}
        self._roles: dict[str, Role] = {view.id: dispatch.assign.get(view.id, view.role) for view in fleet}
        self._demoted: Collection[str] = dispatch.demote
        self._now = now
        self._groups: dict[str, str] = {}
        self._queued: Counter[str] = Counter()
        self._count: Counter[str] = Counter()
        for id, replica in dispatch.place.items():
            if (seq := self._seqs.get(id)) is not None and replica in self._fleet:
                self._queued[replica] += seq.pending - self._cached(seq, replica)
                self._count[replica] += 1

    def choose_replica(self, id: str, chosen: str, why: dict[str, str]) -> str:
        """Returns the replica for a request instead of the router's choice; `why` gets the reason if it is another
        one."""
        seq = self._seqs.get(id)
        if seq is None or chosen not in self._fleet:
            return chosen
        group, before = seq.request.group, self._cached(seq, chosen)
        self._queued[chosen] -= seq.pending - before
        self._count[chosen] -= 1
        to = chosen
        if group in self._groups:  # what one prompt's choices share is on one replica
            to = self._groups[group]
        elif seq.request.handoff is None:
            to = self._best(seq, chosen, before)
        if group:
            self._groups[group] = to
        cached = self._cached(seq, to)
        self._queued[to] += seq.pending - cached
        self._count[to] += 1
        self._index.expect(seq, to)
        if to != chosen:
            why[id] = f"{cached} tokens cached here, {before} on {chosen}" + (f" ({why[id]})" if id in why else "")
        return to

    def _cached(self, seq: SeqView, replica: str) -> int:
        """Returns the tokens of a request in a replica's KV; 0 for one whose own KV comes along."""
        return 0 if seq.cached else self._index.cached(seq, replica)

    def _best(self, seq: SeqView, chosen: str, before: int) -> str:
        """Returns a replica with a longer cached prefix than `chosen` that keeps the SLO; else `chosen`."""
        role = self._roles[chosen]
        longer: list[tuple[int, int, int, View]] = []
        for id, view in self._fleet.items():
            if id != chosen and self._roles[id] == role and (cached := self._index.cached(seq, id)) > before:
                longer.append((-cached, self._load(view), len(longer), view))
        for negative, there, _, view in sorted(longer):
            if self._keeps_slo(seq, view, -negative, there - self._load(self._fleet[chosen]), -negative - before):
                return view.id
        return chosen

    def _load(self, view: View) -> int:
        """Returns the load of a replica in tokens, with what this dispatch adds."""
        return loads([view])[0] + self._queued[view.id] + DECODE_TO_COME_TOKENS * self._count[view.id]

    def _keeps_slo(self, seq: SeqView, view: View, cached: int, more: int, saved: int) -> bool:
        """Returns whether `view` keeps its SLO, where its load is `more` than that of the router's choice, and `saved`
        tokens are not computed."""
        has_slo = not (seq.best_effort or seq.id in self._demoted)
        due, tpot = (seq.due, seq.slo.tpot) if has_slo else (inf, None)
        if due == inf:
            if more > saved:
                return False
        elif self._now + prefill_seconds(view, self._queued[view.id] + seq.pending - cached) > due:
            return False
        return tpot is None or self._step_of_all(seq, view) <= tpot

    def _step_of_all(self, seq: SeqView, view: View) -> float:
        """Returns the seconds of a step with a token of every request there or placed there now, and of this one."""
        count = min(view.count + self._count[view.id] + 1, view.limits.max_num_seqs)
        kv = sum([s.length for s in view.running]) + sum([s.length for s in view.waiting])
        return view.latency.step_time(Shape.decodes(count, kv + self._queued[view.id] + seq.length))
