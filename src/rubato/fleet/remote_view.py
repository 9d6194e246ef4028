"""The view of a replica in another process: a fold over its reports.

The replica reports in batches: events in order, and the few numbers of its state that events do not carry. What was
submitted and is not yet acknowledged counts as waiting there. Times are in the replica's own clock on the way and in
the controller's after `shifted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from rubato.core.interfaces import Host, LatencyModel, LengthPredictor, View
from rubato.core.plan import ANY, KV, NO_BATCH, Limits, Role, Sample, Shape
from rubato.core.request import Handoff, HandoffReason, Request
from rubato.replica.sequence import Seq
from rubato.wire.messages import State


class Held(NamedTuple):
    """What a sequence holds: tokens in KV, KV blocks, of which its own, tokens in flight."""

    cached: int
    blocks: int
    own: int
    in_flight: int


NOT_HELD = Held(0, 0, 0, 0)  # of a sequence without KV


class GaveUp(NamedTuple):
    """A request that a replica hands off: it is to be placed again. cached: tokens of which KV stays there for where it
    goes on."""

    id: str
    reason: HandoffReason
    at: float
    cached: int = 0


@dataclass(frozen=True, slots=True)
class There:
    """One request of a replica that tells of all it has. state: "arriving": its KV is to come; "leaving": only that is
    left. cached: tokens in KV; of one that waits, what the prefix cache has of it. times, token_ids: of its output."""

    request: Request
    state: State
    started: bool
    demoted: bool
    cached: int
    times: tuple[float, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What happened at a replica up to `as_of`, and its state then. held: of each sequence that runs, leaves or
    arrives. in_flight: the batch that runs. error: it is beyond recovery; by then every request there has ended. hits:
    of waiting sequences, tokens that the prefix cache has, where that has changed. gave_up: handed off, which whoever
    takes the report in is to fold as `HandedOff`. there: all that is there, in the
    order in which it came, after reports were missed; None where none was."""

    as_of: float
    events: tuple[Event, ...]
    kv_free: int
    busy_until: float
    held: Mapping[str, Held]
    error: str | None = None
    in_flight: Shape = NO_BATCH
    hits: tuple[tuple[str, int], ...] = ()
    gave_up: tuple[GaveUp, ...] = ()
    there: tuple[There, ...] | None = None


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
        self._counted: frozenset[str] | None = None  # those that ran when it was read; None: it was not read
        self._busy_until = now
        self._in_flight = NO_BATCH
        self._lengths = lengths
        self._held: Mapping[str, Held] = {}  # as last reported
        self._strange: set[str] = set()  # requests that were not submitted here
        self._seen: set[str] = set()  # that the replica has reported
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
        seq = Seq(request, self._next_order(), now, lengths=self._lengths, kv=self, token_ids=[])
        coming = request.handoff is not None and request.handoff.cached > 0
        (self._arriving if coming else self._waiting)[request.id] = seq

    def assign(self, role: Role) -> None:
        self._role = role

    def take(self, report: Report) -> None:
        """Fold a report in. Events of requests that are not here (they have ended) change nothing."""
        if report.there is not None:
            self._begin_afresh(report.there, report.as_of)
        for event in report.events:
            self.fold(event)
        for id, cached in report.hits:
            if (waits := self._waiting.get(id)) is not None:
                waits.cached = cached
        left = self._leaving.items()  # one that has come back holds KV anew
        self._leaving = {id: seq for id, seq in left if id in report.held and id not in self._running}
        self._held = report.held
        for id, (cached, _, _, in_flight) in report.held.items():
            seq = self._running.get(id) or self._leaving.get(id) or self._arriving.get(id)
            if seq is not None:
                seq.cached, seq.in_flight = cached, in_flight
        self.as_of = report.as_of
        self._kv_free, self._counted = report.kv_free, None
        self._busy_until = report.busy_until
        self._in_flight = report.in_flight

    def told_kv_free(self, blocks: int) -> None:
        """So many blocks are free there, as was read just now where no report says it. What starts afterwards is taken
        off until it is read again; what else grows or ends meanwhile changes nothing. (What was in KV already and had
        no token yet is taken off twice for so long: a router had better think a replica fuller than it is.) No event
        tells of it: a router that holds requests until KV is free has to ask for another call (`Dispatch.wake_at`)."""
        self._kv_free = blocks
        self._counted = frozenset(self._running)

    def blocks_of(self, seq: Seq) -> int:
        """Its KV blocks; of one whose KV is to come, those that are kept for it."""
        if (held := self._held.get(seq.id)) is None and seq.id in self._arriving:
            return self.limits.blocks(seq.length)
        return 0 if held is None else held[1]

    def own_blocks_of(self, seq: Seq) -> int:
        """Of these, those not shared."""
        return self._held.get(seq.id, NOT_HELD)[2]

    def view(self, now: float) -> View:
        if self._busy_until <= now:
            self.latency.idle(now - self._stepped)
        waiting = sorted(self._waiting.values(), key=lambda s: s.order)
        moving = (*self._leaving.values(), *self._arriving.values())
        kept = sum([self.limits.blocks(seq.length) for id, seq in self._arriving.items() if id not in self._held])
        if self._counted is not None:
            kept += sum([self.limits.blocks(s.length) for id, s in self._running.items() if id not in self._counted])
        limits = self.limits
        if moving and limits.max_running is not None:
            limits = replace(limits, max_running=limits.max_running - len(moving))
        return View(
            id=self.id,
            now=now,
            waiting=waiting,
            running=list(self._running.values()),
            kv_free=max(0, self._kv_free - kept) if kept else self._kv_free,
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

    def left(self, at: float) -> list[Request]:
        """The requests submitted here that have not ended, each with what it has received: the replica is lost, and
        they are to be served elsewhere. at: up to when it may have begun a batch that no report tells of."""
        here = [*self._running.values(), *self._waiting.values(), *self._arriving.values()]
        requests = []
        for seq in here:
            if seq.id not in self._strange:
                request = self._with_progress(seq)
                if self._may_be_cause(seq, at):
                    request = replace(request, losses=request.losses + 1)
                requests.append(request)
        return requests

    def _may_be_cause(self, seq: Seq, at: float) -> bool:
        """Whether the replica may be lost by it: not by one that was reported, while a batch without it runs. The
        report of the next batch may be lost with the replica."""
        is_reported = seq.id in self._seen or seq.id not in self._waiting
        runs_without = self._in_flight.seqs > 0 and seq.in_flight == 0 and at <= self._busy_until
        return not (is_reported and runs_without)

    def moved(self, id: str, reason: HandoffReason, at: float, cached: int = 0) -> Request | None:
        """A request that the replica hands off, with what it has received; None if it is not here. cached: tokens of
        which KV stays there for where it goes on."""
        seq = self.known(id)
        if seq is None:
            return None
        handoff = Handoff.after(seq.request.handoff, self.id, reason, at, cached)
        return replace(self._with_progress(seq), group="", handoff=handoff)

    def known(self, id: str) -> Seq | None:
        """A request that is here."""
        return self._running.get(id) or self._waiting.get(id) or self._arriving.get(id)

    def running(self, id: str) -> Seq | None:
        return self._running.get(id)

    def waits(self, id: str) -> bool:
        return id in self._waiting

    def is_reported(self, id: str) -> bool:
        """Whether the replica has told that it has a request, and not yet that it has not."""
        return id in self._seen or (id not in self._waiting and self.known(id) is not None)

    def unreported(self) -> dict[str, float]:
        """Waiting requests that the replica has told nothing of, and since when."""
        return {id: seq.waiting_since for id, seq in self._waiting.items() if id not in self._seen}

    def arrives(self, id: str) -> bool:
        """Whether its KV is to come."""
        return id in self._arriving

    def leaves(self, id: str) -> bool:
        """Whether it has been handed off, and its KV is still here."""
        return id in self._leaving

    def forget(self, id: str) -> None:
        """It is not here any more, whatever became of it."""
        for where in (self._waiting, self._running, self._arriving, self._leaving):
            where.pop(id, None)
        self._strange.discard(id)
        self._seen.discard(id)

    def correct(self, id: str, prompt: int) -> None:
        """A waiting request's prompt has so many tokens."""
        seq = self._waiting[id]
        self._waiting[id] = Seq(
            _of_length(seq.request, prompt), seq.order, seq.waiting_since, lengths=self._lengths, kv=self, token_ids=[]
        )

    def _with_progress(self, seq: Seq) -> Request:
        received = seq.total_output or seq.demoted or seq.delays_elsewhere
        return replace(seq.request, progress=seq.progress(seq.delays_elsewhere) if received else None)

    def _begin_afresh(self, there: Sequence[There], now: float) -> None:
        """Show what there is. One that was submitted and is not there has ended, or has not come yet: it waits."""
        before = {**self._waiting, **self._running, **self._arriving}
        left, arrived = self._leaving, self._arriving
        self._waiting, self._running, self._arriving, self._leaving = {}, {}, {}, {}
        strange, self._strange = self._strange, set()
        self._seen -= strange
        for one in there:
            self._seen.add(one.request.id)
            had = before.pop(one.request.id, None) or left.get(one.request.id)
            request = one.request
            if had is None or request.id in strange:
                self._strange.add(request.id)
            else:
                request = _of_length(had.request, request.prompt)
            order = had.order if had is not None else self._next_order()
            seq = Seq(request, order, now, lengths=self._lengths, kv=self, token_ids=[])
            seq.started, seq.demoted, seq.cached = one.started, one.demoted, one.cached
            seq.add_tokens(one.times)
            if seq.token_ids is not None:
                seq.token_ids += one.token_ids
            where = {"waiting": self._waiting, "arriving": self._arriving, "leaving": self._leaving}
            if one.state == "leaving" and had is not None and request.id not in left:
                self._running[request.id] = seq  # it is not known yet where its KV can be read
            else:
                where.get(one.state, self._running)[request.id] = seq
        for id, seq in before.items():
            if id not in strange:
                (self._arriving if id in arrived else self._waiting)[id] = seq
                seq.cached = seq.in_flight = 0

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted

    def fold(self, event: Event) -> None:
        """Something has happened there."""
        if type(event) is Tokens:
            if seq := self._running.get(event.id) or self._waiting.get(event.id) or self._arriving.get(event.id):
                _add_tokens(seq, event)
            return
        if isinstance(event, Stepped):
            self.latency.update(Sample(event.shape, event.seconds))
            self._stepped = event.at
            self._steps += 1
            return
        seq = self._running.get(event.id) or self._waiting.get(event.id) or self._arriving.get(event.id)
        if isinstance(event, Offered):
            self._came(event, seq)
            return
        if seq is None:
            return
        match event:
            case Started():
                self._running[event.id] = self._waiting.pop(event.id, seq)
                self._arriving.pop(event.id, None)
                seq.started, seq.cached = True, event.cached
            case Preempted():
                self._waiting[event.id] = self._running.pop(event.id, seq)
                seq.cached = seq.in_flight = 0
            case HandedOff():
                self._seen.discard(event.id)
                self._waiting.pop(event.id, None)
                self._arriving.pop(event.id, None)
                handoff = event.request.handoff
                if self._running.pop(event.id, None) is not None and handoff is not None and handoff.cached:
                    self._leaving[event.id] = seq
            case Transferred():
                self._running[event.id] = self._arriving.pop(event.id, seq)
                seq.cached = event.tokens
            case Demoted() | Promoted():
                seq.demoted = isinstance(event, Demoted)
            case Finished():
                if event.outcome == "completed" and self._lengths is not None:
                    self._lengths.learn(seq.request, event.output)
                self._strange.discard(event.id)
                self._seen.discard(event.id)
                for where in (self._running, self._waiting, self._arriving):
                    where.pop(event.id, None)

    def _came(self, event: Offered, seq: Seq | None) -> None:
        """A request has come to the replica: one that was submitted, of which it knows the true length, or another."""
        self._seen.add(event.id)
        if seq is None:
            self._strange.add(event.id)
            seq = Seq(event.request, self._next_order(), event.at, lengths=self._lengths, kv=self, token_ids=[])
            self._waiting[event.id] = seq
        elif event.id in self._waiting:
            self.correct(event.id, event.request.prompt)
        # (of one whose KV comes, the replica that has prefilled it has told the length)


def _add_tokens(seq: Seq, event: Tokens) -> None:
    seq.add_tokens([event.at] * event.tokens)
    if event.token_ids:
        assert seq.token_ids is not None
        seq.token_ids += event.token_ids
    if event.tried:
        seq.tried += event.tried
        seq.accepted += event.tokens - 1
    if event.stage_done:
        seq.next_stage(event.at)


def _of_length(request: Request, prompt: int) -> Request:
    """The request, of which a gateway may have known the length of the prompt only by estimate."""
    first, *rest = request.stages
    if rest or first.prompt == prompt or first.token_ids:
        return request
    return replace(request, stages=(replace(first, prompt=prompt),))


class KVStays:
    """The part of a `Host` elsewhere between which KV does not move. stays: why, for what asks for it all the same."""

    stays = ""

    def reserve(self, request: Request) -> bool:
        raise RuntimeError(self.stays)

    async def transfer(self, id: str, to: Host) -> None:
        raise RuntimeError(self.stays)

    async def receive(self, id: str, kv: KV) -> None:
        raise RuntimeError(self.stays)

    def release(self, id: str) -> None:
        """Nothing is on its way."""

    def resume(self, id: str) -> None:
        """No request here waits for a tool."""


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
    gave_up = tuple([one._replace(at=one.at + by) for one in report.gave_up])
    there = report.there
    if there is not None:
        there = tuple(
            [
                replace(one, request=shifted_request(one.request, by), times=tuple([t + by for t in one.times]))
                for one in there
            ]
        )
    return replace(
        report, as_of=report.as_of + by, busy_until=report.busy_until + by, events=tuple(events), gave_up=gave_up,
        there=there,
    )  # fmt: skip
