"""The reports of vLLM's engine cores in its API server, as metrics in vLLM's `/metrics` and histories of requests.

Each API server has one `EngineReports`, made by the stat logger or the middleware, whichever comes first
(`reports_of`). Messages are read when needed: at vLLM's records of stats, at the end of a response, at a scrape.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished, Offered, Placed, Stepped, Tokens, Transferred, Verdict
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Limits, Shape
from rubato.core.request import Request
from rubato.engines.vllm import link
from rubato.engines.vllm.gateway_reports import answer_of
from rubato.engines.vllm.link import FAULT_PLACES, Reader
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.metrics import STEP_BUCKETS_S, SLOMetrics
from rubato.frontdoor.request_record import RequestRecord
from rubato.wire.messages import EngineState, RequestEvents

log = logging.getLogger("vllm.rubato")
PLAN_BUCKETS_S = tuple(seconds / 100 for seconds in STEP_BUCKETS_S)
END_NOT_REPORTED = "the end was not reported"
PLAIN_TOTALS = ("fallbacks", "stood_aside", "link_refused")  # of a report, by replica alone
QUEUES = ("waiting", "running", "moving")  # states of an engine's sequences
LATE_REPORT_S = 10.0  # reports on an API request count this long after its response


class PluginMetrics(SLOMetrics):
    """Counts what the plug-in reports of steps, besides requests; totals only if `counts`, in one API server."""

    def __init__(self, registry: CollectorRegistry, *, counts: bool) -> None:
        super().__init__(registry, RequestHistory(answer_of=answer_of))
        self._counts_totals = counts
        self._plan = self.histogram("plan_seconds", "Time to plan a step", "replica", PLAN_BUCKETS_S)
        self._totals = {
            "fallbacks": self.counter("plan_fallbacks", "Steps in vLLM's own order after a fault", "replica"),
            "stood_aside": self.counter("plan_stood_aside", "Steps left to vLLM, since every SLO had room", "replica"),
            "link_refused": self.counter(
                "link_refused", "Connections and messages of strangers to the link", "replica"
            ),
            "deviations": self.counter(
                "plan_deviations", "Steps that vLLM did not carry out as planned", "replica", "cause"
            ),
            "faults": self.counter("plan_faults", "Faults of the policy and of the plug-in", "replica", "place"),
        }
        self.lost = self.counter(
            "reports_lost", "Reports of an engine that this API server was too slow for", "replica"
        )

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"rubato_{name}", about, ["replica"], registry=registry, multiprocess_mode="max")

        gives_up = "1: too many faults, vLLM's own order until the engine is restarted"
        self._is_given_up = gauge("given_up", gives_up)
        self._requests_held = gauge("requests_held", "Requests of tenants over their share, held back from the policy")
        self._last_totals: dict[tuple[str, ...], int] = {}

    def begin(self, replicas: Iterable[str]) -> None:
        """Shows all counters as 0: a counter that begins at 1 has no rate."""
        for replica in replicas if self._counts_totals else ():
            for place in FAULT_PLACES:
                self._totals["faults"].labels(replica, place)
            gauges = self._is_given_up, self._requests_held
            for metric in (self._plan, self._step, self.lost, *gauges, *(self._totals[name] for name in PLAIN_TOTALS)):
                metric.labels(replica)

    def state(self, replica: str, fields: Mapping[str, Any]) -> None:
        """Counts the fields of an engine's report."""
        if not self._counts_totals:
            return
        for seconds in fields["planned"]:
            self._plan.labels(replica).observe(seconds)
        for tokens, seqs, seconds in fields["batches"]:
            self(Stepped(0.0, replica, Shape(tokens, seqs), seconds))
        for name in PLAIN_TOTALS:
            self._total(self._totals[name], (name, replica), fields[name], replica)
        for outcome, count in fields["drafted"].items():
            self._total(self._draft_tokens, ("drafted", replica, outcome), count, outcome)
        for name in ("deviations", "faults"):
            for label, count in fields[name].items():
                self._total(self._totals[name], (name, replica, label), count, replica, label)
        self._is_given_up.labels(replica).set(fields["given_up"])
        if "held" in fields:
            self._requests_held.labels(replica).set(len(fields["held"]))

    def _total(self, counter: Counter, key: tuple[str, ...], count: int, *labels: str) -> None:
        """Adds the increase of an engine's total, whose count is since the engine began."""
        before = self._last_totals.get(key, 0)
        self._last_totals[key] = count
        counter.labels(*labels).inc(max(0, count - before))


class EngineReports:
    """Reads the engines' messages and passes their events to `metrics`, which records requests, and further listeners.

    `engines` has the last report of each, `block_size` the tokens of a KV block, 0 where it is unknown.
    """

    def __init__(self, reader: Reader | None, metrics: PluginMetrics) -> None:
        self._reader = reader
        self.block_size = 0
        self.metrics = metrics
        self.requests = metrics.requests
        self.engines: dict[int, dict[str, Any]] = {}
        self.clock = WallClock()
        self._open: dict[str, int] = {}  # the engine of each request that has not ended
        self._listeners: list[Callable[[Event], None]] = []  # of all events but tokens
        self._tickets: dict[str, Callable[[Event], None]] = {}  # by ticket
        self._ticket_listeners: dict[str, Callable[[Event], None]] = {}  # by id of an engine's request
        self._expiring_tickets: deque[tuple[float, str]] = deque()  # tickets, and when they expire

    @property
    def is_connected(self) -> bool:
        return self._reader is not None

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Passes every event but tokens to the listener, engines' steps included."""
        self._listeners.append(listener)

    def listen(self, ticket: str, listener: Callable[[Event], None]) -> None:
        """Passes the events of the engine's requests for this ticket to the listener, until each ends."""
        self._tickets[ticket] = listener

    def forget(self, ticket: str) -> None:
        """Forgets a ticket after LATE_REPORT_S: a request whose client has left may still be reported as offered."""
        self._expiring_tickets.append((self.clock.now() + LATE_REPORT_S, ticket))

    def read(self) -> None:
        """Reads all messages that have arrived, without waiting."""
        if self._reader is None:
            return
        while self._expiring_tickets and self._expiring_tickets[0][0] < self.clock.now():
            self._tickets.pop(self._expiring_tickets.popleft()[1], None)
        for message in self._reader.messages():
            replica = str(message.engine)
            if message.lost:
                self.metrics.lost.labels(replica).inc(message.lost)
            if isinstance(message, RequestEvents):
                for event in message.happened():
                    self._on_event(message, event)
            else:
                self._on_state(message)

    def refuse(self, request: Request, reason: str) -> Finished:
        """Counts a request as offered and refused. Returns its end."""
        now = self.clock.now()
        end = Finished(now, request.id, "refused", reason, Verdict(False, "deadline", "refused"))
        for event in (Offered(now, request.id, request), end):
            self._publish(event)
        return end

    def views(self) -> list[View]:
        """Returns the sequences of each engine, by its last report and the events since."""
        return [self._view(engine, fields) for engine, fields in sorted(self.engines.items())]

    def _view(self, engine: int, fields: Mapping[str, Any]) -> View:
        """Returns the view of one engine, without latency model and batch limits, which engines do not report."""
        now = self.clock.now()
        at = fields.get("at", now) if engine in self._open.values() else now  # an idle engine sends no reports
        reported = {row[0]: row for row in fields.get("sequences", ())}
        held, queues = fields.get("held", ()), dict[str, list[SeqView]]({queue: [] for queue in QUEUES})
        for id in dict.fromkeys([*reported, *self._open]):  # requests since the report come last
            if self._open.get(id) != engine or ((record := self.requests.in_flight[id]).replicas == [] and id in held):
                continue
            seq = _ReportedSequence(record, reported.get(id), at, now)
            queues[seq.queue].append(cast(SeqView, seq))
        free, total = (fields.get(name, 0) if self.block_size else 0 for name in ("kv_free", "kv_total"))
        return View(
            str(engine), now, queues["waiting"], queues["running"], free, total,
            Limits(0, 0, 0, total, self.block_size), cast(LatencyModel, None), as_of=at, moving=queues["moving"],
            steps=fields.get("steps", 0),
        )  # fmt: skip

    def _on_event(self, message: RequestEvents, event: Event) -> None:
        if type(event) is Offered:
            self._open[event.id] = message.engine
            if (listener := self._tickets.get(message.tickets.get(event.id, ""))) is not None:
                self._ticket_listeners[event.id] = listener
        elif event.id not in self._open:
            return  # its offer was lost
        elif isinstance(event, (Placed, Transferred)):
            event = replace(event, replica=str(message.engine))  # an engine does not know its own number
        self._publish(event)

    def _publish(self, event: Event) -> None:
        self.metrics(event)
        if type(event) is not Tokens:
            self._publish_to_listeners(event)
        listener = self._ticket_listeners.get(event.id)
        if type(event) is Finished:
            self._open.pop(event.id, None)
            self._ticket_listeners.pop(event.id, None)
        if listener is not None:
            listener(event)

    def _publish_to_listeners(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _on_state(self, state: EngineState) -> None:
        engine, fields = state.engine, state.fields
        self.metrics.state(str(engine), fields)
        now = self.clock.now()
        for tokens, seqs, seconds in fields["batches"]:
            self._publish_to_listeners(Stepped(now, str(engine), Shape(tokens, seqs), seconds))
        self.engines[engine] = {**(self.engines.get(engine, {})), **fields, "planned": [], "batches": [], "open": []}
        if "open" in fields:  # reported ends came before; other missing requests are lost
            known = set(fields["open"])
            for id in [id for id, at in self._open.items() if at == engine and id not in known]:
                verdict = Verdict(False, "deadline", "failed")
                self._publish(Finished(self.clock.now(), id, "failed", END_NOT_REPORTED, verdict))


class _ReportedSequence:
    """Shows a sequence of an engine, by its last report and its history since.

    Args:
        record: its history.
        row: of the report; None: it arrived later.
        at: time of the report, seconds of the clock.
        now: current time, seconds of the clock.
    """

    pending: int
    blocks: int
    best_effort: bool

    def __init__(self, record: RequestRecord, row: Sequence[Any] | None, at: float, now: float) -> None:
        request, last = record.request, record.stages[0].last  # token
        runs = record.waiting is None
        best_effort = request.best_effort or record.best_effort_since is not None
        blank = (request.id, "", 0, request.prompt, 0, best_effort, None)
        _, queue, _, self.pending, self.blocks, self.best_effort, due = row or blank
        self.id = request.id
        self.queue = "moving" if queue == "moving" else "running" if runs else "waiting"
        self.missed = False  # not reported
        self.due = inf if due is None else due
        if row is None or last > at:
            self.due = record.next_due()
        if runs and record.output:
            self.pending = 1
            if max(at, last) <= self.due < now:  # tokens since then are unknown: not late for lack of reports
                self.due = now


_instances: list[EngineReports] = []  # at most one in a process


def reports_of(parallel_config: Any) -> EngineReports:
    """Returns the reports of this API server, which are made at the first call, from vLLM's `parallel_config`."""
    if _instances:
        return _instances[0]
    folder, client = os.environ.get(link.FOLDER, ""), parallel_config._api_process_rank
    engines = range(parallel_config.data_parallel_size)
    metrics = PluginMetrics(REGISTRY, counts=client == 0)
    if folder:
        metrics.begin(map(str, engines))
    else:
        log.warning("no metrics and no verdicts: VLLM_PLUGINS is set and leaves `rubato` out")
    _instances.append(EngineReports(Reader(folder, engines, client) if folder else None, metrics))
    return _instances[0]
