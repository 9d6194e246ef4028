"""Whatever servers answer, whenever they are lost, whatever clients send: each response and each request ends once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubato.core.events import Finished, Left, Offered
from rubato.fleet.upstream import BrokenError
from rubato.frontdoor.paths import GENERATE
from rubato.wire.sse_stream import MAX_EVENT_BYTES
from tests.conftest import PROFILE, examples
from tests.kit import on
from tests.kit.asgi import call_asgi
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import MemoryReply, StubServer, reply_of

EVENTS = [
    b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\r\n\r\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop","logprobs":-Infinity}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"\xff","finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1000000000}}\n\n',
    b'data: {"choices":null}\n\n',
    b'data: {"choices":[5,{"delta":7},{"delta":null}]}\n\n',
    b'data: {"error":{"message":"x"}}\n\n',
    b"data: [DONE]\n\n",
    b"event: response.output_text.delta\ndata: {}\n\n",
    b"event: message_stop\ndata: {}\n\n",
    b": ping\n\n",
    b"data: {\n\n",
    b'{"usage":{"prompt_tokens":-5,"completion_tokens":"x"},"choices":[]}',
    b'{"choices":[{"text":"whole"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    b"\n",
]


@dataclass(frozen=True)
class Answer:
    """ends: how its connection does: at its end, by a break, or never."""

    status: int
    kind: str
    parts: list[bytes]
    ends: str
    delay: float


answers = st.builds(
    Answer,
    st.sampled_from([200] * 8 + [204, 307, 400, 404, 429, 500, 501, 503]),
    st.sampled_from(["text/event-stream", "text/event-stream", "application/json", ""]),
    st.lists(st.one_of(st.sampled_from(EVENTS), st.binary(max_size=12)), max_size=8),
    st.sampled_from(["whole", "whole", "break", "never"]),
    st.sampled_from([0.0, 0.0, 0.1]),
)
prompts = st.sampled_from([None, "hi", "", [1, 2], [[1, 2], [3]], ["a"], 5, {"a": 1}, [None], [{"role": "user"}]])
messages = st.sampled_from([None, [], "x", [{"role": "user", "content": "hi"}], [{"role": 5}], [7]])
bodies = st.fixed_dictionaries(
    {"model": st.just("stub"), "stream": st.booleans()},
    optional={
        "prompt": prompts, "input": prompts, "messages": messages, "max_tokens": st.sampled_from([1, 4, 100]),
        "n": st.integers(1, 3), "prompt_embeds": st.just("abc"), "tools": st.just([{"type": "function"}]),
        "slo": st.sampled_from([{"e2e_ms": 500}, {"ttft_ms": 100, "on_decline": "refuse"}]), "echo": st.booleans(),
    },
)  # fmt: skip
calls = st.tuples(st.sampled_from(GENERATE), bodies, st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3]))


async def respond(script: list[Answer], server: StubServer, path: str, body: bytes) -> MemoryReply | None:
    """As the script says."""
    if not script or path not in GENERATE:
        return None
    server.bodies.append(json.loads(body))
    answer = script[(len(server.bodies) - 1) % len(script)]
    end = {"break": [BrokenError("ConnectionResetError")]}.get(answer.ends, [])
    parts = [*filter(None, answer.parts), *end]
    reply = reply_of(*parts, status=answer.status, kind=answer.kind, ends=answer.ends == "whole")
    reply.delay = answer.delay
    return reply


def by(script: list[Answer], servers: list[StubServer]) -> None:
    """Servers that answer so."""
    for server in servers:
        server.respond = partial(respond, script, server)


async def post(fleet: Fleet, path: str, body: Any, leaves: float) -> list[Any]:
    """What a client gets: the messages of one ASGI response. leaves: the client, after so many seconds."""
    leave = (lambda answer: asyncio.sleep(leaves)) if leaves else None
    return (await call_asgi(fleet.app, path, orjson.dumps(body), leaves=leave)).messages


def check(script: list[Answer], asked: list[tuple[str, Any, float]], lost_at: float, linked: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        async def lose() -> None:
            await asyncio.sleep(lost_at)
            for server in fleet.servers:
                server.kill()

        losing = asyncio.create_task(lose())
        async with asyncio.timeout(1000.0):
            all_got = await asyncio.gather(*(post(fleet, *one) for one in asked))
            await losing
        for got, (_, _, leaves) in zip(all_got, asked, strict=True):
            if not leaves:
                assert [m["type"] for m in got].count("http.response.start") == 1, got
                assert got[0]["type"] == "http.response.start"
                assert [m.get("more_body", False) for m in got[1:]] == [True] * (len(got) - 2) + [False]
        assert fleet.cluster.in_flight == 0
        assert fleet.cluster.offered == fleet.cluster.finished
        ends = Counter(event.id for event in fleet.of(Finished))
        assert ends == Counter(event.id for event in fleet.of(Offered))
        assert set(ends.values()) <= {1}
        assert max(Counter(event.id for event in fleet.of(Left)).values(), default=0) <= 1
        lines = (await fleet.http.get("/metrics")).text.splitlines()
        assert not [line for line in lines if not line.startswith("#") and float(line.rpartition(" ")[2]) < 0
                    and "margin" not in line]  # fmt: skip

    gateway(scenario, servers=2, linked=linked, change=lambda servers: by(script, servers))


@settings(max_examples=examples(40, 400), deadline=None, derandomize=PROFILE in ("quick", "ci"),
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.lists(answers, max_size=4), st.lists(calls, min_size=1, max_size=4), st.sampled_from([0.05, 0.4, 20.0]),
       st.booleans())  # fmt: skip
def test_each_response_ends(
    script: list[Answer], asked: list[tuple[str, Any, float]], lost_at: float, linked: bool
) -> None:
    check(script, asked, lost_at, linked)


@pytest.mark.parametrize("done", [[EVENTS[10]], []])
@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=1)
async def test_a_stream_whose_choices_have_ended_ends_though_its_connection_stays_open(
    fleet: Fleet, done: list[bytes]
) -> None:
    by([Answer(200, "text/event-stream", [EVENTS[1], EVENTS[3], *done], "never", 0.0)], fleet.servers)
    began = fleet.clock.now()
    (got,) = await asyncio.gather(post(fleet, "/v1/completions", {"prompt": "hi", "stream": True}, 0.0))
    assert b"".join(m.get("body", b"") for m in got).endswith(b"data: [DONE]\n\n")
    assert fleet.clock.now() - began < 3.0


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=1)
async def test_the_error_that_ends_a_stream_is_an_event_of_its_own_behind_half_an_event(fleet: Fleet) -> None:
    half = b'data: {"a":"' + b"a" * MAX_EVENT_BYTES
    by([Answer(200, "text/event-stream", [EVENTS[1], half], "break", 0.0)], fleet.servers)
    body = {"prompt": "hi", "stream": True, "n": 2}
    (got,) = await asyncio.gather(post(fleet, "/v1/completions", body, 0.0))
    last = b"".join(m.get("body", b"") for m in got).rstrip().split(b"\n\n")[-1]
    assert "error" in orjson.loads(last.removeprefix(b"data: "))
