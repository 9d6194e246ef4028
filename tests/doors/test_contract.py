"""What every door does: a table of requests, each with the one right answer, asked of all four.

Where a door cannot have a case (the picker checks no keys; our own server has nothing behind it), it is left out of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import rubato
from rubato.engines.vllm import link
from rubato.frontdoor.paths import GENERATE
from tests.doors.doors import TENANTS, Answer, Door, Seen, asked_of_doors, at

CHAT, TEXT, RESPONSES, MESSAGES = GENERATE
KEY = {"authorization": "Bearer acme-key"}
BULK = {"authorization": "Bearer bulk-key"}
OPS = {"authorization": "Bearer ops-key"}
BEHIND = ("gateway", "middleware", "picker")  # doors with a server behind them


@dataclass(frozen=True)
class Case:
    """One request, and what is right.

    status, param, says: of the answer; says is a part of the error's message. targets: of the verdict. tier, tenant:
    under which it counts. sent: holds of what a server got. offered, missed, errors: what the metrics count of it.
    doors: where it can be asked.
    """

    id: str
    body: Mapping[str, Any] | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = CHAT
    method: str = "POST"
    status: int = 200
    param: str | None = None
    says: str = ""
    targets: Mapping[str, float | None] | None = None
    tier: str | None = None
    tenant: str | None = None
    clamped: str | None = None
    sent: Callable[[Seen], bool] | None = None
    tenants: bool = False
    doors: tuple[str, ...] = ("server", *BEHIND)
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts: int | None = None  # requests offered; by default what `status` says

    @property
    def offered(self) -> int:
        if self.counts is not None:
            return self.counts
        return int(self.status in (200, 429))


def raw(**fields: Any) -> bytes:
    """A chat's body of the model `stub`, as bytes."""
    chat = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return json.dumps({**chat, **fields}).encode()


HEAD = b'{"model":"stub","max_tokens":4,'


def plain(seen: Seen) -> bool:
    """Nothing that was stated to this side has reached the server, in the body or as a client wrote it."""
    return not {"slo", "service_tier"} & seen.body.keys()


HI = {"role": "user", "content": "hi"}
DEFAULT = {"default_tier": "chat"}
KEYLESS = ("server", "gateway", "middleware")
STATED = [
    Case("slo in headers", headers={"x-slo-ttft-ms": "900"}, targets={"ttft_ms": 900.0}),
    Case("slo in llm-d's headers", headers={"x-llm-d-slo-ttft-ms": "900", "x-llm-d-slo-tpot-ms": "90"},
         targets={"ttft_ms": 900.0, "tpot_ms": 90.0}),
    Case("slo in the body", {"slo": {"ttft_ms": 900, "tpot_ms": 300}}, targets={"ttft_ms": 900.0, "tpot_ms": 300.0}),
    Case("a tier", {"service_tier": "chat"}, targets={"ttft_ms": 1000.0, "tpot_ms": 200.0}, sent=plain,
         tier="chat"),
    Case("OpenAI's tier", {"service_tier": "flex"}, targets={"ttft_ms": None}, sent=plain, tier="flex"),
    Case("the default tier", targets={"ttft_ms": 1000.0, "tpot_ms": 200.0}, tier="chat", settings=DEFAULT),
    Case("the default tier by another name", {"service_tier": "scale"}, targets={"ttft_ms": 1000.0}, tier="chat",
         settings=DEFAULT),
    Case("the default tier, best effort asked for", {"service_tier": "flex"}, targets={"ttft_ms": None}, tier="flex",
         settings=DEFAULT),
    Case("the default tier but for a time", {"service_tier": "auto", "slo": {"ttft_ms": 700}}, tier="chat",
         targets={"ttft_ms": 700.0, "tpot_ms": 200.0}, settings=DEFAULT),
    Case("the default tier of Anthropic's messages", {"messages": [HI]}, path=MESSAGES, tier="chat",
         targets={"ttft_ms": 1000.0}, doors=BEHIND, settings=DEFAULT),
    Case("a tier of Anthropic's messages", {"messages": [HI], "service_tier": "standard_only"}, path=MESSAGES,
         targets={"ttft_ms": 1000.0}, tier="chat", doors=BEHIND, settings=DEFAULT),
    Case("a tier of a response", {"input": "hi", "service_tier": "batch"}, path=RESPONSES, tier="batch",
         targets={"ttft_ms": None, "e2e_ms": 60_000.0}, doors=BEHIND),
    Case("a tier with a longest pause", {"service_tier": "calm"}, targets={"tpot_ms": 200.0, "max_pause_ms": 4000.0},
         settings={"tiers": {"calm": {"tpot_ms": 200, "max_pause_ms": 4000}}}, doors=KEYLESS),
    Case("a longest pause behind a picker", {"service_tier": "calm"}, targets={"tpot_ms": 200.0, "ttft_ms": None},
         settings={"tiers": {"calm": {"tpot_ms": 200, "max_pause_ms": 4000}}}, doors=("picker",)),
    Case("Anthropic's tier", {"service_tier": "standard_only"}, targets={"ttft_ms": None}, sent=plain),
    Case(
        "header before body before tier",
        {"service_tier": "chat", "slo": {"ttft_ms": 800, "e2e_ms": 9000}}, {"x-slo-ttft-ms": "700"},
        targets={"ttft_ms": 700.0, "tpot_ms": 200.0, "e2e_ms": 9000.0},
    ),
    Case("keys of vllm_xargs", {"vllm_xargs": {"slo_ttft_ms": "900"}}, targets={"ttft_ms": 900.0},
         doors=BEHIND, sent=lambda seen: seen.body.get("vllm_xargs", {}).get("slo_seal") is not None
         or "slo_ttft_ms" not in seen.body.get("vllm_xargs", {})),
    Case("a tier in vllm_xargs", {"vllm_xargs": {"slo_ttft_ms": 600, "slo_tier": "batch"}}, tier="batch", doors=BEHIND,
         targets={"ttft_ms": 600.0, "e2e_ms": 60_000.0}),
    Case("body before vllm_xargs", {"vllm_xargs": {"slo_ttft_ms": 600}, "slo": {"ttft_ms": 700}}, doors=BEHIND,
         targets={"ttft_ms": 700.0}),
    Case("the rest of a body passes", {"slo": {"ttft_ms": 9}, "seed": 1 << 70, "stop": "\U0001f600", "user": "me",
         "logit_bias": {"5": -100}, "vllm_xargs": {"own": 3, "slo_e2e_ms": 5000}}, targets={"e2e_ms": 5000.0},
         doors=BEHIND, sent=lambda seen: plain(seen) and seen.body["vllm_xargs"]["own"] == 3
         and (seen.body["seed"], seen.body["stop"], seen.body["user"]) == (1 << 70, "\U0001f600", "me")
         and seen.body["logit_bias"] == {"5": -100}),
    Case("no slo at all", {"slo": None, "service_tier": None}, targets={"ttft_ms": None}),
    Case("a misspelt header", headers={"x-slo-tfft-ms": "4"}, status=400, param="x-slo-tfft-ms",
         says="did you mean 'x-slo-ttft-ms'?"),
    Case("a misspelt header of llm-d", headers={"x-llm-d-slo-tftt-ms": "5"}, status=400, param="x-llm-d-slo-tftt-ms",
         says="did you mean 'x-llm-d-slo-ttft-ms'?"),
    Case("a header that is no number", headers={"x-slo-ttft-ms": "soon"}, status=400, param="x-slo-ttft-ms",
         says="'soon' is no number of milliseconds"),
    Case("a header with a thousands comma", headers={"x-slo-ttft-ms": "1,000"}, status=400, param="x-slo-ttft-ms"),
    Case("a negative slo", {"slo": {"ttft_ms": -1}}, status=400, param="slo.ttft_ms"),
    Case("a misspelt dimension", {"slo": {"tfft_ms": 9}}, status=400, param="slo.tfft_ms", says="did you mean ttft_ms"),
    Case("an slo as text", {"slo": {"ttft_ms": "5"}}, status=400, param="slo.ttft_ms", says="valid number"),
    Case("stages", {"slo": {"stages": [{}]}}, status=400, param="slo.stages", says="one stage", doors=BEHIND),
    Case("a misspelt key of vllm_xargs", {"vllm_xargs": {"slo_tfft_ms": 5}}, status=400, doors=BEHIND,
         param="vllm_xargs.slo_tfft_ms", says="'slo_ttft_ms'"),
    Case("a tenant in vllm_xargs", {"vllm_xargs": {"slo_tenant": "acme"}}, status=400, param="vllm_xargs.slo_tenant",
         doors=BEHIND),
    Case("a seal in vllm_xargs", {"vllm_xargs": {"slo_seal": "00"}}, status=400, param="vllm_xargs.slo_seal",
         doors=BEHIND),
    *[Case(f"an slo that is no object: {slo!r}", {"slo": slo}, status=400, param="slo")
      for slo in (5, 0, False, "", [])],
    *[Case(f"a header nearly ours: {name}", headers={name: "4"}, status=400, param=name)
      for name in ("x-slo", "slo-ttft-ms")],
    Case("a header nearly ours, with underscores", headers={"x_slo_ttft_ms": "4"}, status=400, param="x_slo_ttft_ms",
         doors=KEYLESS),
    Case("a wish to be refused, in a header", headers={"x-slo-on-decline": "refuse", "x-slo-ttft-ms": "900"},
         targets={"ttft_ms": 900.0}),
    Case("a wish to be refused, in the body", {"slo": {"ttft_ms": 900, "on_decline": "refuse"}},
         targets={"ttft_ms": 900.0}, doors=("gateway", "picker"),
         sent=lambda seen: seen.headers.get("x-slo-on-decline") == "refuse"),
    Case("an odd wish to be refused", headers={"x-slo-on-decline": "maybe"}, status=400, param="x-slo-on-decline"),
    Case("a misspelt tier", {"service_tier": "chta"}, status=400, param="service_tier",
         says="unknown tier 'chta'; did you mean 'chat'?"),
    Case("an empty tier", {"service_tier": ""}, status=400, param="service_tier"),
    Case("a tier that is a number", {"service_tier": 5}, status=400, param="service_tier"),
    Case("a longest pause, which no client states", {"slo": {"tpot_ms": 200, "max_pause_ms": 4000}}, status=400,
         param="slo.max_pause_ms"),
    Case("a misspelt field of ours", {"service_teir": "chat"}, status=400, param="service_teir",
         says="did you mean service_tier?"),
    Case("another misspelt field of ours", {"slos": {}}, status=400, param="slos", says="did you mean slo?"),
    Case("a session that is no name", headers={"x-session-id": "a b"}, status=400, param="x-session-id"),
]  # fmt: skip
BODIES = [
    Case("a byte order mark", b"\xef\xbb\xbf" + raw()),
    Case("max_tokens as a float", {"max_tokens": 4.0}),
    Case("n as text", {"n": "2"}, counts=2),
    Case("no JSON", b"{", status=400, says="not valid JSON"),
    Case("no body", b"", status=400, says="not valid JSON"),
    Case("a list", b"[1]", status=400, says="must be a JSON object"),
    Case("UTF-16", raw().decode().encode("utf-16"), status=400, says="not valid JSON"),
    Case("NaN", raw()[:-1] + b',"temperature":NaN}', status=400, says="not valid JSON"),
    Case("nested too deeply", b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}", status=400, says="nested"),
    Case("half a surrogate pair", raw()[:-1] + b',"user":"\\ud83d"}', status=400, says="surrogate"),
    Case("a field twice", raw()[:-1] + b',"max_tokens":3}', sent=lambda seen: seen.body["max_tokens"] == 3),
    Case("too large", {"user": "x" * 200_000}, status=413, says="larger than 100000 bytes"),
    Case("too large, of no stated length", {"user": "x" * 200_000}, {"content-length": ""}, status=413,
         says="larger than 100000 bytes"),
    Case("as large as may be", raw().ljust(100_000), doors=BEHIND),
    Case("as large as may be", raw().ljust(99_995), doors=("server",)),  # whose model has a longer name
    Case("too many messages", b'{"messages":[' + b",".join([b'{"":1}'] * 45_000) + b"]}", status=400,
         says="lists, objects and fields", settings={"max_body_bytes": 1 << 20}),
    Case("too many ids", b'{"model":"stub","prompt":[' + b"1," * 99_000 + b"1]}", path=TEXT, status=400,
         says="items in its lists", settings={"max_body_bytes": 1 << 20}),
    Case("as many commas and braces in a text", {"user": ",{[:" * 25_000}, settings={"max_body_bytes": 1 << 20}),
    Case("16 choices", {"n": 16}, counts=16),
    Case("17 choices", {"n": 17}, status=400, param="n", says="17 choices asked for; this server gives at most 16"),
    Case("1,024 choices in 80 bytes", {"prompt": ["x"] * 8, "n": 128}, path=TEXT, status=400, param="n"),
    Case("18 choices of 9 prompts", {"prompt": ["x"] * 9, "n": 2}, path=TEXT, status=400, param="prompt",
         says="9 prompts with n = 2 ask for 18 choices; at most 16 are given"),
    Case("prompts behind a tab", HEAD + b'"prompt":[\t"a",' + b",".join([b'"b"'] * 40) + b"]}", path=TEXT, status=400,
         param="prompt", says="41 prompts"),
    Case("prompts behind blanks", HEAD + b'"prompt":[' + b" " * 80 + b'[1],[2],' + b",".join([b"[3]"] * 39) + b"]}",
         path=TEXT, status=400, param="prompt", says="41 prompts"),
    Case("stream_options that are a number", {"stream": True, "stream_options": 5}, status=400,
         param="stream_options"),
    Case("stream_options that are a list", {"stream": True, "stream_options": ["include_usage"]}, status=400,
         param="stream_options"),
    Case("a salt of 70 kB", {"cache_salt": "x" * 70_000}, BULK, status=400, param="cache_salt", tenants=True,
         doors=BEHIND),
    Case("a flag of 70 kB", {"ignore_eos": "x" * 70_000}, BULK, status=400, param="ignore_eos", tenants=True),
    Case("more choices, by a setting", {"n": 17}, settings={"max_choices": 17}, counts=17),
    Case("other servers' fields, unused", {"models": ["m"], "reasoning_format": "none", "repetition_penalty_range": 64,
         "typical_p": 1, "top_a": 0, "mirostat_mode": 0, "provider": {"order": ["x"]}}),
    Case("fields that nobody knows", {"store": True, "metadata": {"a": "b"}, "prompt_cache_key": "k", "other": [1]}),
    Case("64 fields that nobody knows", {f"field_{i}": 1 for i in range(64)}),
    Case("another server's sampler", {"typical_p": 0.5}, status=400, param="typical_p", doors=("server",)),
    Case("beam search", {"use_beam_search": True}, status=400, param="use_beam_search"),
    Case("where KV is", {"kv_transfer_params": {"remote_host": "10.9.9.9"}}, status=400, param="kv_transfer_params",
         doors=("server", "gateway", "picker")),
    Case("what the server refuses, in the background", {"temperature": -1, "background": True}, status=400),
    Case("a length in other digits", {"slo": {"ttft_ms": 900}}, {"content-length": "\xb2"}),
    Case("where an encoder's output is", {"ec_transfer_params": {"remote_host": "10.9.9.9"}}, status=400,
         param="ec_transfer_params", doors=("gateway", "picker")),
    Case("many fields", raw(**{f"field{i}": 1 for i in range(300)}), status=400, says="at most 256"),
    Case("what the server refuses", {"temperature": -1}, status=400, says="temperature"),
]  # fmt: skip
PATHS = [
    Case("a slash behind the path", path=CHAT + "/"),
    Case("a slash twice", path="//v1//chat/completions"),
    Case("an escape in the path", path="/v1/chat%2Fcompletions"),
    Case("a newline in the path", path="/v1/comp%0Aletions", status=400, says="control character"),
    Case("a tab in the path", path="/v1/chat/comp%09letions", status=400, says="control character"),
    Case("a newline behind the path", path=CHAT + "%0A", status=400, says="control character"),
    Case("escapes within escapes", path="/%" + "25" * 30_000, status=400, says="escapes within escapes"),
    Case("a path that no server has", path="/v1/nothing", method="GET", status=404,
         doors=("server", "gateway", "picker")),
    Case("up in the path", path="/v1/models/../chat/completions", status=400, says="a part . or .."),
    Case("up, escaped", path="/v1/%2e%2e/rubato/link", status=400, says="a part . or .."),
    Case("up, escaped twice", path="/v1/%252e%252e/x", status=400, says="a part . or .."),
    Case("up, after a backslash", path="/v1/models/..%5crubato/link", status=400, says="a part . or .."),
    Case("up, after here", path="/tokenize/./../rubato/state", status=400, says="a part . or .."),
    *[Case(f"not there: {method} {page}", path=page, method=method, status=status, doors=("server",))
      for method, page, status in (("GET", "/v2/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
                                   ("GET", "/v1/models/other", 404))],
    Case("ours, as a tenant", path="/rubato/link", status=403, tenants=True, headers=KEY,
         doors=("gateway", "middleware")),
    Case("ours, spelt otherwise", path="//rubato/./link", status=400, doors=("gateway", "picker", "middleware")),
    Case("ours, escaped", path="/%72ubato/link", status=403, doors=("gateway", "picker")),
    Case("ours, with slashes", path="//rubato//link/", status=403, doors=("gateway", "picker")),
]  # fmt: skip
WHO = [
    Case("no key", status=401, tenants=True, doors=KEYLESS),
    Case("an unknown key", headers={"authorization": "Bearer nobody"}, status=401, tenants=True, doors=KEYLESS),
    *[Case(f"no key: {header!r}", headers={"authorization": header}, status=401, tenants=True, doors=KEYLESS)
      for header in ("Bearer", "Bearer  ", "Basic acme-key", "acme-key", "Bearer acme-key acme-key")],
    Case("no key: another header", headers={"api-key": "acme-key"}, status=401, tenants=True, doors=KEYLESS),
    *[Case(f"no key: {page}", path=page, method="GET", status=401, tenants=True, doors=doors) for page, doors in (
        ("/v1/models", KEYLESS), ("/v1/models/x", KEYLESS), ("/debug/requests/x", ("server", "gateway")),
        ("/rubato/requests/x", ("middleware",)))],
    *[Case(f"no key needed: {page}", path=page, method="GET", tenants=True, counts=0, doors=KEYLESS)
      for page in ("/health", "/metrics", "/openapi.json")],
    Case("a key for the models", headers=KEY, path="/v1/models", method="GET", tenants=True, counts=0, doors=KEYLESS),
    Case("a key", {"user": "bulk", "metadata": {"tenant": "bulk"}},
         {**KEY, "x-tenant": "bulk", "openai-organization": "bulk"}, tenants=True, tenant="acme", doors=KEYLESS),
    Case("a key that nobody asks for", {"user": "me"}, KEY, tenant="default", doors=KEYLESS),
    Case("a key's scheme in lower case", headers={"authorization": "bearer acme-key"}, tenants=True, doors=KEYLESS),
    Case("a key as Anthropic's clients send it", headers={"x-api-key": "acme-key"}, tenants=True, tenant="acme",
         doors=KEYLESS),
    Case("a tier beyond the tenant's", {"service_tier": "batch"}, KEY, tenants=True, doors=KEYLESS,
         targets={"ttft_ms": 1000.0}, clamped="service_tier", tier="chat"),
    Case("a time and a tier beyond the tenant's", {"service_tier": "batch", "vllm_xargs": {"slo_ttft_ms": 1}}, KEY,
         tenants=True, doors=("gateway", "middleware"), targets={"ttft_ms": 1000.0}, clamped="service_tier, ttft"),
    Case("a time beyond the tenant's", {"slo": {"ttft_ms": 100}}, KEY, tenants=True, doors=KEYLESS,
         targets={"ttft_ms": 1000.0}, clamped="ttft"),
    Case("a time beyond the tenant's, streamed", {"slo": {"ttft_ms": 100}, "stream": True}, KEY, tenants=True,
         doors=KEYLESS, clamped="ttft", tenant="acme"),
    Case("another's name", headers={**KEY, "x-rubato-tenant": "bulk"}, status=400, param="x-rubato-tenant",
         tenants=True, doors=KEYLESS),
    Case("another's name, of an admin", headers={**OPS, "x-rubato-tenant": "acme"}, tenants=True, tenant="acme",
         doors=KEYLESS),
    Case("another's name, misspelt", headers={**OPS, "x-rubato-tenant": "acmee"}, status=400, tenants=True,
         param="x-rubato-tenant", says="'acme'", doors=KEYLESS),
    Case("more choices than a tenant may have", {"n": 9}, BULK, status=400, param="n", says="at most 8 in flight",
         tenants=True, doors=KEYLESS),
    Case("where KV is, of a tenant", {"kv_transfer_params": {"remote_host": "10.9.9.9"}}, KEY, status=400,
         param="kv_transfer_params", tenants=True, doors=KEYLESS),
    *[Case(f"an operator's page, as a tenant: {page}", path=page, headers=KEY, status=403, tenants=True,
           doors=("gateway", "middleware"))
      for page in ("/v1/load_lora_adapter", "/v1/chat/completions/batch", "/inference/v1/generate", "/invocations",
                   "/sleep", "/rubato/state")],
    Case("an operator's page, as an admin", path="/invocations", headers=OPS, tenants=True, counts=0,
         doors=("middleware",)),
    Case("what generates nothing, as a tenant", path="/tokenize", headers=KEY, tenants=True, counts=0,
         doors=("gateway", "middleware")),
    Case("another's response", path="/v1/responses/resp_1", method="GET", headers=KEY, status=404, tenants=True,
         doors=("gateway", "middleware")),
    Case("another's response, gone on from", {"previous_response_id": "resp_1", "input": "hi"}, KEY,
         path="/v1/responses", status=404, param="previous_response_id", tenants=True, doors=("gateway", "middleware")),
    Case("prefixes are a tenant's", {"cache_salt": "mine"}, KEY, tenants=True, doors=("gateway", "middleware"),
         sent=lambda seen: seen.body["cache_salt"] not in ("", "mine")),
]  # fmt: skip
HEADERS = [
    Case("internal headers do not pass",
         headers={"x-rubato-tenant": "ops", "x-rubato-any": "1", "x-slo-ttft-ms": "900"}, doors=("gateway", "picker"),
         sent=lambda seen: not {"x-rubato-tenant", "x-rubato-any"} & seen.headers.keys()
         and float(seen.headers["x-slo-ttft-ms"]) == 900.0),
    Case("headers of one hop do not pass", headers={"expect": "100-continue", "te": "trailers", "proxy-connection": "x",
         "http2-settings": "x", "x-forwarded-for": "10.0.0.9", "cookie": "a=b"}, doors=("gateway",),
         sent=lambda seen: not {"expect", "te", "proxy-connection", "http2-settings", "cookie"} & seen.headers.keys()),
    Case("a trace passes", headers={"traceparent": "00-1-2-03", "user-agent": "me"}, doors=BEHIND,
         sent=lambda seen: seen.headers["traceparent"] == "00-1-2-03" and seen.headers["user-agent"] == "me"),
    Case("keys of a tenant do not pass", headers=KEY, tenants=True, doors=("gateway",),
         sent=lambda seen: "authorization" not in seen.headers),
]  # fmt: skip
KV = [
    Case("where KV is, in vllm_xargs", {"vllm_xargs": {"kv_transfer_params": "x"}}, status=400,
         param="vllm_xargs.kv_transfer_params", doors=BEHIND),
    Case("where an encoder's output is, in vllm_xargs, of an admin", {"vllm_xargs": {"ec_transfer_params": ["x"]}}, OPS,
         status=400, param="vllm_xargs.ec_transfer_params", tenants=True, doors=("gateway", "middleware")),
]  # fmt: skip
SHARED = [
    Case("too large, to be tokenized", {"text": "x" * 200_000}, KEY, path="/tokenize", status=413, tenants=True,
         says="larger than 100000 bytes", doors=("gateway", "middleware")),
    Case("the tokens of a message, as a tenant", {"text": "x"}, KEY, path="/v1/messages/count_tokens", tenants=True,
         counts=0, doors=("middleware",)),
]  # fmt: skip
CASES = [*STATED, *BODIES, *PATHS, *WHO, *HEADERS, *KV, *SHARED]


@pytest.fixture(autouse=True)
def _seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "a key")  # of what the middleware says to its engine


@asked_of_doors(CASES)
def test_door_given_a_request_answers_right(door: Any, case: Case) -> None:
    async def scenario(opened: Door) -> None:
        before = _counts(opened)
        body = case.body
        if isinstance(body, bytes):
            body = body.replace(b'"stub"', json.dumps(opened.model).encode())
        answer = await opened.ask(case.path, body, case.headers, method=case.method)
        assert answer.status == case.status, answer.body[:300]
        if case.status != 200:
            assert case.says in answer.body.decode()
            if not case.id.startswith("what the server refuses"):
                _check_error(case, answer)
        _check_promise(opened, case, answer)
        if (
            case.status in (400, 401, 403, 404, 413)
            and not case.id.startswith("what the server refuses")
            and opened.seen is not None
        ):
            assert not list(opened.seen)
        if case.sent is not None and opened.seen is not None:
            assert all(map(case.sent, opened.seen))
            assert list(opened.seen)
        offered, missed, errors, by_code = _counts(opened, case.status)
        assert offered - before[0] == case.offered
        assert missed - before[1] <= case.offered
        is_error = 400 <= case.status < 500 and case.status != 429
        assert (errors - before[2], by_code) == (is_error, is_error)
        if is_error:
            assert missed == before[1]
        assert opened.in_flight() == opened.places() == 0

    at(scenario, door=door, **({"tenants": TENANTS} if case.tenants and door.checks_keys else {}), **case.settings)


def _check_error(case: Case, answer: Answer) -> None:
    """In OpenAI's shape: a sentence that begins with what is wrong, and no key."""
    error = answer.error
    assert answer.headers["content-type"] == "application/json"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    assert "-key" not in answer.body.decode()
    if case.status == 429:
        return
    assert error["type"] == "invalid_request_error"
    if case.param is not None:
        assert error["param"] == case.param
        assert case.status != 400 or error["message"].startswith(case.param)
    if case.status == 401:
        assert (error["code"], answer.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")


def _check_promise(opened: Door, case: Case, answer: Answer) -> None:
    """By the verdict; where a data plane passes the server's answer, by what its server was told."""
    if case.targets is not None and opened.checks_keys:
        targets = answer.json["rubato"]["targets"]
        assert {name: targets[name] for name in case.targets} == case.targets
        assert case.clamped is None or answer.json["rubato"]["met"] is True  # by what is granted
    elif case.targets is not None:
        assert opened.seen is not None
        (seen,) = opened.seen
        headers = {f"x-slo-{name.replace('_', '-')}": ms for name, ms in case.targets.items()}
        told = {name: float(seen.headers[name]) if name in seen.headers else None for name in headers}
        assert told == headers
    if case.status == 200 and opened.checks_keys:
        assert answer.headers.get("x-rubato-clamped") == case.clamped
        assert answer.headers.get("x-rubato-version") == (rubato.__version__ if case.path == "/v1/models" else None)
    labels = {name: label for name in ("tier", "tenant") if (label := getattr(case, name)) is not None}
    assert opened.count("rubato_requests_offered_total", **labels) == case.offered


def _counts(opened: Door, status: int = 0) -> tuple[float, float, float, float]:
    return (
        opened.count("rubato_requests_offered_total"),
        opened.count("rubato_slo_missed_total"),
        opened.count("rubato_client_errors_total"),
        opened.count("rubato_client_errors_total", code=str(status)),
    )
