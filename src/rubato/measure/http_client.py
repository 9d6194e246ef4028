"""How requests to one OpenAI-compatible server are written, and what that server says it is.

Servers that do not know a field may refuse it: SLOs, `ignore_eos` and `continuous_usage_stats` go only to servers that
are known to take them (by `owned_by` in their list of models) or on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from rubato.core.types import SLO
from rubato.measure.http_response import told
from rubato.workloads import Arrival

TierField = Literal["slo", "body", "tier", "none", "vllm-xargs"]
Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "chat/completions", "completions": "completions"}
FIXED_LENGTHS = frozenset({"rubato", "vllm", "sglang"})  # owners whose servers take ignore_eos and usage in each chunk


class BenchError(RuntimeError):
    """The run cannot begin: no server, another model, or a workload without texts."""


@dataclass(frozen=True)
class Target:
    """A server, and how to ask it. base_url: with or without "/v1".

    tier_field: "slo" states each tier's SLO in the body (ms) and its name as service_tier, "body" only the SLO (for a
    server that has no such tiers), "tier" only the name, "vllm-xargs" both as flat keys in vLLM's `vllm_xargs`, "none"
    neither (for a server that knows no SLOs). ignore_eos: ask for exactly as many tokens as the workload says.
    continuous_usage: ask for token counts with each chunk, beside those at the end. extra: fields to add to each body.
    """

    base_url: str
    model: str
    endpoint: Endpoint = "chat"
    tier_field: TierField = "slo"
    ignore_eos: bool = True
    continuous_usage: bool = True
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{v1(self.base_url)}/{PATHS[self.endpoint]}"

    def http_headers(self) -> dict[str, str]:
        return {"content-type": "application/json"} | authorised(self.api_key, self.headers)

    def body(self, arrival: Arrival, slo: SLO) -> bytes:
        """Raises BenchError for a request without a text, or of several stages."""
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
        named = (("ttft_ms", slo.ttft), ("tpot_ms", slo.tpot), ("e2e_ms", slo.e2e))
        stated = {name: value * 1000.0 for name, value in named if value is not None}
        if self.tier_field == "vllm-xargs":
            return {"vllm_xargs": {f"slo_{name}": value for name, value in stated.items()} | {"slo_tier": tier}}
        fields: dict[str, Any] = {"service_tier": tier} if self.tier_field in ("slo", "tier") else {}
        return fields | ({"slo": stated} if self.tier_field in ("slo", "body") else {})


@dataclass(frozen=True, slots=True)
class Listed:
    """What a server's list of models says; models is None where it keeps no such list. owner: `owned_by` of the first,
    "" if it does not say."""

    models: tuple[str, ...] | None
    owner: str = ""

    @property
    def knows_slos(self) -> bool:
        return self.owner == "rubato"

    @property
    def fixed_lengths(self) -> bool:
        """Does this kind of server take `ignore_eos`, and `continuous_usage_stats`?"""
        return self.owner in FIXED_LENGTHS

    def first(self, base_url: str) -> str:
        """The first model. Raises BenchError when there is none."""
        if not self.models:
            raise BenchError(f"the server at {v1(base_url)} lists no models: name the one to ask for")
        return self.models[0]


async def look(base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> Listed:
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
                return Listed(None)
            entries = orjson.loads(await response.read())["data"]
            models = tuple(str(entry["id"]) for entry in entries)
            return Listed(models, str(entries[0].get("owned_by", "")) if entries else "")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"no OpenAI-compatible server at {url}: {told(error)}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{url}/models is not a list of models in OpenAI's shape ({told(error)})") from error


def v1(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1") + "/v1"


def authorised(api_key: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    return ({} if api_key is None else {"authorization": f"Bearer {api_key}"}) | dict(headers)
