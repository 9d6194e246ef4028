"""Canary words: what is nobody else's business is in no log line, metric, board page, and no other client's response.

The words stand for a prompt, a tenant's key, the key of the servers' API, the link's token and a server's host name.
(A password in a server's URL is refused with the configuration: `test_config`.)
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx2
import orjson
import pytest

from rubato.cli.main import main
from rubato.core.server_url import connection_failure
from rubato.engines.simulated import Engine
from rubato.fleet.upstream import UpstreamError, error_code
from rubato.serving.logs import JsonFormatter, TextFormatter
from rubato.wire.link_keys import TOKEN_ENV
from tests.kit import on
from tests.kit.apps import Edge, Failing, edge
from tests.kit.asgi import key, tenant
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, reply_of

PROMPT, TENANT, SERVER, LINK, HOST = (f"canary{what}" for what in ("prompt", "tenant", "server", "link", "host"))
CANARIES = (PROMPT, f"sk-{TENANT}", SERVER, LINK, HOST)
PEOPLE = [tenant(TENANT), tenant("other"), tenant("ops", admin=True)]
FORMS = (JsonFormatter(), TextFormatter())


class Records(logging.Handler):
    """Every line of the log, in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []  # logger and line

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [(record.name, form.format(record)) for form in FORMS]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.setenv(TOKEN_ENV, LINK)
    handler, root = Records(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def shown(response: httpx2.Response) -> str:
    return f"{response.headers}\n{response.text}"


def assert_without(text: str, *, may: Sequence[str] = ()) -> None:
    found = [word for word in CANARIES if word in text and word not in may]
    assert not found, f"{found} in {text}"


async def assert_unseen(http: httpx2.AsyncClient, records: Records) -> None:
    """In what an operator and other clients see. The log of the gateway itself names its servers."""
    assert any(name == "rubato.requests" for name, _ in records.lines)
    for name, line in records.lines:
        assert_without(line, may=(HOST,) if name.startswith("rubato.fleet") else ())
    for path in ("/metrics", "/health", "/ready"):
        assert_without(shown(await http.get(path)))
    for who in (TENANT, "other", "ops"):
        may = (HOST,) if who == "ops" else ()  # an admin's board has a lane for each server
        assert_without(shown(await http.get("/board.json", headers=key(who))), may=may)


async def speak(fault: str, path: str, body: bytes) -> MemoryReply | None:
    """Repeat the prompt in all that goes wrong, and the server's own address, too."""
    said = f"cannot serve {PROMPT} at http://{HOST}0"
    fault = "307" if path == "/elsewhere" else fault if "completions" in path else ""
    if fault.isdecimal():
        error = {"error": {"message": said, "type": "KindOfError", "code": int(fault)}}
        reply = reply_of(orjson.dumps(error), status=int(fault))
        reply.headers = [*reply.headers, ("location", f"http://{HOST}0/{PROMPT}")]
        return reply
    if fault == "refused":
        raise UpstreamError(connection_failure(OSError(f"Cannot connect to host {HOST}0:80")))
    error = {"error": {"message": said, "type": f"{PROMPT} at length"}}
    ends: dict[str, bytes | UpstreamError] = {
        "breaks": UpstreamError(connection_failure(ConnectionResetError(104, f"{HOST}0"))),
        "no JSON": f'data: {{"error": {said}}}\n\n'.encode(),
        **dict.fromkeys(("error", "late error"), b"data: " + json.dumps(error).encode() + b"\n\n"),
    }
    if fault not in ends:
        return None
    text = {"delta": {"content": "la "}} if "chat" in path else {"text": "la "}
    chunk = b"data: " + orjson.dumps({"choices": [{"index": 0, **text, "finish_reason": None}]}) + b"\n\n"
    return reply_of(*([] if fault == "error" else [chunk]), ends[fault], kind="text/event-stream")


FAULTS = ["", "400", "307", "429", "500", "501", "503", "refused", "error", "late error", "no JSON", "breaks"]


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_gateways_servers_that_repeat_a_prompt_are_heard_by_nobody(
    fault: str, linked: bool, records: Records
) -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers:
            server.respond = partial(speak, fault)
        said = [{"role": "user", "content": f"tell me of {PROMPT}"}]
        streams = fault in ("error", "late error", "no JSON", "breaks")
        fields: dict[str, Any] = {"stream": streams, "tools": [{"type": "function", "function": {"name": "f"}}]}
        statuses = []
        for who, body in ((TENANT, {"messages": said}), ("other", {}), ("other", {"service_tier": "strict"})):
            response = await fleet.chat(key(who), **fields, **body)
            statuses.append(response.status_code)
            assert_without(shown(response), may=(PROMPT, HOST) if fault == "400" else ())
        late = fault in ("late error", "no JSON", "breaks")
        expected = {"": 200, "400": 400, "307": 502, "429": 429}.get(fault, 200 if late else 500)
        assert statuses[:2] == [expected, expected]
        for path, status in (("/elsewhere", 502), ("/nowhere", 404)):
            response = await fleet.http.get(path, headers=key("ops"))
            assert response.status_code == status
            assert_without(shown(response))
        assert_without(shown(await fleet.chat({"authorization": f"Bearer sk-{TENANT}-wrong"})))
        heads = [head for server in fleet.servers for head in server.heads]
        assert all(head["authorization"] == f"Bearer {SERVER}" for head in heads)
        await assert_unseen(fleet.http, records)

    gateway(scenario, host=HOST, tenants=PEOPLE, key=SERVER, linked=linked)
    if fault in ("500", "501", "503"):
        assert any(f"answered {fault} (KindOfError)" in line for _, line in records.lines)


@on(gateway, host=HOST, tenants=PEOPLE, key=SERVER)
async def test_a_gateway_that_loses_all_its_servers_names_none_to_clients(fleet: Fleet, records: Records) -> None:
    said = [{"role": "user", "content": f"tell me of {PROMPT}"}]
    asked = [
        asyncio.ensure_future(fleet.chat(key(who), messages=said, max_tokens=200, **body))
        for who in (TENANT, "other")
        for body in ({}, {"stream": True}, {"stream": True, "tools": [{}]})
    ]
    await asyncio.sleep(1.0)
    for server in fleet.servers:
        server.kill()
    for response in await asyncio.gather(*asked):
        assert_without(shown(response))
    await assert_unseen(fleet.http, records)


@on(gateway)
async def test_server_s_error_is_logged_whole_at_level_debug_alone(fleet: Fleet, records: Records) -> None:
    for server in fleet.servers:
        server.respond = partial(speak, "503")
    assert (await fleet.chat()).status_code == 500
    logging.getLogger().setLevel(logging.DEBUG)
    assert not any(PROMPT in line for _, line in records.lines)
    assert (await fleet.chat()).status_code == 500
    assert any(PROMPT in line for _, line in records.lines)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "hush", "type": "ServiceUnavailable", "code": 503}}', " (ServiceUnavailable)"),
        (b'{"error": {"message": "hush", "type": "server_error", "code": "overloaded"}}', " (overloaded)"),
        (b'{"message": "hush", "type": "NotImplementedError"}', " (NotImplementedError)"),
        (b'{"error": {"type": "the prompt is hush"}}', ""),
        (b'{"error": {"type": "' + b"a" * 41 + b'"}}', ""),
        (b'{"error": "hush"}', ""),
        (b"[1]", ""),
        (b"hush", ""),
    ],
)
def test_of_an_error_only_its_code_is_taken(body: bytes, code: str) -> None:
    assert error_code(body) == code


class EachSecond(Failing):
    at = range(2, 1_000_000, 2)


@pytest.mark.parametrize("engine", [Engine, EachSecond])
@on(edge, "engine", tenants=[tenant(TENANT, requests_per_minute=7.0), *PEOPLE[1:]])
async def test_our_own_server_shows_no_prompt_and_no_key(at: Edge, engine: type[Engine], records: Records) -> None:
    said = [{"role": "user", "content": f"tell me of {PROMPT}"}]
    statuses = set()
    for stream in (False, True):
        for fields in ({}, {"temperature": -1}, {"messages": [{"role": PROMPT}]}, {"max_tokens": 10**6}):
            for who in (TENANT, "other", "none"):
                own = {"messages": said} if who == TENANT else {}
                response = await at.chat(key(who), stream=stream, **{**own, **fields})
                statuses.add(response.status_code)
                assert_without(shown(response), may=(PROMPT,) if response.status_code == 400 else ())
    assert statuses >= {500 if engine is EachSecond else 200, 400, 401, 429}
    await assert_unseen(at.http, records)


@pytest.mark.parametrize("words", [["gateway", "--server"], ["epp", "--server"], ["bench"]])
@pytest.mark.parametrize("url", [f"http://user:{SERVER}@10.0.0.7", f"user:{SERVER}@10.0.0.7:8000"])
def test_a_command_given_a_password_in_a_url_does_not_repeat_it(
    words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, url]) == 2
    said = capsys.readouterr()
    assert "must not hold a user or a password" in said.err
    assert SERVER not in said.err + said.out
