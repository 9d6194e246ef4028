"""No policy is built with a setting that is no finite number."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from math import inf, nan
from typing import Any

import pytest

from rubato.policies import PolicyError, describe, load, load_router, router_for

BUILD: dict[str, Callable[..., object]] = {"scheduler": load, "router": load_router}


def _floats() -> Iterator[tuple[str, str, str, str]]:
    """(policy, part, setting, its type) of each setting that is made of floats."""
    for policy, part, _, _, settings in describe():
        cls = getattr(importlib.import_module(f"rubato.policies.{policy}"), part.capitalize())
        for field in dataclasses.fields(cls):
            if field.name in settings and "float" in str(field.type):
                yield policy, part, field.name, str(field.type)


FLOATS = list(_floats())


def given(type_: str, number: float) -> Any:
    if type_.startswith("Mapping"):
        return {"a": 1.0, "b": number}
    return [0.02, number] if type_.startswith("Sequence") else number


@pytest.mark.parametrize("number", [nan, inf, -inf, 10**400])
@pytest.mark.parametrize(("policy", "part", "setting", "type_"), FLOATS)
def test_a_setting_that_is_no_finite_number_is_named(
    policy: str, part: str, setting: str, type_: str, number: float
) -> None:
    says = f"'{policy}': setting {setting} is .*: give finite numbers only"
    with pytest.raises(PolicyError, match=says):
        BUILD[part](policy, {setting: given(type_, number)})


def test_a_router_is_asked_as_well_for_what_its_policy_is_given() -> None:
    with pytest.raises(PolicyError, match="setting max_hops is nan"):
        router_for("slos_serve", "auto", {}, {"max_hops": nan})
    with pytest.raises(PolicyError, match="setting temperature is inf"):
        router_for("vllm", "sa", {"temperature": inf})


def test_every_policy_with_such_settings_is_asked() -> None:
    assert {policy for policy, *_ in FLOATS} >= {"ascendra", "edf", "polyserve", "sa", "slos_serve"}
