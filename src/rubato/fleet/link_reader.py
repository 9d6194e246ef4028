"""A gateway's end of the link to one vLLM engine core: its messages, put together to reports of a replica.

A core says what has changed; here it becomes what a `RemoteReplica` applies. Requests get the names that gateways gave
them; a request that came past all gateways keeps the name of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from rubato.core.events import Event, Finished, Offered, Stepped, Transferred
from rubato.core.plan import NO_BATCH
from rubato.core.request import Request
from rubato.wire import messages
from rubato.wire.messages import EventRow, HandOffRow, OfferedRow, SentRow, Snapshot, TokensRow, event_of
from rubato.wire.replica_report import NO_KV_USAGE, HandOffReport, KVUsage, ReplicaReport, SnapshotEntry


class MissedReportError(Exception):
    """A report is missing before this one: a snapshot is needed."""


class LinkReader:
    """Turns the messages of one engine core into reports.

    Args:
        replica: id of the replica.
        request_id_of: returns the id of the gateway's request that a name in reports means; empty for none.
    """

    def __init__(self, replica: str, request_id_of: Callable[[str], str] = str) -> None:
        self._replica = replica
        self._request_id_of = request_id_of
        self.number = -1  # no snapshot yet
        self._names: dict[str, str] = {}  # of requests, by the engine's id
        self._kv_usage: dict[str, KVUsage] = {}
        self._batches: deque[Mapping[str, int]] = deque()  # that run: tokens of each request
        self._shape = NO_BATCH
        self._kv_free = 0
        self._busy_until = 0.0

    def read(self, message: messages.Report | Snapshot) -> ReplicaReport | None:
        """Returns the report in a message; None for a message that was read before.

        Raises:
            MissedReportError: reports are missing before this one.
            ValueError: no core of this version sends this.
        """
        number, at = message.n, message.at
        if isinstance(message, Snapshot):
            return self._snapshot(message)
        if number <= self.number:
            return None
        if self.number < 0 or number != self.number + 1:
            raise MissedReportError
        self.number = number
        rows = message.events
        events = [self._event(row, at) for row in rows if isinstance(row, TokensRow | OfferedRow | EventRow)]
        moves = [row for row in rows if isinstance(row, HandOffRow)]
        names = [self._names[row.id] if row.cached else self._names.pop(row.id, row.id) for row in moves]
        hand_offs = tuple(
            [HandOffReport(name, row.reason, row.at, row.cached) for name, row in zip(names, moves, strict=True)]
        )
        read_names = [self._names.pop(row.id, row.id) for row in rows if isinstance(row, SentRow)]
        self._kv_free = message.kv
        if message.done is not None:
            shape, seconds = message.done
            landed = self._batches.popleft() if self._batches else {}
            if not self._batches:
                self._shape, self._busy_until = NO_BATCH, at
            self._count_in_flight(landed)
            events.append(Stepped(at, self._replica, shape, seconds))
        if message.shape is not None:
            self._add_batch({self._names.get(id, id): count for id, count in message.tokens.items()})
            self._shape, self._busy_until = message.shape, message.busy
        hits = {self._names.get(id, id): hit for id, hit in message.hits.items()}
        for id, (cached, blocks) in message.held.items():
            name = self._names.get(id, id)
            self._kv_usage[name] = self._kv_usage.get(name, NO_KV_USAGE)._replace(
                cached=cached, blocks=blocks, own=blocks
            )
        report = replace(self._report(at, tuple(events), hits), hand_offs=hand_offs)
        for event in (*events, *hand_offs):
            if isinstance(event, Finished) or (isinstance(event, HandOffReport) and not event.cached):
                self._kv_usage.pop(event.id, None)
        for name in read_names:
            self._kv_usage.pop(name, None)
        return report

    def detach_previous_try(self, id: str) -> None:
        """Attributes all reports of this request so far to an earlier try."""
        for engines, name in self._names.items():
            if name == id:
                self._names[engines] = engines
                self._batches = deque(
                    [{engines if n == id else n: count for n, count in batch.items()} for batch in self._batches]
                )
        self._kv_usage.pop(id, None)

    def _event(self, row: TokensRow | OfferedRow | EventRow, at: float) -> Event:
        if isinstance(row, OfferedRow):
            request = self._rename(row.request, row.own)
            return Offered(row.at, request.id, request)
        event = event_of(row, at)
        if isinstance(event, Transferred):
            event = replace(event, replica=self._replica)
        name = self._names.get(event.id)
        if isinstance(event, Finished):
            self._names.pop(event.id, None)
        return event if name is None or name == event.id else replace(event, id=name)

    def _rename(self, request: Request, gateway_id: str) -> Request:
        name = self._request_id_of(gateway_id) or request.id
        self._names[request.id] = name
        return replace(request, id=name)

    def _add_batch(self, tokens: Mapping[str, int]) -> None:
        """Adds a batch that runs from now on."""
        self._batches.append(tokens)
        self._count_in_flight(tokens)

    def _count_in_flight(self, tokens: Mapping[str, int]) -> None:
        """Counts the tokens in flight of these requests again."""
        for name in tokens:
            in_flight = sum([batch.get(name, 0) for batch in self._batches])
            self._kv_usage[name] = self._kv_usage.get(name, NO_KV_USAGE)._replace(in_flight=in_flight)

    def _report(self, at: float, events: tuple[Event, ...], hits: Mapping[str, int]) -> ReplicaReport:
        return ReplicaReport(
            at, events, self._kv_free, self._busy_until, self._kv_usage, in_flight=self._shape, hits=tuple(hits.items())
        )

    def _snapshot(self, message: Snapshot) -> ReplicaReport | None:
        if message.n < self.number:
            return None
        self.number = message.n
        self._names.clear()
        self._kv_usage = {}
        self._batches.clear()
        self._shape, self._kv_free, self._busy_until = NO_BATCH, message.kv, message.at
        entries = []
        for row in message.seqs:
            request = self._rename(row.request, row.own)
            if row.state != "waiting" and (row.blocks or row.state != "arriving"):
                self._kv_usage[request.id] = KVUsage(row.cached, row.blocks, row.blocks, 0)
            entries.append(SnapshotEntry(request, row.state, row.started, row.demoted, row.cached, row.times, row.ids))
        for tokens in message.batches:
            self._add_batch({self._names.get(id, id): count for id, count in tokens.items()})
        return replace(self._report(message.at, (), {}), snapshot=tuple(entries))
