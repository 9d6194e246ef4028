"""A key is a tenant, a tenant has tiers; nothing else that a client says changes what it may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rubato.core.events import Finished, Offered
from rubato.core.request import SLO
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.frontdoor.tenants import Tenants
from tests.serving.conftest import Edge, key, tenant

Runs = Callable[..., None]
FAST, SLOW = Tier("fast", SLO(1.0, 0.2)), Tier("slow", SLO(5.0, 0.5, 60.0))
TIERS = Tiers([FAST, SLOW], "slow")
TENANTS = [
    tenant("gold", tiers=("slow", "fast")),
    tenant("basic", tiers=("slow",)),
    tenant("free", tiers=("flex",)),
    tenant("any"),
]


def offered(at: Edge) -> Any:
    return [e.request for e in at.events if isinstance(e, Offered)][-1]


def test_who_has_no_key_gets_nothing(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        for headers in (
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer  "},
            {"authorization": "Bearer sk-nobody"},
            {"authorization": "Basic sk-gold"},
            {"authorization": "sk-gold"},
            {"authorization": "Bearer sk-gold sk-gold"},
            {"api-key": "sk-gold"},
        ):
            for answer in (
                await at.chat(headers=headers),
                await at.complete(headers=headers, user="gold"),
                await at.http.get("/v1/models", headers=headers),
                await at.http.get("/v1/models/simulated", headers=headers),
                await at.http.get("/debug/requests/x", headers=headers),
            ):
                assert answer.status_code == 401
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "sk-" not in answer.text
        assert at.events == []
        for path in ("/health", "/metrics", "/openapi.json"):
            assert (await at.http.get(path)).status_code == 200
        assert (await at.http.get("/v1/models", headers=key("gold"))).status_code == 200
        assert (await at.http.get("/v1/models", headers={"authorization": "bearer sk-gold"})).status_code == 200

    edge(scenario, tenants=TENANTS, tiers=TIERS)


def test_the_tenant_is_the_keys_whatever_the_request_says(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        headers = {**key("basic"), "x-tenant": "gold", "openai-organization": "gold"}
        await at.chat(headers=headers, user="gold", metadata={"tenant": "gold"})
        assert offered(at).tenant == "basic"

    edge(scenario, tenants=TENANTS, tiers=TIERS)


def test_without_tenants_everybody_is_one_and_keys_are_not_looked_at(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        answer = await at.chat(headers=key("whatever"), user="somebody")
        assert answer.status_code == 200
        assert offered(at).tenant == "default"
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)

    edge(scenario)


@pytest.mark.parametrize(
    ("who", "asked", "served"),
    [
        ("gold", None, "slow"),  # the server's default, which it may use
        ("gold", "auto", "slow"),
        ("gold", "fast", "fast"),
        ("gold", "flex", "flex"),
        ("basic", "fast", "slow"),
        ("basic", "priority", "slow"),
        ("basic", "flex", "flex"),  # nobody is denied less
        ("free", None, "flex"),
        ("free", "fast", "flex"),
        ("any", "fast", "fast"),
    ],
)
def test_tiers_are_clamped_and_the_answer_says_so(edge: Runs, who: str, asked: str | None, served: str) -> None:
    async def scenario(at: Edge) -> None:
        answer = await at.chat(headers=key(who), **({"service_tier": asked} if asked else {}))
        assert offered(at).tier == served
        assert answer.headers["x-rubato-tier"] == answer.json()["service_tier"] == served
        clamped = asked is not None and asked not in ("auto", "priority") and asked != served
        assert answer.headers.get("x-rubato-clamped") == ("service_tier" if clamped else None)

    edge(scenario, tenants=TENANTS, tiers=TIERS)


def test_a_tier_that_is_not_configured_is_an_error_for_everybody(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        answer = await at.chat(headers=key("basic"), service_tier="platinum")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")

    edge(scenario, tenants=TENANTS, tiers=TIERS)


@pytest.mark.parametrize(
    ("who", "headers", "slo", "promised", "clamped"),
    [
        # gold's tightest are fast's TTFT and TPOT, and slow's e2e
        ("gold", {}, {"ttft_ms": 10, "tpot_ms": 10, "e2e_ms": 10}, (1000, 200, 60000), "ttft, tpot, e2e"),
        ("gold", {"x-slo-ttft-ms": "1500"}, {"tpot_ms": 300}, (1500, 300, 60000), None),
        ("gold", {"x-slo-tpot-ms": "10"}, None, (5000, 200, 60000), "tpot"),
        ("basic", {"x-slo-ttft-ms": "10", "x-llm-d-slo-tpot-ms": "10"}, None, (5000, 500, 60000), "ttft, tpot"),
        ("basic", {}, {"ttft_ms": 9000}, (9000, 500, 60000), None),
        # its only tier promises nothing, so nothing can be had by stating it
        ("free", {"x-slo-ttft-ms": "10"}, {"tpot_ms": 1e6, "e2e_ms": 1e9}, (None, None, None), "ttft, tpot, e2e"),
        # free to use every tier: bounded by the tightest of all
        ("any", {"x-slo-ttft-ms": "10"}, None, (1000, 500, 60000), "ttft"),
    ],
)
def test_stated_slos_are_clamped_and_judged_as_promised(
    edge: Runs,
    who: str,
    headers: dict[str, str],
    slo: Any,
    promised: tuple[float | None, ...],
    clamped: str | None,
) -> None:
    async def scenario(at: Edge) -> None:
        answer = await at.chat(headers={**key(who), **headers}, slo=slo)
        report = answer.json()["rubato"]
        assert report["targets"] == dict(zip(("ttft_ms", "tpot_ms", "e2e_ms"), promised, strict=True))
        assert report["met"] is True  # 100 ms a token: 10 ms would have been missed
        assert answer.headers.get("x-rubato-clamped") == clamped
        stream = await at.chat(headers={**key(who), **headers}, slo=slo, stream=True)
        assert stream.headers.get("x-rubato-clamped") == clamped

    edge(scenario, tenants=TENANTS, tiers=TIERS)


def test_each_stage_is_clamped(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        stages = [{"until": "x", "tpot_ms": 1}, {"ttft_ms": 1, "tpot_ms": 700}]
        answer = await at.chat(headers=key("basic"), slo={"stages": stages})
        assert [stage.slo for stage in offered(at).stages] == [SLO(5.0, 0.5, 60.0), SLO(5.0, 0.7, 60.0)]
        assert answer.headers["x-rubato-clamped"] == "ttft, tpot"

    edge(scenario, tenants=TENANTS, tiers=TIERS)


def test_without_tiers_that_promise_anything_a_tenant_with_all_may_state_what_it_likes() -> None:
    assert Tiers().allowed(None).loosened(SLO(0.01, 0.02, 0.03)) == SLO(0.01, 0.02, 0.03)
    assert Tiers().allowed(["flex"]).loosened(SLO(0.01, 0.02, 0.03)) == SLO()


def test_a_tenants_default_is_the_first_of_its_list_where_it_may_not_use_the_servers() -> None:
    tiers = Tiers([FAST, SLOW], "slow").allowed(["fast", "flex"])
    assert tiers.resolve(None).name == tiers.resolve("slow").name == "fast"


def test_two_tenants_cannot_share_a_key() -> None:
    one = tenant("one")
    with pytest.raises(ValueError, match="'one' and 'two'") as error:
        Tenants([one, tenant("two"), type(one)("two", one.digests)], Tiers())
    assert "sk-" not in str(error.value)
    with pytest.raises(ValueError, match="'gold'"):
        Tenants([tenant("one", tiers=("gold",))], Tiers())


def test_a_prefix_is_never_shared_between_tenants(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        for who in ("gold", "gold", "basic", "basic"):
            assert (await at.complete(headers=key(who), prompt="x" * 40)).status_code == 200
        rows = [
            await at.http.get(f"/debug/requests/{e.id}", headers=key("root"))
            for e in at.events
            if isinstance(e, Finished)
        ]
        assert [row.json()["choices"][0]["cached_tokens"] for row in rows] == [0, 32, 0, 32]

    edge(scenario, tenants=[*TENANTS, tenant("root", admin=True)], tiers=TIERS, prefix_cache=True)
