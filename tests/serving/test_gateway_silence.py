"""Servers that answer /health and not their requests."""

from __future__ import annotations

import asyncio

import pytest

from rubato.core.events import Finished
from rubato.fleet.server_watch import MAX_ABSENCE_S
from rubato.fleet.upstream import MAX_SILENCE_S, BrokenError
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


class Aborts:
    """A server whose API server fails in the middle of a response: the engine is told to give up, and then the
    connection breaks with this error, or the response ends as if nothing had been, with these bytes."""

    asked = 0

    def __init__(self, server: StubServer, end: bytes | BrokenError) -> None:
        self._server, self._end = server, end
        server.respond = self.respond

    async def respond(self, path: str, body: bytes) -> None:
        if "completions" in path:
            self.asked += 1
            asyncio.get_running_loop().call_later(0.45, self.give_up, self._server.open_replies.copy())

    def give_up(self, before: set[MemoryReply]) -> None:
        core = self._server.core
        ids = list(core.listeners)
        core.listeners.clear()
        for id in ids:
            core.abort(id)
        for reply in self._server.open_replies - before:
            reply.put(self._end)
            reply.put(b"")


@pytest.mark.parametrize("stream", [True, False])
@on(gateway)
async def test_request_that_a_failing_server_aborts_goes_elsewhere(fleet: Fleet, stream: bool) -> None:
    aborts = Aborts(fleet.servers[0], BrokenError("ConnectionResetError"))
    answers = await asyncio.gather(*(fleet.complete(max_tokens=8, stream=stream) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 8)] * 4
    assert aborts.asked > 0


@on(gateway, servers=1)
async def test_response_of_an_aborted_request_that_ends_all_the_same_is_no_completion(fleet: Fleet) -> None:
    Aborts(fleet.servers[0], ABORTED + DONE)
    await fleet.complete(max_tokens=8, stream=True)
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.reason) == ("cancelled", "aborted")
