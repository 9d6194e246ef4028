"""Wraps a router or scheduler, and passes on all of its attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rubato.core.events import Event
from rubato.core.interfaces import Assigner, Router, Scheduler

Inner = TypeVar("Inner", bound=Router | Scheduler)


class Wrapper(Generic[Inner]):
    """Wraps a router or scheduler `inner`."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Returns whatever `inner` has: `needs`, `wants`, `tier_names`, settings."""
        if name == "inner":  # it is being copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def observe(self, events: Sequence[Event]) -> None:
        self.inner.observe(events)


class RouterWrapper(Wrapper[Router]):
    """Wraps a router."""

    def __init__(self, inner: Router) -> None:
        super().__init__(inner)
        if isinstance(inner, Assigner):
            self.roles = inner.roles  # of the object, so that only a wrapper of an Assigner is one
