"""Settings that must be numbers: neither NaN nor, where that has no meaning, infinite."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def check_finite(settings: Mapping[str, Any], takes: Callable[..., Any], where: str = "") -> None:
    """Checks that every number in `settings` is finite.

    Args:
        settings: by name; mappings and lists are searched for numbers, too.
        takes: the callable that they are for; infinity is allowed where it is the parameter's default.
        where: how the message begins.

    Raises:
        ValueError: for a setting that is, or contains, NaN or infinity.
    """
    parameters = inspect.signature(takes).parameters
    for name, value in settings.items():
        usual = parameters[name].default if name in parameters else None
        for number in _numbers(value):
            if not abs(number) <= sys.float_info.max and number != usual:
                raise ValueError(f"{where}setting {name} is {value!r:.80}: give finite numbers only")


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _numbers(key)
            yield from _numbers(below)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _numbers(below)
