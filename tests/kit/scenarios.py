"""Tests that are scenarios: coroutines that a harness runs against a fresh server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from inspect import Parameter
from typing import Any

from rubato.core.clock import run_virtual

Scenario = Callable[..., Awaitable[None]]


def on(harness: Callable[..., None], *chosen: str, **settings: Any) -> Callable[[Scenario], Callable[..., None]]:
    """Make a test of a scenario.

    Args:
        harness: gives the scenario its first argument; its others are fixtures and parameters of the test.
        chosen: parameters of the test that are settings of the harness; the scenario has those that it names.
        settings: of the harness, whatever the test's parameters.
    """

    def made(scenario: Scenario) -> Callable[..., None]:
        signature = inspect.signature(scenario)
        own = list(signature.parameters.values())[1:]
        names = [parameter.name for parameter in own]

        @wraps(scenario)
        def test(**given: Any) -> None:
            told = {name: given[name] for name in names}
            harness(lambda first: scenario(first, **told), **settings, **{name: given[name] for name in chosen})

        more = [Parameter(name, Parameter.KEYWORD_ONLY) for name in chosen if name not in names]
        test.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return test

    return made


def on_virtual_clock(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine that waits on the virtual clock."""

    @wraps(scenario)
    def test(**given: Any) -> None:
        run_virtual(scenario(**given))

    return test
