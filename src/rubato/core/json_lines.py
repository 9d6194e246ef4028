"""Reads one line of a file of JSON objects; errors name the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


def json_object(path: str | Path, line: int, text: bytes, error: type[ValueError]) -> dict[str, Any]:
    """Parses one line of a file as a JSON object.

    Args:
        path: of the file, for the message.
        line: number of the line, for the message.
        text: the line.
        error: the class to raise for anything but an object.
    """
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as problem:
        raise error(f"{path}, line {line}: not JSON ({problem})") from problem
    if not isinstance(values, dict):
        raise error(f"{path}, line {line}: should be a JSON object, is {type(values).__name__}")
    return values
