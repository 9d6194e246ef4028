"""Requests that nobody writes, at each door: right ones changed at any depth, odd paths and headers, plain bytes.

Every one is answered in bounded time and never with a 5xx; what a door refuses has OpenAI's form, and is refused alike
at each; and once all are answered, nothing is held.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rubato.core.clock import run_virtual
from rubato.engines.vllm import link
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.paths import GENERATE, canonical_path
from tests.doors import doors
from tests.doors.doors import DOORS, Answer, Door, at
from tests.doors.strict_servers import BY_SERVER, StrictServer, StrictVLLM
from tests.doors.test_contract import BULK, CHAT, KEY, OPS, TEXT
from tests.kit import servers

WITHIN_S = 400.0  # of virtual time: a request of the whole context takes 102, and waits for those before it
TENANTS: dict[str, Any] = {
    "acme": {"keys": ["acme-key"], "tiers": ["chat", "flex"]},
    "bulk": {"keys": ["bulk-key"], "tokens_per_minute": 1_000_000, "max_in_flight": 8},
    "ops": {"keys": ["ops-key"], "admin": True},
}
KEYS = [*[KEY, BULK, OPS] * 3, {"x-api-key": "acme-key"}, {"authorization": "Bearer nobody"}, {}]
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    TEXT: {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
FIELDS: dict[str, list[Any]] = {
    "n": [1, 2, 8, 9, 16, 17, "3", 2.0],
    "stream": [True, False, "true", 1],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "max_tokens": [1, 1000, 10**9, "7"],
    "max_completion_tokens": [4],
    "prompt": [["a", "b"], [1, 2, 3], [[1], [2, 3]], ["a"] * 9, "x" * 3000, ""],
    "messages": [[{"role": "user", "content": [{"type": "text", "text": "hi"}]}] * 20, [{"role": "assistant"}]],
    "slo": [{"ttft_ms": 900}, {"tpot_ms": 50, "e2e_ms": 9000, "on_decline": "refuse"}, {"ttft_ms": 0.01},
            {"stages": [{"ttft_ms": 900, "until": "</think>"}, {"tpot_ms": 100}]}],
    "service_tier": ["chat", "batch", "flex", "auto", "standard_only"],
    "vllm_xargs": [{"slo_ttft_ms": "900", "other": 1}, {"slo_tier": "chat"}, {"slo_seal": "x"}],
    "previous_response_id": ["resp_1"],
    "request_id": ["mine"],
    "background": [True],
    "cache_salt": ["x"],
    "ignore_eos": [True],
    "kv_transfer_params": [{"remote_host": "10.9.9.9"}],
    "use_beam_search": [True],
    "temperature": [0, 1.5, -1],
    "stop": ["x", ["a", "b"]],
    "seed": [1],
    "logprobs": [True, 2],
    "top_logprobs": [2],
    "logit_bias": [{"5": -100}],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "metadata": [{"a": {"b": [1, {"c": None}]}}],
    "model": ["other"],
}  # fmt: skip
ODD = [  # JSON, or nearly so
    b"null", b"true", b"-1", b"0", b"-0.0", b"0.5", b"1e400", b"-1e400", b"1e-400", b"NaN", b"-Infinity", b"1" * 5000,
    b"9223372036854775808", b"18446744073709551616", b'""', b'"5"', b'"nan"', b'"1e999"', b'"' + b"1" * 5000 + b'"',
    b'"\\ud83d"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\xff"', b'"\xc3\xa9"', b'"' + b"x" * 70_000 + b'"', b"[]",
    b"{}", b"[[]]", b"[null]", b'[{"a":1}]', b'[1,-1,"a"]', b'[["b"],1]', b'{"\\ud83d":1}', b'{"a":1,"a":2}',
    b"[" * 200 + b"]" * 200, b"[" * 5000 + b"]" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900, b"tru", b"[1,", b"\t 1 ",
]  # fmt: skip
TIMES = ["900", "0.001", "-1", "nan", "inf", "1e400", "", " 9 ", "1_000", "9" * 5000, "\xb2", "soon", "1,000"]
HEADERS: dict[str, list[str]] = {
    "x-slo-ttft-ms": TIMES,
    "x-llm-d-slo-tpot-ms": TIMES,
    "x-slo-e2e-ms": TIMES,
    "x-slo-" + "x" * 500: ["1"],
    "x-session-id": ["me", "a b", "", "x" * 200, "\xe9"],
    "x-request-id": ["mine", "x" * 129, "a-b", "\xb2", "../.."],
    "x-rubato-tenant": ["bulk", "nobody", ""],
    "content-type": ["text/plain", "application/json; charset=utf-16", ""],
    "accept-encoding": ["br;q=1e400"],
}
PATHS = [
    *RIGHT, CHAT + "/", "//v1/./chat/completions", "/v1/chat%2Fcompletions", "/v1/comp%09letions", "/v1/completions%0A",
    "/v1/completions%3Fx", "/v1/completions%00", "/v1/responses/resp_1", "/v1/responses//cancel", "/v1/models",
    "/v1/models/stub", "/tokenize", "/rubato/link", "/%72ubato/state", "/rubato/requests/x", "/debug/requests/%ff",
    "/health", "/metrics", "/board.json", "/", "", "*", "?", "/%", "/%zz", "/%25252e%25252e/x", "/a?b=%ff#c", "/\xe9",
    "/%" + "25" * 500,
]  # fmt: skip


@dataclass(frozen=True)
class Fuzzed:
    """One request. leaves: the client, a quarter of a second after its body."""

    path: str = CHAT
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    leaves: bool = False
    has_one_fault: bool = False  # at most

    @property
    def is_generating(self) -> bool:
        """Whether a door admits it, and no page answers."""
        try:
            return self.method == "POST" and canonical_path(self.path.partition("?")[0]) in GENERATE
        except ApiError:
            return True  # each refuses it


def write(value: Any) -> bytes:
    """JSON, in which bytes stand as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return b"{" + b",".join([write(name) + b":" + write(one) for name, one in value.items()]) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(write, value)) + b"]"
    return json.dumps(value).encode()


def change(draw: Any, value: Any) -> Any:
    """The same with one change, at any depth."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        at = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        changed = value.copy()
        match draw(st.integers(0, 7)):
            case 0:
                del changed[at]
            case 1 if isinstance(value, dict):
                del changed[at]
                changed[draw(st.sampled_from([at[:-1], at.upper(), at + "x" * 70, "\ud83d", ""]))] = value[at]
            case _:
                changed[at] = change(draw, value[at])
        return changed
    return draw(st.sampled_from(ODD) | st.binary(max_size=8) | (st.floats() | st.integers()).map(lambda x: write(x)))


some_headers = st.just({}) | st.sampled_from(list(HEADERS)).flatmap(
    lambda name: st.fixed_dictionaries({name: st.sampled_from(HEADERS[name])})
)


@st.composite
def fuzzed(draw: Any) -> Fuzzed:
    path = draw(st.sampled_from(list(RIGHT)))
    body: Any = {"model": "stub", **RIGHT[path]}
    for name in draw(st.lists(st.sampled_from(list(FIELDS)), max_size=3)):
        body[name] = draw(st.sampled_from(FIELDS[name]))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        body = change(draw, body)
    raw = write(body)
    match draw(st.integers(0, 9)):
        case 0:
            raw = draw(st.binary(max_size=40))
        case 1 if len(raw) > 2:
            name = draw(st.sampled_from(list(FIELDS)))
            raw = raw[:-1] + b"," + write(name) + b":" + draw(st.sampled_from(ODD)) + b"}"  # maybe twice
        case 2:
            raw = raw[: draw(st.integers(0, len(raw)))]
    headers = draw(some_headers)
    method = "POST"
    if draw(st.integers(0, 3)) == 0:
        path = draw(st.sampled_from(PATHS) | st.text(st.characters(max_codepoint=126), max_size=9).map("/".__add__))
        method = draw(st.sampled_from(["POST", "GET", "PUT", "HEAD", "OPTIONS", "BREW"]))
    return Fuzzed(path, raw, {**headers, **draw(st.sampled_from(KEYS))}, method, draw(st.integers(0, 9)) == 0)


@st.composite
def once_changed(draw: Any) -> Fuzzed:
    """With one field or one header more, right or not."""
    path = draw(st.sampled_from([CHAT, TEXT]))
    body, headers = {"model": "stub", **RIGHT[path]}, draw(some_headers)
    if not headers:
        name = draw(st.sampled_from(list(FIELDS)))
        value = draw(st.sampled_from(FIELDS[name]))
        body[name] = change(draw, value) if draw(st.booleans()) else value
    return Fuzzed(path, write(body), {**headers, **draw(st.sampled_from([KEY, BULK, OPS]))}, has_one_fault=True)


@pytest.fixture(autouse=True)
def _servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "a key")
    monkeypatch.setattr(servers, "StubServer", StrictServer)
    monkeypatch.setattr(doors, "VLLM", StrictVLLM)


async def ask(opened: Door, request: Fuzzed) -> Answer:
    body = request.body.replace(b'"stub"', json.dumps(opened.model).encode())
    asking = opened.ask(request.path, body, request.headers, method=request.method, leaves=request.leaves)
    return await asyncio.wait_for(asking, WITHIN_S)


def asked(door: Any, requests: list[Fuzzed], *, keyed: bool) -> list[Answer]:
    """What they are answered at one door, all at once; each by its rules, and nothing is held afterwards."""
    answers: list[Answer] = []

    async def scenario(opened: Door) -> None:
        answers.extend(await asyncio.gather(*[ask(opened, request) for request in requests]))
        for request, answer in zip(requests, answers, strict=True):
            check_answer(request, answer)
        assert opened.in_flight() == opened.places() == 0
        offered = opened.count("rubato_requests_offered_total")
        assert offered == opened.count("rubato_requests_finished_total")
        if opened.seen is not None:  # none has passed the door uncounted
            refused = opened.count("rubato_client_errors_total")
            assert offered + refused >= sum(canonical_path(seen.path) in GENERATE for seen in opened.seen if seen.body)
        errors = sum(400 <= answer.status < 500 and answer.status != 429 for answer in answers)
        assert opened.count("rubato_client_errors_total") == errors
        right = await opened.ask(body={"n": 8}, headers=BULK)  # as many as this key may have at once
        assert right.status == 200

    at(scenario, door=door, **({"tenants": TENANTS} if keyed else {}))
    return answers


def check_answer(request: Fuzzed, answer: Answer) -> None:
    if request.leaves and answer.status == 0:
        return
    assert 200 <= answer.status < 500, answer.body[:300]
    if answer.status >= 400 and BY_SERVER not in answer.headers and request.method != "HEAD":
        error = answer.error
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(answer.body) < 2000
        assert error["param"] is None or isinstance(error["param"], str)


def check_requests(requests: list[Fuzzed], keyed: bool) -> None:
    """At each door; what the others refuse by the request alone is refused alike. Our own server, which also judges
    what is elsewhere a server's affair, may find another fault first, where there are several."""
    answers = {door.name: asked(door, requests, keyed=keyed) for door in DOORS if door.checks_keys or not keyed}
    for request, *found in zip(requests, *answers.values(), strict=True):
        if not request.is_generating or request.leaves:
            continue
        by_door = {name: refusal(answer) for name, answer in zip(answers, found, strict=True)}
        own, refused = by_door.pop("server"), by_door["gateway"]
        assert set(by_door.values()) == {refused}, by_door
        if refused and refused[1] != "slo.stages":  # which our own server alone has
            assert own, refused
            if request.has_one_fault:  # it reads fields whole: one that is no JSON is the body's fault there
                assert own in (refused, (refused[0], None)), (own, refused)


def refusal(answer: Answer) -> tuple[int, str | None] | None:
    """Status and field, of what a door refuses by the request alone: what a server judges, or whether it has room, is
    another's affair, and which model there is, which a gateway says for its servers."""
    if answer.status < 400 or answer.status == 429 or BY_SERVER in answer.headers:
        return None
    param = answer.error["param"]
    return None if (answer.status, param) == (404, "model") else (answer.status, param)


RUN = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
SOME = st.lists(fuzzed() | once_changed(), min_size=8, max_size=8)


@settings(RUN, max_examples=10)
@given(SOME, st.booleans())
def test_requests_of_any_kind_are_answered_alike_at_each_door(requests: list[Fuzzed], keyed: bool) -> None:
    check_requests(requests, keyed)


@pytest.mark.full
@settings(RUN, max_examples=200)
@given(SOME, st.booleans())
def test_many_requests_of_any_kind_are_answered_alike_at_each_door(requests: list[Fuzzed], keyed: bool) -> None:
    check_requests(requests, keyed)


@pytest.mark.full
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_door_given_large_requests_again_and_again_keeps_none_of_their_bytes(door: Any) -> None:
    kept: list[int] = []

    @settings(RUN, max_examples=2)
    @given(st.lists(fuzzed(), min_size=40, max_size=40))
    def check(requests: list[Fuzzed]) -> None:
        kept.clear()
        pad = b',"user":"' + b"x" * 60_000 + b'"}'
        run_virtual(again([replace(one, body=one.body.removesuffix(b"}") + pad) for one in requests]))
        assert kept[-1] - kept[0] < 10_000 * len(requests) * (len(kept) - 1), kept  # what records and logs may take

    async def again(requests: list[Fuzzed]) -> None:
        async with door.opened({}) as opened:
            for _ in range(4):
                for request in requests:
                    await ask(opened, request)
                for server in getattr(opened.seen, "servers", ()):  # stand-ins remember all
                    for name in ("bodies", "heads", "queries", "went_in", "scopes", "requests"):
                        getattr(server, name, []).clear()
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        check()
    finally:
        tracemalloc.stop()
