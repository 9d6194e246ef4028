"""Functions compiled by Numba, kept on disk where that can be; for searches that a policy runs between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite.binding import ffi
from numba import njit

F = TypeVar("F", bound=Callable[..., Any])

# vLLM asks for `vars` of whatever any module holds; llvmlite's library has no `__dict__`, and answers with a function
if isinstance(table := getattr(ffi.lib, "_fntab", None), dict):
    table.setdefault("__dict__", {})


def compiled(signature: str | None = None) -> Callable[[F], F]:
    """For these arguments at once, where given, else for what it is called with. A function kept on disk is compiled
    anew when its own file changes, not when one that it calls does: keep those that call each other in one file."""

    def made(function: F) -> F:
        try:
            return cast(F, njit(signature, cache=True)(function))
        except RuntimeError:  # there is no folder to write to
            return cast(F, njit(signature)(function))

    return made
