"""What is the gateway's own: a key that servers refuse is its operator's error, and its questions are no client's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.core.server_url import PROBE
from rubato.fleet import server_probe
from rubato.fleet.upstream import Headers
from tests.doors.doors import TENANTS, Door, InVLLM, OwnServer
from tests.kit import on_virtual_clock
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, reply_of


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_key_of_the_gateway_that_a_server_refuses_is_no_error_of_the_client(
    status: int, linked: bool, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers:
            server.broken = status
        for stream in (True, False):
            response = await fleet.complete(stream=stream)
            assert response.status_code == (502 if own else status)
            if own:
                assert response.json()["error"]["code"] == "server_failed"
        passed = await fleet.http.post("/v1/completions/of/another/kind", json={"prompt": "a"})
        assert passed.status_code == (502 if own else status)
        assert await fleet.metric("rubato_client_errors_total") == (0 if own else 3)
        assert await fleet.metric("rubato_requests_offered_total") == (2 if own else 0)
        assert await fleet.metric("rubato_slo_missed_total") == (2 if own else 0)
        outcomes = [event.outcome for event in fleet.of(Finished)]
        assert outcomes == (["failed"] * 2 if own else ["refused"] * 2)
        assert sum(len(server.bodies) for server in fleet.servers) == 3  # nobody else is asked

    gateway(scenario, linked=linked, key="gateways-key" if own else "")
    lines = [record for record in caplog.records if "the gateway's own key" in record.message]
    assert len(lines) == (3 if own else 0)
    assert "gateways-key" not in caplog.text


class Asked:
    """A door of ours as a server of a gateway (`upstream.Upstream`)."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.statuses: list[int] = []

    async def open(self, method: str, path: str, headers: Headers, body: bytes, **_: Any) -> MemoryReply:
        answer = await self._door.open(method, path, dict(headers), body, False)
        self.statuses.append(answer.status)
        return reply_of(answer.body, status=answer.status)

    async def close(self) -> None: ...


@pytest.mark.parametrize("kind", [OwnServer, InVLLM])
@pytest.mark.parametrize("tenants", [{}, TENANTS])
@on_virtual_clock
async def test_questions_of_a_gateway_are_no_errors_of_clients(kind: Any, tenants: dict[str, Any]) -> None:
    async with kind.opened({"tenants": tenants} if tenants else {}) as door:
        server = Asked(door)
        about = {"stub": {"id": "stub"}}
        for ask in (
            server_probe.ready_models("s", server),
            server_probe.link_address("s", server),
            server_probe.about("s", server, None, None, about, "stub"),
            server_probe.kv_used(server),
        ):
            await asyncio.gather(ask, return_exceptions=True)
        assert [status for status in server.statuses if 400 <= status < 500]
        assert door.count("rubato_client_errors_total") == 0
        for path in ("/rubato/link", "/rubato/link"):
            asked = await door.open("GET", path, {}, b"", False)
            assert 400 <= asked.status < 500
        assert door.count("rubato_client_errors_total") == 2
        key = {"authorization": "Bearer acme-key"}
        await door.open("POST", "/v1/completions", {PROBE: "1", **key}, b"[", False)
        assert door.count("rubato_client_errors_total") == 3  # no question of a gateway's
