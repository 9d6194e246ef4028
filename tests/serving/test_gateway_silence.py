"""Servers that answer /health and not their requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.fleet.server_watch import MAX_ABSENCE_S
from rubato.fleet.upstream import MAX_SILENCE_S, BrokenError, Headers
from rubato.wire.response_stream import DONE
from tests.kit import on
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, StubServer


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@on(gateway, "linked", servers=3)
async def test_request_that_no_server_answers_ends_as_failed(fleet: Fleet, linked: bool, stream: bool) -> None:
    for server in fleet.servers:
        server.mute = True
    began = fleet.clock.now()
    response = await fleet.complete(stream=stream)
    assert response.status_code == 500
    took = fleet.clock.now() - began  # by the link it is known that no engine has it
    assert took < 100.0 if linked else took == pytest.approx(2 * MAX_SILENCE_S, abs=1.0)
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.verdict.met) == ("failed", False)
    assert len(fleet.cluster.hosts) == 3  # their /health is right
    fleet.servers[0].mute = False
    answers = [await fleet.complete(stream=stream) for _ in range(2)]
    assert 200 in [answer.status_code for answer in answers]


@on(gateway, servers=1)
async def test_server_is_known_to_work_at_a_request_while_its_link_says_so(fleet: Fleet) -> None:
    (server,) = fleet.servers
    asked = asyncio.ensure_future(fleet.complete(max_tokens=20))
    await asyncio.sleep(0.05)
    is_working = server.is_working
    await asyncio.sleep(1.0)
    assert is_working()
    server.core.silent = server.core.deaf = True
    await asyncio.sleep(7.0)
    assert not is_working()  # the link says nothing
    server.core.silent = server.core.deaf = False
    assert (await asked).status_code == 200
    assert not is_working()


@pytest.mark.parametrize("stream", [True, False])
@on(gateway)
async def test_request_that_an_api_server_keeps_from_its_busy_engine_goes_elsewhere(fleet: Fleet, stream: bool) -> None:
    long = [asyncio.ensure_future(fleet.complete(max_tokens=400)) for _ in range(2)]  # one at each
    await asyncio.sleep(0.5)
    fleet.servers[0].mute = True
    began = fleet.clock.now()
    assert (await fleet.complete(stream=stream)).status_code == 200
    assert MAX_ABSENCE_S < fleet.clock.now() - began < MAX_ABSENCE_S + 3.0
    assert [one.status_code for one in await asyncio.gather(*long)] == [200, 200]


ABORTED = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'


class Aborts(StubServer):
    """Its API server fails in the middle of a response: the engine is told to give up, and then the connection breaks,
    or the response ends as if nothing had been."""

    breaks = True
    asked = 0

    async def open(self, method: str, path: str, headers: Headers, body: bytes, **more: Any) -> MemoryReply:
        if method != "POST" or "completions" not in path:
            return await super().open(method, path, headers, body, **more)
        self.asked += 1
        asyncio.get_running_loop().call_later(0.45, self.give_up, self.open_replies.copy())
        return await super().open(method, path, headers, body, **more)

    def give_up(self, before: set[MemoryReply]) -> None:
        ids = list(self.core.listeners)
        self.core.listeners.clear()
        for id in ids:
            self.core.abort(id)
        for reply in self.open_replies - before:
            reply.put(BrokenError("ConnectionResetError") if self.breaks else ABORTED + DONE)
            reply.put(b"")


@pytest.mark.parametrize("stream", [True, False])
def test_request_that_a_failing_server_aborts_goes_elsewhere(stream: bool) -> None:
    def change(servers: list[StubServer]) -> None:
        servers[0].__class__ = Aborts

    async def scenario(fleet: Fleet) -> None:
        answers = await asyncio.gather(*(fleet.complete(max_tokens=8, stream=stream) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 8)] * 4
        assert fleet.servers[0].asked > 0  # type: ignore[attr-defined]

    gateway(scenario, change=change)


def test_response_of_an_aborted_request_that_ends_all_the_same_is_no_completion() -> None:
    def change(servers: list[StubServer]) -> None:
        servers[0].__class__ = Aborts
        servers[0].breaks = False  # type: ignore[attr-defined]

    async def scenario(fleet: Fleet) -> None:
        await fleet.complete(max_tokens=8, stream=True)
        (end,) = fleet.of(Finished)
        assert (end.outcome, end.reason) == ("cancelled", "aborted")

    gateway(scenario, servers=1, change=change)
