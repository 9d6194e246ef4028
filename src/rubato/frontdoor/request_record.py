"""The record of one request for `/debug/requests/{id}`, the board and the log; `history` folds events into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from rubato.core.events import Finished
from rubato.core.request import Request
from rubato.core.slo import Deadlines, deadlines

# Reasons of waits; the first work after an event ends a wait.
HELD, QUEUE, PREEMPTED, LOST = "held before a replica", "queue of a replica", "preempted", "replica lost"
TRANSFER = "KV on its way to another replica"


@dataclass(slots=True)
class StageRecord:
    """The tokens of one stage."""

    start: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request, which is one choice, from offer to end. Times are seconds of the clock."""

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
    has_started: bool = False
    output: int = 0
    stages: list[StageRecord] = field(default_factory=list)
    end: Finished | None = None

    def waits_until(self, now: float) -> list[tuple[str, float, float]]:
        """All waits, the current one until `now`."""
        return [*self.waits, *([(*self.waiting, now)] if self.waiting is not None else [])]

    def stage_deadlines(self) -> list[Deadlines]:
        """The deadlines (s) of the tokens of each stage that has begun."""
        continues: float | None = None
        found: list[Deadlines] = []
        for stage, times in zip(self.request.stages, self.stages, strict=False):
            after = continues if stage.prompt == 0 else None
            due = deadlines(stage.slo, self.request.arrival, times.start, times.first, after)
            last = due.token(max(0, times.tokens - 1))
            continues = last if last < inf else times.last
            found.append(due)
        return found

    def next_due(self) -> float:
        """When its next token is due (s), by the tokens so far; inf: no SLO."""
        times = self.stages[-1]
        return self.stage_deadlines()[-1].token(times.tokens, times.last)
