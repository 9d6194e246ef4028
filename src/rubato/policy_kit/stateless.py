"""Defines a base for schedulers and routers that keep no state of requests: all that they decide by is in the views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rubato.core.events import Event


class Stateless:
    """Ignores what happens, and needs nothing of an engine unless a subclass says so."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def observe(self, events: Sequence[Event]) -> None:
        """Ignores the events."""
