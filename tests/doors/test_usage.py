"""Tokens are counted and charged as the server's usage says, whatever was reserved or estimated."""

from __future__ import annotations

from typing import Any

import pytest

from rubato.engines.vllm import link
from tests.doors.doors import Answer, Door, Gateway, InVLLM, OwnServer, _Recorded, at
from tests.kit import on
from tests.kit.asgi import chunks

TENANTS = {"a": {"keys": ["a-key"], "tokens_per_minute": 6000}}
KEY = {"authorization": "Bearer a-key"}
TEXT = "/v1/completions"


def usage_of(answer: Answer) -> dict[str, Any]:
    """Of a response that is whole, or of a stream's last chunk that has one."""
    if "event-stream" not in answer.headers["content-type"]:
        return dict(answer.json["usage"])
    found: list[dict[str, Any]] = [chunk["usage"] for chunk in chunks(answer.body) if chunk.get("usage")]
    return found[-1]


@pytest.fixture(autouse=True)
def _seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "a key")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", [OwnServer, Gateway], ids=lambda door: door.name)
@on(at, "door", tenants=TENANTS)
async def test_tokens_of_a_tenant_are_those_of_usage(opened: Door, stream: bool, n: int) -> None:
    body: dict[str, Any] = {"prompt": "some words, of which nobody knows the tokens " * 20, "max_tokens": 5, "n": n}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await opened.ask(TEXT, body, KEY)
    assert answer.status == 200
    usage = usage_of(answer)
    assert usage["prompt_tokens"] > 100
    for kind in ("prompt", "completion"):
        counted = opened.count("rubato_tenant_tokens_total", tenant="a", kind=kind.replace("completion", "output"))
        assert counted == usage[f"{kind}_tokens"]
    after = await opened.ask(TEXT, {"prompt": "x", "max_tokens": 1}, KEY)
    used = usage["prompt_tokens"] + usage["completion_tokens"]
    refilled = 100 * 0.1 * 6  # tokens, in 6 steps of 0.1 s
    left = int(after.headers["x-ratelimit-remaining-tokens"])
    assert left == pytest.approx(6000 - used + refilled, abs=60)


@pytest.mark.parametrize(("asks", "is_known"), [({"stream": True}, True), ({}, True), ({"echo": True}, False)])
@on(at, door=Gateway, tenants=TENANTS)
async def test_what_a_client_that_leaves_has_used_is_charged(
    opened: Door, asks: dict[str, Any], is_known: bool
) -> None:
    """Of a response that a server without the link gives at once nobody knows how much that is: all that was
    reserved."""
    await opened.ask(TEXT, {"prompt": "x", "max_tokens": 200, **asks}, KEY, leaves=True)
    answer = await opened.ask(TEXT, {"prompt": "x", "max_tokens": 1}, KEY)
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert (left < 5900) != is_known


@on(at, door=Gateway, tenants=TENANTS)
async def test_prompt_longer_than_the_model_takes_is_not_believed(opened: Door) -> None:
    assert isinstance(opened.seen, _Recorded)
    for claim in (10**9, 0):
        for server in opened.seen.servers:
            server.claims = claim
        answer = await opened.ask(TEXT, {"prompt": "x", "max_tokens": 1}, KEY)
    answer = await opened.ask(TEXT, {"prompt": "x", "max_tokens": 1}, KEY)
    assert answer.status == 200
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 4000


@on(at, door=Gateway, tenants=TENANTS)
async def test_stream_without_a_wish_for_usage_ends_without_it_and_is_counted(opened: Door) -> None:
    answer = await opened.ask(TEXT, {"prompt": "a b c", "stream": True}, KEY)
    assert b'"usage"' not in answer.body
    assert answer.body.count(b'"choices":[]') == 0
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert opened.count("rubato_tenant_tokens_total", kind="prompt") == len("a b c")


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        (TEXT, {"prompt_tokens": 400, "completion_tokens": 2}),
        ("/v1/responses", {"input_tokens": 400, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 320}}),
        (
            "/v1/messages",  # whose `input_tokens` leave out what is cached
            {"input_tokens": 50, "output_tokens": 2, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 320},
        ),
    ],
)
@on(at, door=InVLLM, tenants=TENANTS)
async def test_middleware_without_reports_charges_the_usage_of_the_response(
    opened: Door, path: str, usage: dict[str, Any]
) -> None:
    front: Any = opened.open
    app = front.__closure__[0].cell_contents
    app._app.silent = True
    app._app.answer = {"id": "x", "choices": [], "usage": usage}
    await opened.ask(path, {"max_tokens": 50}, KEY)
    left = app._front.door._usage["a"].tokens.level
    assert left == pytest.approx(6000 - 402, abs=30)
