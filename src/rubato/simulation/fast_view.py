"""The view of a counted replica: counts as they are, sequences when a policy asks for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import ANY, NO_BATCH, Shape
from rubato.simulation.due_times import DueTimes

if TYPE_CHECKING:
    from rubato.simulation.fast_host import FastHost

SUPPORTS = frozenset({"chunked", "preempt", "mixed"})


class FastView(View):
    """One for each replica, always of now: whoever reads it finds the steps booked that are over."""

    __slots__ = ("_host", "count", "pending", "running_ids")
    __setattr__ = object.__setattr__  # frozen for those who read it, says mypy

    _host: FastHost
    count: int  # numbers that the host keeps, for routers that ask every host at every arrival
    pending: int
    running_ids: Collection[str]

    def __init__(self, host: FastHost) -> None:
        for name, value in (
            ("_host", host), ("id", host.id), ("kv_total", host.limits.kv_blocks), ("limits", host.limits),
            ("latency", host.latency), ("supports", SUPPORTS), ("as_of", inf), ("role", ANY), ("moving", ()),
            ("count", 0), ("pending", 0), ("waiting", host.waiting), ("running_ids", host.running),
        ):  # fmt: skip
            setattr(self, name, value)

    @property
    def now(self) -> float:
        return self._host.clock.time

    @property
    def running(self) -> Sequence[SeqView]:
        host = self._host
        if host.run is None:
            return list(host.running.values())
        host.sync()
        return [seq for seq in host.running.values() if not seq.ended]

    @property
    def kv_free(self) -> int:
        return self._host.free_now()

    @property
    def busy_until(self) -> float:
        """By what the scheduler believes; the step under way when one is."""
        run = self._host.under_way()
        if run is None:
            return self.now
        begun = run.ends[run.done - 1] if run.done else run.begin
        return begun + self.latency.step_time(run.shape(run.done))

    @property
    def in_flight(self) -> Shape:
        run = self._host.under_way()
        return NO_BATCH if run is None else run.shape(run.done)

    @property
    def known(self) -> Mapping[str, SeqView]:
        host = self._host
        if host.run is not None:
            host.sync()
        return host.known

    @property
    def prefilling(self) -> Sequence[SeqView]:
        host = self._host
        if host.run is not None:
            host.sync()
        return list(host.prefilling.values())

    @property
    def dues(self) -> NDArray[np.float64]:
        host = self._host
        if host.run is not None:  # some may have ended and still run
            return super().dues
        if host.dues is None:
            host.dues = DueTimes()
            for seq in host.running.values():
                host.dues.add(seq)
        return host.dues.at(host.tick)

    @property
    def decodes(self) -> Shape:
        host = self._host
        if host.run is not None:
            host.sync()
        pool = host.pool
        return Shape(pool.count, pool.count, pool.kv + pool.count)

    @property
    def decode_blocks(self) -> int:
        host = self._host
        if host.run is not None:
            host.sync()
        return host.pool.blocks(host.tick)

    @property
    def newest(self) -> SeqView | None:
        running = self._host.running
        return running[next(reversed(running))] if running else None
