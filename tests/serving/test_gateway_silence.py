"""Servers that answer /health and not their requests."""

from __future__ import annotations

import asyncio

import pytest

from rubato.core.events import Finished
from rubato.fleet.upstream import MAX_SILENCE_S
from tests.scenario import on
from tests.serving.test_gateway import Fleet, gateway


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_request_that_no_server_answers_ends_as_failed(linked: bool, stream: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers:
            server.mute = True
        began = fleet.clock.now()
        response = await fleet.complete(stream=stream)
        assert response.status_code == 500
        took = fleet.clock.now() - began  # by the link it is known before that no engine has it
        assert took < 100.0 if linked else took == pytest.approx(2 * MAX_SILENCE_S, abs=1.0)
        (end,) = fleet.of(Finished)
        assert (end.outcome, end.verdict.met) == ("failed", False)
        assert len(fleet.cluster.hosts) == 3  # their /health is right
        fleet.servers[0].mute = False
        answers = [await fleet.complete(stream=stream) for _ in range(2)]
        assert 200 in [answer.status_code for answer in answers]

    gateway(scenario, servers=3, linked=linked)


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
