"""Records each request, once for all who read it: metrics, board, log and `/debug/requests/{id}`.

This is a fold over events. It keeps every request in flight and the last `MAX_ENDED_REQUESTS` that ended. It contains
no prompts and outputs; the only text of a client is the beginning of a stage's end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rubato.core.events import REPLICA_EVENTS, Event, Finished, Offered, Placed, Tokens
from rubato.core.interfaces import SeqView, View
from rubato.core.request import NOTHING, Request, without_texts
from rubato.frontdoor.choices import answer_of, first_choices
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.explanation import explain, lateness, phases
from rubato.frontdoor.request_record import HELD, QUEUE, RequestRecord
from rubato.frontdoor.tenants import Tenant
from rubato.frontdoor.verdict import ms, slo_in_ms, verdict

MAX_ENDED_REQUESTS = 1000  # API requests; all choices count as one
TIME_FIELDS = ("at", "until")  # of a step, in seconds; pages show milliseconds


class RequestHistory:
    """Folds the events of each request into its record, as a listener.

    Args:
        on_end: called with each complete record.
        answer_of: from a request's id to that of its API request.
    """

    def __init__(
        self, on_end: Callable[[RequestRecord], None] | None = None, answer_of: Callable[[str], str] = answer_of
    ) -> None:
        self._on_end = on_end
        self._answer_of = answer_of
        self._open: dict[str, RequestRecord] = {}
        self._answers: OrderedDict[str, dict[str, RequestRecord]] = OrderedDict()  # by id of the API request
        self._ended_answers: OrderedDict[str, None] = OrderedDict()
        self._queued: Counter[str] = Counter()  # waiting requests, by replica

    def __call__(self, event: Event) -> None:
        if type(event) is Tokens:
            self._open[event.id].add_tokens(event)
            return
        if isinstance(event, REPLICA_EVENTS):  # of a replica, not of a request
            return
        if type(event) is Offered:
            self._add(event.request)
        record = self._open[event.id]
        self._count_queue(record, -1)
        record.add(event)
        if type(event) is Placed:
            record.queue_ahead = self._queued[event.replica]
        self._count_queue(record, 1)
        if type(event) is Finished:
            self._end(record)

    @property
    def in_flight(self) -> Mapping[str, RequestRecord]:
        """Returns the records of requests that have not ended, by id, in the order in which they were offered."""
        return self._open

    def record(self, id: str) -> RequestRecord:
        """Returns the record of one request that is in flight or remembered. Raises KeyError."""
        return self._answers[self._answer_of(id)][id]

    def find(self, id: str) -> Sequence[RequestRecord]:
        """Returns the records of all choices of an API request, by its id or a choice's; none if it is unknown."""
        return [*self._answers.get(id, self._answers.get(self._answer_of(id), {})).values()]

    def find_for(self, tenant: Tenant, id: str) -> Sequence[RequestRecord]:
        """Returns the records of `find` that a tenant may see. Raises ApiError 404 where there are none."""
        records = [record for record in self.find(id) if tenant.admin or record.request.tenant == tenant.name]
        if not records:
            raise ApiError(404, f"There is no request {id[:80]!r}, or no longer.", param="id", code="request_not_found")
        return records

    def _add(self, request: Request) -> None:
        answer = self._answer_of(request.id)
        if answer in self._answers and self._has_ended(answer):  # clients may use an id again inside vLLM
            del self._answers[answer]
            self._ended_answers.pop(answer, None)
        record = self._open[request.id] = RequestRecord(without_texts(request))
        self._answers.setdefault(answer, {})[request.id] = record

    def _end(self, record: RequestRecord) -> None:
        del self._open[record.request.id]
        if self._has_ended(answer := self._answer_of(record.request.id)):
            self._ended_answers[answer] = None
            self._ended_answers.move_to_end(answer)
        while len(self._ended_answers) > MAX_ENDED_REQUESTS:
            oldest, _ = self._ended_answers.popitem(last=False)
            if self._has_ended(oldest):
                del self._answers[oldest]
        if self._on_end is not None:
            self._on_end(record)

    def _count_queue(self, record: RequestRecord, one: int) -> None:
        if record.waiting is not None and record.waiting[0] == QUEUE:
            self._queued[record.replicas[-1]] += one

    def _has_ended(self, answer: str) -> bool:
        return all(record.end is not None for record in self._answers[answer].values())


# --------------------------------------------------------------------------- as JSON


def page(
    id: str, records: Sequence[RequestRecord], views: Sequence[View], now: float, *, has_fair_share: bool,
    counted_replicas: Collection[str] = (), names: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:  # fmt: skip
    """Returns the page of one API request with all its choices, as JSON; times are milliseconds since its arrival.

    Args:
        has_fair_share: whether a request that is not placed yet may wait for its tenant's share.
        counted_replicas: ids of replicas that do not report their state.
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
        "choices": [
            _choice_json(record, views, now, names, has_fair_share=has_fair_share, counted_replicas=counted_replicas)
            for record in records
        ],
    }


def _choice_json(
    record: RequestRecord, views: Sequence[View], now: float, names: Mapping[str, str], *, has_fair_share: bool,
    counted_replicas: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    arrival, places = record.request.arrival, _places(record, views)
    due = places[0].seq.due if places else record.next_due()  # a replica may know of tokens without events
    late = lateness(record, now, due, counted_replicas)
    until = now if record.end is None else record.end.at
    reason_of_hold = f"{HELD} (fair share)" if has_fair_share else HELD
    demoted = record.best_effort + (now - record.best_effort_since if record.best_effort_since is not None else 0.0)
    return {
        "id": record.request.id,
        "state": _state(record),
        "explanation": explain(record, now, late, names),
        "so_far": None if late is None else {"late_ms": ms(late.seconds), "cause": late.cause},
        "phases": [[kind, ms(seconds)] for kind, seconds in phases(record, now, counted_replicas)],
        "prompt_tokens": record.request.prompt,
        "max_tokens": record.request.sampling.max_tokens,
        "replicas": record.replicas,
        "deadlines": _deadlines_json(record),
        "now": None if record.end is not None else _state_at_replica(record, places, counted_replicas),
        "output_tokens": record.output,
        "cached_tokens": record.cached,
        "preemptions": record.preemptions,
        "waited": [
            {"why": reason_of_hold if why == HELD else why, "at_ms": ms(a - arrival), "ms": ms(b - a)}
            for why, a, b in record.waits_until(now)
            if b > a or record.waiting == (why, a)
        ],
        "best_effort_ms": ms(until - arrival) if record.request.best_effort else ms(demoted),
        "verdict": None if record.end is None else verdict(record.end),
        "events": [_step_json(step, arrival) for step in record.steps],
        "events_left_out": record.omitted_steps,
    }


def _step_json(step: Mapping[str, Any], arrival: float) -> dict[str, Any]:
    """Returns a step with its times in milliseconds since arrival."""
    return {f"{k}_ms" if k in TIME_FIELDS else k: ms(v - arrival) if k in TIME_FIELDS else v for k, v in step.items()}


def _state(record: RequestRecord) -> str:
    if record.end is not None:
        return record.end.outcome
    return "running" if record.waiting is None else record.waiting[0]


class _Place(NamedTuple):
    """Says where in a queue of a replica a request is."""

    view: View
    queue: str
    position: int
    of: int  # requests in the queue
    seq: SeqView


def _places(record: RequestRecord, views: Sequence[View]) -> list[_Place]:
    """Returns where a request is, by the replicas' views."""
    return [
        _Place(view, queue, position, len(seqs), seq)
        for view in views
        for queue, seqs in (("running", view.running), ("waiting", view.waiting), ("moving", view.moving))
        for position, seq in enumerate(seqs)
        if seq.id == record.request.id
    ]


def _state_at_replica(
    record: RequestRecord, places: Sequence[_Place], counted_replicas: Collection[str]
) -> dict[str, Any] | None:  # fmt: skip
    """Returns the state of a request at its replica; None where it is at none."""
    place = next((place for place in places if place.queue != "moving"), None)
    if place is None:
        return None
    is_reported, seq = place.view.id not in counted_replicas, place.seq
    return {
        "replica": place.view.id,
        "in": place.queue,
        "position": place.position if is_reported else None,
        "of": place.of if is_reported else None,
        "pending_tokens": seq.pending if is_reported else None,
        "kv_blocks": seq.blocks if is_reported else None,
        "best_effort": seq.best_effort,
        "next_token_due_ms": ms(seq.due - record.request.arrival),
    }


def _deadlines_json(record: RequestRecord) -> list[dict[str, Any]]:
    """Returns deadlines and measured times of each stage: the first token, each later one, and the last."""
    arrival = record.request.arrival
    return [
        {
            "stage": index,
            "first_token_due_ms": ms(due.first - arrival),
            "then_every_ms": ms(stage.slo.tpot),
            "end_due_ms": ms(due.end - arrival),
            "first_token_ms": None if times.first is None else ms(times.first - arrival),
            "last_token_ms": None if times.first is None else ms(times.last - arrival),
            "tokens": times.tokens,
        }
        for index, (stage, times, due) in enumerate(
            zip(record.request.stages, record.stages, record.stage_deadlines(), strict=False)
        )
    ]
