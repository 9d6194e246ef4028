"""What a server is, asked of itself: over the link, and over HTTP where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import orjson

from rubato.core.interfaces import LatencyModel
from rubato.core.link_messages import Message
from rubato.core.plan import Limits
from rubato.core.server_url import host_in_url
from rubato.fleet.server_replica import ServerAbout
from rubato.fleet.upstream import Upstream, UpstreamError, whole
from rubato.latency import affine

SECONDS = 10.0  # for each answer
KV_SECONDS = 2.0  # for one that is asked for every second
# Of a server that does not say: vLLM's own defaults for its API server, and a context that any model has.
UNSAID = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=16384, block_size=16)
UNLINKED = frozenset({"recall"})  # of a request of which nothing has come
LINKED = frozenset({"recall", "step_times"})
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
# One line for each engine, or rank: vLLM, SGLang.
USED = re.compile(r"^(?:vllm:kv_cache_usage_perc|sglang:token_usage)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


async def about(
    url: str, server: Upstream, told: Message | None, profile: LatencyModel | None, key: str = ""
) -> ServerAbout:
    """told: a core's greeting, None without the link. profile: what is known of step times, for a server that does not
    tell them. Raises ValueError and UpstreamError that name the server."""
    if told is not None:
        try:
            return ServerAbout(
                model=await _model(url, server, key) or told["model"],
                limits=Limits(**told["limits"]),
                latency=affine.Model.from_dict(told["latency"]),
                supports=frozenset(told["supports"]) | LINKED,
                policy=told["policy"],
                version=told["vllm"],
                kv_lease=told["kv_lease"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"server {url}: its engine's greeting cannot be read ({error})") from error
    found = await _json(url, server, "/v1/models", key)
    try:
        first = found["data"][0]
        model = str(first["id"])
        longest = int(first.get("max_model_len") or UNSAID.max_model_len)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"server {url}: /v1/models names no model: is this an OpenAI server?") from error
    limits = _with_cache(replace(UNSAID, max_model_len=longest), await metrics(server))
    supports = UNLINKED if profile is None else UNLINKED | {"step_times"}
    return ServerAbout(model, limits, profile or affine.Model(), supports, version=await _version(server))


async def link_address(url: str, server: Upstream, key: str = "") -> str | None:
    """Where the engine core of a server listens for gateways; None for one without. Raises UpstreamError for a server
    that does not answer."""
    reply = await server.open("GET", "/rubato/link", _headers(key), b"", seconds=SECONDS)
    raw = await whole(reply)
    if reply.status != 200:
        return None
    found = orjson.loads(raw)
    host = str(found["host"])
    if host in ("0.0.0.0", "::", "::1", "127.0.0.1", "localhost"):
        host = urlsplit(url).hostname or host
    return f"tcp://{host_in_url(host)}:{int(found['port'])}"


async def kv_used(server: Upstream) -> float | None:
    """What share of a server's KV is in use, by its metrics; None where these do not say so."""
    return _share_used(await metrics(server, KV_SECONDS))


async def metrics(server: Upstream, seconds: float = SECONDS) -> str:
    """A server's metrics; empty where it has none."""
    try:
        reply = await server.open("GET", "/metrics", (), b"", seconds=seconds)
        raw = await whole(reply)
    except UpstreamError:
        return ""
    return raw.decode(errors="replace") if reply.status == 200 else ""


def _with_cache(limits: Limits, text: str) -> Limits:
    if (found := CACHE.search(text)) is None:
        return limits
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and size.isdecimal() and int(blocks) and int(size)):
        return limits
    return replace(limits, kv_blocks=int(blocks), block_size=int(size))


def _share_used(text: str) -> float | None:
    """The mean, of a server with several engines. None where any of them is no share: the page is not understood."""
    try:
        shares = [float(found) for found in USED.findall(text)]
    except ValueError:
        return None
    if not shares or not all(0.0 <= share <= 1.0 for share in shares):  # (NaN is none)
        return None
    return sum(shares) / len(shares)


async def _model(url: str, server: Upstream, key: str) -> str:
    found = await _json(url, server, "/v1/models", key)
    data = found.get("data") or [{}]
    return str(data[0].get("id", ""))


async def _version(server: Upstream) -> str:
    reply = await server.open("GET", "/version", (), b"", seconds=SECONDS)
    raw = await whole(reply)
    try:
        return str(orjson.loads(raw)["version"]) if reply.status == 200 else ""
    except (ValueError, KeyError, TypeError):
        return ""


async def _json(url: str, server: Upstream, path: str, key: str) -> dict[str, Any]:
    reply = await server.open("GET", path, _headers(key), b"", seconds=SECONDS)
    raw = await whole(reply)
    if reply.status in (401, 403):
        raise ValueError(f"server {url} wants a key: set the environment variable that `server_key_env` names")
    try:
        found = orjson.loads(raw)
    except ValueError:
        found = None
    if reply.status != 200 or not isinstance(found, dict):
        raise ValueError(f"server {url}: {path} answered {reply.status} and no JSON object: is this an OpenAI server?")
    return found


def _headers(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()
