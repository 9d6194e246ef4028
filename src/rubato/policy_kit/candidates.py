"""Lets any router place requests that only some replicas may serve, by asking it about each such set separately.

Not every server of a fleet has the model of each request. A data plane may say which endpoints a request may go to (the
subset of the Gateway API Inference Extension's endpoint picker protocol), and which one it went to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from rubato.core.interfaces import Dispatch, Router, SeqView, View
from rubato.core.request import NO_REPLICA, NO_REPLICA_TIMEOUT_S
from rubato.policy_kit.wrapper import RouterWrapper

RETRY_S = 0.5  # a set without a replica is checked again after this time


class Candidates(RouterWrapper):
    """Wraps `inner` so that it places a request at one of the endpoints that it may go to.

    Args:
        inner: the router.
        only: returns the endpoints that the request of an id may go to; None: anywhere.
        endpoint: returns the endpoint of the replica of an id; a server that comes back as another replica is the same
            endpoint.
    """

    def __init__(
        self, inner: Router, only: Callable[[str], frozenset[str] | None], endpoint: Callable[[str], str]
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self._only = only
        self._endpoint = endpoint
        self._missing: dict[frozenset[str], float] = {}  # sets of which none is there, and since when

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        """Asks `inner` about the requests of each set of endpoints in turn.

        The first decision that places or rejects something is returned alone: the cluster then asks again. Without one,
        the decisions are combined. All requests of a set are rejected once none of its endpoints has been there for
        NO_REPLICA_TIMEOUT_S.
        """
        sets: dict[frozenset[str] | None, list[SeqView]] = {}
        for seq in held:
            sets.setdefault(self._only(seq.id), []).append(seq)
        if list(sets) == [None]:
            self._missing.clear()
            return self.inner.place(held, fleet, now)
        combined, before, self._missing = Dispatch(), self._missing, {}
        for endpoints, seqs in sets.items():
            views = [view for view in fleet if endpoints is None or self._endpoint(view.id) in endpoints]
            if endpoints is not None and not views:  # lost, or given a rest: no event tells that it is over
                since = self._missing[endpoints] = before.get(endpoints, now)
                if now >= since + NO_REPLICA_TIMEOUT_S:
                    return Dispatch(reject={seq.id: NO_REPLICA for seq in seqs})
                combined = combined._replace(wake_at=min(now + RETRY_S, combined.wake_at or inf))
                continue
            own = self.inner.place(seqs, views, now)
            if own.place or own.reject:
                return own
            wake_at = combined.wake_at if own.wake_at is None else min(own.wake_at, combined.wake_at or inf)
            combined = combined._replace(
                demote=[*combined.demote, *own.demote], recall={**combined.recall, **own.recall},
                assign={**combined.assign, **own.assign}, wake_at=wake_at,
            )  # fmt: skip
        return combined
