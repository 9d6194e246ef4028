"""Cells: in parallel as in series, resumed where they stopped, and a file that is damaged or another's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rubato.planning import jobs
from rubato.planning.jobs import Job, JobBatch, Program

HEAD = {"of": "a test"}


def square(number: int, log: str = "") -> dict[str, int]:
    if log:
        with open(log, "a") as file:
            file.write(f"{number}\n")
    if number < 0:
        raise ValueError(f"{number} is negative")
    return {"square": number * number}


def squares(count: int, log: str = "") -> list[Job]:
    return [Job(f"n={i}", square, (i, log)) for i in range(count)]


def test_parallel_equals_serial(tmp_path: Path) -> None:
    one = jobs.run(squares(5), workers=1)
    several = jobs.run(squares(5), workers=2, file=tmp_path / "jobs", head=HEAD)
    assert one.values == several.values == [{"square": i * i} for i in range(5)]
    assert [result.key for result in several.results] == [f"n={i}" for i in range(5)]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    file, log = tmp_path / "jobs", tmp_path / "log"
    with pytest.raises(ValueError, match="-1 is negative"):
        jobs.run([*squares(3, str(log)), Job("bad", square, (-1,))], file=file, head=HEAD, workers=1)
    done = jobs.run(squares(5, str(log)), file=file, head=HEAD, workers=1)
    assert (done.resumed, done.dropped) == (3, 0)
    assert done.values == [{"square": i * i} for i in range(5)]
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]  # nothing ran twice
    again = jobs.run(squares(5, str(log)), file=file, head=HEAD, workers=1)
    assert again.results == done.results
    assert "5 of 5 jobs were in the file already" in again.notes[0]


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_a_half_written_last_line_is_dropped_and_counted(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "jobs"
    jobs.run(squares(3), file=file, head=HEAD, workers=1)
    file.write_bytes(file.read_bytes()[:-cut])
    done = jobs.run(squares(3), file=file, head=HEAD, workers=1)
    assert (done.resumed, done.dropped) == (2, 1)
    assert done.values == [{"square": i * i} for i in range(3)]
    assert "1 half-written line dropped" in done.notes[1]
    assert jobs.run(squares(3), file=file, head=HEAD, workers=1).dropped == 0  # the file is whole again


def test_a_half_written_head_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    file.write_bytes(b'{"format": "rub')
    assert jobs.run(squares(2), file=file, head=HEAD, workers=1).dropped == 1
    assert jobs.run(squares(2), file=file, head=HEAD, workers=1).resumed == 2


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    jobs.run(squares(3), file=file, head=HEAD, workers=1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:10] + b"\n", lines[3]]))
    with pytest.raises(ValueError, match="jobs, line 3: not JSON"):
        jobs.run(squares(3), file=file, head=HEAD, workers=1)


@pytest.mark.parametrize(
    ("was", "becomes"), [(b'"square":1', b'"square":7'), (b'{"square":1}', b"7"), (b'"n=1"', b'"n=7"')]
)
def test_a_damaged_value_is_an_error_that_names_the_line(tmp_path: Path, was: bytes, becomes: bytes) -> None:
    file = tmp_path / "jobs"
    jobs.run(squares(3), file=file, head=HEAD, workers=1)
    file.write_bytes(file.read_bytes().replace(was, becomes))
    with pytest.raises(ValueError, match="jobs, line 3: not as it was written: remove the line"):
        jobs.run(squares(3), file=file, head=HEAD, workers=1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b'{"key": "n=1"}\n', lines[3]]))
    with pytest.raises(ValueError, match="jobs, line 3: not a job"):
        jobs.run(squares(3), file=file, head=HEAD, workers=1)


def test_a_file_of_other_jobs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    jobs.run(squares(1), file=file, head=HEAD, workers=1)
    with pytest.raises(ValueError, match=r"holds the jobs of another run \(what differs: of\): name"):
        jobs.run(squares(1), file=file, head={"of": "something else"}, workers=1)
    (tmp_path / "other").write_text('{"format": "rubato-workload/1"}\n')
    with pytest.raises(ValueError, match=r"is not a file of jobs \(rubato-jobs/2, but 'rubato-workload/1'"):
        jobs.run(squares(1), file=tmp_path / "other", head=HEAD, workers=1)


def test_keys_are_unique_and_workers_some() -> None:
    with pytest.raises(ValueError, match="two jobs have the same key"):
        jobs.run([*squares(1), *squares(1)])
    with pytest.raises(ValueError, match="0 workers: give 1 or more"):
        jobs.run(squares(2), workers=0)


# --------------------------------------------------------------------------- programs that choose their jobs


def squares_up_to(most: int, log: str = "", soon: int = 0) -> Any:
    """A program that squares 1, 2, 4, ... as long as squares are at most `most`; soon: so many numbers further on."""

    def program(values: Mapping[str, Any]) -> Program[int]:
        last, n = 0, 1
        while True:
            ahead = [Job(f"n={n + i}", square, (n + i, log)) for i in range(soon + 1)]
            yield JobBatch(ahead[:1], soon=lambda ahead=ahead: ahead)  # type: ignore[misc]
            if values[f"n={n}"]["square"] > most:
                return last
            last, n = n, 2 * n

    return program


def test_a_program_goes_by_what_its_cells_returned() -> None:
    answer, done = jobs.follow(squares_up_to(100), workers=1)
    assert answer == 8
    assert [result.key for result in done.results] == ["n=1", "n=2", "n=4", "n=8", "n=16"]


def test_with_what_comes_soon_the_answer_is_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer, done = jobs.follow(squares_up_to(100, str(log), soon=3), workers=2)
    assert answer == 8
    assert {result.key for result in done.results} >= {f"n={n}" for n in (1, 2, 4, 8, 16)}
    assert len(log.read_text().split()) == len(set(log.read_text().split()))  # nothing ran twice
    alone, serial = jobs.follow(squares_up_to(100, soon=3), workers=1)
    assert (alone, len(serial.results)) == (8, 5)  # no process is idle where there is one


@pytest.mark.parametrize(
    ("begun", "idle", "begins"),
    [
        (set(), 1, [0, 1]),  # what is missing always begins,
        (set(), 4, [0, 1, 2, 3]),  # what comes soon where a process would be idle
        ({"n=0", "n=1"}, 0, []),
        ({"n=0", "n=1", "n=2"}, 1, [3]),
    ],
)
def test_idle_processes_begin_what_comes_soon(begun: set[str], idle: int, begins: list[int]) -> None:
    five = squares(5)
    assert jobs._begin(five[:2], lambda: five, begun, idle) == [five[i] for i in begins]


def test_a_program_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, log = tmp_path / "jobs", tmp_path / "log"
    first = jobs.follow(squares_up_to(10, str(log)), file=file, head=HEAD, workers=1)
    assert (first[0], first[1].resumed) == (2, 0)
    again = jobs.follow(squares_up_to(100, str(log)), file=file, head=HEAD, workers=1)
    assert (again[0], again[1].resumed) == (8, 3)
    assert log.read_text().split() == ["1", "2", "4", "8", "16"]


def test_what_a_program_raises_leaves_what_has_finished(tmp_path: Path) -> None:
    def program(values: Mapping[str, Any]) -> Program[None]:
        yield JobBatch(squares(2))
        raise ValueError(f"{len(values)} are enough")

    file = tmp_path / "jobs"
    with pytest.raises(ValueError, match="2 are enough"):
        jobs.follow(program, file=file, head=HEAD, workers=1)
    assert jobs.run(squares(2), file=file, head=HEAD, workers=1).resumed == 2
