"""The rows of a trace file: CSV, JSON lines or one JSON array, plain or gzipped, with or without a byte order mark."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rubato.core.json_lines import json_object


class TraceError(ValueError):
    """A trace file that cannot be used; names file, line and field."""


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    """Where each request stands, and its fields, or what is wrong with a line that has none."""
    try:
        yield from _lines(path)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is no CSV, JSON lines or JSON array, plain or gzipped: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        start = file.peek(len(codecs.BOM_UTF8)) if isinstance(file, io.BufferedReader | gzip.GzipFile) else b""
        if start.startswith(codecs.BOM_UTF8):
            file.seek(len(codecs.BOM_UTF8))
            start = file.peek(1)
        first = start.lstrip()[:1]
        if first == b"[":
            yield from _array(path, file.read())
        elif first == b"{":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield f"line {number}", json_object(path, number, line, TraceError)
                    except TraceError as error:
                        yield f"line {number}", error
        else:
            reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            for row in reader:
                where, header = f"line {reader.line_num}", len(reader.fieldnames or ())
                if more := row.get(None):  # where a DictReader puts what has no name
                    said = f"{header + len(more)} fields, but the header names {header}"
                    yield where, TraceError(f"{path}, {where}: {said}")
                else:
                    yield where, row


def _array(path: Path, content: bytes) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        where = f"entry {number}"
        if isinstance(value, dict):
            yield where, value
        else:
            yield where, TraceError(f"{path}, {where}: should be a JSON object, is {type(value).__name__}")
