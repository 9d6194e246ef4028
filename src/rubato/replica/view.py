"""What one replica knows, and how a policy sees it: counts as they are, sequences when they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.core.clock import HandClock
from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import ANY, NO_BATCH, Limits, Role, Shape
from rubato.replica.decode_pool import DecodePool
from rubato.replica.due_times import DueTimes
from rubato.replica.kv_ledger import KVByBlock, KVCounts
from rubato.replica.sequence import Seq, StepEnds
from rubato.replica.step_log import Run


class ReplicaState:
    """Sequences by where they are, counts of them, and the run of steps under way. `Replica` changes it.

    clock: the time, set by the caller; steps of a run whose ends are known are booked as it passes them (`sync`).
    """

    def __init__(
        self, id: str, limits: Limits, latency: LatencyModel, supports: frozenset[str], kv: KVCounts | KVByBlock,
        clock: HandClock,
    ) -> None:  # fmt: skip
        self.id = id
        self.limits = limits
        self.latency = latency
        self.supports = supports
        self.kv = kv
        self.clock = clock
        self.steps = StepEnds()
        self.pool = DecodePool(self.steps, limits.block_size, kv.by_block)
        kv.serve(self.pool)
        self.waiting: list[Seq] = []
        self.running: dict[str, Seq] = {}
        self.prefilling: dict[str, Seq] = {}  # running, more than one token pending; in order of start
        self.resting: list[Seq] = []  # running, one token pending, and not in the run under way
        self.leaving: dict[str, Seq] = {}  # handed off, KV still here
        self.arriving: dict[str, Seq] = {}  # reserved, KV not yet here
        self.here: dict[str, Seq] = {}  # that a plan can be about: waiting or running, not ended
        self.ending: list[Seq] = []  # ended, and in the run under way
        self.role = ANY
        self.run: Run | None = None
        self.idle_since = 0.0  # when the last run ended
        self._dues: DueTimes | None = None  # once they have been asked for
        self.shown = LiveView(self)

    # ----------------------------------------------------------------- time passes

    def sync(self) -> None:
        """Book the steps of the run that are over by now, but for the last: what it brought is told at its end."""
        run = self.run
        if run is not None and run.done + 1 < run.steps and run.ends[run.done] <= self.clock.time:
            self._advance(run, min(bisect_right(run.ends, self.clock.time), run.steps - 1))

    def book(self, run: Run) -> None:
        """All steps of the run are over."""
        if run.done < run.steps:
            self._advance(run, run.steps)

    def _advance(self, run: Run, done: int) -> None:
        """The first `done` steps of the run are over."""
        steps = done - run.done
        self.steps.add(run.ends if steps == len(run.ends) else run.ends[run.done : done])
        self.pool.kv += steps * run.seqs
        for chunk in run.chunks:
            tokens = min(steps * chunk.tokens, chunk.total - run.done * chunk.tokens)
            chunk.seq._cached += tokens
            chunk.seq.in_flight = min(chunk.tokens, chunk.total - done * chunk.tokens)
            if not chunk.seq.ended:
                self.shown.pending -= tokens
        run.done = done

    def under_way(self) -> Run | None:
        """The run of which a step has begun and not ended; None at the instant between two, when a plan is due."""
        self.sync()
        run = self.run
        between = run is None or run.done == run.steps or (run.done and run.ends[run.done - 1] >= self.clock.time)
        self.steps.under_way = not between
        return None if between else run

    @property
    def shape(self) -> Shape:
        """Of the batch in flight, empty between steps."""
        run = self.under_way()
        return NO_BATCH if run is None else run.shape(run.done)

    @property
    def busy_until(self) -> float:
        """When the step under way ends, by what the scheduler believes; the end of the last if there is none."""
        run = self.under_way()
        if run is None:
            return self.idle_since if self.run is None else self.clock.time
        begun = run.ends[run.done - 1] if run.done else run.begin
        return begun + self.latency.step_time(run.shape(run.done))


class LiveView(View):
    """One for each replica, always of now: a read books the steps that are over; but for `pending`, which is of the
    last `sync` while a run of several steps with chunks is under way."""

    __slots__ = ("_state", "count", "pending")
    __setattr__ = object.__setattr__  # frozen for readers, says mypy

    _state: ReplicaState
    count: int  # kept as numbers, for routers that ask every replica at every arrival
    pending: int

    def __init__(self, state: ReplicaState) -> None:
        for name, value in (
            ("_state", state), ("id", state.id), ("kv_total", state.limits.kv_blocks), ("latency", state.latency),
            ("supports", state.supports), ("as_of", inf), ("waiting", state.waiting),
            ("count", 0), ("pending", 0),
        ):  # fmt: skip
            setattr(self, name, value)

    @property
    def now(self) -> float:
        return self._state.clock.time

    @property
    def role(self) -> Role:
        return self._state.role

    @property
    def limits(self) -> Limits:
        state = self._state
        limits = state.limits
        if limits.max_running is None or not (state.leaving or state.arriving):
            return limits
        return replace(limits, max_running=limits.max_running - len(self.moving))  # they hold KV, too

    @property
    def moving(self) -> Sequence[SeqView]:
        state = self._state
        return (*state.leaving.values(), *state.arriving.values()) if state.leaving or state.arriving else ()

    @property
    def running(self) -> Sequence[SeqView]:
        state = self._state
        if state.run is None:
            return list(state.running.values())
        state.under_way()
        return [seq for seq in state.running.values() if not seq.ended]

    @property
    def kv_free(self) -> int:
        self._state.under_way()
        return self._state.kv.free

    @property
    def busy_until(self) -> float:
        return self._state.busy_until

    @property
    def in_flight(self) -> Shape:
        return self._state.shape

    @property
    def steps(self) -> int:
        self._state.sync()
        return self._state.steps.tick

    @property
    def known(self) -> Mapping[str, SeqView]:
        self._state.under_way()
        return self._state.here

    @property
    def running_ids(self) -> Collection[str]:
        state = self._state
        return {id for id, seq in state.running.items() if not seq.ended} if state.ending else state.running

    @property
    def prefilling(self) -> Sequence[SeqView]:
        state = self._state
        state.sync()
        return [seq for seq in state.prefilling.values() if not seq.ended]

    @property
    def dues(self) -> NDArray[np.float64]:
        state = self._state
        if state.run is not None:  # some may have ended and still run
            return super().dues
        if state._dues is None:
            state._dues = DueTimes()
            for seq in state.running.values():
                state._dues.add(seq)
        return state._dues.at(state.steps.tick)

    @property
    def decodes(self) -> Shape:
        state = self._state
        state.sync()
        count, kv = state.pool.count, state.pool.kv
        for seq in state.resting:
            count += 1
            kv += seq.cached
        for seq in state.ending:
            if seq.decoding:
                count -= 1
                kv -= seq.cached
        return Shape(count, count, kv + count)

    @property
    def decode_blocks(self) -> int:
        state = self._state
        return state.pool.blocks() if state.run is None else super().decode_blocks

    @property
    def newest(self) -> SeqView | None:
        state = self._state
        if state.ending:
            return super().newest
        return state.running[next(reversed(state.running))] if state.running else None
