"""Jobs in parallel, resumable: processes or a Ray cluster run calls (jobs), and a file keeps the result of each.

The file is JSON lines. The first line is a head: the format, and every input that decides what the jobs are. A file
with another head belongs to another computation and is refused. Every other line is the result of one job, in order of
finishing. A last line that a crash cut off is dropped, and counted; a line that is no result is an error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rubato.core.clock import measure_cost
from rubato.core.cpu_usage import usable_cores
from rubato.core.json_lines import json_object
from rubato.measure.progress_bar import ProgressBar

FORMAT = "rubato-jobs/2"
SHUTDOWN_S = 3.0  # for a pool to end in, once the command is told to


@dataclass(frozen=True)
class Job:
    """One call, `work(*args)`, whose result fits into JSON. To run in another process `work` must be a function of a
    module, and all of `args` must pickle.

    Args:
        key: a unique name.
    """

    key: str
    work: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's return value, read back from JSON, and its wall and CPU seconds."""

    key: str
    value: Any
    wall: float
    cpu: float


@dataclass(frozen=True)
class JobResults:
    """The results of all jobs, in order.

    Args:
        resumed: how many results the file had already.
        dropped: how many lines of the file were half-written.
    """

    results: tuple[JobResult, ...]
    resumed: int = 0
    dropped: int = 0

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self.results]

    def costed(self) -> list[dict[str, Any]]:
        """Returns the values, which are mappings, each with its wall and CPU seconds added."""
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
    """Runs the jobs that the file does not have yet; results are in the order of the jobs. `how`: options of
    `open_runner`. Raises as `open_runner` and `JobRunner.run`."""
    with open_runner(**how) as runner:
        runner.about = about
        runner.run(jobs)
        return runner.job_results()


Start = Callable[[Sequence[Job]], list[Future[JobResult]]]


@contextlib.contextmanager
def open_runner(
    *,
    file: str | Path | None = None,
    head: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> Iterator[JobRunner]:
    """Opens a runner of jobs, for a program that chooses its jobs by the results of others.

    Args:
        file: where results are written to, and read from if they are there.
        head: every input that decides what the jobs are.
        workers: processes (None: one a core; 1: this process).
        ray: the address of a Ray cluster that runs them instead.

    Raises:
        ValueError: fewer than one worker, `workers` and `ray` together, no cluster, or a file of another computation.
        MissingExtra: Ray is not installed.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"{workers} workers: give 1 or more")
    if workers is not None and ray is not None:
        raise ValueError("--workers are this machine's: leave it out with --ray, which uses the cluster's cores")
    path = None if file is None else Path(file)
    stored, dropped = ({}, 0) if path is None else _read(path, head or {})
    with ProgressBar(unit="job", disable=not progress) as bar, _starter(workers, ray) as start:
        yield JobRunner(start, path, stored, dropped, bar)


class JobRunner:
    """Runs jobs, in processes or in this one, and keeps their results. about: what the next jobs are for, as the
    progress bar says it."""

    def __init__(
        self, start: Start | None, file: Path | None, stored: Mapping[str, JobResult], dropped: int, bar: ProgressBar
    ) -> None:
        self.about = "jobs"
        self._start = start
        self._file = file
        self._stored = stored
        self._results = dict(stored)
        self._dropped = dropped
        self._job_keys: dict[str, None] = {}  # in order
        self._bar = bar

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """The jobs' values, in their order; what has run does not run again. Raises what a job raises, the file holds
        what had finished by then, and ValueError for keys that are not unique."""
        if len({job.key for job in jobs}) != len(jobs):
            raise ValueError("two jobs have the same key: each needs its own")
        missing = [job for job in jobs if job.key not in self._results]
        self._job_keys |= dict.fromkeys(job.key for job in jobs)
        self._bar.desc, self._bar.total = f"{self.about}: ", len(self._job_keys)
        self._bar.n = len(self._job_keys) - len(missing)
        self._bar.refresh()
        if self._start is None or len(missing) < 2:
            finished: Iterator[JobResult] = map(_run, missing)
        else:  # in the order of finishing
            finished = (future.result() for future in as_completed(self._start(missing)))
        for result in finished:
            self._results[result.key] = result
            if self._file is not None:
                with open(self._file, "ab") as out:
                    out.write(_line(asdict(result)))
            self._bar.update()
        return [self._results[job.key].value for job in jobs]

    def job_results(self) -> JobResults:
        """Returns the results of all jobs that `run` was called with, in that order."""
        results = tuple(self._results[key] for key in self._job_keys)
        return JobResults(results, sum(key in self._stored for key in self._job_keys), self._dropped)


def _starter(workers: int | None, ray: str | None) -> contextlib.AbstractContextManager[Start | None]:
    if ray is None:
        return _pool(workers or len(usable_cores()))
    from rubato.planning.ray_jobs import ray_pool  # needs the extra `ray`

    return ray_pool(ray, _run)


@contextlib.contextmanager
def _pool(count: int) -> Iterator[Start | None]:
    """What starts jobs in a pool of so many processes; None where one is enough, and jobs run in this process."""
    if count == 1:
        yield None
        return
    # spawn: a child that shares nothing by accident, on every platform
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    try:
        # A signal that ends the command raises in the main thread. A process whose start that interrupted would be
        # unknown to the pool and outlive it. A thread that is there before any process starts them uninterrupted.
        with ThreadPoolExecutor(1) as starter:
            starter.submit(int).result()
            yield lambda jobs: starter.submit(lambda: [pool.submit(_run, job) for job in jobs]).result()
    except (SystemExit, KeyboardInterrupt) as end:  # not after the jobs under way, which may take minutes
        _kill_children()
        # a pool whose processes were ended as they started has been seen to wait for ever
        status = end.code if isinstance(end, SystemExit) else 128 + signal.SIGINT
        watch = threading.Timer(SHUTDOWN_S, _exit, (status,))
        watch.daemon = True
        watch.start()
        try:
            pool.shutdown(cancel_futures=True)
        finally:
            watch.cancel()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _exit(status: object) -> None:
    """End this process and every process that it started, whatever they wait for."""
    _kill_children()
    os._exit(status if isinstance(status, int) else 1)


def _run(job: Job) -> JobResult:
    value, cost = measure_cost(lambda: job.work(*job.args))
    return JobResult(job.key, orjson.loads(orjson.dumps(value)), cost.wall, cost.cpu)


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


def _read(path: Path, head: Mapping[str, Any]) -> tuple[dict[str, JobResult], int]:
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
    first, *others = whole.splitlines()
    known = json_object(path, 1, first, ValueError)
    if known.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of jobs ({FORMAT}, but {known.get('format')!r}): name another file")
    other = list(_differing(known, expected))
    if other:
        what = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if other[3:] else "")
        raise ValueError(f"{path} holds the jobs of another run (what differs: {what}): name another file")
    results = [_result(path, number, line) for number, line in enumerate(others, start=2)]
    return {result.key: result for result in results}, dropped


def _result(path: Path, number: int, line: bytes) -> JobResult:
    try:
        found = orjson.loads(line)
        return JobResult(found["key"], found["value"], found["wall"], found["cpu"])
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        says = f"{path}, line {number}: not the result of a job ({error!r}): remove the line, its job runs again"
        raise ValueError(says) from error


def _differing(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Where two JSON values differ, as `sweep.settings.0.slo_rule`."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differing(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    elif one != other:
        yield name
