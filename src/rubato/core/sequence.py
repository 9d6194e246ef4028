"""One request being served: what it has received, what is due, what it holds. Changed by its replica alone, and by
whoever folds a replica's events from afar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from rubato.core.interfaces import LengthPredictor
from rubato.core.kv_blocks import KVBlocks, next_key
from rubato.core.plan import Tree
from rubato.core.request import Cause, Progress, Request
from rubato.core.slo import TOLERANCE, Deadlines, deadlines

NO_DEADLINES = Deadlines()


@dataclass(slots=True, eq=False)
class Seq:
    """One request being served (a `SeqView` to policies)."""

    request: Request
    order: int  # of submission: its place among those that wait
    stage_start: float
    since: float  # waiting since; attributes the wait when it starts
    length: int
    stage: int = 0
    first_token_at: float | None = None
    output: int = 0
    cached: int = 0
    in_flight: int = 0
    demoted: bool = False
    missed: bool = False
    started: bool = False
    ended: bool = False  # finished while its batch was in flight: KV goes back at commit
    held: bool = False  # behind the first of its group, whose prompt's KV it will share
    calling: bool = False  # the tool that its next stage waits for runs
    away: float = 0.0  # seconds that its tools took so far
    resumed_by_recompute: bool = False  # preempted, and no token has come out since
    shared: int = 0  # while it waits: blocks it would share with two or more
    block_ids: list[int] = field(default_factory=list)
    kv: KVBlocks | None = None
    ids: list[int] | None = None  # all token ids so far, where they are known and can be shared
    keys: list[bytes] = field(default_factory=list)  # of its blocks; the first is where the chain begins
    seen: int = -1  # the version of `kv` that `cached` was looked up at
    times: list[list[float]] = field(default_factory=lambda: [[]])
    starts: list[float] = field(default_factory=list)
    delays: dict[Cause, float] = field(default_factory=dict)
    continues: float | None = None  # in a decode-only stage: the deadline that its own go on from
    deadlines: Deadlines = NO_DEADLINES
    due: float = inf
    lengths: LengthPredictor | None = None
    draft: Tree | None = None
    tried: int = 0
    accepted: int = 0
    token_ids: list[int] | None = None  # of its output so far, where it may have to go on elsewhere
    id: str = field(init=False)  # its request's: policies ask for it more often than for anything else

    def __post_init__(self) -> None:
        self.id = self.request.id

    @classmethod
    def queued(cls, request: Request, order: int, now: float, **parts: Any) -> Self:
        """One that waits from now on, with what it has received elsewhere if it moved. parts: other fields."""
        seq = cls(request, order, request.arrival, now, request.stages[0].prompt, **parts)
        seq.starts.append(request.arrival)
        seq.renew_due()
        if request.progress is not None:
            seq.resume(request.progress)
        return seq

    @property
    def pending(self) -> int:
        return self.length - self.cached

    @property
    def blocks(self) -> int:
        return len(self.block_ids) or self.shared

    @property
    def own_blocks(self) -> int:
        return self.kv.own(self.block_ids) if self.kv else 0

    @property
    def best_effort(self) -> bool:
        return self.demoted or self.request.best_effort

    @property
    def predicted(self) -> float | None:
        return self.lengths.remaining(self.request, self.total_output) if self.lengths else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.tried if self.tried else None

    @property
    def total_output(self) -> int:
        return sum(map(len, self.times))

    @property
    def progress(self) -> Progress:
        """What goes along when the request moves."""
        times = tuple(map(tuple, self.times))
        return Progress(tuple(self.starts), times, tuple(self.token_ids or ()), self.demoted, dict(self.delays))

    def book_delay(self, cause: Cause, seconds: float) -> None:
        """Book time lost, until the first miss: what comes after did not cause it."""
        if not self.missed and seconds > 0.0:
            self.delays[cause] = self.delays.get(cause, 0.0) + seconds

    def learn_keys(self, block: int) -> None:
        """Name the blocks that the tokens so far fill."""
        if self.ids is not None:
            for end in range(len(self.keys) * block, len(self.ids) + 1, block):
                self.keys.append(next_key(self.keys[-1], self.ids[end - block : end]))

    def extend(self, ids: Sequence[int], tokens: int) -> None:
        """`tokens` more tokens, of these ids; where the ids are not known no further block has a name."""
        if self.ids is not None:
            if len(ids) == tokens:
                self.ids += ids
            else:
                self.ids = None

    def renew_due(self) -> None:
        stage = self.request.stages[self.stage]
        self.deadlines = deadlines(
            stage.slo, self.request.arrival + self.away, self.stage_start, self.first_token_at, self.continues
        )
        self.due = self.deadlines.token(self.output)

    def got(self, times: Sequence[float]) -> None:
        """Output tokens of this stage came out at these times."""
        if not times:
            return
        self.resumed_by_recompute = False
        if self.first_token_at is None:
            self.first_token_at = times[0]
            if self.deadlines.first == inf:  # a TPOT without TTFT runs from the first token
                self.renew_due()
        # tokens of one step come together: the first of them is the one that can be late
        if any(t > self.deadlines.token(self.output + i) + TOLERANCE for i, t in enumerate(times)):
            self.missed = True
        self.times[-1].extend(times)
        self.output += len(times)
        self.length += len(times)
        self.due = self.deadlines.token(self.output)

    def next_stage(self, now: float) -> None:
        last_due = self.deadlines.token(self.output - 1)
        self.away += max(0.0, now - self.times[-1][-1])  # a stage without a tool begins with the last token
        self.stage += 1
        stage = self.request.stages[self.stage]
        self.stage_start = now
        self.starts.append(now)
        self.times.append([])
        self.output = 0
        self.first_token_at = None
        self.length += stage.prompt
        self.continues = None if stage.prompt else (last_due if last_due < inf else now)
        self.renew_due()

    def resume(self, progress: Progress) -> None:
        """Put a request that moved to where it was: everything but its KV."""
        self.delays = dict(progress.delays)
        self.demoted = progress.demoted
        at = 0
        for i, (start, times) in enumerate(zip(progress.starts, progress.times, strict=True)):
            if i:
                self.next_stage(start)
                self.extend(self.request.stages[i].token_ids, self.request.stages[i].prompt)
            self.got(times)
            self.extend(progress.token_ids[at : at + len(times)], len(times))
            at += len(times)
        self.started = self.resumed_by_recompute = self.total_output > 0
        if self.token_ids is not None:
            self.token_ids = list(progress.token_ids)
