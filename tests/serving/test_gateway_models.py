"""Models that not every server of a fleet has: where requests go, and what clients are told of them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from rubato.core.events import Finished, Placed
from rubato.latency.affine import Model
from rubato.serving.model_list import named_model
from tests.kit import on
from tests.kit.asgi import key, tenant
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import StubServer

LISTS = (("stub", "lora-x"), ("stub",), ("stub", "lora-y", "lora-x"))
ROUTERS = ["least_loaded", "power_of_two", "lmetric", "round_robin", "random", "minimal"]
READ_S = 11.0  # a list is read every five heartbeats, and each may take a while


def listed(server: StubServer, names: Sequence[str]) -> None:
    data = [{"id": name, "object": "model", "owned_by": "me", "max_model_len": 1024} for name in names]
    server.pages["/v1/models"] = (200, json.dumps({"object": "list", "data": data}).encode())


def change(servers: list[StubServer]) -> None:
    for server, names in zip(servers, LISTS, strict=True):
        listed(server, names)


def got(fleet: Fleet, model: str) -> list[int]:
    """How many requests for a model each server has got."""
    return [sum(body.get("model") == model for body in server.bodies) for server in fleet.servers]


async def answers(fleet: Fleet, models: Sequence[str], **body: Any) -> list[int]:
    asked = [fleet.complete(model=model, prompt=[1] * 20, **body) for model in models]
    return [response.status_code for response in await asyncio.gather(*asked)]


@pytest.mark.parametrize(
    ("policy", "router", "linked"),
    [
        *[("edf", router, linked) for router in ROUTERS for linked in (True, False)],
        *[(policy, "auto", True) for policy in ("polyserve", "slos_serve", "ascendra", "rubato")],
    ],
)
@on(gateway, "linked", "policy", "router", servers=3, profile=lambda: Model(b=(0.1, 0.0)), change=change)
async def test_request_goes_to_a_server_that_lists_its_model_whatever_the_router(fleet: Fleet) -> None:
    models = ["lora-x", "stub", "lora-y", "lora-x", "stub", "stub"] * 6
    assert await answers(fleet, models, service_tier="chat") == [200] * 36
    assert got(fleet, "lora-x")[1] == 0
    assert got(fleet, "lora-y")[:2] == [0, 0]
    assert min(sum(got(fleet, "lora-x")) - 11, sum(got(fleet, "stub")) - 17) > 0  # a scheduler may hand one on
    assert {event.outcome for event in fleet.of(Finished)} == {"completed"}


@on(gateway, servers=3, change=change)
async def test_models_are_the_union_of_all_servers_lists_each_time(fleet: Fleet) -> None:
    pages = [(await fleet.http.get("/v1/models")).content for _ in range(6)]
    assert len(set(pages)) == 1
    assert [model["id"] for model in json.loads(pages[0])["data"]] == ["stub", "lora-x", "lora-y"]
    one = await fleet.http.get("/v1/models/lora-y")
    assert (one.status_code, one.json()["owned_by"]) == (200, "me")
    assert (await fleet.http.get("/v1/models/lora-z")).status_code == 404
    fleet.servers[2].down = fleet.servers[2].core.silent = True
    await asyncio.sleep(20.0)
    assert (await fleet.http.get("/v1/models")).content == pages[0]  # it may come back


@on(gateway, servers=3, change=change, tenants=[tenant("a", tiers=("chat",))])
async def test_models_are_for_those_with_a_key(fleet: Fleet) -> None:
    assert (await fleet.http.get("/v1/models")).status_code == 401
    assert len((await fleet.http.get("/v1/models", headers=key("a"))).json()["data"]) == 3


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=3, change=change)
async def test_model_that_no_server_lists_is_one_404_with_the_names(fleet: Fleet) -> None:
    for ask in (fleet.complete, fleet.chat):
        refused = await ask(model="lora-z", stream=True)
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert error["message"] == "The model 'lora-z' does not exist; this fleet serves stub, lora-x, lora-y."
    assert not any(server.bodies for server in fleet.servers)
    assert await fleet.metric("rubato_client_errors_total") == 2
    assert await fleet.metric("rubato_requests_offered_total") == 0
    assert (await fleet.complete(model=None)).status_code == 200


@on(gateway, servers=3, change=change, tenants=[tenant("a", max_in_flight=1)])
async def test_model_with_a_name_too_long_to_read_is_a_404_each_time(fleet: Fleet) -> None:
    for _ in range(2):
        assert (await fleet.complete(headers=key("a"), model="x" * 100_000)).status_code == 404


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=3, change=change)
async def test_adapter_that_is_loaded_or_unloaded_is_seen_within_seconds(fleet: Fleet) -> None:
    listed(fleet.servers[1], ["stub", "lora-x", "lora-z"])
    listed(fleet.servers[0], ["stub"])
    await asyncio.sleep(READ_S)
    models = ["lora-x", "lora-z"] * 6
    assert await answers(fleet, models) == [200] * 12
    assert got(fleet, "lora-z") == [0, 6, 0]
    assert got(fleet, "lora-x")[0] == 0
    listed(fleet.servers[1], ["stub", "lora-x"])
    fleet.servers[2].pages["/v1/models"] = (500, b"")  # the list that was read last stands
    await asyncio.sleep(READ_S)
    assert await answers(fleet, ["lora-z", "lora-y"]) == [404, 200]


@on(gateway, servers=3, change=change)
async def test_request_whose_only_server_is_away_waits_for_it(fleet: Fleet) -> None:
    away = fleet.servers[2]
    away.down = away.core.silent = True
    await asyncio.sleep(20.0)
    asked = asyncio.ensure_future(fleet.complete(model="lora-y"))
    await asyncio.sleep(10.0)
    assert not fleet.of(Placed)
    assert (await fleet.complete(model="stub")).status_code == 200
    away.down = away.core.silent = False
    assert (await asked).status_code == 200
    assert got(fleet, "lora-y") == [0, 0, 1]


@on(gateway, servers=3, change=change)
async def test_request_that_fails_is_tried_at_a_server_that_lists_its_model(fleet: Fleet) -> None:
    fleet.servers[0].broken = fleet.servers[2].broken = 503
    response = await fleet.complete(model="lora-x")
    assert response.status_code == 500
    assert (got(fleet, "lora-x")[1], sum(got(fleet, "lora-x"))) == (0, 4)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"model":"a","input":["x"]}', "a"),
        (b'{"input":[[]],"model":"a","model":"b"}', "b"),
        (b'{"model":null}', ""), (b'{"model":7}', ""), (b'{"input":1}', ""),
        (b'["model"]', ""), (b"", ""), (b"--form\r\n", ""), (b"[" * 100_000, ""), (b'{"model":"\xbe"}', ""),
    ],
)  # fmt: skip
def test_the_model_of_a_body_that_passes_as_it_is(raw: bytes, name: str) -> None:
    assert named_model(raw) == name


def test_a_body_that_passes_as_it_is_takes_no_memory_to_find_its_model() -> None:
    raw = b'{"input":[' + b"[]," * 500_000 + b'[]],"model":"a"}'
    tracemalloc.start()
    try:
        assert named_model(raw) == "a"
        assert tracemalloc.get_traced_memory()[1] < len(raw)
    finally:
        tracemalloc.stop()
