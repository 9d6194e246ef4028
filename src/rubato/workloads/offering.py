"""Offers requests whose times depend on the ends of earlier requests: closed loops and sessions.

A closed loop offers its requests in order and keeps `concurrency` of them in flight: the next comes at the instant when
one ends. A request that follows another (`follows`) comes a number of seconds after that one has ended. A request's own
`arrival` is then the earliest time at which it may come. In a closed loop of sessions a turn that is due goes before a
new session, so that begun sessions continue.

A session may have a deadline, in seconds after its first turn came, which includes tools and the user's pauses. Each
turn is then offered with the remaining time as its e2e, since later turns are unknown. (The alternative, a share of the
session for each turn by its expected time, needs a plan of the turns, which a client seldom has.)

Every end frees a place in a closed loop, whatever its outcome. But a request that follows one that did not complete is
never offered, nor are its own followers: there is no answer to continue. Such requests count as offered and missed,
with a reason of their own (`Offering.dropped`); otherwise a refusal of every session's first turn would look like
attainment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from rubato.core.request import MIN_SLO_S, NOTHING, Outcome, Request

Follows = Mapping[str, tuple[str, float]]  # request id -> the request that it follows, and seconds after its end


def as_offered(request: Request, at: float, began: float, sessions: Mapping[str, float]) -> Request:
    """Returns a request with its actual arrival, and with the session's remaining time as its e2e where the session has
    a deadline.

    Args:
        request: of a workload.
        at: when it came, in seconds.
        began: when its session began, in seconds.
        sessions: session -> seconds from its beginning to its deadline; `MIN_SLO_S` remain at least.
    """
    seconds = sessions.get(request.session)
    if seconds is None:
        return request if request.arrival == at else replace(request, arrival=at)
    left = max(MIN_SLO_S, began + seconds - at)
    first = request.stages[0]
    e2e = left if first.slo.e2e is None else min(left, first.slo.e2e)
    stages = (replace(first, slo=replace(first.slo, e2e=e2e)), *request.stages[1:])
    return replace(request, arrival=at, stages=stages)


class Offering:
    """The requests of one run. The caller offers what `due` returns, and reports each end to `ended`.

    Args:
        requests: ascending in arrival.
        follows: the request that another one follows, by id.
        concurrency: requests in flight of a closed loop; None: no bound.
        sessions: session -> seconds from the arrival of its first turn to its deadline.

    Raises:
        ValueError: for a concurrency below 1, or a request that follows one that does not come before it.
    """

    def __init__(
        self, requests: Sequence[Request], follows: Follows = NOTHING, concurrency: int | None = None,
        sessions: Mapping[str, float] = NOTHING,
    ) -> None:  # fmt: skip
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: give 1 or more requests in flight, or none for no bound")
        self.requests = requests
        self.remaining = len(requests)  # neither offered nor dropped yet
        self.dropped: dict[str, tuple[float, str]] = {}  # id -> when it was dropped, and why
        self._follows = follows
        self._sessions = sessions
        self._began: dict[str, float] = {}  # session -> when its first turn came
        self._next: dict[str, list[int]] = defaultdict(list)  # id -> indices of the requests that follow it
        # when each free place of a closed loop became free, ascending; None: no bound
        self._free = None if concurrency is None else [-inf] * concurrency
        # (earliest time, index) of requests that follow none, and of due followers
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
        """When the next request is due; inf: not before some request ends, or never."""
        if self._free == []:
            return inf
        first = self._first[0][0] if self._first else inf
        at = min(first, self._later[0][0]) if self._later else first
        return at if self._free is None else max(at, self._free[0])

    def due(self, now: float) -> list[Request]:
        """Returns the requests to offer by `now`, in order; each one's arrival is the instant at which it was due."""
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

    def record_end(self, id: str, at: float, outcome: Outcome) -> None:
        """Records that an offered request ended, at `at` seconds: its place is free, and requests that go on from it
        are due after their gaps; they are dropped if it did not complete."""
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
