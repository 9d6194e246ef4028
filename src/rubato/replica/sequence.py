"""Defines one request on a replica: its tokens, deadlines and KV. Only its replica changes it, or a remote one's
mirror.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from rubato.core.interfaces import LengthPredictor
from rubato.core.plan import Tree
from rubato.core.request import SLO, Cause, Progress, Request
from rubato.core.slo import TOLERANCE_S, Deadlines, deadlines
from rubato.replica.kv_blocks import next_key


class StepEnds:
    """Records when each step of a replica ended. `tick` is the number of steps that are over, and of the next step."""

    __slots__ = ("_ends", "_first", "tick", "under_way")

    def __init__(self) -> None:
        self.tick = 0
        self.under_way = False  # a step has begun and not ended
        self._ends = array("d")
        self._first = 0  # the step whose end is first in the array

    def add(self, ends: list[float]) -> None:
        """Adds the ends of further steps."""
        self._ends.fromlist(ends)
        self.tick += len(ends)

    @property
    def count(self) -> int:
        """Returns the number of steps whose ends are kept."""
        return len(self._ends)

    @property
    def last(self) -> float:
        """Returns when the last step ended."""
        return self._ends[-1]

    def between(self, first: int, after: int) -> array[float]:
        """Returns the ends of the steps first, ..., after - 1, which must not be forgotten yet."""
        return self._ends[first - self._first : after - self._first]

    def at(self, tick: int) -> float:
        """Returns when step `tick` ended."""
        return self._ends[tick - self._first]

    def step_ending_at(self, end: float) -> int:
        """Returns the number of the step that ended at `end`."""
        return self._first + bisect_left(self._ends, end)

    def forget(self, before: int) -> None:
        """Forgets the ends of the steps before this one."""
        if before > self._first:
            del self._ends[: before - self._first]
            self._first = before


class Wait(NamedTuple):
    """One wait of a sequence.

    Args:
        until: the step before which it ended.
        seconds: its length.
        cause: why it waited.
        recompute: its KV was lost and is computed again.
    """

    until: int
    seconds: float
    cause: Cause
    recompute: bool


class KVLedger(Protocol):
    """Tells the KV blocks of sequences."""

    def blocks_of(self, seq: Seq) -> int: ...
    def own_blocks_of(self, seq: Seq) -> int: ...


NO_STEPS = StepEnds()  # for sequences on no local replica, whose numbers are complete
NO_STEPS.under_way = True


class Seq:
    """One request being served (a `SeqView` to policies). While it is unplaced the cluster's table has one; the replica
    where it is placed makes its own.

    While it decodes, each step of its replica brings it a token without any work: `_output` and `_cached` are then
    relative to the replica's first step, so that adding the number of steps gives the true numbers. `times` lacks its
    tokens from step `_first_unlogged` on, which came when these steps ended (`settle`).
    """

    __slots__ = (
        "_cached", "_checked", "_deadlines", "_first_unlogged", "_in_flight", "_missed", "_output", "accepted",
        "block_ids", "cached_at_start", "deadline_base", "decoding", "delays_elsewhere", "demoted", "draft",
        "earlier_output", "ended", "first_token_at", "id", "ids", "keys", "kv", "kv_version_seen", "late_elsewhere",
        "lengths", "milestone", "order", "past_deadlines", "prompt", "recompute", "request", "running_spans", "shared",
        "stage", "stage_start", "start_order", "started", "starts", "steps", "times", "token_ids", "token_spans",
        "tool_seconds", "tried", "waiting_for_tool", "waiting_since", "waits", "waits_for_group",
    )  # fmt: skip

    def __init__(
        self, request: Request, order: int, now: float, *, steps: StepEnds = NO_STEPS,
        lengths: LengthPredictor | None = None, kv: KVLedger | None = None, token_ids: list[int] | None = None,
        ids: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Makes a waiting sequence, with its progress on earlier replicas if it moved."""
        self.request = request
        self.id = request.id  # the attribute that policies read most often
        self.order = order  # of submission: its position in the queue
        self.start_order = 0  # among sequences started on this replica
        self.waiting_since = now  # attributes the wait when it starts
        self.steps = steps
        self.lengths = lengths
        self.kv = kv
        self.stage = 0
        self.stage_start = request.arrival
        self.starts = [request.arrival]
        self.times: list[array[float]] = [array("d")]  # by stage, without those that `steps` has
        self.first_token_at: float | None = None
        self.prompt = request.stages[0].prompt  # tokens, of all stages so far
        self.earlier_output = 0  # output tokens of the stages before this one
        self.decoding = False  # in its replica's `DecodePool`
        self.demoted = False
        self.started = False
        self.ended = False  # finished while its batch was in flight: KV goes back when that has landed
        self.waits_for_group = False  # for the prompt's KV, which the first of its group computes
        self.waiting_for_tool = False  # its next stage waits for a tool
        self.tool_seconds = 0.0  # seconds that its tools took so far
        self.deadline_base: float | None = None  # in a decode-only stage: the deadline from which its own continue
        self.past_deadlines: list[Deadlines] = []  # of the stages before this one
        self.draft: Tree | None = None
        self.tried = 0
        self.accepted = 0
        self.token_ids = token_ids  # of its output so far, where it may move
        self.ids = ids  # of all tokens so far, where known and shareable
        self.keys: list[bytes] = []  # of its blocks, after the start of their chain
        self.block_ids: list[int] = []  # where blocks have ids
        self.shared = 0  # while it waits: blocks that it would share with two or more
        self.kv_version_seen = -1  # version of the KV ledger at the last look-up of `cached`
        self.milestone = -1  # for a simulator: the step after which it checks this sequence
        self.cached_at_start = 0  # tokens in KV when it last started here
        self.recompute = False  # preempted, and not started since
        self.waits: list[Wait] = []
        self.running_spans: list[tuple[int, int]] = []  # steps [from, to) at which it ran; -1: up to now
        self.token_spans: list[tuple[int, int]] = []  # steps [from, to) that brought tokens; -1: up to now
        self.delays_elsewhere: Mapping[Cause, float] = {}  # seconds lost elsewhere, by cause
        self.late_elsewhere = False  # some token was late elsewhere
        self._output = 0
        self._cached = 0
        self._in_flight = 0
        self._first_unlogged = 0
        self._missed = False
        self._checked = 0  # tokens of this stage that `missed` has checked
        self._deadlines: Deadlines | None = None
        if request.progress is not None:
            self._resume(request.progress)

    # ----------------------------------------------------------------- SeqView

    @property
    def slo(self) -> SLO:
        return self.request.stages[self.stage].slo

    @property
    def output(self) -> int:
        return self._output + self.steps.tick if self.decoding else self._output

    @property
    def cached(self) -> int:
        return self._cached + self.steps.tick if self.decoding else self._cached

    @cached.setter
    def cached(self, tokens: int) -> None:
        """Sets the tokens in KV of a sequence that does not decode."""
        self._cached = tokens

    @property
    def length(self) -> int:
        return self.prompt + self.earlier_output + self.output

    @property
    def pending(self) -> int:
        return 1 if self.decoding else self.prompt + self.earlier_output + self._output - self._cached

    @property
    def blocks(self) -> int:
        return self.kv.blocks_of(self) if self.kv else 0

    @property
    def own_blocks(self) -> int:
        return self.kv.own_blocks_of(self) if self.kv else 0

    @property
    def in_flight(self) -> int:
        if not self.steps.under_way:
            return 0
        return self._in_flight + 1 if self.decoding else self._in_flight

    @in_flight.setter
    def in_flight(self, tokens: int) -> None:
        """Sets the tokens in flight; while it decodes, those beside its pending token."""
        self._in_flight = tokens

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
    def deadlines(self) -> Deadlines:
        """Returns the deadlines of this stage, computed on demand."""
        return self._deadlines or self._compute_deadlines()

    @property
    def due(self) -> float:
        due = self._deadlines or self._compute_deadlines()
        i = self._output + self.steps.tick if self.decoding else self._output
        at = due.first + i * due.tpot if i else due.first  # inlined `token`, since each step reads it
        if due.max_pause < inf and i:
            at = min(at, self.last_token_at + due.max_pause)
        return at if at < due.end else due.end

    @property
    def missed(self) -> bool:
        """Returns whether some token was late; checks the tokens since the last call."""
        # not `output`, which inside vLLM counts tokens before they come
        first, steps = self._checked, self.steps
        output = self._output + steps.tick if self.decoding else self._output
        if first < output and not self._missed:
            due = self._deadlines or self._compute_deadlines()
            if first == output - 1 and self.decoding and self._first_unlogged < steps.tick and due.max_pause == inf:
                at = due.first + first * due.tpot if first else due.first  # inlined `token` as in `due`
                self._missed = steps.last > (at if at < due.end else due.end) + TOLERANCE_S
            elif due.first < inf or due.end < inf:
                times = self.times_of_stage()
                self._missed = any(
                    times[i] > due.token(i, times[i - 1] if i else inf) + TOLERANCE_S for i in range(first, output)
                )
            self._checked = output
        return self._missed

    # ----------------------------------------------------------------- output so far

    @property
    def last_token_at(self) -> float:
        """Returns when the last token of this stage came out; inf before its first."""
        if self.decoding and self._first_unlogged < self.steps.tick:
            return self.steps.last
        return self.times[-1][-1] if self.times[-1] else inf

    @property
    def total_output(self) -> int:
        return self.earlier_output + self.output

    def times_of_stage(self) -> array[float]:
        """Returns when each token of this stage came out, as a list that grows with further tokens."""
        if self.decoding:
            self.settle()
        return self.times[-1]

    def times_of_all(self) -> list[array[float]]:
        """Returns when each token came out, by stage so far."""
        return [*self.times[:-1], self.times_of_stage()]

    def progress(self, delays: Mapping[Cause, float]) -> Progress:
        """Returns the progress that moves with the request.

        Args:
            delays: seconds lost so far, by cause.
        """
        times = tuple([tuple(of_stage) for of_stage in self.times_of_all()])
        return Progress(tuple(self.starts), times, tuple(self.token_ids or ()), self.demoted, dict(delays))

    def token_spans_now(self) -> Iterator[tuple[int, int]]:
        """Yields the spans of steps [from, to) that brought tokens, up to now."""
        for first, after in self.token_spans:
            yield first, self.steps.tick if after < 0 else after

    def _compute_deadlines(self) -> Deadlines:
        arrival = self.request.arrival + self.tool_seconds
        due = deadlines(self.slo, arrival, self.stage_start, self.first_token_at, self.deadline_base)
        self._deadlines = due
        return due

    # ----------------------------------------------------------------- changes

    def first_token(self, at: float) -> None:
        """Records when the first token of this stage came out."""
        self.first_token_at = at
        self._deadlines = None  # a TPOT without TTFT runs from the first token

    def add_tokens(self, times: Sequence[float]) -> None:
        """Adds output tokens of this stage, which came at these times, to a sequence that does not decode."""
        if not times:
            return
        if self.first_token_at is None:
            self.first_token(times[0])
        self.times[-1].extend(times)
        self._output += len(times)

    def begin_decoding(self) -> None:
        """Lets each step from the next on bring it a token."""
        tick = self.steps.tick
        self.decoding = True
        self._output -= tick
        self._cached -= tick
        self._first_unlogged = tick
        self.token_spans.append((tick, -1))

    def stop_decoding(self) -> None:
        """Lets it no longer decode from the next step on."""
        self.settle()
        tick = self.steps.tick
        self._output += tick
        self._cached += tick
        self.decoding = False
        first, _ = self.token_spans.pop()
        if first < tick:
            self.token_spans.append((first, tick))

    def settle(self) -> None:
        """Records when the tokens of a decode came."""
        tick = self.steps.tick
        if self._first_unlogged < tick:
            self.times[-1].extend(self.steps.between(self._first_unlogged, tick))
            self._first_unlogged = tick

    def add_accepted(self, tokens: int, at: float) -> None:
        """Adds `tokens` accepted draft tokens of the last step, which ended at `at`; their KV is present."""
        self.settle()
        self.times[-1].fromlist([at] * tokens)
        self._output += tokens
        self._cached += tokens

    def next_stage(self, now: float) -> None:
        """Begins the next stage of a sequence that does not decode."""
        _ = self.missed  # judged by this stage's deadlines
        due = self.deadlines
        self.past_deadlines.append(due)
        last_due = due.token(self._output - 1)
        self.tool_seconds += max(0.0, now - self.times[-1][-1])  # a stage without a tool begins with the last token
        self.earlier_output += self._output
        self.stage += 1
        stage = self.request.stages[self.stage]
        self.stage_start = now
        self.starts.append(now)
        self.times.append(array("d"))
        self._output = self._checked = 0
        self.first_token_at = None
        self.prompt += stage.prompt
        self.deadline_base = None if stage.prompt else (last_due if last_due < inf else now)
        self._deadlines = None

    def extend(self, ids: Sequence[int], tokens: int) -> None:
        """Adds the ids of `tokens` more tokens; without ids no further block gets a key."""
        if self.ids is not None:
            if len(ids) == tokens:
                self.ids += ids
            else:
                self.ids = None

    def learn_keys(self, block_size: int) -> None:
        """Computes the keys of the blocks that the tokens so far fill."""
        if self.ids is not None:
            for end in range(len(self.keys) * block_size, len(self.ids) + 1, block_size):
                self.keys.append(next_key(self.keys[-1], self.ids[end - block_size : end]))

    def _resume(self, progress: Progress) -> None:
        """Restores the progress of a request that moved, except its KV."""
        self.delays_elsewhere = progress.delays
        self.demoted = progress.demoted
        at = 0
        for i, (start, times) in enumerate(zip(progress.starts, progress.times, strict=True)):
            if i:
                self.next_stage(start)
                self.extend(self.request.stages[i].token_ids, self.request.stages[i].prompt)
            self.add_tokens(times)
            self.extend(progress.token_ids[at : at + len(times)], len(times))
            at += len(times)
        self.started = self.recompute = self.total_output > 0
        self.late_elsewhere = self.missed
        if self.token_ids is not None:
            self.token_ids = list(progress.token_ids)
