"""Listeners to the events of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from math import inf
from typing import ParamSpec, TypeVar

from rubato.core.events import Event, Tokens

LOG_PAUSE_S = 60.0  # between two reports of the same failing listener

Listener = Callable[[Event], None]
P = ParamSpec("P")
T = TypeVar("T")


def without_tokens(listener: Listener) -> Listener:
    """Returns a listener that gets no token events, which are most events."""

    @wraps(listener)
    def hear(event: Event) -> None:
        listener(event)

    hear.hears_tokens = False  # type: ignore[attr-defined]
    return hear


class EventBus:
    """Tells listeners of every event, in order, on the event loop.

    A listener that raises (disk full under the event log) stops no request's end, and gets the next event all the same.
    Its errors go to the loop's exception handler, once in LOG_PAUSE_S seconds: asyncio's handler logs them,
    `clock.run_virtual`'s ends the run with the first. Without a running loop they are raised.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[Listener, tuple[type[Event], ...]]] = []  # and the types that each asked for
        self._by_type: dict[type[Event], tuple[Listener, ...]] = {}  # listeners of the types that came so far
        self._failures: dict[str, tuple[int, float]] = {}  # by name: errors so far, and when one was last reported

    def add(self, listener: Listener, *types: type[Event]) -> None:
        """Adds a listener to events of these types. Without types it gets all events, or all but token events, which
        are most, where its `hears_tokens` is False."""
        self._listeners.append((listener, types))
        self._by_type.clear()

    def _listeners_of(self, kind: type[Event]) -> tuple[Listener, ...]:
        is_other = kind is not Tokens
        listeners = [
            listener for listener, types in self._listeners
            if (kind in types if types else is_other or getattr(listener, "hears_tokens", True))
        ]  # fmt: skip
        return self._by_type.setdefault(kind, tuple(listeners))

    @property
    def errors(self) -> dict[str, int]:
        """The number of events on which each listener failed."""
        return {name: count for name, (count, _) in self._failures.items()}

    def publish(self, event: Event, *first: Listener) -> None:
        """Tells the listeners in `first`, in their order, and then every other listener."""
        listeners = self._by_type.get(type(event))
        if listeners is None:
            listeners = self._listeners_of(type(event))
        for listener in (*first, *listeners) if first else listeners:
            try:
                listener(event)
            except Exception as error:
                name = getattr(listener, "__qualname__", type(listener).__qualname__)
                self._report(name, event.at, f"listener {name} failed on {type(event).__name__} of {event.id!r}", error)

    def guarded(self, at: float, otherwise: T, ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `ask` returns; `otherwise` if it raises, which is reported as a listener's error at time
        `at`."""
        try:
            return ask(*args, **kwargs)
        except Exception as error:  # whatever it is: no client is to pay for it
            name = ask.__qualname__
            self._report(name, at, f"{name} failed, and requests go on without it", error)
            return otherwise

    def _report(self, name: str, at: float, message: str, error: Exception) -> None:
        """Counts an error of `name` at time `at` (s), and reports it if none was reported lately."""
        count, last = self._failures.get(name, (0, -inf))
        is_due = at >= last + LOG_PAUSE_S
        self._failures[name] = (count + 1, at if is_due else last)
        if not is_due:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise error from None
        loop.call_exception_handler({"message": f"{message}, errors so far: {count + 1}", "exception": error})
