"""The view of a replica in another process: a fold over its reports.

The replica reports in batches: events in order, and the few numbers of its state that events do not carry. What was
submitted and is not yet acknowledged counts as waiting there. Times are in the replica's own clock on the way and in
the controller's after `shifted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rubato.core.events import (
    Demoted,
    Event,
    Finished,
    HandedOff,
    Offered,
    Preempted,
    Promoted,
    Started,
    Stepped,
    Tokens,
    Transferred,
)
from rubato.core.interfaces import LatencyModel, LengthPredictor, View
from rubato.core.plan import ANY, NO_BATCH, Limits, Role, Sample, Shape
from rubato.core.request import Request
from rubato.replica.sequence import Seq

NOT_HELD = (0, 0, 0, 0)  # of a sequence without KV, as `Report.held` would have it


@dataclass(frozen=True, slots=True)
class Report:
    """What happened at a replica up to `as_of`, and its state then. held: sequence that runs, leaves or arrives ->
    (tokens in KV, KV blocks, of which its own, tokens in flight). in_flight: the batch that runs. error: it is beyond
    recovery; by then every request there has ended."""

    as_of: float
    events: tuple[Event, ...]
    kv_free: int
    busy_until: float
    held: Mapping[str, tuple[int, int, int, int]]
    error: str | None = None
    in_flight: Shape = NO_BATCH


class Mirror:
    """The controller's side of one replica: submissions and reports in, views out. Tokens of its sequences are counted
    one by one, their KV blocks reported as counts. lengths: the controller's own predictor, which learns here from what
    has completed."""

    def __init__(
        self,
        id: str,
        limits: Limits,
        latency: LatencyModel,
        supports: frozenset[str],
        now: float,
        lengths: LengthPredictor | None = None,
    ) -> None:
        self.id = id
        self.limits = limits
        self.latency = latency
        self.supports = supports
        self.as_of = now
        self._kv_free = limits.kv_blocks
        self._busy_until = now
        self._in_flight = NO_BATCH
        self._lengths = lengths
        self._held: Mapping[str, tuple[int, int, int, int]] = {}  # as last reported
        self._waiting: dict[str, Seq] = {}
        self._running: dict[str, Seq] = {}
        self._leaving: dict[str, Seq] = {}
        self._arriving: dict[str, Seq] = {}
        self._role = ANY
        self._stepped = now
        self._steps = 0
        self._submitted = 0

    @property
    def empty(self) -> bool:
        return not (self._waiting or self._running or self._leaving or self._arriving)

    def submit(self, request: Request, now: float) -> None:
        self._submitted += 1
        seq = Seq(request, self._submitted, now, lengths=self._lengths, kv=self, token_ids=[])
        coming = request.handoff is not None and request.handoff.cached > 0
        (self._arriving if coming else self._waiting)[request.id] = seq

    def assign(self, role: Role) -> None:
        self._role = role

    def take(self, report: Report) -> None:
        """Fold a report in. Events of requests that are not here (they have ended) change nothing."""
        for event in report.events:
            self._fold(event)
        self._leaving = {id: seq for id, seq in self._leaving.items() if id in report.held}
        self._held = report.held
        for id, (cached, _, _, in_flight) in report.held.items():
            seq = self._running.get(id) or self._leaving.get(id) or self._arriving.get(id)
            if seq is not None:
                seq.cached, seq.in_flight = cached, in_flight
        self.as_of = report.as_of
        self._kv_free = report.kv_free
        self._busy_until = report.busy_until
        self._in_flight = report.in_flight

    def blocks_of(self, seq: Seq) -> int:
        """Its KV blocks."""
        return self._held.get(seq.id, NOT_HELD)[1]

    def own_blocks_of(self, seq: Seq) -> int:
        """Of these, those not shared."""
        return self._held.get(seq.id, NOT_HELD)[2]

    def view(self, now: float) -> View:
        if self._busy_until <= now:
            self.latency.idle(now - self._stepped)
        waiting = sorted(self._waiting.values(), key=lambda s: s.order)
        moving = (*self._leaving.values(), *self._arriving.values())
        limits = self.limits
        if moving and limits.max_running is not None:
            limits = replace(limits, max_running=limits.max_running - len(moving))
        return View(
            id=self.id,
            now=now,
            waiting=waiting,
            running=list(self._running.values()),
            kv_free=self._kv_free,
            kv_total=self.limits.kv_blocks,
            limits=limits,
            latency=self.latency,
            supports=self.supports,
            busy_until=self._busy_until,
            as_of=min(now, self.as_of),
            role=self._role,
            moving=moving,
            in_flight=self._in_flight,
            steps=self._steps,
        )

    def left(self) -> list[Request]:
        """The requests that have not ended, each with what it has received: to be served elsewhere."""
        seqs = [*self._running.values(), *self._waiting.values(), *self._arriving.values()]
        received = {s.id: s.total_output or s.demoted or s.delays_elsewhere for s in seqs}
        return [replace(s.request, progress=s.progress(s.delays_elsewhere) if received[s.id] else None) for s in seqs]

    def _fold(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.latency.update(Sample(event.shape, event.seconds))
            self._stepped = event.at
            self._steps += 1
            return
        seq = self._running.get(event.id) or self._waiting.get(event.id) or self._arriving.get(event.id)
        if seq is None:
            return
        match event:
            case Started():
                self._running[event.id] = self._waiting.pop(event.id, seq)
                seq.started, seq.cached = True, event.cached
            case Preempted():
                self._waiting[event.id] = self._running.pop(event.id, seq)
                seq.cached = seq.in_flight = 0
            case HandedOff():
                self._waiting.pop(event.id, None)
                handoff = event.request.handoff
                if self._running.pop(event.id, None) is not None and handoff is not None and handoff.cached:
                    self._leaving[event.id] = seq
            case Transferred():
                self._running[event.id] = self._arriving.pop(event.id, seq)
            case Tokens():
                seq.got([event.at] * event.tokens)
                assert seq.token_ids is not None
                seq.token_ids += event.token_ids
                if event.tried:
                    seq.tried += event.tried
                    seq.accepted += event.tokens - 1
                if event.stage_done:
                    seq.next_stage(event.at)
            case Demoted() | Promoted():
                seq.demoted = isinstance(event, Demoted)
            case Finished():
                if event.outcome == "completed" and self._lengths is not None:
                    self._lengths.learn(seq.request, event.output)
                for where in (self._running, self._waiting, self._arriving):
                    where.pop(event.id, None)


def shifted(event: Event, by: float) -> Event:
    """The event in a clock that shows `by` seconds more."""
    changes: dict[str, Any] = {"at": event.at + by}
    if isinstance(event, Offered | HandedOff):
        changes["request"] = shifted_request(event.request, by)
    return replace(event, **changes)


def shifted_request(request: Request, by: float) -> Request:
    """The request in a clock that shows `by` seconds more."""
    progress = request.progress
    if progress is not None:
        starts = tuple(t + by for t in progress.starts)
        times = tuple(tuple(t + by for t in of_stage) for of_stage in progress.times)
        progress = replace(progress, starts=starts, times=times)
    handoff = request.handoff and replace(request.handoff, at=request.handoff.at + by)
    return replace(request, arrival=request.arrival + by, progress=progress, handoff=handoff)


def shifted_report(report: Report, by: float) -> Report:
    """The report in a clock that shows `by` seconds more."""
    events: Sequence[Event] = [shifted(event, by) for event in report.events]
    return replace(report, as_of=report.as_of + by, busy_until=report.busy_until + by, events=tuple(events))
