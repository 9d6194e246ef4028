"""A client of one OpenAI-compatible server: how requests are written, what the server says it is, and each response
followed token by token to the end of its stream.

Servers that do not know a field may refuse it: SLOs, `ignore_eos` and `continuous_usage_stats` go only to servers that
are known to take them (by a header of their list of models, or by `owned_by` in it) or on request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from rubato.core.request import SLO, Outcome
from rubato.core.server_url import VERSION_HEADER, connection_failure
from rubato.workloads import Arrival

TierField = Literal["slo", "body", "tier", "none", "vllm-xargs", "priority"]
EndpointKind = Literal["chat", "completions"]
PATHS: Mapping[EndpointKind, str] = {"chat": "chat/completions", "completions": "completions"}
FIXED_LENGTHS = frozenset({"rubato", "vllm", "sglang"})  # owners whose servers take ignore_eos and usage in each chunk

BROKEN = frozenset({"error", "abort", "cancelled"})  # finish reasons that are not a completion


class BenchError(RuntimeError):
    """The run cannot begin: no server, another model, or a workload without texts."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and how it is asked.

    Args:
        base_url: with or without "/v1".
        tier_field: "slo" states each tier's SLO in the body (ms) and its name as service_tier, "body" only the SLO (for
            a server that has no such tiers), "tier" only the name, "vllm-xargs" both as flat keys in vLLM's
            `vllm_xargs`, "priority" only vLLM's `priority`, the tier's place in `order` (tiers, the most urgent first),
            "none" neither (for a server that knows no SLOs).
        ignore_eos: ask for exactly as many tokens as the workload says.
        continuous_usage: ask for token counts with each chunk, and not only at the end.
        extra: fields to add to each body.
    """

    base_url: str
    model: str
    endpoint: EndpointKind = "chat"
    tier_field: TierField = "slo"
    order: tuple[str, ...] = ()
    ignore_eos: bool = True
    continuous_usage: bool = True
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{v1(self.base_url)}/{PATHS[self.endpoint]}"

    def described(self) -> dict[str, Any]:
        """For the results: never the key, nor what headers hold."""
        values = asdict(self) | {"headers": sorted(self.headers)}
        del values["api_key"]
        return values

    def body(self, arrival: Arrival, slo: SLO) -> bytes:
        """Raises BenchError for a request without a text, of several stages, or of a tier that has no priority."""
        if not arrival.messages:
            raise BenchError(f"request {arrival.id!r} has no prompt text: make some of its length with --texts")
        if arrival.parts:
            raise BenchError(f"request {arrival.id!r} has {len(arrival.parts)} stages: it can only be simulated")
        body: dict[str, Any] = {"model": self.model, **self._prompt(arrival), "max_tokens": arrival.output_tokens}
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= {"temperature": arrival.temperature, "stream": True, "stream_options": {"include_usage": True}}
        if self.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if arrival.seed is not None:
            body["seed"] = arrival.seed
        return orjson.dumps(body | self._promise(arrival.tier, slo) | dict(self.extra))

    def _prompt(self, arrival: Arrival) -> dict[str, Any]:
        if self.endpoint == "completions":
            return {"prompt": "\n\n".join(content for _, content in arrival.messages)}
        return {"messages": [{"role": role, "content": content} for role, content in arrival.messages]}

    def _promise(self, tier: str, slo: SLO) -> dict[str, Any]:
        if self.tier_field == "priority":
            if tier not in self.order:
                raise BenchError(
                    f"tier {tier!r} has no priority: name it in `order`, which has {', '.join(self.order)}"
                )
            return {"priority": self.order.index(tier)}
        # a `max_pause` is a setting of the server's tier
        bounds_ms = {f"{name}_ms": value * 1000.0 for name, value in slo.bounds.items() if name != "max_pause"}
        if self.tier_field == "vllm-xargs":
            return {"vllm_xargs": {f"slo_{name}": value for name, value in bounds_ms.items()} | {"slo_tier": tier}}
        fields: dict[str, Any] = {"service_tier": tier} if self.tier_field in ("slo", "tier") else {}
        return fields | ({"slo": bounds_ms} if self.tier_field in ("slo", "body") else {})


@dataclass(frozen=True, slots=True)
class ServerModels:
    """What a server's list of models says.

    Args:
        models: None where the server keeps no such list.
        owner: `owned_by` of the first, "" if it does not say.
        rubato: the version of Rubato that answers, in front of vLLM or inside it too; "" if none.
    """

    models: tuple[str, ...] | None
    owner: str = ""
    rubato: str = ""

    @property
    def knows_slos(self) -> bool:
        return self.rubato != ""

    @property
    def fixed_lengths(self) -> bool:
        """Does this kind of server take `ignore_eos`, and `continuous_usage_stats`?"""
        return self.owner in FIXED_LENGTHS

    def first(self, base_url: str) -> str:
        """The first model. Raises BenchError when there is none."""
        if not self.models:
            raise BenchError(f"the server at {v1(base_url)} lists no models: name the one to ask for")
        return self.models[0]


async def list_models(
    base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
) -> ServerModels:
    """Ask a server for its models. Raises BenchError when it does not answer, or not in OpenAI's shape."""
    url = v1(base_url)
    try:
        async with (
            asyncio.timeout(30.0),
            aiohttp.ClientSession(headers=authorised(api_key, headers or {})) as session,
            session.get(f"{url}/models") as response,
        ):
            if response.status in (401, 403):
                raise BenchError(f"{url}/models answers HTTP {response.status}: give a valid --api-key")
            if response.status != 200:
                return ServerModels(None)
            entries = orjson.loads(await response.read())["data"]
            models = tuple(str(entry["id"]) for entry in entries)
            owner = str(entries[0].get("owned_by", "")) if entries else ""
            return ServerModels(models, owner, response.headers.get(VERSION_HEADER, ""))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"no OpenAI-compatible server at {url}: {connection_failure(error)}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{url}/models is not a list of models in OpenAI's shape ({error_text(error)})") from error


def v1(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1") + "/v1"


def authorised(api_key: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    return ({} if api_key is None else {"authorization": f"Bearer {api_key}"}) | dict(headers)


# --------------------------------------------------------------------------- one request


@dataclass(slots=True)
class AnswerStream:
    """What has come back for one request so far; times in seconds from the workload's start."""

    sent: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome = "failed"
    reason: str = ""
    status: int | None = None
    prompt_tokens: int | None = None
    total: int = 0  # tokens by the usage at the end of the stream
    counted: bool = False
    finish: str | None = None
    server: dict[str, Any] | None = None  # what a Rubato server says of the request: tier served, verdict
    fault: int | None = None  # errno of a failure to connect

    def count(self, now: float, total: int) -> None:
        if total > (self.tokens[-1] if self.tokens else 0):
            self.times.append(now)
            self.tokens.append(total)

    def spread(self) -> None:
        """With usage at the end only: so many tokens, the first in the first chunk, evenly over the other chunks."""
        chunks = len(self.tokens)
        if not self.counted and chunks and self.total >= chunks:
            rest = (self.total - 1) / max(1, chunks - 1)
            self.tokens = [1 + round(i * rest) for i in range(chunks - 1)] + [self.total]

    def fail(self, reason: str) -> None:
        self.outcome, self.reason = "failed", reason


async def stream_request(
    session: aiohttp.ClientSession, url: str, body: bytes, answer: AnswerStream, start: float, give_up: float,
    headers: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Sends one request and reads its stream to the end; whatever happens to it ends up in `answer`.

    Args:
        start: when the workload began, in seconds of the loop's clock.
        give_up: when to stop waiting, in seconds of the loop's clock.
        headers: sent with those of the session.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(give_up):
            answer.sent = loop.time() - start
            async with session.post(url, data=body, headers=headers) as response:
                answer.status = response.status
                if response.status == 200:
                    await _read(response, answer, start)
                else:
                    _refused_or_failed(response, await response.read(), answer)
    except TimeoutError:
        answer.fail(f"timeout: no end {give_up - start:.1f} s after the start of the workload")
    except orjson.JSONDecodeError as error:
        answer.fail(f"the stream holds an event that is not JSON ({error})")
    except (aiohttp.ClientError, OSError) as error:
        answer.fault = getattr(error, "errno", None)
        answer.fail(f"connection: {connection_failure(error)}")


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refused_or_failed(response: aiohttp.ClientResponse, body: bytes, answer: AnswerStream) -> None:
    message = ""
    code: Any = None
    with contextlib.suppress(orjson.JSONDecodeError):  # not every error page is JSON; its text serves as well
        page = orjson.loads(body)
        error = page.get("error", page) if isinstance(page, dict) else {}
        if isinstance(error, dict):
            message, code = str(error.get("message", "")), error.get("code")
    message = message or body[:200].decode("utf-8", "replace")
    if response.status == 429:
        answer.outcome = "refused"
        answer.reason = response.headers.get("x-rubato-reject-reason") or (str(code) if code else message)
    else:
        answer.fail(f"HTTP {response.status}: {message}")


async def _read(response: aiohttp.ClientResponse, answer: AnswerStream, start: float) -> None:
    """Follow a stream of server-sent events. What arrives in one read has the same time."""
    loop = asyncio.get_running_loop()
    rest = b""
    async for data in response.content.iter_any():
        now = loop.time() - start
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    continue
                try:
                    if not _fold(answer, orjson.loads(payload), now):
                        return
                except (AttributeError, TypeError, LookupError) as error:
                    answer.fail(f"the stream holds an event of another shape than OpenAI's ({error_text(error)})")
                    return
    if answer.finish is None:
        answer.fail(
            f"the stream ended after {answer.tokens[-1] if answer.tokens else 0} tokens without a finish reason"
        )
    elif answer.finish in BROKEN:
        answer.fail(f"the server ended it: {answer.finish}")
    elif not answer.tokens:
        answer.fail("completed without a single token")
    else:
        answer.spread()
        answer.outcome = "completed"


def _fold(answer: AnswerStream, chunk: dict[str, Any], now: float) -> bool:
    """Take in one chunk; False when it is an error, which ends the stream."""
    error = chunk.get("error")
    if error is not None:
        message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        answer.fail(f"error in the stream: {message}")
        return False
    choices = chunk.get("choices")
    usage = chunk.get("usage") or {}
    total = usage.get("completion_tokens")  # some servers send null until the end
    if choices:
        choice = choices[0]
        if choice.get("finish_reason"):
            answer.finish = choice["finish_reason"]
        if total is not None:
            answer.counted = True
            answer.count(now, total)
        elif _text(choice):
            answer.count(now, (answer.tokens[-1] if answer.tokens else 0) + 1)
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens")
    if total is not None:
        answer.total = total
    if chunk.get("rubato"):
        answer.server = chunk["rubato"]
    return True


def _text(choice: dict[str, Any]) -> str:
    """A chunk's text, of a chat (with its reasoning, in either spelling) or of a completion."""
    delta = choice.get("delta") or {}
    said = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"), choice.get("text"))
    return "".join(part for part in said if isinstance(part, str))
