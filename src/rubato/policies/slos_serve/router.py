"""Where a request goes (SLOs-Serve, §4.2): to replicas in turn, until admission at one of them accepts it.

The controller has a virtual scheduler for each replica: the same admission as there, on what the replica shows. A
request that it admits is placed; after `max_hops` replicas more the backup decides. Alone, a replica decides itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

from rubato.core.events import Event, Finished
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policies.slos_serve.scheduler import DECLINED, Scheduler

BACKUPS = ("best_effort", "refuse")


@dataclass
class Router:
    """max_hops: replicas that are asked after the first. backup: what becomes of a request that all of them decline:
    "best_effort" on the least loaded, unless its client asked to be refused, or "refuse". The rest is as the
    Scheduler has it: a cluster hands those settings on.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"step_times"})
    max_hops: int = 3
    backup: str = "best_effort"
    safety_margin: float | None = Scheduler.safety_margin
    max_batch_seconds: float = Scheduler.max_batch_seconds
    tier_values: Mapping[str, float] = field(default_factory=dict)
    tier_reserve: float = Scheduler.tier_reserve
    steady_tokens: bool = Scheduler.steady_tokens
    max_draft: int = Scheduler.max_draft
    _virtual: Scheduler = field(init=False)  # for all replicas: it goes by what each shows
    _landed: int = field(default=0, init=False)
    _declined: set[str] = field(default_factory=set, init=False)  # placed without asking, or by the backup

    def __post_init__(self) -> None:
        if self.max_hops < 0 or self.backup not in BACKUPS:
            raise ValueError(
                f"max_hops {self.max_hops}, backup {self.backup!r}: give 0 or more, and one of {', '.join(BACKUPS)}"
            )
        own = {f.name for f in fields(self)}
        self._virtual = Scheduler(
            **{f.name: getattr(self, f.name) for f in fields(Scheduler) if f.init and f.name in own}
        )

    @property
    def tier_names(self) -> Collection[str]:
        """As its scheduler's."""
        return self._virtual.tier_names

    def observe(self, events: Sequence[Event]) -> None:
        self._virtual.learn(events)
        for event in events:
            if isinstance(event, Finished):
                self._declined.discard(event.id)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        replicas = [_Replica(view, self._virtual, self._declined) for view in fleet]
        place: dict[str, str] = {}
        reject: dict[str, str] = {}
        for seq in held:
            request = seq.request
            # one from elsewhere was admitted, or declined, there
            promised = not request.best_effort and request.progress is None and request.handoff is None
            taker = self._admitting(seq, replicas) if promised else None
            if taker is None:
                if promised and "refuse" in (self.backup, seq.request.on_decline):
                    reject[seq.id] = DECLINED
                    continue
                taker = min(replicas, key=lambda replica: replica.pending)
                self._declined.add(seq.id)
            else:
                self._declined.discard(seq.id)
            taker.added += seq.pending
            place[seq.id] = taker.view.id
        return Dispatch(place, reject)

    def _admitting(self, seq: SeqView, replicas: Sequence[_Replica]) -> _Replica | None:
        """The first replica in turn that would admit it, which counts it as placed from now on."""
        if len(replicas) == 1:
            return replicas[0]
        first = self._landed
        self._landed += 1
        for hop in range(min(self.max_hops + 1, len(replicas))):
            replica = replicas[(first + hop) % len(replicas)]
            if replica.admits(seq):
                replica.placed.append(seq)
                return replica
        return None


class _Replica:
    """placed: those that wait there and were not declined, and those just placed. added: tokens that came along."""

    def __init__(self, view: View, scheduler: Scheduler, declined: set[str]) -> None:
        self.view = view
        self.placed: list[SeqView] = [s for s in view.waiting if not s.best_effort and s.id not in declined]
        self.added = 0
        self._scheduler = scheduler

    @property
    def pending(self) -> int:
        return self.view.pending + self.added

    def admits(self, seq: SeqView) -> bool:
        return self._scheduler.admits(self.view, seq, self.placed)
