"""The only module that reads or makes time: one event loop, two clocks.

`WallClock` is real time. `run_virtual` runs a coroutine on an event loop whose time jumps to the next timer instead of
waiting, so that worker, cluster and server code is the same in simulation.

asyncio fires timers that are due at the same moment in heap order. `VirtualLoop` defines the order: by rank, then first
scheduled first. So step completions come first, then arrivals and cancellations, then plans, then scaling.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

COMPLETION, ARRIVAL, PLAN, SCALE = 0, 1, 2, 3  # ranks

T = TypeVar("T")


class Handle(Protocol):
    """A scheduled callback or task that can be cancelled."""

    def cancel(self) -> object:
        """Prevents it from happening."""
        ...


class Clock(Protocol):
    """Gives the time in seconds, which never falls, and calls back. Ranks order callbacks that are due at the same
    instant.
    """

    def now(self) -> float: ...
    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> Handle: ...
    async def sleep_until(self, when: float, rank: int) -> None: ...
    async def settle(self) -> None:
        """Waits until everything else that is due at this instant has happened."""
        ...

    def spawn(self, main: Coroutine[Any, Any, None], name: str) -> Handle:
        """Runs `main` as a task of its own, which starts when the calling task next waits."""
        ...

    def current_task(self) -> Handle | None:
        """Returns the spawned task that runs now."""
        ...


class WallClock:
    """Gives real time: the event loop's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when, callback)

    async def sleep_until(self, when: float, rank: int) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))

    async def settle(self) -> None:
        await asyncio.sleep(0)

    def spawn(self, main: Coroutine[Any, Any, None], name: str) -> Handle:
        return asyncio.create_task(main, name=name)

    def current_task(self) -> Handle | None:
        return asyncio.current_task()


async def watch_timers(every: float, tell: Callable[[float], object]) -> None:
    """Calls `tell` with the seconds by which a timer fires late, once every `every` seconds, until cancelled.

    A loop that was blocked for longer reports each timer that it missed.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += every
        await asyncio.sleep(due - loop.time())
        late = max(0.0, loop.time() - due)
        tell(late)
        while late > every:
            due += every
            late -= every
            tell(late)


def unix_time() -> float:
    """Returns seconds since 1970, for times that leave the process."""
    return time.time()


def process_cpu_time() -> float:
    """Returns the CPU seconds that all threads of this process have used."""
    return time.process_time()


class VirtualClock(WallClock):
    """Gives the time of the running `VirtualLoop`, which starts at 0."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise RuntimeError("VirtualClock works inside clock.run_virtual only; use WallClock here")
        return loop.call_ranked(when, rank, callback)

    async def sleep_until(self, when: float, rank: int) -> None:
        wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        handle = self.call_at(when, rank, lambda: None if wakeup.done() else wakeup.set_result(None))
        try:
            await wakeup
        finally:
            handle.cancel()

    async def settle(self) -> None:
        await self.sleep_until(self.now(), PLAN)


class HandClock:
    """A clock whose time the caller sets, for hosts without tasks."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class _VirtualSelector(selectors.SelectSelector):
    """A selector that never waits: where every task waits, it fires the loop's next timer instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self.loop.fire_next()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with its own timers: once every task waits, the next timer fires and time moves to it.

    One timer at a time: tasks that it wakes run until they wait again before the next simultaneous one fires. Threads
    and sockets do not belong on this loop.
    """

    def __init__(self) -> None:
        selector = _VirtualSelector()
        selector.loop = self
        self._virtual = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual

    def call_ranked(
        self, when: float, rank: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (max(when, self._virtual), rank, next(self._order), timer))
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_ranked(when, ARRIVAL, callback, *args, context=context)

    def fire_next(self) -> None:
        while self._timers:
            when, _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._virtual = when
                self.call_soon(timer._run)
                return
        raise RuntimeError(
            "virtual time stands still: every task waits for an event that nothing scheduled will bring about"
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """The wall seconds of a computation, and the CPU seconds of all threads of this process."""

    wall: float
    cpu: float


def measure_cost(work: Callable[[], T]) -> tuple[T, Cost]:
    """Runs `work` and returns its result and its cost."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Cost(time.perf_counter() - wall, time.process_time() - cpu)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual loop that starts at time 0, and returns its result.

    Raises:
        RuntimeError: virtual time stands still, since everything waits and no timer is left. Other errors as
            `run_strict`.
    """
    return run_strict(main, VirtualLoop())


def run_strict(main: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Runs `main` to its end on a fresh loop, as `asyncio.run` does, and returns its result.

    Unlike there, an error that asyncio would only log, such as one in a callback or a listener, ends the run and is
    raised.

    Args:
        main: to run.
        loop: a new one, which is closed at the end; None: asyncio's own, in real time.
    """
    loop = loop or asyncio.new_event_loop()
    errors: list[BaseException] = []
    task = loop.create_task(main)

    def end_run(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        errors.append(error if error is not None else RuntimeError(context["message"]))
        task.cancel()

    loop.set_exception_handler(end_run)
    try:
        return loop.run_until_complete(task)
    finally:
        unfinished = asyncio.all_tasks(loop)
        for other in unfinished:
            other.cancel()
        if unfinished:
            loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        if errors:  # whatever became of `main` after it was cancelled
            raise errors[0] from None
