"""The YAML of `rubato serve` inside vLLM: `--additional-config '{"rubato": {"config": "rubato.yaml"}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rubato.config.parts import Named
from rubato.config.schema import Config, ConfigError, load
from rubato.core.did_you_mean import nearest
from rubato.core.length_prediction import PREDICTORS
from rubato.engines.vllm.settings import Settings, settings_of

# Settings that vLLM's own flags decide, or that its server cannot have.
VLLM_OWNED = frozenset(
    {
        "model", "served_model_name", "engine", "replicas", "autoscale", "fleet", "router", "prefix_cache", "host",
        "port",
        "max_connections", "servers", "drain_seconds", "stall_seconds", "step_timeout_seconds", "tls", "log",
        "event_log", "event_log_content", "step_log", "otlp_traces_endpoint",
    }
)  # fmt: skip


def load_for_vllm(additional: object) -> tuple[Settings, Config]:
    """The plug-in's settings from vLLM's `additional_config`, completed from the file that it names.

    Raises ConfigError (ValueError) as `config.schema.load`, and for settings that do not work inside vLLM.
    """
    settings = settings_of(additional)
    if not settings.config:
        return settings, Config()
    config = load(settings.config)
    given = config.model_fields_set
    said = additional.get("rubato", {}) if isinstance(additional, Mapping) else {}
    fill: dict[str, Any] = {}
    if "policy" in given and "policy" not in said:
        fill.update(policy=config.policy.name, settings={**config.policy.settings, **said.get("settings", {})})
    if config.latency is not None and "latency" not in said:
        fill["latency"] = latency_in_vllm(config.latency)
    if "lengths" in given and "lengths" not in said:
        fill["lengths"] = lengths_in_vllm(config)
    if "slo_rule" in given and "slo_rule" not in said:
        fill["slo_rule"] = config.slo_rule
    return replace(settings, **fill), config


def latency_in_vllm(latency: Named) -> Mapping[str, Any]:
    """The coefficients of the latency model. Raises ConfigError for any model but affine."""
    if latency.name != "affine":
        raise ConfigError(f"latency: inside vLLM the model is affine, and {latency.name!r} is asked for")
    return latency.settings


def lengths_in_vllm(config: Config) -> str | None:
    """The name of the length predictor. Raises ConfigError for one with settings, or of a module."""
    lengths = config.lengths
    if lengths is not None and (lengths.name not in PREDICTORS or lengths.settings):
        close = nearest(lengths.name, PREDICTORS)
        raise ConfigError(f"lengths: inside vLLM a predictor without settings, not {lengths!r}{close}")
    return None if lengths is None else lengths.name


def ignored_settings(config: Config) -> list[str]:
    """Settings of the file that have no effect inside vLLM."""
    return sorted(VLLM_OWNED & config.model_fields_set)
