"""Tests that are scenarios: coroutines that a harness runs against a fresh server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

Scenario = Callable[..., Awaitable[None]]


def on(harness: Callable[..., None], **settings: Any) -> Callable[[Scenario], Callable[..., None]]:
    """Make a test of a scenario. harness: gives it its first argument; the others are fixtures and parameters."""

    def made(scenario: Scenario) -> Callable[..., None]:
        @wraps(scenario)
        def test(**given: Any) -> None:
            harness(lambda first: scenario(first, **given), **settings)

        signature = inspect.signature(scenario)
        fixtures = list(signature.parameters.values())[1:]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return made
