"""Shows one replica to policies: counters are read directly, sequences on demand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Limits, Role, Shape
from rubato.replica.due_times import DueTimes
from rubato.replica.state import ReplicaState


class LiveView(View):
    """The view of a replica, always current: each read books the steps that are over.

    Only `pending` is of the last `sync` while a run of several steps with chunks is under way.
    """

    __slots__ = ("_state",)
    __setattr__ = object.__setattr__  # frozen for readers, says mypy

    _state: ReplicaState

    def __init__(self, state: ReplicaState) -> None:
        for name, value in (
            ("_state", state), ("id", state.id), ("kv_total", state.limits.kv_blocks), ("latency", state.latency),
            ("supports", state.supports), ("as_of", inf), ("waiting", state.waiting),
            ("slo_rule", state.options.slo_rule),
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
        if limits.max_running is None or not (state.migrating_out or state.migrating_in):
            return limits
        return replace(limits, max_running=limits.max_running - len(self.moving))  # they hold KV, too

    @property
    def moving(self) -> Sequence[SeqView]:
        state = self._state
        return (
            (*state.migrating_out.values(), *state.migrating_in.values())
            if state.migrating_out or state.migrating_in
            else ()
        )

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
        return self._state.present

    @property
    def pending(self) -> int:
        return self._state.pending

    @property
    def count(self) -> int:
        return len(self._state.present)

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
        return self._due_times().at(state.steps)

    @property
    def first_decode_due(self) -> float:
        state = self._state
        state.sync()
        first = self._due_times().first_decode(state.steps, state.clock.time, state.ending)
        return min([first, *(d for s in state.idle_decodes if not s.ended and (d := s.due) >= state.clock.time)])

    def _due_times(self) -> DueTimes:
        state = self._state
        if state.dues is None:
            state.dues = DueTimes()
            for seq in state.running.values():
                state.dues.add(seq)
        return state.dues

    @property
    def decodes(self) -> Shape:
        state = self._state
        state.sync()
        count, kv = state.pool.count, state.pool.kv
        for seq in state.idle_decodes:
            count += 1
            kv += seq.cached
        for seq in state.ending:
            if seq.decoding:
                count -= 1
                kv -= seq.cached
        return Shape.decodes(count, kv + count)

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
