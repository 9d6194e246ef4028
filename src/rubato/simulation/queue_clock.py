"""Keeps the time of a simulation without an event loop: a queue of callbacks, coroutines and hosts."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from heapq import heappush
from typing import Any, Protocol

from rubato.core.clock import PLAN, HandClock, Handle


class Called(Protocol):
    """What a `QueueClock` calls: `complete` at the end of a step, else `plan`, with the entry's version."""

    def complete(self, version: int) -> bool: ...
    def plan(self, version: int) -> None: ...


class _Timer:
    """Calls a callback."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def plan(self, version: int) -> None:
        if self._callback is not None:
            self._callback()

    def complete(self, version: int) -> bool:
        self.plan(version)
        return False

    def cancel(self) -> None:
        self._callback = None


class _Task:
    """Runs a coroutine that waits only for times."""

    def __init__(self, clock: QueueClock, main: Coroutine[tuple[float, int], None, None]) -> None:
        self._clock = clock
        self._main = main

    def plan(self, version: int) -> None:
        """Runs the coroutine until it waits again."""
        clock, self._clock.task = self._clock, self
        try:
            when, rank = self._main.send(None)
        except StopIteration:
            return
        finally:
            clock.task = None
        clock.add(max(when, clock.time), rank, self, 0)

    def complete(self, version: int) -> bool:
        self.plan(version)
        return False

    def cancel(self) -> None:
        self._main.close()
        self._main = _nothing()


@types.coroutine
def _until(when: float, rank: int) -> Generator[tuple[float, int], None, None]:
    """Waits for a time and a rank."""
    yield when, rank


async def _nothing() -> None: ...


class QueueClock(HandClock):
    """Calls each host, callback or coroutine at its time (`Called`).

    Entries are ordered by time, rank, start of the step that ends (steps that end together end in this order), and
    order of asking.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, float, int, Called, int]] = []
        self._count = itertools.count()
        self.task: _Task | None = None  # that runs now
        self.spawned: list[_Task] = []  # that have yet to begin

    def add(self, when: float, rank: int, called: Called, version: int, since: float = 0.0) -> None:
        heappush(self.heap, (when, rank, since, next(self._count), called, version))

    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> Handle:
        timer = _Timer(callback)
        self.add(max(when, self.time), rank, timer, 0)
        return timer

    async def sleep_until(self, when: float, rank: int) -> None:
        await _until(when, rank)

    async def settle(self) -> None:
        await self.sleep_until(self.time, PLAN)

    def spawn(self, main: Coroutine[Any, Any, None], name: str) -> Handle:
        task = _Task(self, main)
        self.spawned.append(task)
        return task

    def current_task(self) -> Handle | None:
        return self.task

    def begin_spawned(self) -> None:
        """Runs the spawned tasks until they wait, as an event loop does between two timers."""
        while self.spawned:
            self.spawned.pop(0).plan(0)
