"""Replicas of two kinds that hand waiting requests on to each other, without KV, for `simulator_speed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Plan, Role
from rubato.core.request import HandoffReason
from rubato.policy_kit.batch_builder import admit_in_order, run_all

SOURCE = "ours, to measure the simulator by"

KINDS = ("lp", "hp")  # replicas are of either in turn


@dataclass
class Scheduler:
    """`sarathi` with a budget, which hands on one in `every` of the requests that wait and have never run, once each.
    A hash of the id chooses them, so that how often a replica plans makes no difference."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed", "handoff"})
    budget: int = 2048
    every: int = 4

    def __post_init__(self) -> None:
        if self.budget < 1 or self.every < 1:
            raise ValueError(f"budget {self.budget}, every {self.every}: give at least 1 of both")

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        builder = run_all(view, self.budget)
        if not view.waiting:
            return builder.plan(repeat_steps=builder.repeat_steps())
        declined: dict[str, HandoffReason] = {s.id: "declined" for s in view.waiting if self._goes_on(s)}
        admit_in_order(builder, [s for s in view.waiting if s.id not in declined])
        return builder.plan(handoff=declined, repeat_steps=0 if declined else builder.repeat_steps())

    def _goes_on(self, seq: SeqView) -> bool:
        request = seq.request
        return request.handoff is None and seq.output == 0 and crc32(request.id.encode()) % self.every == 0


@dataclass
class Router:
    """Each request to the replica with the least work, as `least_loaded`; one that was handed on, to the one of the
    other kind. per_request: tokens that a request counts for beside its pending prefill."""

    needs: ClassVar[frozenset[str]] = frozenset()
    per_request: int = 64

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Raises ValueError for fewer than two."""
        if len(replicas) < 2:
            raise ValueError("requests are handed on between replicas of two kinds: give 2 replicas or more")
        return {id: Role(kind=KINDS[i % 2]) for i, id in enumerate(replicas)}

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        load = {view.id: view.pending + self.per_request * view.count for view in fleet}
        kind = {view.id: view.role.kind for view in fleet}
        place: dict[str, str] = {}
        for seq in held:
            handoff = seq.request.handoff
            able = load if handoff is None else [id for id in load if kind[id] != kind[handoff.source]]
            to = place[seq.id] = min(able, key=load.__getitem__)
            load[to] += seq.pending + self.per_request
        return Dispatch(place)
