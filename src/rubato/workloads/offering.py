"""When each request is offered, where that follows from how the requests before it ended.

Two things make it so. A closed loop offers its requests in order and keeps `concurrency` of them in flight: the next
comes at the instant when one ends. A request that goes on from another (`follows`) comes so many seconds after that one
has ended. A request's own `arrival` is then the earliest time at which it may come. In both at once, a turn whose time
has come goes before a request that goes on from none, so that what has begun is carried on.

A session may have a deadline, so many seconds after its first turn came, tools and the user's pauses included: the time
that somebody waits. Each turn is then offered with an e2e of what remains of it, which is all that can be known before
the turns to come. (The alternative, shares of the session by what each turn is expected to take, needs a plan of the
turns, which a client seldom has.)

Whatever the outcome, an end makes room in a closed loop. But what goes on from a request that did not complete is never
offered, nor what goes on from that: nobody can go on from an answer that there is not. Such requests count as offered
work that was missed, with a reason of their own (`Offering.dropped`), or refusing the first turn of each session would
look like attaining them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from rubato.core.request import MIN_SLO_S, NOTHING, Outcome, Request

Follows = Mapping[str, tuple[str, float]]  # request id -> the request that it goes on from, and seconds after its end


def as_offered(request: Request, at: float, began: float, sessions: Mapping[str, float]) -> Request:
    """A request of a workload as it came, at `at`, in a session that began at `began`: within what remains of that, if
    the session has a deadline; at least `MIN_SLO_S` seconds, which no server keeps."""
    seconds = sessions.get(request.session)
    if seconds is None:
        return request if request.arrival == at else replace(request, arrival=at)
    left = max(MIN_SLO_S, began + seconds - at)
    first = request.stages[0]
    e2e = left if first.slo.e2e is None else min(left, first.slo.e2e)
    stages = (replace(first, slo=replace(first.slo, e2e=e2e)), *request.stages[1:])
    return replace(request, arrival=at, stages=stages)


class Offering:
    """Requests, each to be offered when `due` says, by a caller that says what has `ended`; for one run.

    requests: ascending in arrival. sessions: session -> seconds from the arrival of its first turn to its deadline.
    Raises ValueError for a concurrency below 1, or a request that goes on from one that does not come before it.
    """

    def __init__(
        self, requests: Sequence[Request], follows: Follows = NOTHING, concurrency: int | None = None,
        sessions: Mapping[str, float] = NOTHING,
    ) -> None:  # fmt: skip
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: give 1 or more requests in flight, or none for no bound")
        self.requests = requests
        self.remaining = len(requests)  # neither offered nor dropped yet
        self.dropped: dict[str, tuple[float, str]] = {}  # id -> when that was known, and why
        self._follows = follows
        self._sessions = sessions
        self._began: dict[str, float] = {}  # session -> when its first turn came
        self._next: dict[str, list[int]] = defaultdict(list)  # id -> places of the requests that go on from it
        # a closed loop's free places, each since when, ascending; None: there is always one
        self._free = None if concurrency is None else [-inf] * concurrency
        # from when a request may come, and its place in the order: of those that go on from none, and of the others
        self._first: list[tuple[float, int]] = []
        self._later: list[tuple[float, int]] = []
        earlier_ids: set[str] = set()
        for place, request in enumerate(requests):
            if request.id not in follows:
                self._first.append((request.arrival, place))
            elif (before := follows[request.id][0]) in earlier_ids:
                self._next[before].append(place)
            else:
                raise ValueError(f"request {request.id!r} goes on from {before!r}, which does not come before it")
            earlier_ids.add(request.id)
        heapify(self._first)

    @property
    def next_at(self) -> float:
        """When `due` has something to say; inf: not before some request ends, or never again."""
        if self._free == []:
            return inf
        first = self._first[0][0] if self._first else inf
        at = min(first, self._later[0][0]) if self._later else first
        return at if self._free is None else max(at, self._free[0])

    def due(self, now: float) -> list[Request]:
        """What is to be offered by now, in order; each request's arrival is the instant at which it was to come."""
        due_now: list[Request] = []
        while (at := self.next_at) <= now:
            _, place = heappop(self._later if self._later and self._later[0][0] <= at else self._first)
            if self._free is not None:
                heappop(self._free)
            request = self.requests[place]
            began = self._began.setdefault(request.session, at)
            due_now.append(as_offered(request, at, began, self._sessions))
        self.remaining -= len(due_now)
        return due_now

    def ended(self, id: str, at: float, outcome: Outcome) -> None:
        """A request that was offered has ended."""
        if self._free is not None:
            heappush(self._free, at)
        if outcome != "completed":
            self._drop(id, at, f"not offered: an earlier turn {'failed' if outcome == 'failed' else f'was {outcome}'}")
            return
        for place in self._next.pop(id, ()):
            request = self.requests[place]
            heappush(self._later, (max(request.arrival, at + self._follows[request.id][1]), place))

    def _drop(self, id: str, at: float, why: str) -> None:
        before = [id]
        while before:
            for place in self._next.pop(before.pop(), ()):
                dropped = self.requests[place].id
                self.dropped[dropped] = at, why
                self.remaining -= 1
                before.append(dropped)
