"""Jobs in parallel, resumable: a pool of processes runs calls (jobs), and a file gets a line for each that finishes.

The file is JSON lines. The first line is a head: the format, and every input that decides what the jobs are. A file
with another head belongs to another computation and is refused. Every other line is the result of one job, in order of
finishing, with a digest of itself. A last line that a crash cut off is dropped, and counted; damage anywhere else is an
error.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import orjson
from tqdm import tqdm

from rubato.core.clock import measured
from rubato.core.json_lines import json_object

FORMAT = "rubato-jobs/2"
PATIENCE = 10.0  # seconds for a pool to end in, once the command is told to
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One call, `work(*given)`, whose result fits into JSON. key: a unique name. To run in another process `work` must
    be a module's function, and all of `given` must pickle."""

    key: str
    work: Callable[..., Any]
    given: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a job returned, read back from JSON, and its wall and CPU seconds."""

    key: str
    value: Any
    wall: float
    cpu: float


@dataclass(frozen=True)
class JobResults:
    """The results of all jobs, in order. resumed: how many the file held already; dropped: half-written lines."""

    results: tuple[Result, ...]
    resumed: int = 0
    dropped: int = 0

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self.results]

    def costed(self) -> list[dict[str, Any]]:
        """The values, which are mappings, each with its wall and CPU seconds added."""
        return [result.value | {"wall": result.wall, "cpu": result.cpu} for result in self.results]

    @property
    def wall(self) -> float:
        """Wall seconds summed over jobs; on several cores more than have passed."""
        return sum(result.wall for result in self.results)

    @property
    def cpu(self) -> float:
        return sum(result.cpu for result in self.results)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.resumed:
            notes.append(f"{self.resumed} of {len(self.results)} jobs were in the file already")
        if self.dropped:
            notes.append(f"{self.dropped} half-written line dropped from the end of the file: its job ran again")
        return tuple(notes)


def run(jobs: Sequence[Job], *, about: str = "jobs", **how: Any) -> JobResults:
    """Run the jobs that the file does not hold yet; results are in the order of the jobs. `how`, and what it raises:
    as `follow`; also ValueError for keys that are not unique."""
    if len({job.key for job in jobs}) != len(jobs):
        raise ValueError("two jobs have the same key: each needs its own")

    def all_of_them(values: Mapping[str, Any]) -> Program[None]:
        yield JobBatch(jobs, about)

    return follow(all_of_them, most=len(jobs), **how)[1]


@dataclass(frozen=True)
class JobBatch:
    """now: the jobs that a computation waits for. soon: called when a process would be idle; the jobs that the
    computation will probably wait for next."""

    now: Sequence[Job]
    about: str = "jobs"
    soon: Callable[[], Sequence[Job]] = tuple


Program = Generator[JobBatch, None, T]  # what it returns is the answer


def follow(
    program: Callable[[Mapping[str, Any]], Program[T]],
    *,
    file: str | Path | None = None,
    head: Mapping[str, Any] | None = None,
    workers: int | None = None,
    most: int | None = None,
    progress: bool = False,
) -> tuple[T, JobResults]:
    """Run a program that chooses its jobs by the results of others; returns its answer and all results.

    The program is given the values by key, which grow as jobs finish. An answer that depends only on jobs that the
    program waited for (`JobBatch.now`) is the same in parallel or not, resumed or not. workers: processes (None: one a
    core; 1: this process); most: how many processes can be of use. Raises ValueError for fewer than one worker or for
    a file of another computation, and what a job or the program raised; the file holds what had finished by then.
    """
    book = _JobFile(None if file is None else Path(file), head or {})
    running: dict[Future[Result], str] = {}
    steps = program(book.values)
    with _opened(workers, most) as (pool, count), tqdm(unit="job", disable=not progress) as bar:
        while True:
            try:
                wanted = next(steps)
            except StopIteration as end:
                bar.n = bar.total = len(book.asked)
                return end.value, book.done()
            book.ask(wanted.now)
            while missing := [job for job in wanted.now if job.key not in book.values]:
                bar.desc, bar.n, bar.total = f"{wanted.about}: ", len(book.asked) - len(missing), len(book.asked)
                bar.refresh()
                if pool is None:
                    book.note(_run(missing[0]))
                    continue
                for job in _begin(missing, wanted.soon, {*book.values, *running.values()}, count - len(running)):
                    book.ask([job])
                    with _uninterrupted():
                        future = pool.submit(_run, job)
                    running[future] = job.key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    book.note(future.result())


def _begin(missing: Sequence[Job], soon: Callable[[], Sequence[Job]], begun: Collection[str], idle: int) -> list[Job]:
    """The missing jobs that have not begun, and as many jobs of `soon` as processes would be idle."""
    found = [job for job in missing if job.key not in begun]
    if len(found) < idle:
        known = {*begun, *(job.key for job in found)}
        found += [job for job in soon() if job.key not in known][: idle - len(found)]
    return found


class _JobFile:
    """The results so far: read from the file, asked for, and finished."""

    def __init__(self, file: Path | None, head: Mapping[str, Any]) -> None:
        self._file = file
        self._results, self._dropped = _read(file, head) if file is not None else ({}, 0)
        self._stored = set(self._results)
        self.values = {key: result.value for key, result in self._results.items()}
        self.asked: dict[str, None] = {}  # in order

    def ask(self, jobs: Sequence[Job]) -> None:
        self.asked |= dict.fromkeys(job.key for job in jobs)

    def note(self, result: Result) -> None:
        self._results[result.key] = result
        self.values[result.key] = result.value
        if self._file is not None:
            with open(self._file, "ab") as out:
                out.write(_line(asdict(result) | {"digest": _digest(result)}))

    def done(self) -> JobResults:
        """The results of the jobs asked for; a job begun ahead of need that has not finished has none."""
        results = tuple(self._results[key] for key in self.asked if key in self._results)
        return JobResults(results, sum(key in self._stored for key in self.asked), self._dropped)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _opened(workers: int | None, most: int | None) -> Iterator[tuple[Executor | None, int]]:
    """A pool of processes and their number; (None, 1) where one is enough, and jobs run in this process."""
    if workers is not None and workers < 1:
        raise ValueError(f"{workers} workers: give 1 or more")
    count = min(workers or cores(), max(1, most or cores()))
    if count == 1:
        yield None, 1
        return
    # spawn: a child that shares nothing by accident, on every platform
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    try:
        yield pool, count
    except (SystemExit, KeyboardInterrupt) as end:  # not after the jobs under way, which may take minutes
        for child in multiprocessing.active_children():
            child.terminate()
        # a pool whose processes were ended as they started has been seen to wait for ever
        code = end.code if isinstance(end, SystemExit) else 128 + signal.SIGINT
        watch = threading.Timer(PATIENCE, _end, (code if isinstance(code, int) else 1,))
        watch.daemon = True
        watch.start()
        try:
            pool.shutdown(cancel_futures=True)
        finally:
            watch.cancel()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end(code: int) -> None:
    """Kill this process and every process that it started, whatever they wait for."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that end a command wait until this is over. In the midst of starting a process they would leave it
    without what it waits for and unknown to the pool, holding open the pipe whose end the pool's threads wait for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for caught in came:
            signal.raise_signal(caught)


def _run(job: Job) -> Result:
    value, cost = measured(lambda: job.work(*job.given))
    return Result(job.key, orjson.loads(orjson.dumps(value)), cost.wall, cost.cpu)


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


def _read(path: Path, head: Mapping[str, Any]) -> tuple[dict[str, Result], int]:
    """Results in the file by key, and the number of half-written lines, which are cut off. A new file gets its head."""
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
        raise ValueError(f"{path} is not a file of jobs ({FORMAT}, but {lines[0].get('format')!r}): name another file")
    other = list(_differing(lines[0], expected))
    if other:
        what = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if other[3:] else "")
        raise ValueError(f"{path} holds the jobs of another run (what differs: {what}): name another file")
    results = [_result(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    return {result.key: result for result in results}, dropped


def _result(path: Path, number: int, line: dict[str, Any]) -> Result:
    digest = line.pop("digest", "")
    try:
        result = Result(**line)
    except TypeError as error:
        raise ValueError(f"{path}, line {number}: not a job ({error}): remove the line, its job runs again") from error
    if digest != _digest(result):
        raise ValueError(f"{path}, line {number}: not as it was written: remove the line, its job runs again")
    return result


def _digest(result: Result) -> str:
    return hashlib.blake2b(orjson.dumps(result), digest_size=8).hexdigest()


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json_object(path, number, line, ValueError)
    except ValueError as error:
        raise ValueError(f"{error}: remove the line, its job runs again") from error


def _differing(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Where two JSON values differ, as `sweep.settings.0.slo_rule`."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differing(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    elif one != other:
        yield name
