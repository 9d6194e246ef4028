"""The record of one request: the fold of its events that metrics, board, log and `/debug/requests/{id}` read."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from rubato.core.events import (
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
from rubato.core.request import Handoff, Request
from rubato.core.slo import Deadlines, deadlines

# Reasons of waits; the first work after an event ends a wait.
HELD, QUEUE, PREEMPTED, LOST = "held before a replica", "queue of a replica", "preempted", "replica lost"
TRANSFER = "KV on its way to another replica"
MAX_STEPS = 256  # of one request's record; a run of tokens is one step


@dataclass(slots=True)
class StageRecord:
    """Counts and times the tokens of one stage."""

    start: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class RequestRecord:
    """Records one request, which is one choice, from offer to end. Times are seconds of the clock."""

    request: Request
    steps: list[dict[str, Any]] = field(default_factory=list)  # events as pages show them; a run of tokens is one
    omitted_steps: int = 0
    waits: list[tuple[str, float, float]] = field(default_factory=list)  # why, from, until
    waiting: tuple[str, float] | None = None
    best_effort_since: float | None = None
    best_effort: float = 0.0  # seconds, until it ended or was promoted again
    demoted_at: str = ""  # the replica where it was when it was demoted last; "" = held by the router
    replicas: list[str] = field(default_factory=list)
    queue_ahead: int = 0  # requests waiting at its last replica when it was placed there
    lost_replica: str = ""  # the last replica that was lost with this request
    why: str = ""  # the router's explanation of the last placement, if any
    preemptions: int = 0
    brings_kv: bool = False  # to its next replica
    cached: int = 0  # prompt tokens found in KV at its first start
    began_at: float | None = None  # its first work
    output: int = 0
    stages: list[StageRecord] = field(default_factory=list)
    end: Finished | None = None

    @property
    def offered_at(self) -> float:
        return float(self.steps[0]["at"])

    @property
    def first_token_at(self) -> float | None:
        return self.stages[0].first

    @property
    def last_token_at(self) -> float | None:
        return None if self.stages[0].first is None else self.stages[-1].last

    def waits_until(self, now: float) -> list[tuple[str, float, float]]:
        """Returns all waits, the current one until `now`."""
        return [*self.waits, *([(*self.waiting, now)] if self.waiting is not None else [])]

    def stage_deadlines(self) -> list[Deadlines]:
        """Returns the deadlines (s) of the tokens of each stage that has begun."""
        continues: float | None = None
        deadlines_of_stages: list[Deadlines] = []
        for stage, times in zip(self.request.stages, self.stages, strict=False):
            after = continues if stage.prompt == 0 else None
            due = deadlines(stage.slo, self.request.arrival, times.start, times.first, after)
            last = due.token(max(0, times.tokens - 1))
            continues = last if last < inf else times.last
            deadlines_of_stages.append(due)
        return deadlines_of_stages

    def next_due(self) -> float:
        """Returns when its next token is due (s), by the tokens so far; inf: no SLO."""
        times = self.stages[-1]
        return self.stage_deadlines()[-1].token(times.tokens, times.last)

    # ----------------------------------------------------------------- the fold

    def add(self, event: Event) -> None:
        """Folds the next event of this request, other than tokens."""
        about = event_fields(event)
        now = event.at
        match event:
            case Offered():
                self.waiting = (HELD, now)
                self.stages.append(StageRecord(self.request.arrival))
            case Placed():
                self.why = event.why
                self.replicas.append(event.replica)
                self._begin_wait(now, TRANSFER if self.brings_kv else QUEUE)
            case HandedOff():
                self.brings_kv = about["cached_tokens"] > 0
                self._begin_wait(now, HELD)
            case Transferred():
                self._begin_wait(now, None)
            case Started():
                if self.began_at is None:
                    self.began_at, self.cached = now, event.cached
                self._begin_wait(now, None)
            case Preempted():
                self.preemptions += 1
                self._begin_wait(now, PREEMPTED)
            case Lost():
                self.lost_replica = event.replica
                self.brings_kv = False
                self._begin_wait(now, LOST)
            case Demoted():
                self.best_effort_since = now
                self.demoted_at = about["replica"] = self.replicas[-1] if self.replicas else ""
            case Promoted():
                self._end_best_effort(now)
            case Finished():
                self._begin_wait(now, None)
                self._end_best_effort(now)
                self.output = max(self.output, event.output)  # an untimed response had no token events
                self.end = event
        self._add_step(event, about)

    def add_tokens(self, event: Tokens) -> None:
        """Folds the next event of this request, of tokens."""
        if not event.tokens:  # withheld text of tokens that were counted before
            return
        while len(self.stages) <= event.stage:
            self.stages.append(StageRecord(self.stages[-1].last))
        stage = self.stages[event.stage]
        first, until = (event.times[0], event.times[-1]) if event.times else (event.at, event.at)
        stage.first = first if stage.first is None else stage.first
        stage.last = until
        stage.tokens += event.tokens
        self.output += event.tokens
        last = self.steps[-1]
        if last["event"] != "tokens" or last["stage"] != event.stage:
            last = self._add_step(event, {"at": first, "stage": event.stage, "tokens": 0})
        last["tokens"] += event.tokens
        last["until"] = until

    def _add_step(self, event: Event, about: dict[str, Any]) -> dict[str, Any]:
        """Adds a step and returns it. Of a long record the first and the last steps are kept."""
        step = {"at": event.at, "event": type(event).__name__.lower(), **about}
        self.steps.append(step)
        if len(self.steps) > MAX_STEPS:
            del self.steps[MAX_STEPS // 2]
            self.omitted_steps += 1
        return step

    def _begin_wait(self, now: float, why: str | None) -> None:
        """Ends the current wait, and begins the next one for the reason `why`; None: the request runs."""
        if self.waiting is not None:
            self.waits.append((self.waiting[0], self.waiting[1], now))
            if len(self.waits) > MAX_STEPS:
                del self.waits[MAX_STEPS // 2]
        self.waiting = None if why is None else (why, now)

    def _end_best_effort(self, now: float) -> None:
        if self.best_effort_since is not None:
            self.best_effort += now - self.best_effort_since
            self.best_effort_since = None


def event_fields(event: Event) -> dict[str, Any]:
    """Returns the fields of an event of a request, as pages and traces show them."""
    match event:
        case Placed(replica=replica, why=why):
            return {"replica": replica, **({"why": why} if why else {})}
        case HandedOff(request=Request(handoff=Handoff() as handoff)):
            return {"replica": handoff.source, "why": handoff.reason, "cached_tokens": handoff.cached}
        case Transferred(replica=replica, source=source, tokens=tokens, size=size):
            return {"replica": replica, "from": source, "tokens": tokens, "bytes": size}
        case Started(resumed=resumed, cached=cached):
            return {"resumed": resumed, "cached_tokens": cached}
        case Lost(replica=replica):
            return {"replica": replica}
        case Finished(outcome=outcome, reason=reason):
            return {"outcome": outcome, "reason": reason}
    return {}
