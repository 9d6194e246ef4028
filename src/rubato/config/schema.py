"""The configuration of one server: a YAML file, and `a.b=value` overrides on top of it.

    model: bundled
    engine: {kind: torch, dtype: bfloat16, kv_gib: 1.0}
    policy: {name: rubato, fairness: 2}
    tiers:
      interactive: {ttft_ms: 1000, tpot_ms: 80}
      batch: {e2e_ms: 60000, on_decline: refuse}
    tenants:
      acme: {keys_env: ACME_KEYS, tiers: [interactive], requests_per_minute: 600}

Every unknown or impossible setting is a ConfigError that names it and the nearest known one. Keys and passwords are
never in an error: what was given for a tenant, for servers or for TLS is not repeated unless it is a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rubato.core.did_you_mean import nearest
from rubato.core.request import LEAST_MS, MOST, MOST_MS, SLO, OnDecline
from rubato.core.server_url import check_url, server_base_url
from rubato.core.slo import SLO_RULES


class ConfigError(ValueError):
    """A setting that is unknown or impossible; the message names it, and what would do."""


class StrictSettings(BaseModel):
    """Settings of which every name and type must be right."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Named(StrictSettings):
    """Something chosen by name, with settings that the chosen thing itself checks."""

    name: str = Field(min_length=1)
    settings: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """`rubato`, `{name: rubato, fairness: 2}` and `{kind: ...}` -> name and settings."""
        if isinstance(value, str):
            return {"name": value, "settings": {}}
        if not isinstance(value, Mapping) or set(value) == {"name", "settings"}:
            return value
        rest = dict(value)
        name = rest.pop("kind", None) if "kind" in rest else rest.pop("name", None)
        if name is None:
            raise ValueError("say which: `name` (or `kind`) is missing")
        return {"name": name, "settings": rest}


def _digest(value: Any) -> bytes:
    """Of a key's SHA-256: the key itself is not kept. Raises ValueError for what no client could send."""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
        raise ValueError("a key must be a string of visible ASCII characters without blanks")
    return sha256(value.encode()).digest()


class TierSettings(StrictSettings):
    """A tier, of a server or in a file of request kinds: its SLO in milliseconds, and what becomes of a request whose
    SLO cannot be met. max_pause_ms: between two of its tokens, by the deadline rule; default: no bound."""

    ttft_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    tpot_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    e2e_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    max_pause_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    on_decline: OnDecline = "best_effort"

    @model_validator(mode="after")
    def _pause_of_a_pace(self) -> TierSettings:
        if self.max_pause_ms is not None and self.tpot_ms is None:
            raise ValueError("max_pause_ms bounds the pauses of a tier with a TPOT: give tpot_ms too")
        return self

    @property
    def slo(self) -> SLO:
        return SLO.from_ms(self.ttft_ms, self.tpot_ms, self.e2e_ms, self.max_pause_ms)


class TenantSettings(StrictSettings):
    """A tenant: its keys, tiers and limits. Keys stand here, in a file (one a line, # comments), or in an environment
    variable (separated by blanks or commas); only their digests are kept.

    tiers: names of the tiers it may use, None = all. weight: of its share beside other tenants'. tokens_per_minute
    counts prompt and output. admin: may see every tenant's requests.
    """

    keys: Annotated[tuple[Annotated[bytes, BeforeValidator(_digest)], ...], Field(strict=False, repr=False)] = ()
    key_file: str | None = None
    keys_env: str | None = None
    tiers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    max_in_flight: int | None = Field(default=None, ge=1)
    admin: bool = False

    @model_validator(mode="after")
    def _some_key(self) -> TenantSettings:
        if not self.keys and self.key_file is None and self.keys_env is None:
            raise ValueError("no request can be of this tenant: give keys, key_file or keys_env")
        return self

    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every key, those in the file and the environment included. Raises ConfigError."""
        found = list(self.keys)
        for source, words in (("key_file", self._from_file()), ("keys_env", self._from_environment())):
            try:
                found += map(_digest, words)
            except ValueError as error:
                raise ConfigError(f"{source}: {error}") from None
        return tuple(found)

    def _from_file(self) -> list[str]:
        if self.key_file is None:
            return []
        try:
            lines = Path(self.key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"key_file: {self.key_file} cannot be read ({why})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"key_file: {self.key_file} holds no key: write one a line")
        return keys

    def _from_environment(self) -> list[str]:
        if self.keys_env is None:
            return []
        keys = os.environ.get(self.keys_env, "").replace(",", " ").split()
        if not keys:
            raise ConfigError(f"keys_env: the environment variable {self.keys_env} is not set, or holds no key")
        return keys


class ServerSettings(StrictSettings):
    """One OpenAI server behind the gateway. url: what stands before the path of each request; a /v1 at its end is left
    out. link: its engine core's address for gateways, such as tcp://10.0.0.7:5557; default: as the server says
    (`/rubato/link`). key_env: the environment variable that holds a key for its API; default: a client's own key is
    passed on, where no tenants are configured."""

    url: str
    link: str = ""
    key_env: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """`http://10.0.0.7:8000` alone is the url."""
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return server_base_url(url, "for a key of its API set key_env to the environment variable that holds it")

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: str) -> str:
        if link and not re.fullmatch(r"tcp://[^\s@]+:\d+", link):
            raise ValueError("give the address of its engine core, such as tcp://10.0.0.7:5557")
        return link

    @property
    def key(self) -> str:
        """Raises ConfigError for a variable that is not set."""
        if self.key_env is None:
            return ""
        if not (key := os.environ.get(self.key_env, "")):
            raise ConfigError(f"servers: {self.url}: the environment variable {self.key_env} holds no key")
        return key


class FairShareSettings(StrictSettings):
    """window: requests that one replica sustains before tenants are held to their shares; null = worked out from the
    tightest TPOT promised and the replica's step times."""

    window: int | None = Field(default=None, ge=1)


class LogSettings(StrictSettings):
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TLSSettings(StrictSettings):
    """Paths of PEM files; key_password: of an encrypted key. Uvicorn's ssl_certfile, ssl_keyfile, ..._password."""

    cert: str
    key: str
    key_password: SecretStr | None = None


PARTS: Mapping[str, type[StrictSettings]] = {
    "tiers": TierSettings,
    "tenants": TenantSettings,
    "servers": ServerSettings,
    "fair_share": FairShareSettings,
    "log": LogSettings,
    "tls": TLSSettings,
}


class Config(StrictSettings):
    """Everything `serve` needs. max_in_flight: requests beyond it are refused at once (null: no bound; auto:
    `build.most_in_flight`). max_connections: null = as many as file descriptors allow. max_choices: prompts times `n`
    of one body.

    servers: of a gateway, the servers that it routes to; of a server that runs a model itself, none.

    replicas: at the start. autoscale: what adds and drains some while requests are served; null = nothing.
    fleet: where the replicas run, `local` (in this process) or `ray` (an actor each). prefix_cache: reuse the KV of
    prompts that begin alike, of one tenant. drain_seconds: how long SIGTERM lets running requests go on. stall_seconds:
    a client that takes or sends nothing for that long while it should is cut off. step_timeout_seconds: a step that
    takes longer than this, beyond what was predicted, is hung and its replica lost. event_log: path of the log of all
    events, null for none; prompts and outputs are in it only with event_log_content. step_log: path of a log of the
    steps alone. otlp_traces_endpoint: the collector's URL for OpenTelemetry's spans, such as
    http://127.0.0.1:4318/v1/traces; auto: as OTEL_EXPORTER_OTLP_ENDPOINT says; null: no spans.
    """

    model: str | None = None
    served_name: str | None = None
    engine: Named = Named(name="torch")
    servers: Annotated[tuple[ServerSettings, ...], Field(strict=False)] = ()
    replicas: int = Field(default=1, ge=1)
    autoscale: Named | None = None
    fleet: Named = Named(name="local")
    policy: Named = Named(name="rubato")
    router: Named = Named(name="auto")
    latency: Named | None = None
    lengths: Named | None = None
    tiers: Mapping[str, TierSettings] = {}
    default_tier: str = "default"
    tenants: Mapping[str, TenantSettings] = {}
    fair_share: FairShareSettings | None = None
    prefix_cache: bool = True
    max_in_flight: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: int = Field(default=4 << 20, ge=1)
    max_choices: int = Field(default=16, ge=1)
    max_connections: int | None = Field(default=None, ge=1)
    drain_seconds: float = Field(default=30.0, ge=0, le=MOST)
    stall_seconds: float = Field(default=30.0, gt=0, le=MOST)
    step_timeout_seconds: float = Field(default=60.0, gt=0, le=MOST)
    tls: TLSSettings | None = None
    log: LogSettings = LogSettings()
    event_log: str | None = None
    event_log_content: bool = False
    step_log: str | None = None
    otlp_traces_endpoint: str | None = None
    slo_rule: Literal["deadline", "mean", "windowed"] = "deadline"

    @field_validator("tiers", "tenants")
    @classmethod
    def _names(cls, named: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        what = "tier" if info.field_name == "tiers" else "tenant"
        if what == "tier" and "auto" in named:
            raise ValueError("`auto` cannot be a tier: it is OpenAI's name for the default one; set default_tier")
        for name in named:
            if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
                raise ValueError(
                    f"{name!r:.80} cannot be a {what}'s name: use letters, digits, `_`, `-` and `.` only, at most 64"
                )
        return named

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if "/" in host or host.startswith("unix:"):
            raise ValueError("Unix domain sockets are not supported: give an address, such as 127.0.0.1")
        return host

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_collector(cls, url: str | None) -> str | None:
        if url not in (None, "auto"):
            check_url(url, "for a key of the collector set OTEL_EXPORTER_OTLP_HEADERS")
        return url

    @property
    def tier_names(self) -> list[str]:
        """Every tier that a request may be of."""
        return [*self.tiers, "default", "flex"]

    @model_validator(mode="after")
    def _agrees(self) -> Config:
        known = self.tier_names
        if self.default_tier not in known:
            raise ValueError(
                f"default_tier {self.default_tier!r} is not among the tiers{nearest(self.default_tier, known)}"
            )
        for tenant, settings in self.tenants.items():
            for tier in settings.tiers or ():
                if tier not in known:
                    raise ValueError(f"tenants.{tenant}.tiers: {tier!r} is not among the tiers{nearest(tier, known)}")
        urls = [server.url for server in self.servers]
        if twice := {url for url in urls if urls.count(url) > 1}:
            raise ValueError(f"servers: {min(twice)} is named twice")
        if self.fair_share is not None and not self.tenants:
            raise ValueError("fair_share: there are no tenants to share between; configure tenants, or leave it out")
        if self.step_log is not None and self.step_log == self.event_log:
            raise ValueError("step_log: the same file as event_log; name another")
        return self


def load(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Config:
    """The configuration in a YAML file (or a mapping), changed first by `values`, which are taken as they are
    (`{"engine.kind": "torch"}`), then by overrides such as `policy.safety_margin=0.2`, which are read as YAML unless
    the setting is text.

    Raises ConfigError.
    """
    tree = _tree(source)
    for path, value in (values or {}).items():
        _set(tree, path.split("."), value)
    for override in overrides:
        path, found, text = override.partition("=")
        if not found or not path:
            raise ConfigError(f"override {path!r}: write it as setting=value, such as policy.safety_margin=0.2")
        words = path.split(".")
        _set(tree, words, text if text and _is_text(words) else _yaml(text, f"override of {path}"))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(tree, details) for details in error.errors(include_url=False))) from None


def _tree(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from error
    tree = _yaml(text, str(source))
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{source}: the top level must be settings with their values, such as `model: NAME`")
    return tree


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        # pyyaml's own message quotes the line, which may hold a key; so does the traceback of its cause
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{where}: not YAML ({getattr(error, 'problem', None) or 'unreadable'}{place})") from None


def _is_text(path: Sequence[str]) -> bool:
    """Whether a setting is text, in which `3.1` and `null` are a name as any other."""
    first, *below = path
    group = PARTS.get(first) if below else Config
    if group is None:  # of what is chosen by name; its own settings are its own affair
        return below in (["name"], ["kind"])
    field = group.model_fields.get(path[-1])
    return field is not None and field.annotation in (str, str | None, SecretStr | None)


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value deep in nested mappings; a name that stood alone (`policy: rubato`) becomes {name: rubato}."""
    root = tree
    for part in path[:-1]:
        below = tree.get(part)
        if below is None and tree is root and part in Config.model_fields:
            default = Config.model_fields[part].default
            below = default.name if isinstance(default, Named) else None
        if isinstance(below, str):
            below = {"name": below}
        below = dict(below) if isinstance(below, Mapping) else {}
        tree[part] = below
        tree = below
    if path[-1] in ("kind", "name"):  # two spellings of one thing
        tree.pop("kind", None)
        tree.pop("name", None)
    tree[path[-1]] = value


def _sentence(tree: Mapping[str, Any], details: Any) -> str:
    where = ".".join(str(part) for part in details["loc"])
    message: str = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        group = PARTS[str(details["loc"][0])] if len(details["loc"]) > 1 else Config
        return f"{where}: unknown setting{nearest(str(details['loc'][-1]), group.model_fields)}"
    if not where:
        return message
    if details["type"] == "literal_error" and where == "slo_rule":
        return f"slo_rule: unknown rule {details['input']!r}{nearest(str(details['input']), SLO_RULES)}"
    if details["type"] == "tuple_type":
        message = "give a list"
    secret = details["loc"][0] == "tls" or "keys" in details["loc"]
    secret = secret or (details["loc"][0] in ("tenants", "servers") and not isinstance(details["input"], int | float))
    shown = "" if details["type"] == "value_error" or secret else f", got {details['input']!r:.80}"
    return f"{where}: {message}{shown}"
