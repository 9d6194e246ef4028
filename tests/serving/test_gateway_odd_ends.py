"""Ends that were not thought of at first: models whose servers are gone, streams that are more than text, kills that
follow errors, servers of another kind among vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from rubato.core.events import Finished, Left
from rubato.core.plan import Limits
from rubato.fleet.served_models import ServedModels
from rubato.fleet.server_probe import with_cache
from rubato.fleet.upstream import BrokenError
from tests.kit import on
from tests.kit.gateways import Fleet, gateway
from tests.serving.test_every_response_ends import Answer, by, post
from tests.serving.test_gateway_models import READ_S, change, got, listed
from tests.stubs.vllm_server import MemoryReply, StubServer, reply_of

END = b'data: {"id":"x","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=3, change=change)
async def test_requests_for_a_model_whose_only_server_is_lost_end(fleet: Fleet) -> None:
    begun = asyncio.create_task(fleet.complete(model="lora-y", stream=True, max_tokens=50))
    await asyncio.sleep(0.35)
    fleet.servers[2].kill()
    await asyncio.sleep(30.0)
    later = asyncio.create_task(fleet.complete(model="lora-y"))
    other = await fleet.complete(model="stub")
    await asyncio.wait_for(asyncio.gather(begun, later), 120.0)
    assert (other.status_code, later.result().status_code) == (200, 429)
    assert b"[DONE]" not in begun.result().content
    assert fleet.cluster.in_flight == 0


@on(gateway, linked=False)
async def test_requests_for_a_model_that_every_server_has_stopped_listing_end(fleet: Fleet) -> None:
    for server in fleet.servers:
        listed(server, ["other"])
    await asyncio.sleep(READ_S)
    assert (await asyncio.wait_for(fleet.complete(), 120.0)).status_code == 429


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_server_that_lists_nothing_any_more_gets_nothing(fleet: Fleet) -> None:
    listed(fleet.servers[1], [])
    await asyncio.sleep(READ_S)
    await asyncio.gather(*(fleet.complete() for _ in range(8)))
    assert got(fleet, "stub") == [8, 0]


def test_names_that_no_server_lists_are_not_kept() -> None:
    models = ServedModels(["a", "b"])
    assert models.servers_of("m") is None or models.servers_of("m") == frozenset()
    models.set_models("a", {"m": {}})
    for number in range(1000):
        assert models.servers_of(f"odd{number}") == frozenset()
    assert models.servers_of("m") is None  # b was not asked yet
    assert len(models._servers) == 1


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_last_server_that_takes_requests_is_lost_while_another_drains(fleet: Fleet) -> None:
    """What runs there goes on, and what comes waits for a server."""
    asked = [asyncio.create_task(fleet.complete(max_tokens=100, stream=True)) for _ in range(4)]
    await asyncio.sleep(0.25)
    fleet.cluster._scaling.drain("r1")
    fleet.servers[0].kill()
    await asyncio.sleep(2.0)
    late = asyncio.create_task(fleet.complete())
    await asyncio.wait_for(asyncio.gather(*asked, late), 600.0)
    assert all(task.result().content.endswith(b"[DONE]\n\n") for task in asked[1::2])
    assert {event.id for event in fleet.of(Left)} >= {"r0"}


def parts(data: bytes) -> list[bytes]:
    return [data[at : at + 65536] for at in range(0, len(data), 65536)]


TEXTS = {
    "an event of more than a megabyte": parts(
        b'data: {"id":"x","choices":[{"index":0,"text":"AAA ","logprobs":"' + b"l" * (2 << 20) + b'"}]}\n\n'
    ),
    "a field that is not known": [b'data: {"id":"x","choices":[{"index":0,"text":"AAA","thinking":"x"}]}\n\n'],
    "log probabilities": [b'data: {"id":"x","choices":[{"index":0,"text":"AAA","logprobs":{"tokens":["A"]}}]}\n\n'],
    "a text that is none": [b'data: {"id":"x","choices":[{"index":0,"text":["AAA"]}]}\n\n'],
    "what is no JSON": [b"data: AAA\n\n", b'data: {"id":"x","choices":[{"index":0,"text":"B"}]}\n\n'],
}


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("came", TEXTS)
@on(gateway, "linked")
async def test_stream_that_is_more_than_text_is_begun_once(fleet: Fleet, came: str) -> None:
    by([Answer(200, "text/event-stream", TEXTS[came], "break", 0.0)], fleet.servers[:1])
    by([Answer(200, "text/event-stream", [*TEXTS[came], END], "whole", 0.0)], fleet.servers[1:])
    said = await post(fleet, "/v1/completions", {"model": "stub", "prompt": "hi", "stream": True}, 0.0)
    raw = b"".join(message.get("body", b"") for message in said)
    assert raw.count(b"AAA") == 1
    assert b'"error"' in raw
    assert len(fleet.servers[1].bodies) == 0
    assert [event.outcome for event in fleet.of(Finished)] == ["failed"]


def mixed(servers: list[StubServer]) -> None:
    """The second is no vLLM, and would begin anew."""
    servers[1].pages |= dict.fromkeys(("/version", "/tokenize"), (404, b"{}"))


@on(gateway, linked=False, change=mixed)
async def test_stream_of_a_vllm_server_does_not_go_on_at_one_that_is_none(fleet: Fleet) -> None:
    fleet.servers[0].cut = 2
    response = await fleet.chat(stream=True, max_tokens=8)
    assert b"not known to continue" in response.content
    assert fleet.servers[1].bodies == []


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_response_that_says_it_failed_is_no_success(fleet: Fleet) -> None:
    event = b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"message":"odd"}}}\n\n'
    by([Answer(200, "text/event-stream", [event], "whole", 0.0)], fleet.servers)
    said = await post(fleet, "/v1/responses", {"model": "stub", "input": "hi", "stream": True}, 0.0)
    assert b"".join(message.get("body", b"") for message in said) == event
    assert [(one.outcome, one.verdict.met) for one in fleet.of(Finished)] == [("failed", False)]


async def die(kinds: list[str], server: StubServer, path: str, body: bytes) -> MemoryReply | None:
    """At the prompt `poison`: answer with an error and die, or die at once; the last of the kinds again and again."""
    if b"poison" not in body:
        return None
    kind = kinds.pop(0) if len(kinds) > 1 else kinds[0]
    if kind == "dies":
        server.kill()
        return reply_of(BrokenError("ConnectionResetError"))
    asyncio.get_running_loop().call_later(0.05, server.kill)
    return reply_of(b'{"error": {"message": "engine dead"}}', status=int(kind))


@pytest.mark.parametrize("how", [("dies",), ("500",), ("500", "dies"), ("dies", "503")])
@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=7)
async def test_request_whose_servers_fail_and_die_takes_two(fleet: Fleet, how: Sequence[str]) -> None:
    kinds = list(how)
    for server in fleet.servers:
        server.respond = partial(die, kinds, server)
    others = [asyncio.create_task(fleet.complete(max_tokens=40, stream=True)) for _ in range(6)]
    await asyncio.sleep(0.05)
    assert (await fleet.complete(prompt="poison", stream=True)).status_code == 500
    await asyncio.gather(*others)
    await asyncio.sleep(10.0)
    assert len(fleet.of(Left)) == 2
    cut = [other for other in others if not other.result().content.endswith(b"[DONE]\n\n")]
    assert len(cut) <= 1  # one that was at both: nobody can tell it from what they died of


def test_metrics_page_with_an_endless_name_is_read_once() -> None:
    """Each of its bytes began a name anew: a page of 100 kB took a minute."""
    limits = Limits(8, 512, 1024, 100, 16)
    assert with_cache(limits, "vllm:cache_config_info{" + "a" * 1_000_000 + "}") is limits
    page = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="77"} 1.0'
    found = with_cache(limits, page)
    assert (found.kv_blocks, found.block_size) == (77, 32)
