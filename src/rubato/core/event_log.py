"""The event log: one JSON object a line, written alike by production and simulation, readable back as events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import orjson
from pydantic import TypeAdapter

from rubato.core.events import (
    Assigned,
    Demoted,
    Draining,
    Event,
    Finished,
    HandedOff,
    Joined,
    Left,
    Lost,
    Offered,
    Placed,
    Preempted,
    Promoted,
    Returned,
    Started,
    Stepped,
    Tokens,
    Transferred,
)

log = logging.getLogger(__name__)

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (
        Offered,
        Placed,
        Started,
        Tokens,
        HandedOff,
        Transferred,
        Lost,
        Preempted,
        Demoted,
        Promoted,
        Returned,
        Finished,
        Assigned,
        Joined,
        Draining,
        Left,
        Stepped,
    )
}


def encode(event: Event) -> bytes:
    """One line, newline included."""
    return b'{"kind":"%s",' % type(event).__name__.encode() + orjson.dumps(event, default=_named)[1:] + b"\n"


def _named(value: Any) -> dict[str, Any]:
    """A named tuple by its names."""
    return cast(dict[str, Any], value._asdict())


def without_content(event: Event) -> Event:
    """The event without what was said: no text, no token ids."""
    if isinstance(event, Tokens):
        return replace(event, text="", token_ids=(), logprobs=())
    if isinstance(event, Offered | HandedOff):
        stages = tuple(replace(stage, token_ids=()) for stage in event.request.stages)
        return replace(event, request=replace(event.request, stages=stages, progress=None))
    return event


class EventLogWriter:
    """A listener that writes events to a file. Prompts and outputs are left out unless `content` is asked for."""

    def __init__(self, path: str | Path, *, content: bool = False) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - the writer is the context manager
        self._content = content

    def __call__(self, event: Event) -> None:
        self._file.write(encode(event if self._content else without_content(event)))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def decode(line: bytes) -> Event:
    """The event of one line. Raises ValueError for a line that holds none."""
    row = orjson.loads(line)
    if not isinstance(row, dict) or row.get("kind") not in _KINDS:
        raise ValueError(f"expected a JSON object with a kind among {', '.join(_KINDS)}")
    return cast(Event, _KINDS[row.pop("kind")].validate_python(row))


def read(path: str | Path) -> Iterator[Event]:
    """The events of a log, in order; a last line that was cut short is left out, with a warning. Raises ValueError
    naming file, line and what is wrong with it."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = decode(line)
            except ValueError as error:  # of JSON and of pydantic too
                if not line.endswith(b"\n"):  # a server that was killed while it wrote: what came before is whole
                    log.warning("%s, line %d: cut short, left out", path, number)
                    return
                raise ValueError(f"{path}, line {number}: not an event ({error})") from error
            yield event
