"""The rows of a trace file: CSV, JSON lines or one JSON array, plain or gzipped, with or without a byte order mark.

Of an event log there is a row for each request that it tells of, with the fields of our own layout.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import orjson

from rubato.core.event_log import event_of
from rubato.core.events import Finished, Offered
from rubato.core.json_lines import json_object


class TraceError(ValueError):
    """A trace file that cannot be used; names file, line and field."""


Row = tuple[str, Mapping[str, Any] | TraceError]  # where it stands, and its fields or what is wrong with it


def read_rows(path: Path) -> Iterator[Row]:
    """Of each request."""
    try:
        rows = _lines(path)
        for first in rows:
            is_log = isinstance(first[1], Mapping) and {"kind", "at", "id"} <= first[1].keys()
            rows = chain([first], rows)
            yield from _of_events(path, rows) if is_log else rows
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is no CSV, JSON lines or JSON array, plain or gzipped: {error}") from error


def _of_events(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Of requests in an event log, those last that had not ended: they have no output tokens."""
    open: dict[str, tuple[str, dict[str, Any]]] = {}
    last = -inf
    for where, row in rows:
        if isinstance(row, TraceError):
            yield where, row
        elif row.get("kind") in ("Offered", "Finished"):
            try:
                event = event_of(row["kind"], {name: value for name, value in row.items() if name != "kind"})
            except ValueError as error:
                yield where, TraceError(f"{path}, {where}: not an event ({error})")
                continue
            if isinstance(event, Offered):
                if event.at < last:
                    raise TraceError(f"{path}, {where}: time goes back, as a machine's restart does: split it there")
                last = event.at
                asked = event.request
                own = {"prompt_tokens": asked.prompt, "output_tokens": 0, "slo": asked.stages[0].slo}
                open[event.id] = where, {"kind": "", "at": asked.arrival, "tier": asked.tier, **own}
            elif isinstance(event, Finished) and event.id in open:
                begun, open_row = open.pop(event.id)
                yield (
                    begun,
                    open_row
                    | {
                        "prompt_tokens": event.prompt or open_row["prompt_tokens"],
                        "output_tokens": event.output,
                    },
                )
    yield from open.values()


def _lines(path: Path) -> Iterator[Row]:
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


def _array(path: Path, content: bytes) -> Iterator[Row]:
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
