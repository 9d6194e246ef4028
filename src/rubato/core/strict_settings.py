"""Defines settings with pydantic, for what is read from YAML and JSON; errors are sentences that name the setting."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rubato.core.did_you_mean import nearest
from rubato.core.registry import ConfigError


class StrictSettings(BaseModel):
    """Settings of which every name and type must be right.

    `PARTS` names settings that have settings of their own; no error repeats the values of those in `SECRET`, unless
    they are numbers.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    PARTS: ClassVar[Mapping[str, type[StrictSettings]]] = {}
    SECRET: ClassVar[Collection[str]] = ()

    @classmethod
    def of(cls, tree: Mapping[str, Any], where: str = "") -> Self:
        """Checks settings.

        Raises:
            ConfigError: its every line begins with `where` and the setting's name.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            lines = [cls._sentence(where, details) for details in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines))

    @classmethod
    def _sentence(cls, where: str, details: Any) -> str:
        path, value = [str(part) for part in details["loc"]], details["input"]
        name = where + ".".join(path)
        message: str = "give a list" if details["type"] == "tuple_type" else details["msg"]
        if details["type"] == "extra_forbidden":
            group = cls.PARTS[path[0]] if len(path) > 1 else cls
            return f"{name}: unknown setting{nearest(path[-1], group.model_fields)}"
        if details["type"] == "value_error":
            message = message.removeprefix("Value error, ")
            return f"{name}: {message}" if path else message
        secret = "keys" in path or (path[:1] and path[0] in cls.SECRET and not isinstance(value, int | float))
        return f"{name}: {message}" if secret else f"{name}: {message}, got {value!r:.80}"
