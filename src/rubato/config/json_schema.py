"""The configuration as a table of its keys and as a JSON schema, from which editors complete and check a YAML file.

Types and bounds are pydantic's, texts those of docstrings (`core/setting_texts.py`), and what is chosen by name
(`engine`, `policy`, ...) has the settings of each packaged choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rubato import policies
from rubato.config.build import SIMULATED_LIMITS
from rubato.config.parts import PARTS
from rubato.config.schema import Config
from rubato.config.vllm_server import VllmServers
from rubato.core import registry
from rubato.core.length_prediction import PREDICTORS
from rubato.core.registry import Registry
from rubato.core.setting_texts import Setting, setting_texts, settings_of
from rubato.core.strict_settings import StrictSettings
from rubato.engines import simulated
from rubato.fleet.autoscalers import AUTOSCALERS
from rubato.latency.model_kinds import MODELS

LIMIT_TEXTS = {
    "max_num_seqs": "sequences of one batch",
    "max_num_batched_tokens": "tokens of one batch",
    "max_model_len": "tokens of one sequence",
    "kv_blocks": "KV capacity in blocks",
    "block_size": "tokens in a KV block",
}
ROUTER_TEXTS = {"prefix_affinity": "new requests go where their prefix is cached, if their SLO is kept there"}
RAY_TEXTS = {
    "address": "Ray cluster to join, `auto` or HOST:PORT; null = one is started here",
    "num_cpus": "CPUs of each actor",
    "num_gpus": "GPUs of each actor",
    "resources": "Ray resources of each actor",
    "runtime_env": "Ray's runtime environment of each actor",
}


Choices = Mapping[str, tuple[Setting, ...]]  # the packaged names, with the settings of each


def choices() -> dict[str, Choices]:
    """Returns the packaged choices of `policy`, `router`, `engine`, `latency`, `lengths`, `autoscale` and `fleet`, each
    with its settings. Engine `torch` has none here: reading them would import PyTorch."""
    parts: dict[str, dict[str, tuple[Setting, ...]]] = {"policy": {}, "router": {"auto": ()}}
    for name, kind, *_ in sorted(policies.describe()):
        part = policies.SCHEDULERS if kind == "scheduler" else policies.ROUTERS
        parts[part.part][name] = policy_settings(part.class_of(name), part)
    engine = settings_of(simulated.Engine, {"noise": 0.0, "seed": 0, "drafter": None, "link": {}, "start_seconds": 0.0})
    limits = tuple(Setting(name, default, LIMIT_TEXTS[name]) for name, default in SIMULATED_LIMITS.items())
    return {
        **parts,
        "engine": {"torch": (), "simulated": limits + engine, "vllm": of_signature(VllmServers)},
        "latency": {name: of_signature(model, model.SETTINGS) for name, model in MODELS.items()},
        "lengths": {name: of_signature(predictor) for name, predictor in PREDICTORS.items()},
        "autoscale": {name: of_signature(scaler) for name, scaler in AUTOSCALERS.packaged.items()},
        "fleet": {"local": (), "ray": tuple(Setting(name, None, text) for name, text in RAY_TEXTS.items())},
    }


def policy_settings(cls: Any, kind: Registry) -> tuple[Setting, ...]:
    """Returns the settings of a policy's class."""
    settings = settings_of(cls, kind.settings_of(cls))
    return tuple(each if each.text else replace(each, text=ROUTER_TEXTS.get(each.name, "")) for each in settings)


def of_signature(builder: Any, names: Iterable[str] | None = None) -> tuple[Setting, ...]:
    """Returns the parameters of a class or a function as settings; only those in `names` where it is given."""
    defaults = registry.settings_of(builder)
    return settings_of(builder, {name: defaults[name] for name in (defaults if names is None else names)})


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of a configuration file."""
    schema = Config.model_json_schema()
    _describe(schema, Config)
    for cls in PARTS.values():
        _describe(schema["$defs"][cls.__name__], cls)
    for key, packaged in choices().items():
        field = schema["properties"][key]
        null = [{"type": "null"}] if "anyOf" in field else []
        default = Config.model_fields[key].default
        schema["properties"][key] = {
            "description": field["description"],
            "default": None if default is None else default.name,
            "anyOf": [
                {"enum": list(packaged)},
                *(_choice_schema(name, own) for name, own in packaged.items()),
                *_OTHER_MODULES,
                *null,
            ],
        }
    del schema["$defs"]["Named"]
    servers = schema["properties"]["servers"]
    servers["items"] = {"anyOf": [{"type": "string"}, servers["items"]]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Rubato's configuration"}


_OTHER_MODULES = [  # the user's own module or file
    {"type": "string"},
    {"type": "object", "anyOf": [{"required": ["name"]}, {"required": ["kind"]}]},
]


def _choice_schema(name: str, own: Iterable[Setting]) -> dict[str, Any]:
    properties = {setting.name: {"description": setting.text} for setting in own}
    word = {"const": name}
    return {
        "type": "object",
        "properties": {"name": word, "kind": word, **properties},
        "anyOf": [{"required": ["name"]}, {"required": ["kind"]}],
    }


def _describe(schema: dict[str, Any], cls: type[StrictSettings]) -> None:
    """Puts the text of each setting beside it, and keeps only the first paragraph of the class's docstring."""
    texts = setting_texts(cls.__doc__, cls.model_fields)
    schema["description"] = (cls.__doc__ or "").strip().split("\n\n")[0]
    for name, field in schema["properties"].items():
        field["description"] = texts[name]
        field.pop("title", None)
