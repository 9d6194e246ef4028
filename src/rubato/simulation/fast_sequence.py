"""One request on a counted replica: a `SeqView` whose numbers follow from the count of steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from rubato.core.kv_blocks import blocks_for
from rubato.core.request import Request, Stage
from rubato.core.slo import TOLERANCE, Deadlines, deadlines

if TYPE_CHECKING:
    from rubato.simulation.fast_host import FastHost

WAITING, PREFILLING, DECODING = range(3)


class FastSeq:
    """`tick` counts the steps of its replica. While it decodes, tokens and KV are what they were when the replica's
    tick was 0, plus the tick; `_output` and `_cached` then hold that offset, else the numbers themselves."""

    __slots__ = (
        "_cached", "_checked", "_deadlines", "_missed", "_output", "begun", "continues", "demoted", "due_tick", "ended",
        "first_token_at", "host", "id", "most", "nth", "order", "prompt", "request", "since", "spans", "stage",
        "stage_start", "started", "starts", "state", "target", "targets", "total", "waits",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, now: float, host: FastHost, targets: Sequence[int] | None) -> None:
        self.request = request
        self.id = request.id
        self.order = order
        self.nth = 0  # of those started at this replica
        self.host = host
        self.since = now
        self.state = WAITING
        self.stage = 0
        self.stage_start = request.arrival
        self.starts = [request.arrival]
        self.first_token_at: float | None = None
        self.prompt = request.stages[0].prompt  # of all stages so far
        self.total = 0  # output tokens of the stages before this one
        self.continues: float | None = None
        self.demoted = request.progress is not None and request.progress.demoted
        self.started = False
        self.ended = False
        self.due_tick = -1  # the step that brings its first token of the stage, or the stage's last
        self.spans: list[list[tuple[int, int]]] = [[]]  # of each stage: steps [from, to) that brought a token each
        self.waits: list[tuple[int, float, bool]] = []  # (tick at the start, seconds, after a preemption)
        self.begun: list[tuple[int, int]] = []  # ticks [from, to) at which it ran
        self.targets = targets
        self.most = request.sampling.max_tokens
        self._output = 0
        self._cached = 0
        self._missed = False
        self._checked = 0
        self._deadlines: Deadlines | None = None
        self.aim()

    def __lt__(self, other: FastSeq) -> bool:
        return self.order < other.order

    # ----------------------------------------------------------------- SeqView

    @property
    def output(self) -> int:
        return self._output + self.host.tick if self.state == DECODING else self._output

    @property
    def cached(self) -> int:
        return self._cached + self.host.tick if self.state == DECODING else self._cached

    @property
    def length(self) -> int:
        return self.prompt + self.total + self.output

    @property
    def pending(self) -> int:
        return 1 if self.state == DECODING else self.prompt + self.total + self._output - self._cached

    @property
    def blocks(self) -> int:
        return 0 if self.state == WAITING else blocks_for(self.cached, self.host.block)

    @property
    def own_blocks(self) -> int:
        return self.blocks

    @property
    def in_flight(self) -> int:
        run = self.host.under_way()
        if run is None or self.state == WAITING:
            return 0
        if self.state == DECODING:
            return 1
        return next((part.at(run.done)[0] for part in run.chunks if part.seq is self), 0)

    @property
    def away(self) -> float:
        return 0.0

    @property
    def draft(self) -> None:
        return None

    @property
    def tried(self) -> int:
        return 0

    @property
    def acceptance(self) -> None:
        return None

    @property
    def best_effort(self) -> bool:
        return self.demoted or self.request.best_effort

    @property
    def predicted(self) -> float | None:
        lengths = self.host.lengths
        return lengths.remaining(self.request, self.total_output) if lengths else None

    @property
    def deadlines(self) -> Deadlines:
        """Of this stage; worked out when asked for."""
        return self._deadlines or self._renewed()

    @property
    def due(self) -> float:
        due = self._deadlines or self._renewed()
        i = self._output + self.host.tick if self.state == DECODING else self._output
        at = due.first + i * due.tpot if i else due.first  # `token`, without the calls: asked of everyone, every step
        return at if at < due.end else due.end

    @property
    def missed(self) -> bool:
        """Looks at the tokens that came since it was last asked."""
        output = self.output
        if not self._missed and self._checked < output:
            times = self.host.log.times(self.spans_now()[-1])[self._checked :]
            late = (self.deadlines.token(i) + TOLERANCE < t for i, t in enumerate(times, start=self._checked))
            self._missed = any(late)
            self._checked = output
        return self._missed

    # ----------------------------------------------------------------- what changes it

    @property
    def total_output(self) -> int:
        return self.total + self.output

    def aim(self) -> None:
        """How many tokens this stage will have: what was drawn for it, unless max_tokens comes first."""
        left = self.most - self.total
        self.target = left if self.targets is None else min(left, self.targets[self.stage])

    def _renewed(self) -> Deadlines:
        stage: Stage = self.request.stages[self.stage]
        due = self._deadlines = deadlines(
            stage.slo, self.request.arrival, self.stage_start, self.first_token_at, self.continues
        )
        return due

    def first_token(self, at: float) -> None:
        self.first_token_at = at
        self._deadlines = None  # a TPOT without TTFT runs from the first token

    def decode(self, tick: int) -> None:
        """From this step on it has one pending token."""
        self.state = DECODING
        self._output -= tick
        self._cached -= tick
        self.spans[-1].append((tick, -1))

    def halt(self, tick: int, state: int) -> None:
        """From this step on it does not decode."""
        if self.state == DECODING:
            self._output += tick
            self._cached += tick
            begun, _ = self.spans[-1].pop()
            if begun < tick:
                self.spans[-1].append((begun, tick))
        self.state = state

    def spans_now(self) -> list[list[tuple[int, int]]]:
        """Steps that brought its tokens, of each stage, up to now."""
        if self.state != DECODING:
            return self.spans
        begun = self.spans[-1][-1][0]
        return [*self.spans[:-1], [*self.spans[-1][:-1], (begun, self.host.tick)]]

    def next_stage(self, now: float) -> None:
        """This stage is done, and it does not decode: the next begins."""
        _ = self.missed  # judged by this stage's deadlines
        last_due = self.deadlines.token(self._output - 1)
        self.total += self._output
        self.stage += 1
        stage = self.request.stages[self.stage]
        self.stage_start = now
        self.starts.append(now)
        self.spans.append([])
        self._output = 0
        self._checked = 0
        self.first_token_at = None
        self.prompt += stage.prompt
        self.continues = None if stage.prompt else (last_due if last_due < inf else now)
        self.aim()
        self._deadlines = None
