"""A tenant beside a hostile one, at the gateway before two servers of 16 places each, on the virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from rubato.latency.affine import Model
from rubato.policy_kit.fair_share import FairShare
from tests.kit import gateways
from tests.kit.asgi import key, tenant
from tests.kit.gateways import Fleet, gateway

SECONDS = 4.0
STEP_S = 0.02  # of the servers, whatever the batch


@dataclass(frozen=True)
class Hostile:
    """What the other tenant does: so many connections, each with the next request as soon as the last one has ended."""

    id: str
    connections: int
    body: Mapping[str, Any] | bytes
    path: str = "/v1/completions"
    method: str = "POST"
    status: int = 200
    kept: float = 0.9  # of what the good tenant has alone


CASES = [
    Hostile("long answers", 64, {"prompt": "x y", "max_tokens": 200}),
    Hostile("1,024 choices in 80 bytes", 2, {"prompt": ["x"] * 8, "n": 128, "max_tokens": 2}, status=400),
    Hostile("as many choices as there may be", 2, {"prompt": ["x"] * 8, "n": 2, "max_tokens": 2}),
    Hostile("16 choices, on all its places", 16, {"prompt": "x", "n": 16, "max_tokens": 200}, kept=0.8),
    Hostile("200,000 token ids", 2, b'{"prompt":[' + b"1," * 200_000 + b'1],"max_tokens":2}', status=400),
    Hostile("cheap pages", 32, b"", "/v1/models", "GET"),
]


def completions(hostile: Hostile | None) -> tuple[int, Counter[int]]:
    """How many requests of the good tenant end within SECONDS, and the hostile one's statuses."""
    good, other = 0, Counter[int]()

    async def scenario(fleet: Fleet) -> None:
        nonlocal good
        until = fleet.clock.now() + SECONDS

        async def use() -> None:
            nonlocal good
            while fleet.clock.now() < until:
                answer = await fleet.complete(key("good"), prompt="a b c d", max_tokens=20, stream=True)
                good += answer.status_code == 200 and fleet.clock.now() < until

        async def attack(with_: Hostile) -> None:
            body = with_.body if isinstance(with_.body, bytes) else json.dumps(with_.body)
            while fleet.clock.now() < until:
                answer = await fleet.http.request(with_.method, with_.path, content=body, headers=key("evil"))
                other[answer.status_code] += 1
                await asyncio.sleep(0.2 if answer.status_code == 429 else 0.02)

        attackers = [attack(hostile) for _ in range(hostile.connections)] if hostile is not None else []
        await asyncio.gather(*(use() for _ in range(4)), *attackers)

    gateway(scenario, tenants=[tenant("good"), tenant("evil", max_in_flight=64)], fair=FairShare())
    return good, other


@cache
def alone() -> int:
    return completions(None)[0]


@pytest.fixture
def _servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "LIMITS", replace(gateways.LIMITS, max_num_seqs=16))
    monkeypatch.setattr(gateways, "STEP", Model(k=(0.0, 0.0), b=(STEP_S, 0.0)))


@pytest.mark.usefixtures("_servers")
@pytest.mark.parametrize("hostile", CASES, ids=lambda case: case.id)
def test_good_tenant_beside_a_hostile_one_keeps_its_completions(hostile: Hostile) -> None:
    beside, statuses = completions(hostile)
    assert alone() >= 4 * (SECONDS / (21 * STEP_S) - 1)
    assert beside >= hostile.kept * alone()
    assert hostile.status in statuses
