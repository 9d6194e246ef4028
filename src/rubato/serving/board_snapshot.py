"""The state of a cluster at one instant, for the board: where each request in flight is and why, and each replica.

One pass over the requests in flight serves every tenant; rows are made only of the requests that are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from typing import Any, Literal, NamedTuple

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Role
from rubato.core.request import NOTHING
from rubato.frontdoor.explanation import phases
from rubato.frontdoor.request_record import LOST, PREEMPTED, RequestRecord
from rubato.frontdoor.verdict import ms

MAX_SHOWN_REQUESTS = 200  # in flight; all of them are counted
State = Literal["held", "waiting", "running", "moving"]
# Columns of `requests`. phases: [letter, milliseconds, letter, milliseconds, ...] since the request's arrival, with the
# first letter of each `explanation.Phase`; due_in_ms: until its next token is due (negative: late, null: no SLO).
COLUMNS = (
    "id", "tier", "tenant", "state", "replica", "why", "age_ms", "due_in_ms", "late", "best_effort", "prompt_tokens",
    "output_tokens", "max_tokens", "phases",
)  # fmt: skip


class _Place(NamedTuple):
    """Says where a request is: at which replica ("": at none), and behind how many others in its queue (`before`)."""

    state: State
    seq: SeqView | None = None
    replica: str = ""
    before: int = 0


@dataclass(slots=True)
class TierInFlight:
    """Counts one tier's requests in flight, and those of them with a late token."""

    states: Counter[str] = field(default_factory=Counter)
    late: int = 0
    oldest_wait: float = 0.0  # seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as JSON."""
        waiting = self.states["held"] + self.states["waiting"]
        running = self.states["running"] + self.states["moving"]
        wait = ms(self.oldest_wait) if waiting else None
        return {"waiting": waiting, "running": running, "late": self.late, "oldest_wait_ms": wait}


class RequestsInFlight:
    """Knows where all requests in flight are at one instant.

    Args:
        records: by request, in the order in which they were offered.
        held: requests at no replica.
        views: of the replicas.
        now: seconds of the clock.
        has_fair_share: whether a request may be held for its tenant's share.
        counted_replicas: ids of replicas that do not report their state.
        is_routed: whether a router may hold requests.
    """

    def __init__(
        self,
        records: Mapping[str, RequestRecord],
        held: Sequence[SeqView],
        views: Sequence[View],
        now: float,
        *,
        has_fair_share: bool,
        counted_replicas: Collection[str] = (),
        is_routed: bool = True,
    ) -> None:
        places: dict[str, _Place] = {}
        for view in views:  # a moving request is in the view of its source, and held
            places.update((seq.id, _Place("moving", seq, view.id)) for seq in view.moving)
        places.update((seq.id, _Place("held", seq, before=at)) for at, seq in enumerate(held))
        for view in views:
            places.update((seq.id, _Place("running", seq, view.id)) for seq in view.running)
            places.update((seq.id, _Place("waiting", seq, view.id, at)) for at, seq in enumerate(view.waiting))
        self._now = now
        self._has_fair_share, self._counted_replicas, self._is_routed = has_fair_share, counted_replicas, is_routed
        self._places = [(record, places.get(id) or _place_without_view(record)) for id, record in records.items()]

    def by_tier(self) -> dict[str, TierInFlight]:
        """Returns the counts by tier."""
        tiers: dict[str, TierInFlight] = {}
        for record, place in self._places:
            tier = tiers.setdefault(record.request.tier, TierInFlight())
            tier.states[place.state] += 1
            tier.late += _is_late(place, self._now)
            if record.waiting is not None and place.state in ("held", "waiting"):
                tier.oldest_wait = max(tier.oldest_wait, self._now - record.waiting[1])
        return tiers

    def to_json(self, tenant: str | None, names: Mapping[str, str] = NOTHING) -> dict[str, Any]:
        """Returns the requests of one tenant, or of all (None), as JSON: exact counts, and rows of the
        `MAX_SHOWN_REQUESTS` whose next token is due soonest, in the order in which they were offered.

        Args:
            tenant: its name.
            names: of replicas, where the reader knows them by another name than their id.
        """
        own_places = [each for each in self._places if tenant in (None, each[0].request.tenant)]
        counts = Counter(place.state for _, place in own_places)
        rows = own_places
        if len(own_places) > MAX_SHOWN_REQUESTS:
            soonest = nsmallest(MAX_SHOWN_REQUESTS, range(len(own_places)), key=lambda at: _due_time(own_places[at][1]))
            rows = [own_places[at] for at in sorted(soonest)]
        return {
            "queue": {"in_flight": len(own_places), **{name: counts[name] for name in _STATES}},
            "request_columns": COLUMNS,
            "requests": [self._row(record, place, names) for record, place in rows],
        }

    def _row(self, record: RequestRecord, place: _Place, names: Mapping[str, str]) -> list[Any]:
        """Returns a request's row, in the order of COLUMNS."""
        request, now = record.request, self._now
        if place.state == "moving" and record.replicas:
            place = place._replace(replica=record.replicas[-1])
        due = ms(_due_time(place) - now)
        return [
            request.id,
            request.tier,
            request.tenant,
            place.state,
            place.replica,
            self._why(record, place, names),
            round((now - request.arrival) * 1e3),
            None if due is None else round(due),
            _is_late(place, now),
            request.best_effort or record.best_effort_since is not None,
            request.prompt,
            record.output,
            request.sampling.max_tokens,
            [part for kind, s in phases(record, now, self._counted_replicas) for part in (kind[0], round(s * 1e3))],
        ]

    def _why(self, record: RequestRecord, place: _Place, names: Mapping[str, str]) -> str:
        """Returns a sentence on why the request is where it is."""
        seq, replica = place.seq, names.get(place.replica, place.replica)
        waits_for = "" if record.waiting is None else record.waiting[0]
        if place.state == "held":
            if seq is None:
                return "has just come"
            if waits_for == LOST:
                return "its replica is gone: held by the router until another takes it"
            if seq.request.handoff is not None:
                handoff = seq.request.handoff
                source = names.get(handoff.source, handoff.source)
                return f"handed off by {source} ({handoff.reason}): held until another replica takes it"
            holders = ["by the router"] * self._is_routed + ["for its tenant's share"] * self._has_fair_share
            return f"held {' or '.join(holders)}, {_queue_position(place.before)}"
        if place.replica in self._counted_replicas and place.state == "waiting":
            return f"sent to {replica}: nothing has come of it yet"
        if place.replica in self._counted_replicas and place.state == "running":
            return f"running at {replica}, {record.output} of {record.request.sampling.max_tokens}"
        if place.state == "waiting":
            turn = "preempted, waits to go on" if waits_for == PREEMPTED else "waits for its turn"
            return f"{turn} at {replica}, {_queue_position(place.before)}"
        if place.state == "moving":
            return f"on its way to {replica}"
        pending = 1 if seq is None else seq.pending
        if pending > 1:
            return f"runs at {replica}: prefill, {pending} tokens to go"
        return f"runs at {replica}: decode"


_STATES: tuple[State, ...] = ("held", "waiting", "running", "moving")


def _place_without_view(record: RequestRecord) -> _Place:
    """Returns the place of a request in no view: it, or its KV, has just been sent."""
    return _Place("moving", replica=record.replicas[-1]) if record.replicas else _Place("held")


def _due_time(place: _Place) -> float:
    return inf if place.seq is None else place.seq.due


def _is_late(place: _Place, now: float) -> bool:
    return _due_time(place) < now or (place.seq is not None and place.seq.missed)


def _queue_position(before: int) -> str:
    return "first in the queue" if before == 0 else f"behind {before} other{'s' if before > 1 else ''}"


def replica_json(
    view: View, step_seconds: float | None, draining_replicas: Collection[str],
    counted_replicas: Collection[str] = (), url: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Returns a replica as JSON; `age_ms` is the age of its last report.

    Args:
        step_seconds: mean of its last steps.
        draining_replicas: ids of replicas that drain.
        counted_replicas: ids of replicas that do not report; their KV in use is unknown where all of it looks free.
        url: of a server; "" for a replica of this process.
    """
    block, is_counted = view.limits.block_size, view.id in counted_replicas
    is_busy = bool(view.running or (is_counted and view.waiting))
    used = (view.kv_total - view.kv_free) * block
    return {
        "id": view.id,
        "url": url,
        "role": role_words(view.role),
        "state": "draining" if view.id in draining_replicas else "busy" if is_busy else "idle",
        "link": "counted" if is_counted else "linked" if url else "here",
        "running": len(view.running),
        "waiting": len(view.waiting),
        "moving": len(view.moving),
        "kv_used_tokens": None if not view.kv_total or (is_counted and not used) else used,
        "kv_total_tokens": view.kv_total * block or None,
        "age_ms": None if is_counted else ms(max(0.0, view.now - min(view.as_of, view.now))),
        "steps": None if is_counted else view.steps,
        "step_ms": ms(step_seconds),
    }


def role_words(role: Role) -> str:
    """Returns a replica's role in words."""
    phase = "prefill and decode" if role.phase == "both" else f"{role.phase} only"
    more = [("tier", role.tier), ("group", role.group), ("kind", role.kind)]
    return ", ".join([phase, *(f"{name} {value}" for name, value in more if value)])
