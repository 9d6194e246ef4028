"""Long computations in cells: a pool of processes, and a file that gets a line for each finished cell and is resumed.

The file is JSON lines. The first is a head: the format, and all that decides what the cells are. A file with another
head belongs to another computation and is refused. Every other line is one finished cell, in order of finishing. A last
line that was cut off by a crash is dropped, and counted; damage anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from rubato.clock import measured
from rubato.workloads.file import json_object

FORMAT = "rubato-cells/1"


@dataclass(frozen=True)
class Cell:
    """One call, `work(*given)`, whose result JSON can hold. key: its name, unique. For other processes `work` must be
    a function of a module, and all of `given` must pickle."""

    key: str
    work: Callable[..., Any]
    given: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell returned, as JSON gives it back, and what it took in seconds."""

    key: str
    value: Any
    wall: float
    cpu: float


@dataclass(frozen=True)
class Done:
    """results: in the order of the cells. resumed: how many were in the file; dropped: half-written lines there."""

    results: tuple[Result, ...]
    resumed: int = 0
    dropped: int = 0

    def plus(self, other: Done) -> Done:
        return Done(self.results + other.results, self.resumed + other.resumed, self.dropped + other.dropped)

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self.results]

    def costed(self) -> list[dict[str, Any]]:
        """The values, which are mappings, each with the seconds it took."""
        return [result.value | {"wall": result.wall, "cpu": result.cpu} for result in self.results]

    @property
    def wall(self) -> float:
        """Seconds, summed over cells: on several cores more than went by."""
        return sum(result.wall for result in self.results)

    @property
    def cpu(self) -> float:
        return sum(result.cpu for result in self.results)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.resumed:
            notes.append(f"{self.resumed} of {len(self.results)} cells were in the file already")
        if self.dropped:
            notes.append(f"{self.dropped} half-written line dropped from the end of the file: its cell ran again")
        return tuple(notes)


def run(
    cells: Sequence[Cell],
    *,
    file: str | Path | None = None,
    head: Mapping[str, Any] | None = None,
    workers: int | None = None,
    pool: Executor | None = None,
    progress: bool = False,
    about: str = "cells",
) -> Done:
    """Run what the file does not have yet. workers: processes (None: one a core; 1: in this one); pool: one that is
    open already (`opened`), for several calls whose cells share what a process has made.

    Raises ValueError for keys that are not unique, fewer than one worker or a file that is not this computation's,
    and what a cell raised; what had finished by then is in the file.
    """
    if len({cell.key for cell in cells}) != len(cells):
        raise ValueError("two cells have the same key: each needs its own")
    kept, dropped = _read(Path(file), head or {}) if file is not None else ({}, 0)
    wanted = [cell for cell in cells if cell.key not in kept]
    resumed = len(cells) - len(wanted)
    with (
        tqdm(total=len(cells), initial=resumed, desc=about, unit="cell", disable=not progress) as bar,
        contextlib.nullcontext(pool) if pool else opened(workers, most=len(wanted)) as using,
    ):
        for result in _each(wanted, using):
            kept[result.key] = result
            if file is not None:
                with open(file, "ab") as out:
                    out.write(_line(result))
            bar.update()
    return Done(tuple(kept[cell.key] for cell in cells), resumed, dropped)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def opened(workers: int | None = None, most: int | None = None) -> Iterator[Executor | None]:
    """A pool of processes; none where one is enough: what then runs, runs here."""
    if workers is not None and workers < 1:
        raise ValueError(f"{workers} workers: give 1 or more")
    count = min(workers or cores(), max(1, most or cores()))
    if count == 1:
        yield None
        return
    # spawn: a child that shares nothing by accident, on every platform
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _each(cells: Sequence[Cell], pool: Executor | None) -> Iterator[Result]:
    if pool is None:
        yield from map(_run, cells)
        return
    for future in as_completed([pool.submit(_run, cell) for cell in cells]):
        yield future.result()


def _run(cell: Cell) -> Result:
    value, cost = measured(lambda: cell.work(*cell.given))
    return Result(cell.key, orjson.loads(orjson.dumps(value)), cost.wall, cost.cpu)


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


def _read(path: Path, head: Mapping[str, Any]) -> tuple[dict[str, Result], int]:
    """What the file holds of this computation; a new file gets its head, a half-written line is cut off."""
    expected = orjson.loads(orjson.dumps({"format": FORMAT, **head}))
    text = path.read_bytes() if path.exists() else b""
    whole, dropped = text[: text.rfind(b"\n") + 1], 0
    if whole != text:
        dropped = 1
        path.write_bytes(whole)
    if not whole:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_line(expected))
        return {}, dropped
    lines = [_object(path, number, line) for number, line in enumerate(whole.splitlines(), start=1)]
    if lines[0].get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of cells (format {lines[0].get('format')!r}): name another file")
    other = sorted(_differing(lines[0], expected))
    if other:
        raise ValueError(f"{path} holds the cells of another run: {', '.join(other)} differ; name another file")
    try:
        return {result.key: result for result in (Result(**line) for line in lines[1:])}, dropped
    except TypeError as error:
        raise ValueError(f"{path}: a line is not a cell ({error}): remove it, or name another file") from error


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json_object(path, number, line, ValueError)
    except ValueError as error:
        raise ValueError(f"{error}: remove the line, its cell runs again") from error


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterable[str]:
    return (key for key in {*one, *other} if one.get(key) != other.get(key))
