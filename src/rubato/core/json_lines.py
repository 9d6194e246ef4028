"""One line of a file of JSON objects, with errors that say where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


def json_object(path: str | Path, line: int, text: bytes, error: type[ValueError]) -> dict[str, Any]:
    """The object of one line of a file. Raises `error`, saying where and what is wrong, for anything else."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as problem:
        raise error(f"{path}, line {line}: not JSON ({problem})") from problem
    if not isinstance(values, dict):
        raise error(f"{path}, line {line}: should be a JSON object, is {type(values).__name__}")
    return values
