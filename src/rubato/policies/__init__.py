"""Scheduling and routing policies, one file each; a module's name is the policy's name.

A policy module defines a dataclass `Scheduler` (and/or `Router`) whose fields are its settings, and `SOURCE`, its
origin. `load` and `load_router` also take your own file (`my_policy.py`) or dotted module (`my_pkg.my_policy`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rubato.core.did_you_mean import nearest
from rubato.core.finite_settings import check_finite
from rubato.core.interfaces import Router, Scheduler
from rubato.core.length_prediction import PREDICTORS
from rubato.policy_kit import prefix_affinity

COMMON_ROUTER_SETTINGS: Mapping[str, object] = {prefix_affinity.SETTING: False}  # settings, with their defaults
REQUIRED_ATTRIBUTES = {"Scheduler": ("needs", "observe", "plan"), "Router": ("needs", "observe", "place")}
_local: dict[str, ModuleType] = {}  # policies of this process alone, by name


class PolicyError(ValueError):
    """An unknown policy or setting; the message names the nearest known one."""


def names() -> list[str]:
    """Returns the names of all packaged policies, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str, settings: Mapping[str, object] | None = None) -> Scheduler:
    """Builds the Scheduler of a policy module with these settings. Raises PolicyError."""
    return cast(Scheduler, _build(name, "Scheduler", settings or {}))


def load_router(name: str, settings: Mapping[str, object] | None = None) -> Router:
    """Builds the Router of a policy module with these settings, and with prefix affinity if they ask for it
    (`policy_kit.prefix_affinity`). Raises PolicyError."""
    own, wanted = dict(settings or {}), False
    if prefix_affinity.SETTING not in _fields(getattr(module_of(name), "Router", None)):
        wanted = bool(_checked(name, prefix_affinity.SETTING, own.pop(prefix_affinity.SETTING, False), False))
    router = cast(Router, _build(name, "Router", own))
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
        for kind in ("Scheduler", "Router"):
            cls = getattr(module, kind, None)
            if cls is not None and _is_own(module, cls):
                about = (module.__doc__ or "").strip().split("\n")[0]
                yield name, kind.lower(), about, str(module.SOURCE), settings_of(cls, kind)


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
    kind = next(
        (kind for kind, parts in REQUIRED_ATTRIBUTES.items() if all(hasattr(cls, part) for part in parts)), None
    )
    if kind is None:
        words = " or ".join(f"a {kind} (with {', '.join(parts)})" for kind, parts in REQUIRED_ATTRIBUTES.items())
        raise PolicyError(f"{cls.__name__} is no policy: give {words}, or the name of one")
    given = {} if policy is cls else {name: getattr(policy, name) for name in _fields(cls)}
    settings = {name: value for name, value in given.items() if value != _fields(cls)[name]}
    packaged = cls.__module__.removeprefix(f"{__name__}.").partition(".")[0]
    if packaged in names() and getattr(module_of(packaged), kind, None) is cls:
        return packaged, settings
    _local[cls.__name__] = module = ModuleType(cls.__module__, cls.__doc__)
    setattr(module, kind, cls)
    return cls.__name__, settings


def is_local(name: str) -> bool:
    """Returns whether a policy is known to this process only (`register`)."""
    return name in _local


def module_of(name: str) -> ModuleType:
    if name in _local:
        return _local[name]
    if name in names():
        return importlib.import_module(f"{__name__}.{name}")
    if name.endswith(".py"):
        return _file(Path(name))
    if "." in name and importlib.util.find_spec(name.split(".")[0]) is not None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise PolicyError(f"policy module {name!r} cannot be imported: {error}") from error
    raise PolicyError(f"unknown policy {name!r}{nearest(name, names())}; `rubato policies` lists them")


def _file(path: Path) -> ModuleType:
    """Returns the module of a policy file, which is read once however it is named."""
    key = f"rubato policy {path.resolve()}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise PolicyError(f"there is no policy file {str(path)!r}")
        module = sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look there
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise PolicyError(f"policy file {str(path)!r} cannot be run: {type(error).__name__}: {error}") from error
    return sys.modules[key]


def _build(name: str, kind: str, settings: Mapping[str, object]) -> object:
    module = module_of(name)
    cls = getattr(module, kind, None)
    if cls is None:
        has = [k for k in ("Scheduler", "Router") if hasattr(module, k)]
        raise PolicyError(f"policy {name!r} has no {kind}; it defines {' and '.join(has) or 'neither'}")
    if not hasattr(cls, "__dataclass_fields__"):
        raise PolicyError(
            f"policy {name!r}: {kind} is no dataclass; its fields are to be the settings, put @dataclass there"
        )
    if lacking := [part for part in REQUIRED_ATTRIBUTES[kind] if not hasattr(cls, part)]:
        raise PolicyError(
            f"policy {name!r}: {kind} lacks {', '.join(lacking)}; it must have {', '.join(REQUIRED_ATTRIBUTES[kind])}"
        )
    if not isinstance(cls.needs, frozenset | set):
        raise PolicyError(
            f"policy {name!r}: {kind}.needs is {cls.needs!r}: give a frozenset of features, empty for none"
        )
    known = settings_of(cls, kind)
    for key, value in settings.items():
        if key not in known:
            other = getattr(module, "Router", None) if kind == "Scheduler" else None
            if other is not None and key in _fields(other):
                raise PolicyError(f"{key!r} is a setting of {name}'s router: write {name}@{name}:{key}={value}")
            if kind == "Scheduler" and key in COMMON_ROUTER_SETTINGS:
                raise PolicyError(f"{key!r} is a setting of the router: write {name}@auto:{key}={value}")
            raise PolicyError(f"policy {name!r} has no setting {key!r}{nearest(key, list(known))}")
        _checked(name, key, value, known[key])
    try:
        check_finite(settings, cls)
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"policy {name!r}: {error}") from error


def _checked(name: str, key: str, value: object, default: object) -> object:
    """Returns a setting's value. Raises PolicyError if its kind differs from that of its default, if known."""
    if default is not None and not _same_kind(value, default):
        raise PolicyError(f"policy {name!r}: setting {key} is {value!r}; give a {_kind(default)}, like {default!r}")
    return value


def settings_of(cls: Any, kind: str) -> dict[str, object]:
    """Returns the settings of a policy's scheduler or router, with defaults."""
    own = _fields(cls)
    return own | {name: value for name, value in COMMON_ROUTER_SETTINGS.items() if kind == "Router" and name not in own}


def _fields(cls: Any) -> dict[str, object]:
    """Returns the settable fields of a policy's dataclass, with defaults; {} for other classes."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {f.name: _default(f) for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")}


def _default(setting: dataclasses.Field[Any]) -> object:
    """Returns the default of a field, None if there is none."""
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return None if setting.default is dataclasses.MISSING else setting.default


def _kind(default: object) -> str:
    return "list" if isinstance(default, tuple) else type(default).__name__


def _same_kind(value: object, default: object) -> bool:
    if isinstance(default, dict):  # which says nothing of what may be in it: its policy does
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, tuple):  # of one kind; YAML has lists
        return isinstance(value, list | tuple) and all(_same_kind(each, default[0]) for each in value)
    return isinstance(value, type(default))
