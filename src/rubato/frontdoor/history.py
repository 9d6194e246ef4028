"""The events of a request and why it waited, for `/debug/requests/{id}` and the log. No prompt, no output, and no
other text of a client but for the beginning of what ends a stage.

A fold over events. Kept: every request in flight, and the last `KEEP` ended.
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
from rubato.frontdoor.choices import answer_of, firsts
from rubato.frontdoor.explanation import cause_so_far, explain, phases
from rubato.frontdoor.request_record import HELD, LOST, PREEMPTED, QUEUE, TRANSFER, RequestRecord, StageRecord
from rubato.frontdoor.verdict import in_ms, ms, verdict

KEEP = 1000  # requests that have ended, all choices of one counted as one
MOST_STEPS = 256  # entries of one request's history; a run of tokens is one
TIMES = ("at", "until")  # of a step, in seconds; worked out in milliseconds only where it is shown


class RequestHistory:
    """A listener. ended: called with each record that is complete. answer_of: of a request's id, the
    one that the API gave."""

    def __init__(
        self,
        ended: Callable[[RequestRecord], None] | None = None,
        answer_of: Callable[[str], str] = answer_of,
    ) -> None:
        self._ended = ended
        self._answer_of = answer_of
        self._open: dict[str, RequestRecord] = {}
        self._answers: OrderedDict[str, list[RequestRecord]] = OrderedDict()  # by the id that the API gave
        self._done: OrderedDict[str, None] = OrderedDict()
        self._queued: Counter[str] = Counter()  # requests that wait, by replica

    def __call__(self, event: Event) -> None:
        if type(event) is Tokens:
            _tokens(self._open[event.id], event)
            return
        if isinstance(event, REPLICA_EVENTS):  # of a replica, not of a request
            return
        if type(event) is Offered:
            record = self._open[event.id] = RequestRecord(without_texts(event.request))
            answer = self._answer_of(event.id)
            if answer in self._answers and self._is_done(answer):  # an id that clients use again, as inside vLLM
                del self._answers[answer]
                self._done.pop(answer, None)
            self._answers.setdefault(answer, []).append(record)
        record = self._open[event.id]
        self._count_queue(record, -1)
        _fold(record, event)
        if type(event) is Placed:
            record.ahead = self._queued[event.replica]
        self._count_queue(record, 1)
        if type(event) is Finished:
            del self._open[event.id]
            if self._is_done(answer := self._answer_of(event.id)):
                self._done[answer] = None
                self._done.move_to_end(answer)
            while len(self._done) > KEEP:
                oldest, _ = self._done.popitem(last=False)
                if self._is_done(oldest):
                    del self._answers[oldest]
            if self._ended is not None:
                self._ended(record)

    @property
    def in_flight(self) -> Mapping[str, RequestRecord]:
        """Those that have not ended, every choice by its own id, in the order in which they were offered."""
        return self._open

    def find(self, id: str) -> Sequence[RequestRecord]:
        """All choices of the request that the API calls `id`, which may be the id of a choice; none if it is not known,
        or no longer."""
        return self._answers[id] if id in self._answers else self._answers.get(self._answer_of(id), ())

    def _count_queue(self, record: RequestRecord, one: int) -> None:
        if record.waiting is not None and record.waiting[0] == QUEUE:
            self._queued[record.replicas[-1]] += one

    def _is_done(self, answer: str) -> bool:
        return all(record.end is not None for record in self._answers[answer])


def _fold(record: RequestRecord, event: Event) -> None:
    if isinstance(event, Tokens):
        _tokens(record, event)
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
        _wait(record, event.at, TRANSFER if record.brings_kv else QUEUE)
    elif isinstance(event, HandedOff):
        handoff = event.request.handoff
        assert handoff is not None
        about = {"replica": handoff.source, "why": handoff.reason, "cached_tokens": handoff.cached}
        record.brings_kv = handoff.cached > 0
        _wait(record, event.at, HELD)
    elif isinstance(event, Transferred):
        about = {"replica": event.replica, "from": event.source, "tokens": event.tokens, "bytes": event.size}
        _wait(record, event.at, None)
    elif isinstance(event, Started):
        about = {"resumed": event.resumed, "cached_tokens": event.cached}
        if not record.started:
            record.started, record.cached = True, event.cached
        _wait(record, event.at, None)
    elif isinstance(event, Preempted):
        record.preemptions += 1
        _wait(record, event.at, PREEMPTED)
    elif isinstance(event, Lost):
        about["replica"] = record.lost = event.replica
        record.brings_kv = False
        _wait(record, event.at, LOST)
    elif isinstance(event, Demoted):
        record.best_effort_since = event.at
        record.demoted_at = about["replica"] = record.replicas[-1] if record.replicas else ""
    elif isinstance(event, Promoted):
        _served_best_effort(record, event.at)
    elif isinstance(event, Finished):
        about = {"outcome": event.outcome, "reason": event.reason}
        _wait(record, event.at, None)
        _served_best_effort(record, event.at)
        record.output = max(record.output, event.output)  # of an untimed response nothing was heard before
        record.end = event
    _add(record, event, about)


def _tokens(record: RequestRecord, event: Tokens) -> None:
    if not event.tokens:  # text that was held back, of tokens counted before
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
        last = _add(record, event, {"at": first, "stage": event.stage, "tokens": 0})
    last["tokens"] += event.tokens
    last["until"] = until


def _add(record: RequestRecord, event: Event, about: dict[str, Any]) -> dict[str, Any]:
    """One more step, returned. The first and the last of a long history are kept."""
    step = {"at": event.at, "event": type(event).__name__.lower(), **about}
    record.steps.append(step)
    if len(record.steps) > MOST_STEPS:
        del record.steps[MOST_STEPS // 2]
        record.left_out += 1
    return step


def _wait(record: RequestRecord, now: float, why: str | None) -> None:
    """What it waited for until now, and waits for from now on."""
    if record.waiting is not None:
        record.waits.append((record.waiting[0], record.waiting[1], now))
        if len(record.waits) > MOST_STEPS:
            del record.waits[MOST_STEPS // 2]
    record.waiting = None if why is None else (why, now)


def _served_best_effort(record: RequestRecord, now: float) -> None:
    if record.best_effort_since is not None:
        record.best_effort += now - record.best_effort_since
        record.best_effort_since = None


# --------------------------------------------------------------------------- as JSON


def shown(
    id: str, records: Sequence[RequestRecord], views: Sequence[View], now: float, *, fair: bool,
    counted: Collection[str] = (), names: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:  # fmt: skip
    """The page of one answer, all its choices; times in milliseconds since its arrival.

    fair: tenants share the replicas, so a request not yet placed waits for its tenant's share. counted: replicas that
    tell nothing of themselves. names: of replicas, as an admin knows them.
    """
    requests = [record.request for record in records]
    request = requests[0]
    return {
        "id": id,
        "tenant": request.tenant,
        "tier": request.tier,
        "state": "finished" if all(record.end is not None for record in records) else "in flight",
        "slo": [{"until": stage.ends, **in_ms(stage.slo)} for stage in request.stages],
        "on_decline": request.on_decline,
        "prompt_tokens": sum(requests[at].prompt for at in firsts(requests)),
        "max_tokens": max(request.sampling.max_tokens for request in requests),
        "age_ms": ms(now - request.arrival),
        "choices": [_choice(record, views, now, names, fair=fair, counted=counted) for record in records],
    }


def _choice(
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
        "so_far": None if record.end is not None else _so_far(record, now, counted, due),
        "phases": [[kind, ms(seconds)] for kind, seconds in phases(record, now, counted)],
        "prompt_tokens": record.request.prompt,
        "max_tokens": record.request.sampling.max_tokens,
        "replicas": record.replicas,
        "deadlines": _due(record),
        "now": None if record.end is not None else _now(record, views, counted),
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
        "events": [_step(step, arrival) for step in record.steps],
        "events_left_out": record.left_out,
    }


def _step(step: Mapping[str, Any], arrival: float) -> dict[str, Any]:
    """With its times in milliseconds since arrival."""
    return {f"{k}_ms" if k in TIMES else k: ms(v - arrival) if k in TIMES else v for k, v in step.items()}


def _state(record: RequestRecord) -> str:
    if record.end is not None:
        return record.end.outcome
    return "running" if record.waiting is None else record.waiting[0]


def _now(record: RequestRecord, views: Sequence[View], counted: Collection[str]) -> dict[str, Any] | None:
    """How it stands at its replica, where it has one."""
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
    """When its next token is due (s): as its replica has it, which may know of tokens that were not told of one by
    one."""
    here = (seq for view in views for seqs in (view.running, view.waiting, view.moving) for seq in seqs)
    return next((seq.due for seq in here if seq.id == record.request.id), record.next_due())


def _so_far(record: RequestRecord, now: float, counted: Collection[str], due: float) -> dict[str, Any] | None:
    """Of a request in flight whose next token is late: by how much, and what has cost it the most time."""
    return {"late_ms": ms(now - due), "cause": cause_so_far(record, now, counted)[0]} if now > due else None


def _due(record: RequestRecord) -> list[dict[str, Any]]:
    """When each stage's tokens are due: the first, each after it, and the last."""
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
