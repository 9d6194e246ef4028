"""Builds engines, latency models, predictors and fair shares from a configuration.

Simulations use this module, too, so it needs none of the server's libraries.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast

from rubato import engines
from rubato.config.parts import Named
from rubato.config.schema import Config, ConfigError
from rubato.core.clock import Clock
from rubato.core.did_you_mean import nearest
from rubato.core.interfaces import Assigner, Autoscaler, Engine, LatencyModel, LengthPredictor
from rubato.core.length_prediction import DEFAULT_LENGTHS, LENGTHS, PREDICTORS
from rubato.core.plan import Limits, Role
from rubato.core.registry import Registry, construct, settings_of
from rubato.engines import simulated
from rubato.engines.simulated import Drafter, KVLink, drafter
from rubato.fleet.autoscalers import AUTOSCALERS, PoolAutoscaler, ReplicaBounds
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import profiles
from rubato.latency.model_base import with_defaults
from rubato.latency.model_kinds import LATENCY_MODELS
from rubato.latency.with_drafter import WithDrafter, WithLearntDrafter
from rubato.policies import default_lengths, load
from rubato.policy_kit.fair_share import FairShare

REAL_ENGINE_SETTINGS = ("dtype", "device", "kv_gib", "threads", "noise", "seed")  # a simulation ignores them
# Default limits of a simulated engine: about a small model on one GPU.
SIMULATED_LIMITS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "kv_blocks": 4096,
    "block_size": 16,
}
# `max_in_flight: auto` allows this many batches of every replica, and at least this many requests.
BATCHES_IN_FLIGHT, MIN_IN_FLIGHT = 4, 256
# Drafters of real tokens; imported only when an engine is built, since they need PyTorch.
DRAFTERS = Registry(
    "drafter", "Drafter",
    {"suffix": "rubato_torch.drafters.suffix:SuffixDrafter", "model": "rubato_torch.model_drafter:ModelDrafter"},
    ("draft", "verified", "forget"),
)  # fmt: skip
_ENGINES = {m.name: f"rubato.engines.{m.name}" for m in pkgutil.iter_modules(engines.__path__)}
ENGINES = Registry("engine", "Engine", _ENGINES, ("supports", "add", "execute", "forget"))
AFFINE = Named(name="affine")  # where no latency model is configured


def engine_of(config: Config, clock: Clock, replica: int) -> Engine:
    """Returns the engine of `engine.kind`: one of `rubato.engines`, or the class `Engine` of the user's own module.

    Its constructor gets what it has parameters for: `model`, `clock`, `latency`, `limits` and `seed`, and the settings;
    `drafter` is made by `drafter_of` or, for an engine that is not simulated, `token_drafter_of`. Raises ConfigError.
    """
    name, settings = config.engine.name, dict(config.engine.settings)
    takes = inspect.signature(ENGINES.class_of(name)).parameters
    parameters: dict[str, Any] = {"clock": clock}
    if "model" in takes and config.model is not None and "model" not in settings:
        parameters["model"] = config.model
    elif "model" in takes and config.model is None and takes["model"].default is inspect.Parameter.empty:
        raise ConfigError(f"model: engine {name!r} needs one; set model to its path or name")
    if "limits" in takes:
        parameters["limits"] = Limits(**simulation_limits(config))
        settings = {key: value for key, value in settings.items() if key not in SIMULATED_LIMITS}
    if "latency" in takes:
        parameters["latency"] = latency_of(config)
    if "seed" in takes and type(seed := settings.get("seed", 0)) is int:
        settings["seed"] = seed + replica
    if "drafter" in takes:
        parameters["drafter"] = _drafter_for_policy(config)
        settings.pop("drafter", None)
    if "link" in takes:
        parameters["link"] = link_of(config)
        settings.pop("link", None)
    return cast(Engine, ENGINES.build(name, settings, **{key: parameters[key] for key in parameters if key in takes}))


def _drafter_for_policy(config: Config) -> object | None:
    """Returns the engine's drafter. Raises ConfigError where there is none and the policy needs drafts."""
    drafter = drafter_of(config) if _is_simulated(config) else token_drafter_of(config)
    if drafter is None and "draft" in load(config.policy.name, config.policy.settings).needs:
        such = "{alpha: 0.7}, right 7 times of 10" if _is_simulated(config) else "suffix"
        raise ConfigError(
            f"policy {config.policy.name!r} needs draft, and engine {config.engine.name!r} was given no drafter: "
            f"set engine.drafter, such as engine.drafter: {such}"
        )
    return drafter


def simulation_limits(config: Config) -> dict[str, int]:
    """Returns a simulated engine's `Limits` fields: SIMULATED_LIMITS changed by settings. Raises ConfigError."""
    names = [*SIMULATED_LIMITS, *REAL_ENGINE_SETTINGS, "drafter", "link", "start_seconds"]
    for name in config.engine.settings:
        if name not in names and config.engine.name in ("torch", "simulated"):
            raise ConfigError(f"engine {config.engine.name!r} has no setting {name!r}{nearest(name, names)}")
    limits = {name: config.engine.settings.get(name, default) for name, default in SIMULATED_LIMITS.items()}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"engine.{name} is {value!r}: give a whole number, 1 or more")
    return limits


def start_seconds_of(config: Config) -> float:
    """Returns the seconds that a simulated replica takes to start (`engine.start_seconds`). Raises ConfigError."""
    seconds = config.engine.settings.get("start_seconds", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (isfinite(seconds) and seconds >= 0.0):
        raise ConfigError(f"engine.start_seconds is {seconds!r}: give a number of seconds, 0 or more")
    return float(seconds)


def drafter_of(config: Config) -> Drafter | None:
    """Returns the drafter of a simulated engine, from `engine.drafter`: a profile's name, settings of `Acceptance`, or
    both.

    Without a profile drafting costs nothing. Raises ConfigError, also for a drafter of real tokens: nobody knows how
    often it would be right.
    """
    value = config.engine.settings.get("drafter")
    if value is None:
        return None
    name, settings = _split_drafter(value)
    if name is None and "alpha" not in settings:
        raise ConfigError(
            f"engine.drafter is {value!r}: give the name of a profile, such as opt-125m-a100-40g, or alpha, how often "
            "it is right, of a drafter that costs nothing"
        )
    if name is not None and (name in DRAFTERS.packaged or ("." in name and not _is_profile(name))):
        raise ConfigError(
            f"engine.drafter {name!r} drafts real tokens, which a simulation does not have: say how often it is right "
            "(at no cost), such as --set 'engine.drafter={alpha: 0.5}', or simulate without it, --set "
            "engine.drafter=null"
        )
    try:
        return drafter(name, **settings)
    except ValueError as error:
        raise ConfigError(f"engine.drafter: {error}") from error


def token_drafter_of(config: Config) -> object | None:
    """Returns the drafter of an engine that runs a model, from `engine.drafter`: one of `DRAFTERS` or any module with a
    class `Drafter` (`rubato_torch.drafters.Drafter`), with or without settings. Raises ConfigError."""
    value = config.engine.settings.get("drafter")
    if value is None:
        return None
    name, settings = _split_drafter(value)
    if name is None or _is_profile(name):
        raise ConfigError(
            f"engine.drafter is {value!r}, which is for simulated engines: engine {config.engine.name!r} drafts with "
            f"{', '.join(DRAFTERS.packaged)}, or a module of yours with a class Drafter"
        )
    return cast(object, DRAFTERS.build(name, settings))


def _split_drafter(value: object) -> tuple[str | None, dict[str, Any]]:
    """Splits a value of `engine.drafter` into its name and its settings."""
    settings = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = settings.pop("kind", None) if "kind" in settings else settings.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"engine.drafter is {value!r}: give a name, or {{name: ..., SETTING: ...}}")
    return name, settings


def _is_profile(name: str) -> bool:
    profile, _ = profiles.named(name)
    return profile in profiles.names() or profile.endswith(".json")


def _is_simulated(config: Config) -> bool:
    return issubclass(ENGINES.class_of(config.engine.name), simulated.Engine)


def link_of(config: Config) -> KVLink:
    """Returns the cost of moving KV to a simulated engine (`engine.link`). Raises ConfigError."""
    value = config.engine.settings.get("link", {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"engine.link is {value!r}: give {', '.join(settings_of(KVLink))}")
    return cast(KVLink, construct("engine.link", KVLink, value))


def believed_latency_of(config: Config) -> LatencyModel:
    """Returns the latency model by which a scheduler predicts steps. Where a real engine has a drafter, the model also
    learns the drafting time that the engine measures."""
    if not _is_simulated(config):
        believed = latency_of(config)
        return believed if config.engine.settings.get("drafter") is None else WithLearntDrafter(believed)
    model, drafter = latency_of(config), drafter_of(config)
    return model if drafter is None or drafter.latency is None else WithDrafter(model, drafter.latency)


def latency_of(config: Config) -> LatencyModel:
    """Returns the model of `latency.kind`: one of `MODELS`, or the class `Model` of the user's own module. The default
    is `affine`, which begins with a guess and learns from each step.

    A `Model` needs step_time, largest_chunk, fit and update; `latency.model_base` adds the rest of a `LatencyModel`.
    Raises ConfigError.
    """
    named = config.latency or AFFINE
    return with_defaults(LATENCY_MODELS.build(named.name, named.settings))


def guessed_settings(config: Config) -> list[str]:
    """Returns the names of `latency` settings that are not given and whose defaults are guesses (`GUESSED` of the
    model). A live server learns them; a simulation would take the guess for the truth."""
    named = config.latency or AFFINE
    guessed = getattr(LATENCY_MODELS.class_of(named.name), "GUESSED", ())
    return [name for name in guessed if name not in named.settings]


def lengths_of(config: Config, truth: Mapping[str, Sequence[int]] | None = None) -> LengthPredictor | None:
    """Returns the length predictor of `lengths.kind`: one of `PREDICTORS`, or the class `Lengths` of the user's own
    module.

    The default is the policy's (`policies.default_lengths`); if it has none, `DEFAULT_LENGTHS` where a request may have
    an e2e SLO. None where `lengths` is null and the policy has none.

    Args:
        truth: request id -> output tokens of each stage; known in simulations only, where it allows `oracle`.

    Raises:
        ConfigError: for settings that are unknown or impossible.
        PolicyError: for a policy or router that does not exist.
    """
    if config.lengths is None:
        usual = default_lengths(config.policy.name, config.router.name)
        if usual is None and "lengths" not in config.model_fields_set and _may_have_e2e(config):
            usual = DEFAULT_LENGTHS
        return None if usual is None else PREDICTORS[usual]()
    name, settings = config.lengths.name, config.lengths.settings
    if name != "oracle":
        return cast(LengthPredictor, LENGTHS.build(name, settings))
    if truth is None:
        raise ConfigError(f"lengths: the oracle knows simulated requests only; serve with {' or '.join(PREDICTORS)}")
    outputs = {id: sum(outputs) for id, outputs in truth.items()}
    return cast(LengthPredictor, LENGTHS.build(name, settings, truth=outputs))


def _may_have_e2e(config: Config) -> bool:
    """Returns whether a request may have an e2e SLO: a tier has one, or some client may state any SLO."""
    promised = any(tier.e2e_ms is not None for tier in config.tiers.values())
    return promised or not config.tenants or any(tenant.tiers is None for tenant in config.tenants.values())


def autoscaler_of(config: Config) -> Autoscaler | None:
    """Returns the autoscaler of `autoscale.kind`: a packaged one, or the class `Autoscaler` of the user's own module;
    None where the fleet does not scale. Raises ConfigError, also for `pool` with a policy that keeps no pool."""
    if config.autoscale is None:
        return None
    autoscaler = AUTOSCALERS.build(config.autoscale.name, config.autoscale.settings)
    if isinstance(autoscaler, ReplicaBounds) and not autoscaler.min <= config.replicas <= autoscaler.max:
        raise ConfigError(
            f"replicas is {config.replicas}: give as many as there are to be at the start, from autoscale.min, "
            f"{autoscaler.min}, to autoscale.max, {autoscaler.max}"
        )
    _check_roles(config, autoscaler)
    return cast(Autoscaler, autoscaler)


def _check_roles(config: Config, autoscaler: Any) -> None:
    """Raises ConfigError where the router needs a fixed fleet, or `pool` is asked for and the router keeps none."""
    policy, (_, routes) = config.policy, choice_of(config).build()
    roles = _roles(routes, config.replicas).values() if isinstance(routes, Assigner) else ()
    is_pooled = bool(roles) and all(role.kind == "best_effort" for role in roles)
    if isinstance(autoscaler, PoolAutoscaler) and not is_pooled:
        raise ConfigError(
            f"autoscale 'pool' follows the pool of a policy that keeps one, as polyserve does, and "
            f"{policy.name!r} has none: choose autoscale.kind=attainment, or policy polyserve"
        )
    if roles and not is_pooled:
        raise ConfigError(
            f"autoscale: {policy.name!r} gives its replicas roles at the start, and none to those that join: choose a "
            "policy whose replicas are all alike, such as edf, or polyserve"
        )
    if isinstance(routes, Assigner) and isinstance(autoscaler, ReplicaBounds):
        _roles(routes, autoscaler.min)


def _roles(router: Assigner, replicas: int) -> Mapping[str, Role]:
    """Returns the roles of this many replicas. Raises ConfigError where the router needs more."""
    try:
        return router.roles([f"r{i}" for i in range(replicas)])
    except ValueError as e:
        raise ConfigError(f"autoscale: with {replicas} replicas, {e}") from e


def check_names(config: Config) -> None:
    """Raises ConfigError where the policy or its router names a tier that does not exist, and PolicyError as `load`."""
    scheduler, router = choice_of(config).build()
    tiers = config.tier_names
    for part, built in (("policy", scheduler), ("router", router)):
        for tier in getattr(built, "tier_names", ()):
            if tier not in tiers:
                raise ConfigError(f"{part}: its settings name {tier!r}, not among the tiers{nearest(tier, tiers)}")


def most_in_flight(config: Config, limits: Limits) -> int | None:
    """Returns the bound on requests in flight (`max_in_flight`), with as many replicas as the autoscaler may add.

    Args:
        config: of the server.
        limits: of one of the engines.
    """
    scaled = autoscaler_of(config)
    replicas = scaled.max if isinstance(scaled, ReplicaBounds) else config.replicas
    return in_flight_bound(config, replicas * limits.max_num_seqs)


def in_flight_bound(config: Config, places: int) -> int | None:
    """Returns the bound on requests in flight (`max_in_flight`); `auto` is a multiple of `places`, the sequences in one
    batch of every replica."""
    if config.max_in_flight != "auto":
        return config.max_in_flight
    return max(MIN_IN_FLIGHT, BATCHES_IN_FLIGHT * places)


def choice_of(config: Config) -> PolicyChoice:
    """Returns the names and settings of the policy and the router; nothing is imported yet."""
    return PolicyChoice(config.policy.name, config.policy.settings, config.router.name, config.router.settings)


def fair_share_of(config: Config) -> FairShare | None:
    """Returns the fair share between tenants; None without tenants."""
    if not config.tenants:
        return None
    weights = {name: tenant.weight for name, tenant in config.tenants.items()}
    return FairShare(weights, config.fair_share.window if config.fair_share else None)
