"""What the engine cores of a vLLM report, in its API server: metrics in vLLM's `/metrics`, histories of requests.

One in each API server, made by whichever of the stat logger and the middleware is there first (`reports_of`). It is
read where something is asked of it: at each of vLLM's records of stats, at the end of a response, at a scrape.
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
from rubato.frontdoor.metrics import STEP, SLOMetrics
from rubato.frontdoor.request_record import RequestRecord
from rubato.wire.messages import EngineState, RequestEvents

log = logging.getLogger("vllm.rubato")
PLAN = tuple(seconds / 100 for seconds in STEP)
LOST = "the end was not reported"
QUEUES = ("waiting", "running", "moving")  # of an engine's sequences
LATE = 10.0  # seconds for which what is reported of an API request counts after its response


class PluginMetrics(SLOMetrics):
    """With what the plug-in's steps were like. counts: totals of engines are counted here, by no other API server."""

    def __init__(self, registry: CollectorRegistry, *, counts: bool) -> None:
        super().__init__(registry)
        self._counts = counts
        self._plan = self.histogram("plan_seconds", "Time to plan a step", "replica", PLAN)
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
        self._given_up = gauge("given_up", gives_up)
        self._held = gauge("requests_held", "Requests of tenants over their share, held back from the policy")
        self._seen: dict[tuple[str, ...], int] = {}

    def begin(self, replicas: Iterable[str]) -> None:
        """Show what there is to count as 0: of a counter that begins at 1 no rate can be told."""
        for replica in replicas if self._counts else ():
            for place in FAULT_PLACES:
                self._totals["faults"].labels(replica, place)
            for metric in (
                self._plan,
                self._step,
                self._totals["fallbacks"],
                self._totals["stood_aside"],
                self._totals["link_refused"],
                self.lost,
                self._given_up,
                self._held,
            ):
                metric.labels(replica)

    def state(self, replica: str, fields: Mapping[str, Any]) -> None:
        """Count what an engine reports."""
        if not self._counts:
            return
        for seconds in fields["planned"]:
            self._plan.labels(replica).observe(seconds)
        for tokens, seqs, seconds in fields["batches"]:
            self(Stepped(0.0, replica, Shape(tokens, seqs), seconds))
        for name in ("fallbacks", "stood_aside", "link_refused"):
            self._total(self._totals[name], (name, replica), fields[name], replica)
        for outcome, count in fields["drafted"].items():
            self._total(self._drafted, ("drafted", replica, outcome), count, outcome)
        for name in ("deviations", "faults"):
            for label, count in fields[name].items():
                self._total(self._totals[name], (name, replica, label), count, replica, label)
        self._given_up.labels(replica).set(fields["given_up"])
        if "held" in fields:
            self._held.labels(replica).set(len(fields["held"]))

    def _total(self, counter: Counter, key: tuple[str, ...], count: int, *labels: str) -> None:
        """count: an engine's, since it began."""
        before = self._seen.get(key, 0)
        self._seen[key] = count
        counter.labels(*labels).inc(max(0, count - before))


class EngineReports:
    """metrics, history: listeners to the events of this API server's requests. engines: what each reported last.
    block_size: tokens of a block of KV, 0 where it is not known."""

    def __init__(self, reader: Reader | None, metrics: PluginMetrics) -> None:
        self._reader = reader
        self.block_size = 0
        self.metrics = metrics
        self.history = RequestHistory(answer_of=answer_of)
        self.engines: dict[int, dict[str, Any]] = {}
        self.clock = WallClock()
        self._open: dict[str, int] = {}  # the engine of each request that has not ended
        self._more: list[Callable[[Event], None]] = []  # listeners
        self._tickets: dict[str, Callable[[Event], None]] = {}  # listeners, of API requests
        self._listening: dict[str, Callable[[Event], None]] = {}  # the same by id, of engines' requests
        self._forgotten: deque[tuple[float, str]] = deque()  # tickets, and when they are

    @property
    def connected(self) -> bool:
        return self._reader is not None

    def hear(self, listener: Callable[[Event], None]) -> None:
        """Every event but tokens goes to the listener, those of engines' steps among them."""
        self._more.append(listener)

    def listen(self, ticket: str, listener: Callable[[Event], None]) -> None:
        """Events of the engine's requests for the API request of this ticket go to the listener, of each until it
        ends."""
        self._tickets[ticket] = listener

    def forget(self, ticket: str) -> None:
        """No request will be made for it any more. One whose client has left may yet be reported as offered."""
        self._forgotten.append((self.clock.now() + LATE, ticket))

    def read(self) -> None:
        """Take in what has come, without waiting."""
        if self._reader is None:
            return
        while self._forgotten and self._forgotten[0][0] < self.clock.now():
            self._tickets.pop(self._forgotten.popleft()[1], None)
        for message in self._reader.messages():
            replica = str(message.engine)
            if message.lost:
                self.metrics.lost.labels(replica).inc(message.lost)
            if isinstance(message, RequestEvents):
                for event in message.happened():
                    self._take(message, event)
            else:
                self._stands(message)

    def refuse(self, request: Request, reason: str) -> Finished:
        """Count a request that is refused here as offered and refused. Its end."""
        now = self.clock.now()
        end = Finished(now, request.id, "refused", reason, Verdict(False, "deadline", "refused"))
        for event in (Offered(now, request.id, request), end):
            self._tell(event)
        return end

    def views(self) -> list[View]:
        """The sequences of each engine, as of its last report and what happened since."""
        return [self._view(engine, fields) for engine, fields in sorted(self.engines.items())]

    def _view(self, engine: int, fields: Mapping[str, Any]) -> View:
        """No step times and no batch: engines plan ahead and report neither."""
        now = self.clock.now()
        at = fields.get("at", now) if engine in self._open.values() else now  # one with nothing to run has no news
        reported = {row[0]: row for row in fields.get("sequences", ())}
        held, queues = fields.get("held", ()), dict[str, list[SeqView]]({queue: [] for queue in QUEUES})
        for id in dict.fromkeys([*reported, *self._open]):  # those that have come since at the end
            if self._open.get(id) != engine or ((record := self.history.in_flight[id]).replicas == [] and id in held):
                continue
            seq = _Shown(record, reported.get(id), at, now)
            queues[seq.queue].append(cast(SeqView, seq))
        free, total = (fields.get(name, 0) if self.block_size else 0 for name in ("kv_free", "kv_total"))
        return View(
            str(engine), now, queues["waiting"], queues["running"], free, total,
            Limits(0, 0, 0, total, self.block_size), cast(LatencyModel, None), as_of=at, moving=queues["moving"],
            steps=fields.get("steps", 0),
        )  # fmt: skip

    def _take(self, message: RequestEvents, event: Event) -> None:
        if type(event) is Offered:
            self._open[event.id] = message.engine
            if (listener := self._tickets.get(message.tickets.get(event.id, ""))) is not None:
                self._listening[event.id] = listener
        elif event.id not in self._open:
            return  # its offer was lost
        elif isinstance(event, (Placed, Transferred)):
            event = replace(event, replica=str(message.engine))  # an engine does not know its number among others
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self.metrics(event)
        self.history(event)
        if type(event) is not Tokens:
            self._tell_more(event)
        listener = self._listening.get(event.id)
        if type(event) is Finished:
            self._open.pop(event.id, None)
            self._listening.pop(event.id, None)
        if listener is not None:
            listener(event)

    def _tell_more(self, event: Event) -> None:
        for listener in self._more:
            listener(event)

    def _stands(self, state: EngineState) -> None:
        engine, fields = state.engine, state.fields
        self.metrics.state(str(engine), fields)
        now = self.clock.now()
        for tokens, seqs, seconds in fields["batches"]:
            self._tell_more(Stepped(now, str(engine), Shape(tokens, seqs), seconds))
        self.engines[engine] = {**(self.engines.get(engine, {})), **fields, "planned": [], "batches": [], "open": []}
        if "open" in fields:  # an end that was reported came before; one that was not is lost
            known = set(fields["open"])
            for id in [id for id, at in self._open.items() if at == engine and id not in known]:
                verdict = Verdict(False, "deadline", "failed")
                self._tell(Finished(self.clock.now(), id, "failed", LOST, verdict))


class _Shown:
    """A sequence, with what a history shows of it: as it was reported at `at` (row; None: it was not there yet), and
    what has happened to it since (record)."""

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
        self.missed = False  # that is not reported
        self.due = inf if due is None else due
        if row is None or last > at:
            self.due = record.next_due()
        if runs and record.output:
            self.pending = 1
            if max(at, last) <= self.due < now:  # more tokens have come since: it is not late for want of news
                self.due = now


_made: list[EngineReports] = []  # the one of this process


def reports_of(parallel_config: Any) -> EngineReports:
    """The reports of this API server. parallel_config: vLLM's."""
    if _made:
        return _made[0]
    folder, client = os.environ.get(link.FOLDER, ""), parallel_config._api_process_rank
    engines = range(parallel_config.data_parallel_size)
    metrics = PluginMetrics(REGISTRY, counts=client == 0)
    if folder:
        metrics.begin(map(str, engines))
    else:
        log.warning("no metrics and no verdicts: VLLM_PLUGINS is set and leaves `rubato` out")
    _made.append(EngineReports(Reader(folder, engines, client) if folder else None, metrics))
    return _made[0]
