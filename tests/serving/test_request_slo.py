"""Precedence of SLOs: header, body, tier, default; each dimension for itself."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.core.request import SLO, Stage
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.slo_body import SLOBody
from rubato.frontdoor.slo_fields import Tier, Tiers, grant

GOLD = Tier("gold", SLO(0.2, 0.05, 5.0), "refuse")
TIERS = Tiers([GOLD, Tier("basic", SLO(ttft=2.0))], default="basic")
PROMPT = (1, 2, 3)


def stages(headers: dict[str, str], body: SLOBody | None, tier: str | None = None) -> tuple[Stage, ...]:
    return grant(TIERS, headers, tier, body).stages(PROMPT)


@pytest.mark.parametrize(
    ("headers", "body", "tier", "slo"),
    [
        ({}, None, None, SLO(ttft=2.0)),
        ({}, None, "auto", SLO(ttft=2.0)),
        ({}, None, "gold", SLO(0.2, 0.05, 5.0)),
        ({}, None, "flex", SLO()),
        ({}, {"tpot_ms": 70}, "gold", SLO(0.2, 0.07, 5.0)),
        ({}, {"tpot_ms": 70}, "flex", SLO(tpot=0.07)),
        ({"x-slo-ttft-ms": "900"}, {"ttft_ms": 800, "tpot_ms": 70}, "gold", SLO(0.9, 0.07, 5.0)),
        ({"x-slo-e2e-ms": "1500.5"}, {"e2e_ms": 9}, None, SLO(2.0, None, 1.5005)),
        ({"x-llm-d-slo-ttft-ms": "300", "x-llm-d-slo-tpot-ms": "40"}, None, "flex", SLO(0.3, 0.04)),
        ({"x-llm-d-slo-tpot-ms": "40", "x-slo-tpot-ms": "50"}, None, "flex", SLO(tpot=0.05)),
        ({}, {"ttft_ms": None}, "gold", SLO(0.2, 0.05, 5.0)),
    ],
)
def test_header_wins_over_body_over_tier_in_each_dimension(
    headers: dict[str, str], body: dict[str, Any] | None, tier: str | None, slo: SLO
) -> None:
    parsed = SLOBody.model_validate(body) if body is not None else None
    (stage,) = stages(headers, parsed, tier)
    assert stage.slo == slo
    assert stage.prompt == 3
    assert stage.token_ids == PROMPT


def test_max_pause_of_a_tier_holds_whatever_tpot_a_client_states() -> None:
    tiers = Tiers([Tier("chat", SLO(0.2, 0.05, max_pause=1.0))], default="chat")
    (stage,) = grant(tiers.restrict_to(["chat"]), {"x-slo-tpot-ms": "70"}, None, None).stages(PROMPT)
    assert stage.slo == SLO(0.2, 0.07, max_pause=1.0)
    (stage,) = grant(tiers, {}, "flex", SLOBody.model_validate({"tpot_ms": 70})).stages(PROMPT)
    assert stage.slo == SLO(tpot=0.07)


def test_stages_take_what_they_do_not_state_from_the_whole() -> None:
    body = SLOBody.model_validate(
        {"ttft_ms": 500, "tpot_ms": 90, "e2e_ms": 9000, "stages": [{"until": "</think>", "tpot_ms": 200}, {}]}
    )
    first, second = stages({}, body, "gold")
    assert (first.slo, first.ends, first.prompt) == (SLO(0.5, 0.2, 9.0), "</think>", 3)
    assert (second.slo, second.ends, second.prompt) == (SLO(None, 0.09, 9.0), "eos", 0)


def test_a_header_wins_over_every_stage() -> None:
    body = SLOBody.model_validate({"stages": [{"until": "x", "ttft_ms": 100, "tpot_ms": 200}, {"ttft_ms": 300}]})
    first, second = stages({"x-slo-tpot-ms": "10", "x-slo-ttft-ms": "20"}, body, "flex")
    assert (first.slo, second.slo) == (SLO(0.02, 0.01), SLO(0.3, 0.01))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"tpot_ms": 5}, {}], "slo.stages[0].until"),
        ([{"until": "eos"}, {}], "slo.stages[0].until"),
        ([{"until": "a"}, {"until": "b"}], "slo.stages[1].until"),
    ],
)
def test_stages_say_what_ends_them(given: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as error:
        stages({}, SLOBody.model_validate({"stages": given}))
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    "text", ["soon", "", "-1", "0", "nan", "inf", "1e400", "5ms", "0.0009", "1e-300", "1000000001", "1e300"]
)
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms", "x-llm-d-slo-ttft-ms"])
def test_a_header_that_is_no_time_is_named(name: str, text: str) -> None:
    with pytest.raises(ApiError) as error:
        stages({name: text}, None)
    assert (error.value.status, error.value.param) == (400, name)
    assert str(error.value) == f"{name}: {text!r} is no number of milliseconds from 0.001 to 1e+09."


def test_openai_tiers_are_always_known_and_others_are_not() -> None:
    for name in (None, "auto", "default", "priority"):
        assert TIERS.resolve(name).name == "basic"
    assert TIERS.resolve("flex").slo.best_effort
    with pytest.raises(ApiError, match="did you mean 'gold'") as error:
        TIERS.resolve("golden")
    assert (error.value.status, error.value.param) == (400, "service_tier")


def test_an_operator_may_say_what_openai_tiers_mean() -> None:
    tiers = Tiers([Tier("priority", SLO(ttft=0.1)), Tier("flex", SLO(e2e=60.0)), Tier("default", SLO(ttft=1.0))])
    assert tiers.resolve("priority").slo == SLO(ttft=0.1)
    assert tiers.resolve("flex").slo == SLO(e2e=60.0)
    assert tiers.resolve("auto").slo == SLO(ttft=1.0)
