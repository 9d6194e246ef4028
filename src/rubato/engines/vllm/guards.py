"""Keeps faults of the policy and of the plug-in from vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rubato.engines.vllm.link import FAULT_PLACES

P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Wraps a method: a fault in it is counted and logged, and the caller, vLLM's own code, gets None. Raises
    ValueError for a method whose name is not in FAULT_PLACES."""
    place = FAULT_PLACES[FAULT_PLACES.index(method.__name__.lstrip("_"))]

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.fault(place)
            return None

    return call
