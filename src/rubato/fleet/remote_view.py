"""The view of a replica in another process: a fold over its reports.

A submitted request that is not yet acknowledged counts as waiting there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from rubato.core.plan import ANY, NO_BATCH, Limits, Role, Sample
from rubato.core.request import Handoff, HandoffReason, Request
from rubato.replica.sequence import Seq
from rubato.wire.replica_report import NO_KV_USAGE, KVUsage, ReplicaReport, SnapshotEntry


class RemoteReplica:
    """Mirrors one replica at the controller: takes submissions and reports, and makes views. Tokens are counted one by
    one; KV blocks are reported as counts.

    Args:
        lengths: the controller's own predictor, which learns from completions.
    """

    def __init__(
        self, id: str, limits: Limits, latency: LatencyModel, supports: frozenset[str], now: float,
        lengths: LengthPredictor | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self.limits = limits
        self.latency = latency
        self.supports = supports
        self.as_of = now
        self._kv_free = limits.kv_blocks
        self._running_when_read: frozenset[str] | None = None  # ids when the free KV was read; None: it was not read
        self._busy_until = now
        self._in_flight = NO_BATCH
        self._lengths = lengths
        self._kv_usage: Mapping[str, KVUsage] = {}  # as last reported
        self._unsubmitted_ids: set[str] = set()  # requests of other gateways and clients
        self._reported_ids: set[str] = set()  # requests that the replica has reported
        self._waiting: dict[str, Seq] = {}
        self._running: dict[str, Seq] = {}
        self._leaving: dict[str, Seq] = {}
        self._arriving: dict[str, Seq] = {}
        self.role = ANY
        self._last_step_at = now
        self._steps = 0
        self._submitted = 0

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._running or self._leaving or self._arriving)

    def submit(self, request: Request, now: float) -> None:
        seq = Seq(request, self._next_order(), now, lengths=self._lengths, kv=self, token_ids=[])
        coming = request.handoff is not None and request.handoff.cached > 0
        (self._arriving if coming else self._waiting)[request.id] = seq

    def assign(self, role: Role) -> None:
        self.role = role

    def apply(self, report: ReplicaReport) -> None:
        """Applies a report. Events of requests that have ended here change nothing."""
        if report.snapshot is not None:
            self._apply_snapshot(report.snapshot, report.as_of)
        for event in report.events:
            self.fold(event)
        for id, cached in report.hits:
            if (waits := self._waiting.get(id)) is not None:
                waits.cached = cached
        left = self._leaving.items()  # a request that has come back holds new KV
        self._leaving = {id: seq for id, seq in left if id in report.kv_usage and id not in self._running}
        self._kv_usage = report.kv_usage
        for id, (cached, _, _, in_flight) in report.kv_usage.items():
            seq = self._running.get(id) or self._leaving.get(id) or self._arriving.get(id)
            if seq is not None:
                seq.cached, seq.in_flight = cached, in_flight
        self.as_of = report.as_of
        self._kv_free, self._running_when_read = report.kv_free, None
        self._busy_until = report.busy_until
        self._in_flight = report.in_flight

    def set_kv_free(self, blocks: int) -> None:
        """Sets the free KV blocks, as just read from a server that does not report them.

        Until the next reading, requests that start are subtracted, and nothing else changes the number. (KV that a
        request held before its first token is subtracted twice: better a replica that looks too full.) No event
        follows, so a router that holds requests until KV is free must ask for another call (`Dispatch.wake_at`).
        """
        self._kv_free = blocks
        self._running_when_read = frozenset(self._running)

    def blocks_of(self, seq: Seq) -> int:
        """Returns the KV blocks of a sequence; while its KV has not come, the blocks reserved for it."""
        if (kv_usage := self._kv_usage.get(seq.id)) is None and seq.id in self._arriving:
            return self.limits.blocks(seq.length)
        return 0 if kv_usage is None else kv_usage[1]

    def own_blocks_of(self, seq: Seq) -> int:
        """Returns the KV blocks that no other sequence shares."""
        return self._kv_usage.get(seq.id, NO_KV_USAGE)[2]

    def view(self, now: float) -> View:
        if self._busy_until <= now:
            self.latency.idle(now - self._last_step_at)
        waiting = sorted(self._waiting.values(), key=lambda s: s.order)
        moving = (*self._leaving.values(), *self._arriving.values())
        kv_due = sum([self.limits.blocks(seq.length) for id, seq in self._arriving.items() if id not in self._kv_usage])
        if self._running_when_read is not None:
            kv_due += sum(
                [self.limits.blocks(s.length) for id, s in self._running.items() if id not in self._running_when_read]
            )
        limits = self.limits
        if moving and limits.max_running is not None:
            limits = replace(limits, max_running=limits.max_running - len(moving))
        return View(
            id=self.id,
            now=now,
            waiting=waiting,
            running=list(self._running.values()),
            kv_free=max(0, self._kv_free - kv_due) if kv_due else self._kv_free,
            kv_total=self.limits.kv_blocks,
            limits=limits,
            latency=self.latency,
            supports=self.supports,
            busy_until=self._busy_until,
            as_of=min(now, self.as_of),
            role=self.role,
            moving=moving,
            in_flight=self._in_flight,
            steps=self._steps,
        )

    def unfinished_requests(self, at: float) -> list[Request]:
        """Returns the submitted requests that have not ended, each with its output so far, for another replica after a
        loss.

        Args:
            at: until then the lost replica may have begun an unreported batch (s).
        """
        here = [*self._running.values(), *self._waiting.values(), *self._arriving.values()]
        requests = []
        for seq in here:
            if seq.id not in self._unsubmitted_ids:
                request = self._with_progress(seq)
                if self._may_be_cause(seq, at):
                    request = replace(request, losses=request.losses + 1)
                requests.append(request)
        return requests

    def _may_be_cause(self, seq: Seq, at: float) -> bool:
        """Returns whether the request may have caused the loss of the replica. A reported request has not if a batch
        without it runs; later the report of the next batch may be lost with the replica."""
        is_reported = seq.id in self._reported_ids or seq.id not in self._waiting
        runs_without = self._in_flight.seqs > 0 and seq.in_flight == 0 and at <= self._busy_until
        return not (is_reported and runs_without)

    def handed_off_request(self, id: str, reason: HandoffReason, at: float, cached: int = 0) -> Request | None:
        """Returns the request with its output so far, as the replica hands it off; None if it is not here.

        Args:
            reason: why it is handed off.
            at: when (s).
            cached: tokens whose KV stays there until it is read.
        """
        seq = self.seq_of(id)
        if seq is None:
            return None
        handoff = Handoff.after(seq.request.handoff, self.id, reason, at, cached)
        return replace(self._with_progress(seq), group="", handoff=handoff)

    def seq_of(self, id: str) -> Seq | None:
        """Returns the sequence of a request; None if it is not here."""
        return self._running.get(id) or self._waiting.get(id) or self._arriving.get(id)

    def running_seq(self, id: str) -> Seq | None:
        return self._running.get(id)

    def is_waiting(self, id: str) -> bool:
        return id in self._waiting

    def is_reported(self, id: str) -> bool:
        """Returns whether the replica has reported the request, and no end of it."""
        return id in self._reported_ids or (id not in self._waiting and self.seq_of(id) is not None)

    def unreported_since(self) -> dict[str, float]:
        """Returns waiting requests that the replica has not reported, and since when each waits (s)."""
        return {id: seq.waiting_since for id, seq in self._waiting.items() if id not in self._reported_ids}

    def is_arriving(self, id: str) -> bool:
        """Returns whether the request waits for its KV."""
        return id in self._arriving

    def is_leaving(self, id: str) -> bool:
        """Returns whether the request was handed off and its KV is still here."""
        return id in self._leaving

    def forget(self, id: str) -> None:
        """Removes a request, whatever became of it."""
        for where in (self._waiting, self._running, self._arriving, self._leaving):
            where.pop(id, None)
        self._unsubmitted_ids.discard(id)
        self._reported_ids.discard(id)

    def set_prompt_tokens(self, id: str, prompt: int) -> None:
        """Sets the prompt tokens of a waiting request."""
        seq = self._waiting[id]
        self._waiting[id] = Seq(
            _of_length(seq.request, prompt), seq.order, seq.waiting_since, lengths=self._lengths, kv=self, token_ids=[]
        )

    def _with_progress(self, seq: Seq) -> Request:
        has_progress = seq.total_output or seq.demoted or seq.delays_elsewhere
        return replace(seq.request, progress=seq.progress(seq.delays_elsewhere) if has_progress else None)

    def _apply_snapshot(self, snapshot: Sequence[SnapshotEntry], now: float) -> None:
        """Replaces the state by a snapshot. A submitted request that is not in it counts as waiting, or still as one
        whose KV comes: the replica had not heard of it yet."""
        unreported = {**self._waiting, **self._running, **self._arriving}
        leaving, arriving = self._leaving, self._arriving
        self._waiting, self._running, self._arriving, self._leaving = {}, {}, {}, {}
        unsubmitted, self._unsubmitted_ids = self._unsubmitted_ids, set()
        self._reported_ids -= unsubmitted
        for entry in snapshot:
            id, request = entry.request.id, entry.request
            self._reported_ids.add(id)
            earlier = unreported.pop(id, None) or leaving.get(id)
            if earlier is None or id in unsubmitted:
                self._unsubmitted_ids.add(id)
            else:  # as it was submitted, which says more
                request = _of_length(earlier.request, request.prompt)
            order = earlier.order if earlier is not None else self._next_order()
            seq = Seq(request, order, now, lengths=self._lengths, kv=self, token_ids=[])
            seq.started, seq.demoted, seq.cached = entry.started, entry.demoted, entry.cached
            seq.add_tokens(entry.times)
            if seq.token_ids is not None:
                seq.token_ids += entry.token_ids
            group = {"waiting": self._waiting, "arriving": self._arriving, "leaving": self._leaving}.get(entry.state)
            if group is self._leaving and earlier is not None and id not in leaving:
                group = None  # it runs until the address of its KV is known
            (self._running if group is None else group)[id] = seq
        for id, seq in unreported.items():
            if id not in unsubmitted:
                (self._arriving if id in arriving else self._waiting)[id] = seq
                seq.cached = seq.in_flight = 0

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted

    def fold(self, event: Event) -> None:
        """Applies one event."""
        if type(event) is Tokens:
            if seq := self._running.get(event.id) or self._waiting.get(event.id) or self._arriving.get(event.id):
                _add_tokens(seq, event)
            return
        if isinstance(event, Stepped):
            self.latency.update(Sample(event.shape, event.seconds))
            self._last_step_at = event.at
            self._steps += 1
            return
        seq = self._running.get(event.id) or self._waiting.get(event.id) or self._arriving.get(event.id)
        if isinstance(event, Offered):
            self._add_offered(event, seq)
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
                self._reported_ids.discard(event.id)
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
                self._unsubmitted_ids.discard(event.id)
                self._reported_ids.discard(event.id)
                for where in (self._running, self._waiting, self._arriving):
                    where.pop(event.id, None)

    def _add_offered(self, event: Offered, seq: Seq | None) -> None:
        """Adds a request that has come to the replica: a submitted one, whose true length is now known, or a
        stranger's."""
        self._reported_ids.add(event.id)
        if seq is None:
            self._unsubmitted_ids.add(event.id)
            seq = Seq(event.request, self._next_order(), event.at, lengths=self._lengths, kv=self, token_ids=[])
            self._waiting[event.id] = seq
        elif event.id in self._waiting:
            self.set_prompt_tokens(event.id, event.request.prompt)
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
    """Returns the request with the true length of its prompt, which a gateway may only have estimated."""
    first, *rest = request.stages
    if rest or first.prompt == prompt or first.token_ids:
        return request
    return replace(request, stages=(replace(first, prompt=prompt),))
