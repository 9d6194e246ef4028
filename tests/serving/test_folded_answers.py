"""Answers that do not stream, of servers without the link: asked for as streams, so that their times are seen."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from rubato.core.events import Finished, HandedOff
from rubato.fleet import server_try
from rubato.frontdoor.body_fields import BodyFields
from rubato.serving.gateway import _with_usage
from rubato.wire.folded_answer import FoldedAnswer
from rubato.wire.response_stream import DONE
from rubato.wire.sse_stream import MAX_EVENT_BYTES
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.kit.gateways import Fleet, gateway
from tests.serving.test_every_response_ends import Answer, by
from tests.stubs.vllm_server import MemoryReply, reply_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@on(edge)
async def test_a_folded_answer_of_our_own_server_is_the_one_that_it_gives_at_once(
    at: Edge, path: str, logprobs: bool, n: int
) -> None:
    asks: dict[str, Any] = {"n": n, "max_tokens": 5, "seed": 3, "temperature": 1.0}
    if logprobs:
        asks |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    ask = at.chat if path == CHAT else at.complete
    whole = (await ask(**asks)).json()
    fields = _with_usage(path, BodyFields.parse(orjson.dumps(asks), 1000))
    streamed = await ask(**json.loads(fields.to_json()))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    answer = FoldedAnswer(is_chat=path == CHAT)
    answer.add(streamed.content)
    folded = json.loads(answer.to_json())
    for one in (whole, folded):
        del one["id"], one["created"], one["rubato"]  # what was measured of either
    assert folded == whole


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@on(gateway, linked=False)
async def test_a_client_gets_the_answer_that_the_server_would_have_given_it(fleet: Fleet, path: str, n: int) -> None:
    said = [{"role": "user", "content": "x"}]
    body = {"model": "stub", "max_tokens": 4, "n": n, "prompt": "abc", "messages": said}
    response = await fleet.http.post(path, json=body)
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    assert "cache-control" not in response.headers
    (asked,) = [asked for server in fleet.servers for asked in server.bodies]
    assert asked == {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = response.json()
    for name in ("rubato", "service_tier"):
        del answer[name]
    id = answer["id"].partition("-")[2]
    reply = await fleet.servers[0].open("POST", path, [("x-request-id", id)], orjson.dumps(body))
    assert without_nulls(answer) == json.loads(await reply.part())


@on(gateway, linked=False)
async def test_times_of_an_answer_that_does_not_stream_are_those_of_its_tokens(fleet: Fleet) -> None:
    answer = (await fleet.chat(service_tier="chat")).json()
    verdict = answer["rubato"]
    assert (verdict["met"], verdict["ttft_ms"], verdict["tpot_ms"], verdict["e2e_ms"]) == (True, 100.0, 100.0, 400.0)
    assert await fleet.metric("rubato_ttft_seconds_sum") == pytest.approx(0.1)
    assert await fleet.metric("rubato_slo_unjudged_total") == 0


UNFOLDED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    (TEXT, {"prompt": "hi", "echo": True}), (TEXT, {"prompt": "hi", "prompt_logprobs": 0}),
    (TEXT, {"prompt": "hi", "best_of": 2}),
    (TEXT, {"prompt": "hi", "return_token_ids": True}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "asks"), UNFOLDED)
@on(gateway, linked=False)
async def test_an_answer_that_a_stream_does_not_bring_is_judged_by_its_end_alone(
    fleet: Fleet, path: str, asks: dict[str, Any]
) -> None:
    def ask(**slo: int) -> Any:
        return fleet.http.post(path, json={"model": "stub", "max_tokens": 4, **asks, "slo": slo})

    for slo in ({"ttft_ms": 300}, {"tpot_ms": 10, "e2e_ms": 500}):
        assert (await ask(**slo)).status_code == 200
    await ask(e2e_ms=500)
    await ask(e2e_ms=300, ttft_ms=10)
    assert not any("stream" in body for server in fleet.servers for body in server.bodies)
    ends = [event.verdict for event in fleet.of(Finished)]
    assert [(v.met, v.unjudged, v.ttft, v.tpot) for v in ends] == [
        (False, True, None, None), (False, True, None, None), (True, False, None, None), (False, False, None, None)
    ]  # fmt: skip
    assert [v.e2e for v in ends] == [pytest.approx(0.4)] * 4
    assert {event.output for event in fleet.of(Finished)} <= {4, 0}  # the stub counts nothing of some
    assert await fleet.metric("rubato_slo_unjudged_total") == 2
    assert await fleet.metric('rubato_slo_met_total{dimension="all",tenant="default",tier="default"}') == 1
    assert await fleet.metric("rubato_slo_missed_total") == 1
    assert await fleet.metric("rubato_requests_offered_total") == 4
    assert await fleet.metric("rubato_ttft_seconds_count") == 0
    board = (await fleet.http.get("/board.json")).json()["total"]
    assert (board["met"], board["missed"], board["unjudged"], board["in_flight"]) == (1, 1, 2, 0)
    assert await fleet.metric("rubato_tenant_tokens_total") >= sum(event.output for event in fleet.of(Finished))


@on(gateway, linked=False)
async def test_an_unjudged_verdict_has_null_for_what_was_not_measured(fleet: Fleet) -> None:
    answer = (await fleet.complete(echo=True, n=2, slo={"ttft_ms": 1000})).json()
    verdict = answer["rubato"]
    assert [verdict[name] for name in ("met", "cause", "ttft_ms", "tpot_ms", "margin_ms")] == [None] * 5
    assert verdict["e2e_ms"] == 400.0
    assert [choice["met"] for choice in verdict["choices"]] == [None, None]
    assert [event.output for event in fleet.of(Finished)] == [4, 4]


@pytest.mark.parametrize("how", ["cut", "says_error_after"])
@on(gateway, linked=False, is_vllm=lambda: False)
async def test_a_stream_that_fails_half_way_is_tried_elsewhere_and_the_client_gets_one_whole_answer(
    fleet: Fleet, how: str
) -> None:
    for server in fleet.servers:
        setattr(server, how, 2)
    fleet.servers[1].cut = fleet.servers[1].says_error_after = 0
    response = await fleet.complete(prompt="abc", slo={"ttft_ms": 1000})
    assert response.status_code == 200
    answer = response.json()
    assert answer["choices"][0]["text"] == "la ti do re "
    assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert answer["usage"]["completion_tokens"] == 4
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.output) == ("completed", 4)
    assert end.verdict.ttft == pytest.approx(0.31 if how == "cut" else 0.3)  # a server that is cut off is looked at
    assert len(fleet.of(HandedOff)) == 1


@on(gateway, linked=False)
async def test_a_stream_that_fails_everywhere_is_one_error_with_a_status(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.says_error_after = 2
    response = await fleet.complete()
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"]


def script(fleet: Fleet, *parts: bytes) -> None:
    """Have its servers answer with these parts."""
    by([Answer(200, "text/event-stream", list(parts), "whole", 0.0)], fleet.servers)


@pytest.mark.parametrize(
    ("code", "status", "asked"), [(400, 400, 1), (404, 404, 1), (500, 500, 2), (None, 500, 2), (429, 429, 2)]
)
@on(gateway, linked=False)
async def test_error_in_a_stream_has_the_status_that_it_names(
    fleet: Fleet, code: int | None, status: int, asked: int
) -> None:
    error = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": code}}
    script(fleet, CHUNK, b"data: " + orjson.dumps(error) + b"\n\n", DONE)
    response = await fleet.complete()
    assert response.status_code == status
    assert sum(len(server.bodies) for server in fleet.servers) >= asked
    if status in (400, 404):
        assert response.json() == error
        (end,) = fleet.of(Finished)
        assert end.is_client_error


@pytest.mark.parametrize("parts", [[DONE], [CHUNK, b"data: {\n\n", DONE], [CHUNK]])
@on(gateway, linked=False)
async def test_stream_that_is_no_answer_is_an_error(fleet: Fleet, parts: list[bytes]) -> None:
    script(fleet, *parts)
    assert (await fleet.complete()).status_code == 500


@on(gateway, linked=False)
async def test_answer_without_end_is_cut_off_where_memory_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_try, "MAX_ANSWER_BYTES", 900)
    script(fleet, *[CHUNK] * 1000, DONE)
    assert (await fleet.complete()).status_code == 500


@on(gateway, linked=False)
async def test_answer_of_one_chunk_is_as_long_as_one_that_does_not_stream(fleet: Fleet) -> None:
    long = CHUNK.replace(b'"a"', b'"%b"' % (b"a" * 2 * MAX_EVENT_BYTES)).replace(b"null", b'"stop"')
    script(fleet, *[long[at : at + 65536] for at in range(0, len(long), 65536)])
    answer = (await fleet.complete()).json()
    assert answer["choices"][0]["text"] == "a" * 2 * MAX_EVENT_BYTES
    assert [end.outcome for end in fleet.of(Finished)] == ["completed"]


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("stream", [True, False])
@on(gateway, linked=False)
async def test_server_that_refuses_what_is_added_is_asked_as_the_client_asks(
    fleet: Fleet, status: int, stream: bool
) -> None:
    async def refuse(path: str, body: bytes) -> MemoryReply | None:
        """What it does not know: counts in streams."""
        said = b'{"detail":"stream_options: Extra inputs are not permitted"}'
        return reply_of(said, status=status) if b"stream_options" in body else None

    for server in fleet.servers:
        server.respond = refuse
    assert (await fleet.complete(stream=stream)).status_code == 200
    (body,) = [body for server in fleet.servers for body in server.bodies]
    assert body.get("stream", False) is stream
    assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 4)]
    own = await fleet.complete(stream=True, stream_options={"include_usage": True})
    assert own.status_code == status


@on(gateway)
async def test_a_server_with_the_link_is_asked_as_the_client_asks(fleet: Fleet) -> None:
    await fleet.complete()
    assert not any("stream" in body for server in fleet.servers for body in server.bodies)


@on(gateway)
async def test_a_server_whose_link_is_silent_is_asked_for_a_stream(fleet: Fleet) -> None:
    for host in fleet.cluster.hosts.values():
        host.requests.is_linked = False  # type: ignore[attr-defined]
    verdict = (await fleet.complete(slo={"ttft_ms": 1000})).json()["rubato"]
    assert verdict["ttft_ms"] == 100.0
    assert [body["stream"] for server in fleet.servers for body in server.bodies] == [True]
