"""Asks a server for its properties: over the link, or over HTTP without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

import orjson

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.core.server_url import host_in_url
from rubato.fleet.served_models import Models, ServedModels
from rubato.fleet.server_link import Link
from rubato.fleet.upstream import PROBE_HEADERS, Upstream, UpstreamError, ask_health, read_all
from rubato.latency import affine
from rubato.wire.messages import CoreAbout

ANSWER_S = 10.0  # timeout of each answer
MODELS_ANSWER_S = 5.0  # for the models of a server that serves
KV_ANSWER_S = 2.0  # for metrics that are read every second
# Of a server that does not say: vLLM's own defaults for its API server, and a context that any model has.
DEFAULT_LIMITS = Limits(
    max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=16384, block_size=16
)
SUPPORTS_WITHOUT_LINK = frozenset({"recall"})  # recall: only before the first token
SUPPORTS_WITH_LINK = frozenset({"recall", "step_times"})
MAX_PAGE_BYTES = 8 << 20  # of a server's answer to the gateway's own question
MAX_MODEL_LEN_TOKENS = 1 << 30
COUNT = re.compile(r"[1-9][0-9]{0,8}")
CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL = re.compile(r'\b(\w{1,64})="([^"]{0,256})"')  # bounded: a page is a server's, of any length
# One line for each engine, or rank: vLLM, SGLang.
KV_USAGE = re.compile(r"^(?:vllm:kv_cache_usage_perc|sglang:token_usage)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ServerAbout:
    """Describes a server: its model, and the properties that a router sees.

    Args:
        version: of vLLM; empty if the server does not report it.
        kv_lease: seconds that the engine keeps KV for another engine to read; None: it has no KV connector.
    """

    model: str
    limits: Limits
    latency: LatencyModel
    supports: frozenset[str]
    policy: str = ""
    version: str = ""
    kv_lease: float | None = None


async def about(
    url: str, server: Upstream, core: CoreAbout | None, profile: LatencyModel | None, models: Models, model: str
) -> ServerAbout:
    """Asks a server for its properties.

    Args:
        url: its address.
        server: HTTP to it.
        core: the greeting of its core; None without a link.
        profile: predicts step times, for a server that does not report them.
        models: those that the server lists.
        model: the fleet's model, one of these.

    Raises:
        ValueError: an answer cannot be used.
        UpstreamError: the server does not answer.
    """
    if core is not None:
        try:
            return ServerAbout(
                model=model,
                limits=core.limits,
                latency=affine.Model.from_dict(core.latency),
                supports=frozenset(core.supports) | SUPPORTS_WITH_LINK,
                policy=core.policy,
                version=core.vllm,
                kv_lease=core.kv_lease,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"server {url}: its engine's greeting cannot be read ({error})") from error
    context_tokens = models[model].get("max_model_len") or DEFAULT_LIMITS.max_model_len
    if not (type(context_tokens) is int and 0 < context_tokens <= MAX_MODEL_LEN_TOKENS):
        raise ValueError(f"server {url}: /v1/models has a max_model_len that is no number of tokens")
    limits = with_cache(replace(DEFAULT_LIMITS, max_model_len=context_tokens), await metrics(server))
    supports = SUPPORTS_WITHOUT_LINK if profile is None else SUPPORTS_WITHOUT_LINK | {"step_times"}
    return ServerAbout(model, limits, profile or affine.Model(), supports, version=await _version(server))


async def ready_models(url: str, server: Upstream, key: str = "") -> Models:
    """Returns the models of a ready server: its /health is 200, or 404 if it has no such page, and it lists models.

    Raises:
        ValueError: the server is not ready.
    """
    try:
        status = await ask_health(server, ANSWER_S)
        why = "" if status in (200, 404) else f"/health answered {status}"
        served = {} if why else await models(url, server, key)
    except UpstreamError as error:
        why = str(error)
    if why:
        raise ValueError(f"server {url} is not there ({why}): start it first, or correct its address")
    if not served:
        raise ValueError(f"server {url}: /v1/models names no model yet")
    return served


async def models(url: str, server: Upstream, key: str = "", seconds: float = ANSWER_S) -> Models:
    """Returns the models that a server lists at /v1/models.

    Args:
        url: its address, for errors.
        server: HTTP to it.
        key: for its API.
        seconds: for the answer.

    Raises:
        UpstreamError: the server does not answer.
        ValueError: the list cannot be read.
    """
    reply = await server.open("GET", "/v1/models", _headers(key), b"", seconds=seconds)
    raw = await read_all(reply, MAX_PAGE_BYTES)
    if reply.status in (401, 403):
        raise ValueError(f"server {url} wants a key: set the environment variable that `key_env` names")
    if reply.status != 200:
        raise ValueError(f"server {url}: /v1/models answered {reply.status}: is this an OpenAI server?")
    try:
        entries = {one["id"]: dict(one) for one in orjson.loads(raw)["data"] or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"server {url}: /v1/models is no list of models: is this an OpenAI server?") from error
    if not all(isinstance(name, str) for name in entries):
        raise ValueError(f"server {url}: /v1/models has a model without a name: is this an OpenAI server?")
    return entries


async def link_address(url: str, server: Upstream, key: str = "") -> str | None:
    """Returns where the engine core of a server listens for gateways; None for a server without a link.

    Raises:
        UpstreamError: the server does not answer, or not for now.
        ValueError: it names no address, or one of another host.
    """
    reply = await server.open("GET", "/rubato/link", _headers(key), b"", seconds=ANSWER_S)
    raw = await read_all(reply, MAX_PAGE_BYTES)
    if reply.status in (502, 503, 504):
        raise UpstreamError(f"/rubato/link answered {reply.status}")
    if reply.status != 200:
        return None
    own = urlsplit(url).hostname or ""
    try:
        found = orjson.loads(raw)
        named, port = str(found["host"]), int(found["port"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"server {url}: /rubato/link names no address ({type(error).__name__})") from error
    if named.lower() != own and not _means_itself(named):
        raise ValueError(
            f"server {url} names {host_in_url(named)}:{port} as its link, on another host: if it is there, give "
            f"this server as {{url: ..., link: tcp://{host_in_url(named)}:{port}}}"
        )
    return f"tcp://{host_in_url(own)}:{port}"


def _means_itself(host: str) -> bool:
    """Returns whether a server means itself by this address: all of its own, or loopback."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


async def kv_used(server: Upstream) -> float | None:
    """Returns the share of a server's KV in use, from its metrics; None if they do not report it."""
    return _share_used(await metrics(server, KV_ANSWER_S))


async def metrics(server: Upstream, seconds: float = ANSWER_S) -> str:
    """Returns a server's metrics; empty for a server without any."""
    try:
        reply = await server.open("GET", "/metrics", PROBE_HEADERS, b"", seconds=seconds)
        raw = await read_all(reply, MAX_PAGE_BYTES)
    except UpstreamError:
        return ""
    return raw.decode(errors="replace") if reply.status == 200 else ""


def with_cache(limits: Limits, text: str) -> Limits:
    """Returns the limits with the number and size of KV blocks that the server's metrics show, if they do."""
    if (found := CACHE_INFO.search(text)) is None:
        return limits
    labels = dict(LABEL.findall(found[1]))
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (COUNT.fullmatch(blocks) and COUNT.fullmatch(size)):
        return limits
    return replace(limits, kv_blocks=int(blocks), block_size=int(size))


def _share_used(text: str) -> float | None:
    """Returns the share of the KV in use, a mean over engines; None if any value is no share: the page is not
    understood."""
    try:
        shares = [float(found) for found in KV_USAGE.findall(text)]
    except ValueError:
        return None
    if not shares or not all(0.0 <= share <= 1.0 for share in shares):  # (NaN is none)
        return None
    return sum(shares) / len(shares)


async def _version(server: Upstream) -> str:
    reply = await server.open("GET", "/version", PROBE_HEADERS, b"", seconds=ANSWER_S)
    raw = await read_all(reply, MAX_PAGE_BYTES)
    try:
        return str(orjson.loads(raw)["version"]) if reply.status == 200 else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _headers(key: str) -> tuple[tuple[str, str], ...]:
    return (*PROBE_HEADERS, ("authorization", f"Bearer {key}")) if key else PROBE_HEADERS


class UnlikeServerError(ValueError):
    """A server is of another kind than the fleet; the gateway does not start."""


class HomogeneityCheck:
    """Checks that all servers of a fleet are like the first one.

    Args:
        policy: of the gateway's router.
        urls: of the servers, if known.
    """

    def __init__(self, policy: str, urls: Iterable[str] = ()) -> None:
        self.first_server: ServerAbout | None = None
        self.models = ServedModels(urls)
        self._first_url = ""  # its address
        self._policy = policy

    def check_models(self, url: str, models: Models) -> None:
        """Takes the models of a starting server.

        Raises:
            ValueError: the fleet's model, the first of the first server, is not among them.
        """
        main = self.models.main = self.models.main or next(iter(models))
        if main not in models:
            raise ValueError(f"server {url} lists the models {', '.join(models):.200}, and not the fleet's, {main!r}")
        self.models.set_models(url, models)

    def check(self, url: str, about_server: ServerAbout) -> None:
        """Raises UnlikeServerError for a server of another vLLM version, or another policy, than the first server."""
        if self.first_server is None:
            self.first_server, self._first_url = about_server, url
        first = self.first_server
        for what, ours, theirs in (
            ("vLLM", first.version, about_server.version),
            ("policy", first.policy, about_server.policy),
        ):
            if ours and theirs and ours != theirs:
                raise UnlikeServerError(
                    f"server {url} has {what} {theirs!r}, and {self._first_url} {ours!r}: a gateway is for servers "
                    "that are alike; start another gateway for those"
                )
        if about_server.policy and about_server.policy != self._policy:
            raise UnlikeServerError(
                f"server {url} schedules by policy {about_server.policy!r}, and the gateway is to route for "
                f"{self._policy!r}: give the gateway --policy {about_server.policy}, or start the server with "
                f"{self._policy!r}"
            )


class FleetProbe:
    """Asks a replica's server, whose answers must fit its fleet.

    Args:
        url: of the server.
        upstream: HTTP to it.
        profile: predicts step times of servers that do not report them.
        link: opens the link to a core's address; None: the server is not asked for it.
        link_address: of the server's core; empty: as the server says.
        check: raises ValueError for a server that the fleet cannot use.
    """

    def __init__(
        self, url: str, upstream: Upstream, homogeneity: HomogeneityCheck, profile: Callable[[], LatencyModel | None],
        link: Callable[[str], Link] | None, *, key: str = "", link_address: str = "",
        check: Callable[[ServerAbout, CoreAbout | None], None] = lambda about, core: None,
    ) -> None:  # fmt: skip
        self.url = url
        self.upstream = upstream
        self._homogeneity, self._profile, self._link, self._check = homogeneity, profile, link, check
        self._key, self._link_address = key, link_address
        self._models: Models = {}

    async def open_link(self) -> Link | None:
        """Opens the link; returns None for a server without one.

        Raises:
            ValueError: the server is not ready.
            UpstreamError: the server does not answer.
        """
        self._models = await ready_models(self.url, self.upstream, self._key)
        self._homogeneity.check_models(self.url, self._models)
        if self._link is None:
            return None
        address = self._link_address or await link_address(self.url, self.upstream, self._key)
        return None if address is None else self._link(address)

    async def about(self, core: CoreAbout | None) -> ServerAbout:
        """Asks a ready server for its properties. Raises ValueError, UpstreamError or UnlikeServerError.

        Args:
            core: the greeting of its core; None without a link.
        """
        models, main = self._models, self._homogeneity.models.main
        about_server = await about(self.url, self.upstream, core, self._profile(), models, main)
        self._homogeneity.check(self.url, about_server)
        self._check(about_server, core)
        return about_server

    async def read_models(self) -> None:
        """Reads the server's list of models again. Raises ValueError or UpstreamError."""
        listed = await models(self.url, self.upstream, self._key, MODELS_ANSWER_S)
        self._homogeneity.models.set_models(self.url, listed)

    async def kv_used(self) -> float | None:
        """Reads the share of the server's KV in use; None if its metrics do not report it."""
        return await kv_used(self.upstream)
