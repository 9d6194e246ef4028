"""What a replica elsewhere reports to its controller: events in order, and what of its state events do not carry.

Times are in the replica's own clock; `shift_report` converts them to the controller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rubato.core.events import Event, HandedOff, Offered
from rubato.core.plan import NO_BATCH, Shape
from rubato.core.request import HandoffReason, Request
from rubato.wire.messages import State


class KVUsage(NamedTuple):
    """Counts the KV of a sequence.

    Args:
        cached: tokens.
        blocks: that hold them.
        own: blocks that no other sequence shares.
        in_flight: tokens in the batches that run.
    """

    cached: int
    blocks: int
    own: int
    in_flight: int


NO_KV_USAGE = KVUsage(0, 0, 0, 0)


class HandOffReport(NamedTuple):
    """Reports a request that a replica hands off, to be placed again.

    Args:
        cached: tokens whose KV stays there until it is read.
    """

    id: str
    reason: HandoffReason
    at: float
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """Shows one request in a full report of a replica.

    Args:
        state: "arriving": its KV has not come yet; "leaving": only its KV is still there.
        cached: tokens in KV; of a waiting request, tokens in the prefix cache.
        times: of its output tokens (s).
        token_ids: of its output tokens.
    """

    request: Request
    state: State
    started: bool
    demoted: bool
    cached: int
    times: tuple[float, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Reports the events of a replica up to `as_of`, and its state then.

    Args:
        busy_until: predicted end of the batch that runs (s).
        kv_free: free blocks.
        kv_usage: of each sequence that runs, leaves or arrives.
        error: why the replica is beyond recovery; every request there has ended.
        in_flight: the batch that runs.
        hits: cached tokens of each waiting sequence for which they changed.
        hand_offs: the reader of the report applies them as `HandedOff`.
        snapshot: all requests in order of arrival, after missed reports; None otherwise.
    """

    as_of: float
    events: tuple[Event, ...]
    kv_free: int
    busy_until: float
    kv_usage: Mapping[str, KVUsage]
    error: str | None = None
    in_flight: Shape = NO_BATCH
    hits: tuple[tuple[str, int], ...] = ()
    hand_offs: tuple[HandOffReport, ...] = ()
    snapshot: tuple[SnapshotEntry, ...] | None = None


def shift_event(event: Event, by: float) -> Event:
    """Returns the event in a clock that shows `by` seconds more."""
    changes: dict[str, Any] = {"at": event.at + by}
    if isinstance(event, Offered | HandedOff):
        changes["request"] = shift_request(event.request, by)
    return replace(event, **changes)


def shift_request(request: Request, by: float) -> Request:
    """Returns the request in a clock that shows `by` seconds more."""
    progress = request.progress
    if progress is not None:
        starts = tuple(t + by for t in progress.starts)
        times = tuple(tuple(t + by for t in of_stage) for of_stage in progress.times)
        progress = replace(progress, starts=starts, times=times)
    handoff = request.handoff and replace(request.handoff, at=request.handoff.at + by)
    return replace(request, arrival=request.arrival + by, progress=progress, handoff=handoff)


def shift_report(report: ReplicaReport, by: float) -> ReplicaReport:
    """Returns the report in a clock that shows `by` seconds more."""
    events: Sequence[Event] = [shift_event(event, by) for event in report.events]
    hand_offs = tuple([one._replace(at=one.at + by) for one in report.hand_offs])
    snapshot = report.snapshot
    if snapshot is not None:
        snapshot = tuple(
            [
                replace(one, request=shift_request(one.request, by), times=tuple([t + by for t in one.times]))
                for one in snapshot
            ]
        )
    return replace(
        report, as_of=report.as_of + by, busy_until=report.busy_until + by, events=tuple(events), hand_offs=hand_offs,
        snapshot=snapshot,
    )  # fmt: skip
