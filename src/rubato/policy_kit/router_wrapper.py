"""A router around another one, which decides most: it has all that the other has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rubato.core.events import Event
from rubato.core.interfaces import Assigner, Router


class RouterWrapper:
    """inner: the router that is asked."""

    def __init__(self, inner: Router) -> None:
        self.inner = inner
        if isinstance(inner, Assigner):
            self.roles = inner.roles  # of the object, so that only a wrapper of an Assigner is one

    def __getattr__(self, name: str) -> Any:
        """`needs`, `wants`, `tier_names`, settings, whatever `inner` has."""
        if name == "inner":  # it is being copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def observe(self, events: Sequence[Event]) -> None:
        self.inner.observe(events)
