"""What passes the gateway as it is: limits of its tenant, clients that leave, servers that fail at it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.fleet.upstream import MAX_SILENCE_S, Headers, UnreachableError, UpstreamError
from rubato.serving.asgi_client import WRITER_KEY
from tests.kit import on
from tests.kit.asgi import call_asgi, key, tenant
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, StubServer

EMBED = "/v1/embeddings"
BODY = json.dumps({"model": "stub", "input": "a"}).encode()


class Embedding(StubServer):
    """Has embeddings, once `done` is set. asked: how often; open_: calls that have not ended; fails: with this; breaks:
    an answer begins and does not end, or with this."""

    asked = 0
    open_ = 0
    fails: Exception | None = None
    breaks: bool | UpstreamError = False

    async def open(self, method: str, path: str, headers: Headers, body: bytes, **more: Any) -> MemoryReply:
        if path != EMBED:
            return await super().open(method, path, headers, body, **more)
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        self.open_ += 1
        try:
            await self.done.wait()
        except BaseException:
            self.open_ -= 1
            raise
        reply = MemoryReply(200, "application/json", self._left)
        if self.breaks:
            reply.put(b'{"data"')
            if isinstance(self.breaks, UpstreamError):
                reply.put(self.breaks)
            return reply
        self.open_ -= 1
        reply.put(b'{"data":[]}')
        reply.put(b"")
        return reply

    def _left(self) -> None:
        self.open_ -= 1

    @property
    def done(self) -> asyncio.Event:
        return self.__dict__.setdefault("_done", asyncio.Event())


def change(servers: list[StubServer]) -> None:
    for server in servers:
        server.__class__ = Embedding


def embeddings(fleet: Fleet) -> list[Any]:
    return fleet.servers


async def call(fleet: Fleet, who: str = "a", *, leaves: bool = False) -> tuple[int, bytes]:
    headers = {**key(who), "content-type": "application/json", "content-length": str(len(BODY))}
    leave = (lambda answer: asyncio.sleep(0.25)) if leaves else None
    answer = await call_asgi(fleet.app, EMBED, BODY, headers, leaves=leave)
    return answer.status, answer.body


@on(gateway, change=change, tenants=[tenant("a", max_in_flight=1), tenant("b")])
async def test_passed_calls_beyond_a_tenants_max_in_flight_are_refused(fleet: Fleet) -> None:
    asked = [asyncio.create_task(call(fleet)) for _ in range(60)]
    await asyncio.sleep(0.1)
    assert Counter(task.result()[0] for task in asked if task.done()) == {429: 59}
    assert sum(server.asked for server in embeddings(fleet)) == 1
    other = asyncio.create_task(call(fleet, "b"))
    completion = await fleet.complete(key("a"))
    assert completion.status_code == 429  # they count together
    for server in embeddings(fleet):
        server.done.set()
    assert {status for status, _ in await asyncio.gather(*asked, other)} == {200, 429}
    assert (await call(fleet))[0] == 200
    assert (await fleet.complete(key("a"))).status_code == 200
    assert await fleet.metric("rubato_client_errors_total") == 0
    assert all(event.reason == "rejected-tenant-saturated" for event in fleet.of(Finished)[:-1])


@pytest.mark.parametrize("breaks", [False, True])
@on(gateway, change=change, tenants=[tenant("a", max_in_flight=60)])
async def test_passed_call_whose_client_leaves_is_given_up_at_the_server(fleet: Fleet, breaks: bool) -> None:
    for server in embeddings(fleet):
        server.breaks = breaks  # the response has begun, and does not end
        if breaks:
            server.done.set()
    asked = [asyncio.create_task(call(fleet, leaves=True)) for _ in range(60)]
    await asyncio.sleep(0.1)
    assert sum(server.open_ for server in embeddings(fleet)) == 60
    await asyncio.sleep(1.0)
    assert sum(server.open_ for server in embeddings(fleet)) == 0
    await asyncio.gather(*asked)
    for server in embeddings(fleet):
        server.breaks = False
        server.done.set()
    assert {status for status, _ in await asyncio.gather(*[call(fleet) for _ in range(60)])} == {200}


@on(gateway, change=change, tenants=[tenant("a")])
async def test_passed_response_that_breaks_off_breaks_its_clients_connection(fleet: Fleet) -> None:
    """It does not end as if it were whole, and no error is left to the HTTP server to log."""
    for server in embeddings(fleet):
        server.breaks = UpstreamError("closed")
        server.done.set()
    aborted = asyncio.Event()

    class Connection:
        flow = None

        def abort(self) -> None:
            aborted.set()

    extensions = {WRITER_KEY: Connection()}
    answer = await call_asgi(
        fleet.app, EMBED, BODY, key("a"), leaves=lambda answer: aborted.wait(), extensions=extensions
    )
    assert aborted.is_set()
    assert [message.get("more_body") for message in answer.messages] == [None, True]


@pytest.mark.parametrize(
    ("error", "status", "asked"), [(UnreachableError("refused"), 503, 4), (UpstreamError("closed"), 502, 2)]
)
@on(gateway, servers=4, change=change, tenants=[tenant("a")])
async def test_passed_call_at_which_servers_fail_is_sent_to_one_other_that_may_have_begun(
    fleet: Fleet, error: Exception, status: int, asked: int
) -> None:
    for server in embeddings(fleet):
        server.fails = error
    assert (await call(fleet))[0] == status
    assert sum(server.asked for server in embeddings(fleet)) == asked


@on(gateway, servers=3)
async def test_passed_call_that_no_server_answers_ends(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.mute = True
    began = fleet.clock.now()
    assert (await fleet.http.post("/tokenize", json={"prompt": "a"})).status_code == 502
    assert fleet.clock.now() - began == pytest.approx(2 * MAX_SILENCE_S, abs=1.0)


@on(gateway, servers=3, change=change, tenants=[tenant("a")])
async def test_passed_call_goes_to_a_server_that_lists_its_model(fleet: Fleet) -> None:
    for server in embeddings(fleet):
        server.done.set()
    fleet.servers[1].pages["/v1/models"] = (200, b'{"data":[{"id":"stub"},{"id":"embedder"}]}')
    await asyncio.sleep(11.0)
    body = json.dumps({"model": "embedder", "input": "a"}).encode()
    head = {**key("a"), "content-type": "application/json", "content-length": str(len(body))}
    for _ in range(6):
        assert (await call_asgi(fleet.app, EMBED, body, head)).status == 200
    assert [server.asked for server in embeddings(fleet)] == [0, 6, 0]
