"""Faults of the policy and of our books, kept from vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rubato.engines.vllm.link import FAULT_PLACES

P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """A fault in it is counted and logged; the caller, vLLM's own code, gets None and goes on. Raises ValueError for a
    method whose name is not in FAULT_PLACES."""
    place = FAULT_PLACES[FAULT_PLACES.index(method.__name__.lstrip("_"))]

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.fault(place)
            return None

    return call
