"""Compiles functions with Numba, cached on disk where possible, for searches that run between two steps.

Without Numba (extra `fast`) they run in plain Python, with the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

try:
    from llvmlite.binding import ffi
    from numba import njit
except ImportError:
    njit = None  # type: ignore[assignment]
else:
    # vLLM calls `vars` on all that a module holds; llvmlite's library has no `__dict__` but returns a function
    if isinstance(table := getattr(ffi.lib, "_fntab", None), dict):
        table.setdefault("__dict__", {})

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str | None = None) -> Callable[[F], F]:
    """Returns a decorator that compiles a function: now for the argument types of `signature`, else for those of each
    call.

    A function kept on disk is compiled anew when its own file changes, not when one that it calls does: keep those that
    call each other in one file.
    """

    def compile_function(function: F) -> F:
        if njit is None:
            return function
        try:
            return cast(F, njit(signature, cache=True)(function))
        except RuntimeError:  # there is no folder to write to
            return cast(F, njit(signature)(function))

    return compile_function


@lru_cache
def warn_if_plain(policy: str, slower: str) -> None:
    """Warns, once for each policy, if its search runs in plain Python.

    Args:
        policy: that runs.
        slower: how much that costs, in words.
    """
    if njit is None:
        log.warning(
            "%s plans in plain Python, %s, as Numba is not installed: pip install 'rubato-llm[fast]'", policy, slower
        )
