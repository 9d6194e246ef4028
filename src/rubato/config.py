"""The configuration of one server: a YAML file, and `a.b=value` overrides on top of it.

    model: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: {kind: torch, dtype: bfloat16, kv_gib: 1.0}
    policy: {name: edf, safety: 0.1}
    tiers:
      interactive: {ttft_ms: 1000, tpot_ms: 80}
      batch: {e2e_ms: 60000, on_decline: refuse}

Every unknown or impossible setting is a ConfigError that names it and the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rubato.policies import nearest
from rubato.slo import RULES
from rubato.types import SLO, OnDecline


class ConfigError(ValueError):
    """A setting that is unknown or impossible; the message names it, and what would do."""


class _Settings(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


S = TypeVar("S", bound="Named")


class Named(_Settings):
    """Something chosen by name, with settings of its own that what is chosen checks itself."""

    name: str = Field(min_length=1)
    settings: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """`edf`, `{name: edf, safety: 0.1}` and `{kind: ...}` -> name and settings."""
        if isinstance(value, str):
            return {"name": value, "settings": {}}
        if not isinstance(value, Mapping) or set(value) == {"name", "settings"}:
            return value
        rest = dict(value)
        name = rest.pop("kind", None) if "kind" in rest else rest.pop("name", None)
        if name is None:
            raise ValueError("say which: `name` (or `kind`) is missing")
        return {"name": name, "settings": rest}


class TierSettings(_Settings):
    """A promise in milliseconds, and what becomes of a request whose promise cannot be kept."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)
    on_decline: OnDecline = "best_effort"

    @property
    def slo(self) -> SLO:
        return SLO(*(None if ms is None else ms / 1e3 for ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)))


class Config(_Settings):
    """Everything `serve` needs. max_in_flight: requests beyond it are refused at once (null: no bound).

    drain_seconds: how long SIGTERM lets running requests go on. trace: path of the event log, null for none; prompts
    and outputs are in it only with trace_content.
    """

    model: str | None = None
    served_name: str | None = None
    engine: Named = Named(name="torch")
    replicas: int = Field(default=1, ge=1)
    policy: Named = Named(name="edf")
    router: Named = Named(name="least_loaded")
    latency: Named | None = None
    lengths: Named | None = None
    tiers: Mapping[str, TierSettings] = {}
    default_tier: str = "default"
    max_in_flight: int | None = Field(default=256, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: int = Field(default=4 << 20, ge=1)
    drain_seconds: float = Field(default=30.0, ge=0)
    trace: str | None = None
    trace_content: bool = False
    judge: Literal["deadline", "mean", "windowed"] = "deadline"

    @field_validator("tiers")
    @classmethod
    def _names(cls, tiers: Mapping[str, TierSettings]) -> Mapping[str, TierSettings]:
        if "auto" in tiers:
            raise ValueError("`auto` cannot be a tier: it is OpenAI's name for the default one; set default_tier")
        for name in tiers:
            if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise ValueError(f"{name!r} cannot be a tier's name: use letters, digits, `_`, `-` and `.` only")
        return tiers

    @model_validator(mode="after")
    def _default(self) -> Config:
        known = [*self.tiers, "default", "flex"]
        if self.default_tier not in known:
            raise ValueError(
                f"default_tier {self.default_tier!r} is not among the tiers{nearest(self.default_tier, known)}"
            )
        return self


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file (or a mapping), changed by overrides such as `policy.safety=0.2`.

    Raises ConfigError.
    """
    tree = _tree(source)
    for override in overrides:
        path, found, text = override.partition("=")
        if not found or not path:
            raise ConfigError(f"override {override!r}: write it as setting=value, such as policy.safety=0.2")
        _set(tree, path.split("."), _yaml(text, f"override {override!r}"))
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
        raise ConfigError(f"{where}: not YAML ({' '.join(str(error).split())})") from error


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value deep in nested mappings; a name that stood alone (`policy: edf`) becomes {name: edf}."""
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
        fields = TierSettings.model_fields if details["loc"][0] == "tiers" else Config.model_fields
        return f"{where}: unknown setting{nearest(str(details['loc'][-1]), fields)}"
    if not where:
        return message
    if details["type"] == "literal_error" and where == "judge":
        return f"judge: unknown rule {details['input']!r}{nearest(str(details['input']), RULES)}"
    shown = "" if details["type"] == "value_error" else f", got {details['input']!r:.80}"
    return f"{where}: {message}{shown}"
