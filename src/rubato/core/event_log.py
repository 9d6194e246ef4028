"""The event log: one JSON object a line, written alike by production and simulation, readable back as events."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import orjson
from pydantic import TypeAdapter

from rubato.core import events
from rubato.core.events import Event, HandedOff, Offered, Tokens

log = logging.getLogger(__name__)

MAX_KIND_BYTES = 64  # of a line, which name its kind
READ_BYTES = 1 << 16

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}


def encode(event: Event) -> bytes:
    """Returns the event as one line of JSON, newline included."""
    return b'{"kind":"%s",' % type(event).__name__.encode() + orjson.dumps(event, default=_as_mapping)[1:] + b"\n"


def _as_mapping(value: Any) -> dict[str, Any]:
    """Converts a named tuple to a mapping, for JSON."""
    return cast(dict[str, Any], value._asdict())


def without_content(event: Event) -> Event:
    """Returns the event without prompts and outputs: no text, no token ids, no keys made from them."""
    if isinstance(event, Tokens):
        return replace(event, text="", token_ids=(), logprobs=())
    if isinstance(event, Offered | HandedOff):
        stages = tuple(replace(stage, token_ids=()) for stage in event.request.stages)
        return replace(event, request=replace(event.request, stages=stages, progress=None, prefix=()))
    return event


class EventLogWriter:
    """A listener that writes events to a file; it omits prompts and outputs unless `content` is true.

    An existing log is continued. Only the owner may read a new file (mode 0600).

    Raises:
        ValueError: the file is no event log, another process writes it, or it is a pipe, whose reader could stop the
            server.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, content: bool = False) -> None:
        self._path = path
        if Path(path).is_fifo() or Path(path).is_socket():
            raise ValueError(f"event log {path}: it is a pipe, and its reader could stop the server; name a file")
        self._file = open(path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115 - the writer is the context manager
        try:
            _check_ours(path, self._file)
        except ValueError:
            self._file.close()
            raise
        self._content = content

    def __call__(self, event: Event) -> None:
        self._file.write(encode(event if self._content else without_content(event)))

    def close(self) -> None:
        """Closes the file. A failed write, as on a full disk, is only logged: the process ends as it would."""
        try:
            self._file.close()
        except OSError as error:
            log.error("event log %s: its last events could not be written (%s)", self._path, error.strerror)

    def __enter__(self) -> EventLogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_event_log(path: str | Path) -> None:
    """Checks, without changing anything, that `EventLogWriter` could write this file.

    Whether another process writes it now is not checked.

    Raises:
        ValueError: it could not.
    """
    file = Path(path)
    if file.is_file():
        _whole_lines(path)
    elif not file.exists() and not os.access(file.parent, os.W_OK):
        raise ValueError(f"event log {path}: it cannot be made in {file.parent}: name a folder that you may write to")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"event log {path}: you may not write it; name another file")


def _check_ours(path: str | Path, file: IO[bytes]) -> None:
    """Locks the file for this process and cuts off a last line that a killed server left incomplete.

    Raises:
        ValueError: the file is no event log, or another process writes it.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"event log {path}: another process writes it; name another file") from None
    whole = _whole_lines(path)
    if whole < os.fstat(file.fileno()).st_size:
        log.warning("event log %s: its last line was cut short, and is left out", path)
        file.truncate(whole)


def _whole_lines(path: str | Path) -> int:
    """Returns the bytes up to the end of the last whole line. Raises ValueError for a file that is no event log."""
    with Path(path).open("rb") as file:
        first = file.readline()
        whole = _end_of_lines(file)
        file.seek(whole)
        cut = file.read(MAX_KIND_BYTES)
        begins = cut.startswith(LINE_STARTS)
        if whole:  # a last line may be cut short anywhere, where its writer was killed
            is_log = _is_event(first) and (begins or any(begin.startswith(cut) for begin in LINE_STARTS))
        else:
            is_log = begins or not cut
        if not is_log:
            raise ValueError(f"event log {path}: the file is there and is no event log; name another, or move it away")
    return whole


def _is_event(line: bytes) -> bool:
    try:
        decode(line)
    except ValueError:
        return False
    return True


LINE_STARTS = tuple(b'{"kind":"%s",' % kind.encode() for kind in _KINDS)


def _end_of_lines(file: IO[bytes]) -> int:
    """Returns the bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - READ_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def decode(line: bytes) -> Event:
    """Returns the event of one line. Raises ValueError for a line without one."""
    row = orjson.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object with a kind among {', '.join(_KINDS)}")
    return event_of(row.pop("kind", None), row)


def event_of(kind: object, fields: object) -> Event:
    """Returns the event of this kind from its fields as JSON. Raises ValueError where they are no event."""
    if kind not in _KINDS:
        raise ValueError(f"expected a JSON object with a kind among {', '.join(_KINDS)}")
    return cast(Event, _KINDS[kind].validate_python(fields))


def read(path: str | Path) -> Iterator[Event]:
    """Yields the events of a log, in order; an incomplete last line is omitted with a warning.

    Raises:
        ValueError: a line is no event; the message names the file, the line and its problem.
    """
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
