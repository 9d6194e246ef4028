"""A key is a tenant, a tenant has tiers; nothing else that a client says changes what it may have."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.core.request import SLO
from rubato.frontdoor.slo_body import SLOBody
from rubato.frontdoor.slo_fields import Tier, Tiers, grant
from rubato.frontdoor.tenants import Tenants
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.kit.asgi import key, tenant

FAST, SLOW = Tier("fast", SLO(1.0, 0.2)), Tier("slow", SLO(5.0, 0.5, 60.0))
TIERS = Tiers([FAST, SLOW], "slow")
ALLOWED = {"gold": ("slow", "fast"), "basic": ("slow",), "free": ("flex",), "any": None}


@pytest.mark.parametrize(
    ("who", "asked", "headers", "slo", "tier", "promised", "clamped"),
    [
        ("gold", None, {}, {}, "slow", SLO(5.0, 0.5, 60.0), ()),  # the server's default, which it may use
        ("gold", "auto", {}, {}, "slow", SLO(5.0, 0.5, 60.0), ()),
        ("gold", "fast", {}, {}, "fast", SLO(1.0, 0.2), ()),
        ("gold", "flex", {}, {}, "flex", SLO(), ()),
        ("basic", "fast", {}, {}, "slow", SLO(5.0, 0.5, 60.0), ("service_tier",)),
        ("basic", "priority", {}, {}, "slow", SLO(5.0, 0.5, 60.0), ()),
        ("basic", "flex", {}, {}, "flex", SLO(), ()),  # nobody is denied less
        ("free", None, {}, {}, "flex", SLO(), ()),
        ("free", "fast", {}, {}, "flex", SLO(), ("service_tier",)),
        ("any", "fast", {}, {}, "fast", SLO(1.0, 0.2), ()),
        # gold's tightest are fast's TTFT and TPOT, and slow's e2e
        ("gold", None, {}, {"ttft_ms": 10, "tpot_ms": 10, "e2e_ms": 10}, "slow", SLO(1.0, 0.2, 60.0),
         ("ttft", "tpot", "e2e")),
        ("gold", None, {"x-slo-ttft-ms": "1500"}, {"tpot_ms": 300}, "slow", SLO(1.5, 0.3, 60.0), ()),
        ("gold", None, {"x-slo-tpot-ms": "10"}, {}, "slow", SLO(5.0, 0.2, 60.0), ("tpot",)),
        ("basic", None, {"x-slo-ttft-ms": "10", "x-llm-d-slo-tpot-ms": "10"}, {}, "slow", SLO(5.0, 0.5, 60.0),
         ("ttft", "tpot")),
        ("basic", None, {}, {"ttft_ms": 9000}, "slow", SLO(9.0, 0.5, 60.0), ()),
        # its only tier promises nothing, so nothing can be had by stating it
        ("free", None, {"x-slo-ttft-ms": "10"}, {"tpot_ms": 1e6, "e2e_ms": 1e9}, "flex", SLO(),
         ("ttft", "tpot", "e2e")),
        # free to use every tier: bounded by the tightest of all
        ("any", None, {"x-slo-ttft-ms": "10"}, {}, "slow", SLO(1.0, 0.5, 60.0), ("ttft",)),
    ],
)  # fmt: skip
def test_what_a_tenant_states_is_granted_within_its_tiers(
    who: str, asked: str | None, headers: dict[str, str], slo: Any, tier: str, promised: SLO, clamped: tuple[str, ...]
) -> None:
    granted = grant(TIERS.restrict_to(ALLOWED[who]), headers, asked, SLOBody.model_validate(slo))
    assert (granted.tier, granted.slo, granted.clamped) == (tier, promised, clamped)


def test_each_stage_is_clamped() -> None:
    body = SLOBody.model_validate({"stages": [{"until": "x", "tpot_ms": 1}, {"ttft_ms": 1, "tpot_ms": 700}]})
    granted = grant(TIERS.restrict_to(("slow",)), {}, None, body)
    assert [stage.slo for stage in granted.stages((1,))] == [SLO(5.0, 0.5, 60.0), SLO(5.0, 0.7, 60.0)]
    assert granted.clamped == ("ttft", "tpot")


def test_without_tiers_that_promise_anything_a_tenant_with_all_may_state_what_it_likes() -> None:
    assert Tiers().restrict_to(None).loosen(SLO(0.01, 0.02, 0.03)) == SLO(0.01, 0.02, 0.03)
    assert Tiers().restrict_to(["flex"]).loosen(SLO(0.01, 0.02, 0.03)) == SLO()


def test_a_tenants_default_is_the_first_of_its_list_where_it_may_not_use_the_servers() -> None:
    tiers = Tiers([FAST, SLOW], "slow").restrict_to(["fast", "flex"])
    assert tiers.resolve(None).name == tiers.resolve("slow").name == "fast"


def test_two_tenants_cannot_share_a_key() -> None:
    one = tenant("one")
    with pytest.raises(ValueError, match="'one' and 'two'") as error:
        Tenants([one, tenant("two"), type(one)("two", one.digests)], Tiers())
    assert "sk-" not in str(error.value)
    with pytest.raises(ValueError, match="'gold'"):
        Tenants([tenant("one", tiers=("gold",))], Tiers())


@on(edge, tenants=[tenant("gold"), tenant("basic"), tenant("root", admin=True)], prefix_cache=True)
async def test_a_prefix_is_never_shared_between_tenants(at: Edge) -> None:
    for who in ("gold", "gold", "basic", "basic"):
        assert (await at.complete(headers=key(who), prompt="x" * 40)).status_code == 200
    rows = [
        await at.http.get(f"/debug/requests/{e.id}", headers=key("root")) for e in at.events if isinstance(e, Finished)
    ]
    assert [row.json()["choices"][0]["cached_tokens"] for row in rows] == [0, 32, 0, 32]
