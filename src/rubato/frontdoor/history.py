"""Records the events and waits of each request, for `/debug/requests/{id}` and the log.

This is a fold over events. It keeps every request in flight and the last `MAX_ENDED_REQUESTS` that ended. It contains
no prompts and outputs; the only text of a client is the beginning of a stage's end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rubato.core.events import (
    REPLICA_EVENTS,
    Demoted,
    Event,
    Finished,
    HandedOff,
    Lost,
    Offered,
    Placed,
    Preempted,
    Promoted,
    Started,
    Tokens,
    Transferred,
)
from rubato.core.interfaces import View
from rubato.core.request import NOTHING, without_texts
from rubato.frontdoor.choices import answer_of, first_choices
from rubato.frontdoor.explanation import cause_so_far, explain, phases
from rubato.frontdoor.request_record import HELD, LOST, PREEMPTED, QUEUE, TRANSFER, RequestRecord, StageRecord
from rubato.frontdoor.verdict import ms, slo_in_ms, verdict

MAX_ENDED_REQUESTS = 1000  # API requests; all choices count as one
MAX_STEPS = 256  # of one request's history; a run of tokens is one step
TIME_FIELDS = ("at", "until")  # of a step, in seconds; pages show milliseconds


class RequestHistory:
    """A listener that records requests.

    Args:
        on_end: called with each complete record.
        answer_of: from a request's id to that of its API request.
    """

    def __init__(
        self,
        on_end: Callable[[RequestRecord], None] | None = None,
        answer_of: Callable[[str], str] = answer_of,
    ) -> None:
        self._on_end = on_end
        self._answer_of = answer_of
        self._open: dict[str, RequestRecord] = {}
        self._answers: OrderedDict[str, list[RequestRecord]] = OrderedDict()  # by id of the API request
        self._done: OrderedDict[str, None] = OrderedDict()
        self._queued: Counter[str] = Counter()  # waiting requests, by replica

    def __call__(self, event: Event) -> None:
        if type(event) is Tokens:
            _add_tokens(self._open[event.id], event)
            return
        if isinstance(event, REPLICA_EVENTS):  # of a replica, not of a request
            return
        if type(event) is Offered:
            record = self._open[event.id] = RequestRecord(without_texts(event.request))
            answer = self._answer_of(event.id)
            if answer in self._answers and self._is_done(answer):  # clients may use an id again inside vLLM
                del self._answers[answer]
                self._done.pop(answer, None)
            self._answers.setdefault(answer, []).append(record)
        record = self._open[event.id]
        self._count_queue(record, -1)
        _fold(record, event)
        if type(event) is Placed:
            record.queue_ahead = self._queued[event.replica]
        self._count_queue(record, 1)
        if type(event) is Finished:
            del self._open[event.id]
            if self._is_done(answer := self._answer_of(event.id)):
                self._done[answer] = None
                self._done.move_to_end(answer)
            while len(self._done) > MAX_ENDED_REQUESTS:
                oldest, _ = self._done.popitem(last=False)
                if self._is_done(oldest):
                    del self._answers[oldest]
            if self._on_end is not None:
                self._on_end(record)

    @property
    def in_flight(self) -> Mapping[str, RequestRecord]:
        """The records of requests that have not ended, by id, in the order in which they were offered."""
        return self._open

    def find(self, id: str) -> Sequence[RequestRecord]:
        """The records of all choices of an API request; none if it is unknown or forgotten. id: its, or a choice's."""
        return self._answers[id] if id in self._answers else self._answers.get(self._answer_of(id), ())

    def _count_queue(self, record: RequestRecord, one: int) -> None:
        if record.waiting is not None and record.waiting[0] == QUEUE:
            self._queued[record.replicas[-1]] += one

    def _is_done(self, answer: str) -> bool:
        return all(record.end is not None for record in self._answers[answer])


def _fold(record: RequestRecord, event: Event) -> None:
    if isinstance(event, Tokens):
        _add_tokens(record, event)
        return
    about: dict[str, Any] = {}
    if isinstance(event, Offered):
        record.waiting = (HELD, event.at)
        record.stages.append(StageRecord(event.request.arrival))
    elif isinstance(event, Placed):
        about["replica"] = event.replica
        record.why = event.why
        if event.why:
            about["why"] = event.why
        record.replicas.append(event.replica)
        _begin_wait(record, event.at, TRANSFER if record.brings_kv else QUEUE)
    elif isinstance(event, HandedOff):
        handoff = event.request.handoff
        assert handoff is not None
        about = {"replica": handoff.source, "why": handoff.reason, "cached_tokens": handoff.cached}
        record.brings_kv = handoff.cached > 0
        _begin_wait(record, event.at, HELD)
    elif isinstance(event, Transferred):
        about = {"replica": event.replica, "from": event.source, "tokens": event.tokens, "bytes": event.size}
        _begin_wait(record, event.at, None)
    elif isinstance(event, Started):
        about = {"resumed": event.resumed, "cached_tokens": event.cached}
        if not record.has_started:
            record.has_started, record.cached = True, event.cached
        _begin_wait(record, event.at, None)
    elif isinstance(event, Preempted):
        record.preemptions += 1
        _begin_wait(record, event.at, PREEMPTED)
    elif isinstance(event, Lost):
        about["replica"] = record.lost_replica = event.replica
        record.brings_kv = False
        _begin_wait(record, event.at, LOST)
    elif isinstance(event, Demoted):
        record.best_effort_since = event.at
        record.demoted_at = about["replica"] = record.replicas[-1] if record.replicas else ""
    elif isinstance(event, Promoted):
        _end_best_effort(record, event.at)
    elif isinstance(event, Finished):
        about = {"outcome": event.outcome, "reason": event.reason}
        _begin_wait(record, event.at, None)
        _end_best_effort(record, event.at)
        record.output = max(record.output, event.output)  # an untimed response had no token events
        record.end = event
    _add_step(record, event, about)


def _add_tokens(record: RequestRecord, event: Tokens) -> None:
    if not event.tokens:  # withheld text of tokens that were counted before
        return
    while len(record.stages) <= event.stage:
        record.stages.append(StageRecord(record.stages[-1].last))
    stage = record.stages[event.stage]
    first, until = (event.times[0], event.times[-1]) if event.times else (event.at, event.at)
    stage.first = first if stage.first is None else stage.first
    stage.last = until
    stage.tokens += event.tokens
    record.output += event.tokens
    last = record.steps[-1]
    if last["event"] != "tokens" or last["stage"] != event.stage:
        last = _add_step(record, event, {"at": first, "stage": event.stage, "tokens": 0})
    last["tokens"] += event.tokens
    last["until"] = until


def _add_step(record: RequestRecord, event: Event, about: dict[str, Any]) -> dict[str, Any]:
    """Add a step and return it. Of a long history the first and the last steps are kept."""
    step = {"at": event.at, "event": type(event).__name__.lower(), **about}
    record.steps.append(step)
    if len(record.steps) > MAX_STEPS:
        del record.steps[MAX_STEPS // 2]
        record.omitted_steps += 1
    return step


def _begin_wait(record: RequestRecord, now: float, why: str | None) -> None:
    """End the current wait, and begin the next one. why: reason of the next; None: the request runs."""
    if record.waiting is not None:
        record.waits.append((record.waiting[0], record.waiting[1], now))
        if len(record.waits) > MAX_STEPS:
            del record.waits[MAX_STEPS // 2]
    record.waiting = None if why is None else (why, now)


def _end_best_effort(record: RequestRecord, now: float) -> None:
    if record.best_effort_since is not None:
        record.best_effort += now - record.best_effort_since
        record.best_effort_since = None


# --------------------------------------------------------------------------- as JSON


def page(
    id: str, records: Sequence[RequestRecord], views: Sequence[View], now: float, *, fair: bool,
    counted: Collection[str] = (), names: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:  # fmt: skip
    """The page of one API request with all its choices, as JSON; times are milliseconds since its arrival.

    Args:
        fair: whether a request that is not placed yet may wait for its tenant's share.
        counted: ids of replicas that do not report their state.
        names: of replicas, as an admin knows them.
    """
    requests = [record.request for record in records]
    request = requests[0]
    return {
        "id": id,
        "tenant": request.tenant,
        "tier": request.tier,
        "state": "finished" if all(record.end is not None for record in records) else "in flight",
        "slo": [{"until": stage.ends, **slo_in_ms(stage.slo)} for stage in request.stages],
        "on_decline": request.on_decline,
        "prompt_tokens": sum(requests[at].prompt for at in first_choices(requests)),
        "max_tokens": max(request.sampling.max_tokens for request in requests),
        "age_ms": ms(now - request.arrival),
        "choices": [_choice_json(record, views, now, names, fair=fair, counted=counted) for record in records],
    }


def _choice_json(
    record: RequestRecord, views: Sequence[View], now: float, names: Mapping[str, str], *, fair: bool,
    counted: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    arrival, due = record.request.arrival, _next_due(record, views)
    until = now if record.end is None else record.end.at
    demoted = record.best_effort + (now - record.best_effort_since if record.best_effort_since is not None else 0.0)
    return {
        "id": record.request.id,
        "state": _state(record),
        "explanation": explain(record, now, names, counted, due),
        "so_far": None if record.end is not None else _lateness_json(record, now, counted, due),
        "phases": [[kind, ms(seconds)] for kind, seconds in phases(record, now, counted)],
        "prompt_tokens": record.request.prompt,
        "max_tokens": record.request.sampling.max_tokens,
        "replicas": record.replicas,
        "deadlines": _deadlines_json(record),
        "now": None if record.end is not None else _state_at_replica(record, views, counted),
        "output_tokens": record.output,
        "cached_tokens": record.cached,
        "preemptions": record.preemptions,
        "waited": [
            {"why": f"{why} (fair share)" if why == HELD and fair else why, "at_ms": ms(a - arrival), "ms": ms(b - a)}
            for why, a, b in record.waits_until(now)
            if b > a or record.waiting == (why, a)
        ],
        "best_effort_ms": ms(until - arrival) if record.request.best_effort else ms(demoted),
        "verdict": None if record.end is None else verdict(record.end),
        "events": [_step_json(step, arrival) for step in record.steps],
        "events_left_out": record.omitted_steps,
    }


def _step_json(step: Mapping[str, Any], arrival: float) -> dict[str, Any]:
    """A step with its times in milliseconds since arrival."""
    return {f"{k}_ms" if k in TIME_FIELDS else k: ms(v - arrival) if k in TIME_FIELDS else v for k, v in step.items()}


def _state(record: RequestRecord) -> str:
    if record.end is not None:
        return record.end.outcome
    return "running" if record.waiting is None else record.waiting[0]


def _state_at_replica(record: RequestRecord, views: Sequence[View], counted: Collection[str]) -> dict[str, Any] | None:
    """The state of a request at its replica; None where it is at none."""
    for view in views:
        for queue, seqs in (("running", view.running), ("waiting", view.waiting)):
            for position, seq in enumerate(seqs):
                if seq.id == record.request.id:
                    is_told = view.id not in counted
                    return {
                        "replica": view.id,
                        "in": queue,
                        "position": position if is_told else None,
                        "of": len(seqs) if is_told else None,
                        "pending_tokens": seq.pending if is_told else None,
                        "kv_blocks": seq.blocks if is_told else None,
                        "best_effort": seq.best_effort,
                        "next_token_due_ms": ms(seq.due - record.request.arrival),
                    }
    return None


def _next_due(record: RequestRecord, views: Sequence[View]) -> float:
    """When the next token is due (s). The replica's value comes first: it may know of tokens without events."""
    here = (seq for view in views for seqs in (view.running, view.waiting, view.moving) for seq in seqs)
    return next((seq.due for seq in here if seq.id == record.request.id), record.next_due())


def _lateness_json(record: RequestRecord, now: float, counted: Collection[str], due: float) -> dict[str, Any] | None:
    """Lateness and main cause of a request whose next token is late; None where it is not."""
    return {"late_ms": ms(now - due), "cause": cause_so_far(record, now, counted)[0]} if now > due else None


def _deadlines_json(record: RequestRecord) -> list[dict[str, Any]]:
    """Deadlines and measured times of each stage: the first token, each later one, and the last."""
    arrival = record.request.arrival
    rows = []
    for index, (times, due) in enumerate(zip(record.stages, record.stage_deadlines(), strict=True)):
        rows.append(
            {
                "stage": index,
                "first_token_due_ms": ms(due.first - arrival),
                "then_every_ms": ms(record.request.stages[index].slo.tpot),
                "end_due_ms": ms(due.end - arrival),
                "first_token_ms": None if times.first is None else ms(times.first - arrival),
                "last_token_ms": None if times.first is None else ms(times.last - arrival),
                "tokens": times.tokens,
            }
        )
    return rows
