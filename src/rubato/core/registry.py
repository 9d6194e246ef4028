"""Builds what a configuration names: a packaged class or one of the user's own module, with settings checked here.

A name is a packaged one, the user's own `file.py`, or a dotted module; both have a class of the name that the registry
states (`Scheduler`, `Engine`, ...). Settings are the parameters of the class.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from urllib.parse import quote, unquote

from rubato.core.did_you_mean import nearest
from rubato.core.extras import MissingExtra

FILE_PREFIX = "rubato file "  # of the name in `sys.modules` of a module that is a user's file
OWN_CLASSES = ("Scheduler", "Router", "Engine", "Model", "Lengths", "Autoscaler", "Drafter")
YAML_FLOAT = re.compile(r"[-+]?\d+[eE][-+]?\d+")  # such as 1e-5, which has no point
TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}
NONE: Mapping[str, object] = MappingProxyType({})


class ConfigError(ValueError):
    """A name or a setting is unknown or impossible; the message names it, and what would do."""


@dataclasses.dataclass(frozen=True)
class Registry:
    """What one part of a configuration may name.

    Args:
        part: what it is in an error, such as `latency model`.
        attribute: class that a user's own module has.
        packaged: name -> class or function, or the module that has it, as `MODULE` or `MODULE:CLASS`.
        required: attributes that everything built here must have.
        common: settings that each one has beside its own, with their defaults; they are not passed to its class.
        error: class of the errors.
    """

    part: str
    attribute: str
    packaged: Mapping[str, Callable[..., Any] | str]
    required: tuple[str, ...] = ()
    common: Mapping[str, object] = dataclasses.field(default_factory=dict)
    error: type[ConfigError] = ConfigError

    def build(self, name: str, settings: Mapping[str, Any], **parameters: Any) -> Any:
        """Builds what `name` is with these settings and parameters; the latter are no settings. Raises `error`."""
        builder, label = self.class_of(name), f"{self.part} {name!r}"
        result = construct(label, builder, settings, self.common, self.error, **parameters)
        if lacking := [each for each in self.required if not hasattr(result, each)]:
            must = f"it must have {', '.join(self.required)}"
            raise self.error(f"{label}: {self.attribute} lacks {', '.join(lacking)}; {must}")
        return result

    def settings_of(self, builder: Callable[..., Any] | None) -> dict[str, object]:
        """Returns the settings of a class, the common ones last, with their defaults."""
        own = {} if builder is None else settings_of(builder)
        return own | {name: default for name, default in self.common.items() if name not in own}

    def class_of(self, name: str) -> Any:
        """Returns the class (or function) of a name. Raises `error`."""
        packaged = self.packaged.get(name, "")
        if callable(packaged):
            return packaged
        module, attribute = self.module_of(name), packaged.partition(":")[2] or self.attribute
        if not hasattr(module, attribute):
            others = [each for each in OWN_CLASSES if hasattr(module, each)]
            raise self.error(f"{self.part} {name!r} has no {attribute}; it defines {' and '.join(others) or 'none'}")
        return getattr(module, attribute)

    def module_of(self, name: str) -> ModuleType:
        """Imports the module of a name, a file once however it is named. Raises `error`."""
        packaged = self.packaged.get(name)
        is_file = name.endswith(".py") and packaged is None
        if is_file and not Path(name).is_file():
            raise self.error(f"there is no {self.part} file {name!r}")
        if packaged is None and "." not in name:
            own = f" (one of your own is a FILE.py or a dotted module with a class {self.attribute})"
            raise self.error(f"unknown {self.part} {name!r}{nearest(name, self.packaged)}{own}")
        target = _module_name(Path(name)) if is_file else str(packaged or name).partition(":")[0]
        try:
            return importlib.import_module(target)
        except MissingExtra as error:
            raise self.error(f"{self.part} {name!r}: {error}") from error
        except (Exception, SystemExit) as error:
            if packaged is not None:
                raise
            what = f"{self.part} {'file' if is_file else 'module'} {name!r}"
            raise self.error(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


class _FileFinder:
    """Finds modules of files by their names, also where a process unpickles what one of them defines."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(FILE_PREFIX):
            return None
        return importlib.util.spec_from_file_location(name, name_of(name))


sys.meta_path.append(_FileFinder)


def _module_name(path: Path) -> str:
    """Returns the name of a file's module: its path without dots, which would stand for packages."""
    return FILE_PREFIX + quote(str(path.resolve())).replace(".", "%2E")


def name_of(module: str) -> str:
    """Returns the name by which a user named a module, which is the path of a file, or else the module's own."""
    return unquote(module.removeprefix(FILE_PREFIX))


def settings_of(builder: Callable[..., Any]) -> dict[str, object]:
    """Returns the parameters of a class or a function with their defaults, None where there is none.

    Names that begin with an underscore are not settings.
    """
    fields = dataclasses.fields(builder) if dataclasses.is_dataclass(builder) else ()
    factories = {field.name: field.default_factory for field in fields}
    defaults: dict[str, object] = {}
    for name, parameter in inspect.signature(builder).parameters.items():
        if not name.startswith("_"):
            factory = factories.get(name, dataclasses.MISSING)
            default = None if parameter.default is parameter.empty else parameter.default
            defaults[name] = default if factory is dataclasses.MISSING else factory()
    return defaults


def construct(
    label: str, builder: Callable[..., Any], settings: Mapping[str, Any], common: Mapping[str, object] = NONE,
    error: type[ConfigError] = ConfigError, **parameters: Any,
) -> Any:  # fmt: skip
    """Calls a class or a function with settings that are known, of the right type, and finite. A default states the
    type, unless the parameter's annotation has the value's; a number may be infinite if the default is.

    Args:
        label: how a message begins.
        builder: takes the settings.
        settings: by name.
        common: further settings with their defaults, which are checked, but not passed.
        error: class of the errors.
        parameters: passed, too; they are no settings.

    Raises:
        ConfigError: of the class `error`.
    """
    own = {name: default for name, default in settings_of(builder).items() if name not in parameters}
    defaults = {**common, **own}
    if unknown := [name for name in settings if name not in defaults]:
        raise error(f"{label} has no setting {unknown[0]!r}{nearest(unknown[0], defaults)}")
    values = {name: _with_floats(value, defaults[name]) for name, value in settings.items()}
    annotations = {name: str(parameter.annotation) for name, parameter in inspect.signature(builder).parameters.items()}
    for name, value in values.items():
        default, says = defaults[name], f"{label}: setting {name} is {value!r:.80}"
        is_annotated = re.search(rf"\b{type(value).__name__}\b", annotations.get(name, ""))
        if default is not None and not is_annotated and not _is_same_type(value, default):
            like = next(words for kind, words in TYPE_WORDS.items() if isinstance(default, kind))
            raise error(f"{says}; give {like}, like {default!r}")
        for number in _numbers(value):
            if not abs(number) <= sys.float_info.max and number != default:
                raise error(f"{says}: give finite numbers only")
    try:
        return builder(**parameters, **{name: value for name, value in values.items() if name in own})
    except (TypeError, ValueError) as cause:
        raise error(f"{label}: {cause}") from cause


def _with_floats(value: object, default: object) -> object:
    """Returns a value with the numbers that YAML 1.1 reads as text, where the default is a number or has some."""
    if isinstance(default, float) and isinstance(value, str) and YAML_FLOAT.fullmatch(value):
        return float(value)
    if isinstance(default, tuple) and default and isinstance(value, list | tuple):
        items = [_with_floats(each, default[0]) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _is_same_type(value: object, default: object) -> bool:
    """Returns whether a value has the type of the default, if that is a scalar or a list; classes check other types."""
    if not isinstance(default, tuple(TYPE_WORDS)):
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, tuple):  # of one type; YAML has lists
        return isinstance(value, list | tuple) and all(_is_same_type(each, default[0]) for each in value if default)
    return isinstance(value, type(default))


def _numbers(value: object) -> Iterator[int | float]:
    """Yields the numbers in a value, those in mappings and lists included."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _numbers(key)
            yield from _numbers(below)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _numbers(below)
