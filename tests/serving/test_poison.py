"""Requests at which servers fail, beside a good tenant: what it completes, and how many servers they take with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from rubato.core.events import Finished, Left
from rubato.fleet.upstream import BrokenError
from tests.kit import on
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, StubServer, reply_of

SECONDS = 4.0
POISON = "poison"
ERROR = b'data: {"error":{"message":"odd","type":"BadRequestError","code":500}}\n\ndata: [DONE]\n\n'


async def fail(server: StubServer, path: str, body: bytes) -> MemoryReply | None:
    """At a request that says how."""
    if POISON.encode() not in body:
        return None
    kind = body.partition(POISON.encode())[2][1:].partition(b'"')[0].decode()
    if kind.isdecimal():
        return reply_of(b'{"error":{"message":"odd"}}', status=int(kind))
    if kind == "error":
        return reply_of(ERROR, kind="text/event-stream")
    if kind == "closed":
        raise BrokenError("ServerDisconnectedError")
    if kind == "broken":
        return reply_of(BrokenError("ConnectionResetError"), kind="text/event-stream")
    reply = reply_of(kind="text/event-stream", ends=False)
    server.open_replies.add(reply)
    if kind == "dies":
        server.kill()
    elif kind == "hangs":
        server.hangs = server.core.silent = True
        for open_ in server.open_replies:
            open_.flows.clear()
    return reply


def change(servers: list[StubServer]) -> None:
    for server in servers:
        server.respond = partial(fail, server)


def served(kind: str | None, linked: bool) -> int:
    """Requests that the good tenant completes, four at a time, beside two of this kind a second."""
    done = 0

    async def scenario(fleet: Fleet) -> None:
        nonlocal done
        end = fleet.clock.now() + SECONDS

        async def good() -> None:
            nonlocal done
            while fleet.clock.now() < end:
                response = await fleet.complete(max_tokens=5, stream=True, prompt=[1, 2, 3])
                done += response.status_code == 200 and response.content.endswith(b"[DONE]\n\n")

        async def bad() -> None:
            response = await fleet.complete(max_tokens=4, stream=True, prompt=f"{POISON}:{kind}")
            assert response.status_code in (429, 500, 502, 503)

        async def poisoner() -> None:
            sent = []
            while kind is not None and fleet.clock.now() < end:
                sent.append(asyncio.create_task(bad()))
                await asyncio.sleep(0.5)
            await asyncio.gather(*sent)

        await asyncio.gather(*(good() for _ in range(4)), poisoner())

    gateway(scenario, servers=4, linked=linked, change=change)
    return done


@pytest.mark.parametrize("linked", [True, False])
def test_good_tenant_beside_a_poisoner_completes_nine_tenths(linked: bool) -> None:
    alone = served(None, linked)
    beside = {kind: served(kind, linked) for kind in ("500", "501", "503", "429", "error", "closed", "broken")}
    assert {kind: count for kind, count in beside.items() if count < 0.9 * alone} == {}, alone


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("kind", ["dies", "hangs"])
@on(gateway, "linked", servers=5, change=change)
async def test_a_request_that_takes_its_server_with_it_takes_two_at_most(fleet: Fleet, kind: str) -> None:
    others = [asyncio.create_task(fleet.complete(max_tokens=40, stream=True)) for _ in range(6)]
    await asyncio.sleep(0.05)
    response = await fleet.complete(max_tokens=4, stream=True, prompt=f"{POISON}:{kind}")
    assert response.status_code == 500
    answers = await asyncio.gather(*others)
    await asyncio.sleep(10.0)  # by then a server that nobody answers for is lost
    assert len({event.id for event in fleet.of(Left)}) == 2
    assert sum([server.down or server.hangs for server in fleet.servers]) == 2
    assert sum([answer.status_code == 200 for answer in answers]) >= 4
    assert (await fleet.complete()).status_code == 200
    assert len({event.id for event in fleet.of(Finished)}) == 8


def test_a_request_whose_step_kills_its_server_before_the_report_of_that_step_takes_two_at_most() -> None:
    def die_at_the_step(servers: list[StubServer]) -> None:
        for server in servers:

            def report(server: StubServer = server, report: Callable[[], None] = server.core._report) -> None:
                replica = server.core.host.replica
                assert replica is not None
                if any(POISON in seq.id and seq.in_flight for seq in replica.running.values()) and not server.down:
                    server.kill()
                report()

            server.core._report = report  # type: ignore[method-assign]

    async def scenario(fleet: Fleet) -> None:
        others = [asyncio.create_task(fleet.complete(max_tokens=300, stream=True)) for _ in range(6)]
        await asyncio.sleep(0.35)  # in the middle of a step: it is reported to wait while that runs
        response = await fleet.complete({"x-request-id": POISON}, max_tokens=4, stream=True)
        answers = await asyncio.gather(*others)
        assert len(fleet.of(Left)) == 2
        assert b"[DONE]" not in response.content
        assert sum([answer.content.endswith(b"[DONE]\n\n") for answer in answers]) >= 4

    gateway(scenario, servers=6, change=die_at_the_step)


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=2, change=change)
async def test_a_server_that_dies_of_itself_costs_no_request_however_many_it_has(fleet: Fleet) -> None:
    """Half of what runs goes on elsewhere at once: more than the budget of retries."""
    asked = [asyncio.create_task(fleet.complete(max_tokens=40, stream=True)) for _ in range(24)]
    await asyncio.sleep(0.05)
    fleet.servers[0].kill()
    answers = await asyncio.gather(*asked)
    assert [answer.content.endswith(b"[DONE]\n\n") for answer in answers] == [True] * 24
    assert {event.id for event in fleet.of(Left)} == {"r0"}
