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

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from rubato.config.parts import (
    PARTS,
    FairShareSettings,
    LogSettings,
    Named,
    ServerSettings,
    TenantSettings,
    TierSettings,
    TLSSettings,
)
from rubato.config.yaml_text import parse_yaml
from rubato.core.did_you_mean import nearest
from rubato.core.registry import ConfigError as ConfigError
from rubato.core.request import MAX_SLO_S
from rubato.core.server_url import check_url
from rubato.core.strict_settings import StrictSettings


class Config(StrictSettings):
    """Everything that a server, a gateway or a simulation needs.

    Args:
        model: a local Hugging Face folder, a GGUF file or `bundled`; null = the engine's.
        served_model_name: the model's name for clients; null = the model's own.
        engine: what runs the model, `torch`, `simulated`, `vllm` (servers on Ray), a file.py or a dotted module, with
            its settings.
        servers: URLs of OpenAI-compatible servers; with any of them this is a gateway.
        replicas: engines at the start.
        autoscale: adds and drains replicas while requests are served, `attainment`, `pool`, a file.py or a dotted
            module; null = never.
        fleet: where replicas run, `local` (in this process) or `ray` (an actor each).
        policy: the scheduling policy, a name, a file.py or a dotted module, with its settings.
        router: the routing policy, likewise; `auto` = the policy's own, or `least_loaded`.
        latency: the model of step times, likewise; null = `affine`, which learns them.
        lengths: the predictor of output lengths, likewise; left out = the policy's own, or `running_mean` where a
            request may have an e2e; null = the policy's own, or none.
        tiers: named SLOs, which a request asks for by `service_tier`; OpenAI's auto, default, priority and flex are
            always known: flex is best effort unless it is configured, the others are the default_tier.
        default_tier: the tier of a request that names none.
        tenants: clients with keys and limits; none = any client may use the server, without a key.
        fair_share: how tenants share replicas.
        slo_rule: how a TPOT is judged: `deadline` (token i is due at TTFT + i * TPOT), `mean` or `windowed` (every ten
            tokens).
        prefix_cache: reuse the KV of prompts that begin alike, of one tenant.
        max_in_flight: requests beyond it are refused with 429, best effort beyond nine tenths of it; null = no bound;
            `auto` = four batches of every replica, 256 at least.
        max_body_bytes: larger bodies are refused with 413.
        max_choices: prompts times `n` of one body; more are a 400.
        max_connections: open connections; null = as many as file descriptors allow, at most 16384.
        host: address to listen on.
        port: port to listen on; 0 = any free one, printed at the start.
        tls: certificate and key; null = plain HTTP.
        drain_seconds: how long running requests go on after SIGTERM.
        stall_seconds: a client that sends or takes nothing for that long while it should is cut off.
        step_timeout_seconds: a step that takes longer, and 20 times its prediction on top, hangs, and its replica is
            lost.
        log: format and level of the log on standard error.
        event_log: path of the log of all events; null = none.
        event_log_content: write prompts and outputs to it, too.
        step_log: path of a log of step shapes and seconds alone, for `rubato fit`; null = none.
        otlp_traces_endpoint: the collector's URL for OpenTelemetry's spans, such as http://127.0.0.1:4318/v1/traces;
            `auto` = as OTEL_EXPORTER_OTLP_ENDPOINT says; null = no spans.
    """

    PARTS: ClassVar[Mapping[str, type[StrictSettings]]] = PARTS
    SECRET: ClassVar[Collection[str]] = ("tenants", "servers", "tls")
    model: str | None = None
    served_model_name: str | None = None
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
    drain_seconds: float = Field(default=30.0, ge=0, le=MAX_SLO_S)
    stall_seconds: float = Field(default=30.0, gt=0, le=MAX_SLO_S)
    step_timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_SLO_S)
    tls: TLSSettings | None = None
    log: LogSettings = LogSettings()
    event_log: str | None = None
    event_log_content: bool = False
    step_log: str | None = None
    otlp_traces_endpoint: str | None = None
    slo_rule: Literal["deadline", "mean", "windowed"] = "deadline"

    @field_validator("tiers", "tenants")
    @classmethod
    def _check_names(cls, named: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
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
        """Returns every tier that a request may be of."""
        return [*self.tiers, "default", "flex"]

    @model_validator(mode="after")
    def _check_consistency(self) -> Config:
        tier_names = self.tier_names
        if self.default_tier not in tier_names:
            raise ValueError(
                f"default_tier {self.default_tier!r} is not among the tiers{nearest(self.default_tier, tier_names)}"
            )
        for tenant, settings in self.tenants.items():
            for tier in settings.tiers or ():
                if tier not in tier_names:
                    raise ValueError(
                        f"tenants.{tenant}.tiers: {tier!r} is not among the tiers{nearest(tier, tier_names)}"
                    )
        urls = [server.url for server in self.servers]
        if repeated := {url for url in urls if urls.count(url) > 1}:
            raise ValueError(f"servers: {min(repeated)} is named twice")
        if self.fair_share is not None and not self.tenants:
            raise ValueError("fair_share: there are no tenants to share between; configure tenants, or leave it out")
        if self.step_log is not None and self.step_log == self.event_log:
            raise ValueError("step_log: the same file as event_log; name another")
        return self


def load(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Config:
    """Returns the configuration in a YAML file (or a mapping), changed first by `values`, which are taken as they are
    (`{"engine.kind": "torch"}`), then by overrides such as `policy.safety_margin=0.2`, which are read as YAML unless
    the setting is text.

    Raises ConfigError.
    """
    tree = _tree(source)
    for path, value in (values or {}).items():
        _set(tree, path.split("."), value)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {path!r}: write it as setting=value, such as policy.safety_margin=0.2")
        words = path.split(".")
        _set(tree, words, text if text and _is_text(words) else parse_yaml(text, f"override of {path}"))
    return Config.of(tree)


def _tree(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    try:
        text = Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from error
    tree = parse_yaml(text, str(source))
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{source}: the top level must be settings with their values, such as `model: NAME`")
    return tree


def _is_text(path: Sequence[str]) -> bool:
    """Returns whether a setting is text, in which `3.1` and `null` are a name as any other."""
    first, *below = path
    group = PARTS.get(first) if below else Config
    if group is None:  # of what is chosen by name; its own settings are its own affair
        return below in (["name"], ["kind"])
    field = group.model_fields.get(path[-1])
    return field is not None and field.annotation in (str, str | None, SecretStr | None)


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets a value deep in nested mappings; a name that stood alone (`policy: rubato`) becomes {name: rubato}."""
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
