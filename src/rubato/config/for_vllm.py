"""The YAML of `rubato serve` inside vLLM: `--additional-config '{"rubato": {"config": "rubato.yaml"}}'`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from rubato.config.schema import Config, ConfigError, load
from rubato.core.did_you_mean import nearest
from rubato.core.length_prediction import PREDICTORS
from rubato.engines.vllm.settings import PREFIX, Settings, settings_of

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
    """Returns the plug-in's settings from vLLM's `additional_config`, completed from the file that it names.

    Raises ConfigError for settings that are unknown, impossible, or do not work inside vLLM.
    """
    settings = settings_of(additional)
    if not settings.config:
        return settings, Config()
    config, stated = load(settings.config), settings.model_dump(exclude_unset=True)
    implied = settings_inside_vllm(config, stated)
    own = {**implied["settings"], **settings.settings} if "policy" not in stated else settings.settings
    return Settings.of({**implied, **stated, "settings": own}, PREFIX), config


def settings_inside_vllm(config: Config, replaced: Collection[str] = ()) -> dict[str, Any]:
    """Returns the plug-in's settings that a configuration implies, but for `latency` and `lengths` if `replaced`.
    Raises ConfigError for a latency model that is not affine, and for a predictor with settings or of a module."""
    name, lengths = config.policy.name, config.lengths
    latency = None if "latency" in replaced else config.latency
    has_lengths = "lengths" in config.model_fields_set and "lengths" not in replaced
    settings: dict[str, Any] = {
        "policy": os.path.abspath(name) if name.endswith(".py") else name,  # the server may run in another folder
        "settings": dict(config.policy.settings),
        "slo_rule": config.slo_rule,
    }
    if latency is not None and latency.name != "affine":
        raise ConfigError(f"latency: inside vLLM the model is affine, and {latency.name!r} is asked for")
    if latency is not None:
        settings["latency"] = dict(latency.settings)
    if has_lengths and lengths is not None and (lengths.name not in PREDICTORS or lengths.settings):
        if lengths.name in PREDICTORS:
            raise ConfigError(
                f"lengths: inside vLLM {lengths.name!r} has no settings: leave out {', '.join(lengths.settings)}"
            )
        close = nearest(lengths.name, PREDICTORS)
        raise ConfigError(f"lengths: unknown length predictor {lengths.name!r} inside vLLM{close}")
    if has_lengths:
        settings["lengths"] = None if lengths is None else lengths.name
    return settings


def ignored_settings(config: Config) -> list[str]:
    """Returns the settings of the file that have no effect inside vLLM."""
    return sorted(VLLM_OWNED & config.model_fields_set)
