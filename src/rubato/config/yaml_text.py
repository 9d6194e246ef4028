"""Reads YAML of settings and request kinds; errors name the place and never quote the text, which may hold a key."""

from __future__ import annotations

from typing import Any

import yaml

from rubato.core.registry import ConfigError


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Returns the plain values of a text. Raises ConfigError that names `where`, line and column."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        # pyyaml's own message quotes the line, which may hold a key; so does the traceback of its cause
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ConfigError(f"{where}: not YAML ({problem}{place})") from None
