"""Scheduling and routing policies, one file each; a module's name is the policy's name.

A policy module defines a dataclass `Scheduler` (and/or `Router`) whose fields are its settings, and `SOURCE`, its
origin. `load` and `load_router` also take your own file (`my_policy.py`) or dotted module (`my_pkg.my_policy`).
"""

from __future__ import annotations

import dataclasses
import pkgutil
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

from rubato.core import registry
from rubato.core.interfaces import Router, Scheduler
from rubato.core.length_prediction import PREDICTORS
from rubato.core.registry import ConfigError, Registry
from rubato.policy_kit import prefix_affinity


class PolicyError(ConfigError):
    """An unknown policy or setting; the message names the nearest known one."""


_local: dict[str, Any] = {}  # policies of this process alone: name -> that of their module
_packaged: dict[str, Any] = {m.name: f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__)}
SCHEDULERS = Registry(
    "policy", "Scheduler", ChainMap(_local, _packaged), ("needs", "observe", "plan"), error=PolicyError
)
ROUTERS = Registry(
    "router",
    "Router",
    SCHEDULERS.packaged,
    ("needs", "observe", "place"),
    {prefix_affinity.SETTING: False},
    PolicyError,
)
module_of = SCHEDULERS.module_of


def names() -> list[str]:
    """Returns the names of all packaged policies, sorted."""
    return sorted(_packaged)


def load(name: str, settings: Mapping[str, object] | None = None) -> Scheduler:
    """Builds the Scheduler of a policy module with these settings. Raises PolicyError."""
    module = module_of(name)
    own, routers = (kind.settings_of(getattr(module, kind.attribute, None)) for kind in (SCHEDULERS, ROUTERS))
    for key, value in (settings or {}).items() if hasattr(module, "Scheduler") else ():
        if key in routers and key not in own:
            router = "auto" if key in ROUTERS.common else name
            raise PolicyError(f"{key!r} is a setting of the router: write {name}@{router}:{key}={value}")
    return cast(Scheduler, _build(SCHEDULERS, name, settings or {}))


def load_router(name: str, settings: Mapping[str, object] | None = None) -> Router:
    """Builds the Router of a policy module with these settings, and with prefix affinity if they ask for it
    (`policy_kit.prefix_affinity`). Raises PolicyError."""
    router = cast(Router, _build(ROUTERS, name, settings or {}))
    has_own = prefix_affinity.SETTING in _fields(type(router))
    wanted = not has_own and (settings or {}).get(prefix_affinity.SETTING)
    return cast(Router, prefix_affinity.PrefixAffinity(router)) if wanted else router


def router_for(
    policy: str, router: str, settings: Mapping[str, object] | None = None, own: Mapping[str, object] | None = None
) -> Router:
    """Builds the router of a fleet.

    Args:
        policy: name of the policy
        router: name of the router; "auto": the policy's own, or `least_loaded`
        settings: of the router
        own: of the policy; its own Router also takes those of them that it has and `settings` does not name

    Raises:
        PolicyError
    """
    module = module_of(policy)
    paired = getattr(module, "Router", None)
    if router == "auto":
        router = policy if paired else "least_loaded"
    scheduler = getattr(module, "Scheduler", None)
    if paired and router != policy and scheduler is not None and not _is_own(module, scheduler):
        raise PolicyError(
            f"policy {policy!r} is a router in front of another policy's scheduler: beside router {router!r} nothing "
            "of it would be left; choose router auto"
        )
    if paired and router == policy:
        shared = _fields(paired)
        settings = {name: value for name, value in (own or {}).items() if name in shared} | dict(settings or {})
    return load_router(router, settings)


def default_lengths(policy: str, router: str = "auto") -> str | None:
    """Returns the length predictor that `router` ("auto": the policy's own), or else the policy's scheduler, uses by
    default (`default_lengths`); None for no predictor. Raises PolicyError, also for an unknown predictor."""
    for chosen, part in ((policy if router == "auto" else router, "Router"), (policy, "Scheduler")):
        name: str | None = getattr(getattr(module_of(chosen), part, None), "default_lengths", None)
        if name is not None and name not in PREDICTORS:
            raise PolicyError(f"policy {chosen!r}: default_lengths is {name!r}: give {' or '.join(PREDICTORS)}")
        if name is not None:
            return name
    return None


def optional(scheduler: Scheduler) -> frozenset[str]:
    """Returns the features beyond its needs that a scheduler uses if available (`uses`, as in `View.supports`)."""
    uses: frozenset[str] = getattr(scheduler, "uses", frozenset())
    return uses


def describe() -> Iterator[tuple[str, str, str, str, dict[str, object]]]:
    """Yields (name, "scheduler" | "router", first line of its docstring, source, settings with defaults)."""
    for name in names():
        module = module_of(name)
        for kind in (SCHEDULERS, ROUTERS):
            cls = getattr(module, kind.attribute, None)
            if cls is not None and _is_own(module, cls):
                about = (module.__doc__ or "").strip().split("\n")[0]
                yield name, kind.attribute.lower(), about, str(module.SOURCE), kind.settings_of(cls)


def _is_own(module: ModuleType, cls: type) -> bool:
    """Returns whether a policy defines this class itself."""
    return f"{cls.__module__}.".startswith(f"{module.__name__}.")


def register(policy: object) -> tuple[str, dict[str, object]]:
    """Registers a scheduler or router, an object or its class, in this process.

    A packaged policy has its own name, any other the name of its class; a later one replaces an earlier one. Every
    replica gets its own object with these settings.

    Returns:
        name and settings to build it with

    Raises:
        PolicyError: it is no policy
    """
    cls = policy if isinstance(policy, type) else type(policy)
    kinds = {each.attribute: each.required for each in (SCHEDULERS, ROUTERS)}
    kind = next((kind for kind, parts in kinds.items() if all(hasattr(cls, part) for part in parts)), None)
    if kind is None:
        words = " or ".join(f"a {kind} (with {', '.join(parts)})" for kind, parts in kinds.items())
        raise PolicyError(f"{cls.__name__} is no policy: give {words}, or the name of one")
    given = {} if policy is cls else {name: getattr(policy, name) for name in _fields(cls)}
    settings = {name: value for name, value in given.items() if value != _fields(cls)[name]}
    packaged = cls.__module__.removeprefix(f"{__name__}.").partition(".")[0]
    if packaged in names() and getattr(module_of(packaged), kind, None) is cls:
        return packaged, settings
    module = ModuleType(cls.__module__, cls.__doc__)
    setattr(module, kind, cls)
    _local[cls.__name__] = key = f"rubato policy {cls.__name__}"
    sys.modules[key] = module
    return cls.__name__, settings


def is_local(name: str) -> bool:
    """Returns whether a policy is known to this process only (`register`)."""
    return name in _local


def _build(kind: Registry, name: str, settings: Mapping[str, object]) -> Any:
    if not dataclasses.is_dataclass(kind.class_of(name)):
        raise PolicyError(
            f"{kind.part} {name!r}: {kind.attribute} is no dataclass; its fields are to be the settings, put "
            "@dataclass there"
        )
    part = kind.build(name, settings)
    if not isinstance(part.needs, frozenset | set):
        raise PolicyError(
            f"{kind.part} {name!r}: {kind.attribute}.needs is {part.needs!r}: give a frozenset of features, empty for "
            "none"
        )
    return part


def _fields(cls: Any) -> dict[str, object]:
    """Returns the settable fields of a policy's dataclass, with defaults; {} for other classes."""
    return registry.settings_of(cls) if hasattr(cls, "__dataclass_fields__") else {}
