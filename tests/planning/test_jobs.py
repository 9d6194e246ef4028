"""Jobs: in parallel as in series, resumed where they stopped, and a file that is damaged or another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rubato.planning import jobs
from rubato.planning.jobs import Job, JobResults

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
    with pytest.raises(ValueError, match=r"jobs, line 3: not the result of a job .*: remove the line"):
        jobs.run(squares(3), file=file, head=HEAD, workers=1)


@pytest.mark.parametrize("line", [b'{"key": "n=1"}', b"7", b'["n=1"]'])
def test_a_line_that_is_no_result_is_an_error_that_names_it(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "jobs"
    jobs.run(squares(3), file=file, head=HEAD, workers=1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], line + b"\n", lines[3]]))
    with pytest.raises(ValueError, match=r"jobs, line 3: not the result of a job .*: remove the line"):
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


def squares_up_to(most: int, log: str = "", **how: Any) -> tuple[int, JobResults]:
    """Squares 1, 2, 4, ... as long as squares are at most `most`; each is asked for with the number below it."""
    with jobs.open_runner(head=HEAD, **how) as runner:
        last, n = 0, 1
        while runner.run([Job(f"n={i}", square, (i, log)) for i in (n, n - 1)])[0]["square"] <= most:
            last, n = n, 2 * n
        return last, runner.job_results()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_program_goes_by_what_its_jobs_returned(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    answer, done = squares_up_to(100, str(log), workers=workers)
    assert answer == 8
    assert [result.key for result in done.results] == ["n=1", "n=0", "n=2", "n=4", "n=3", "n=8", "n=7", "n=16", "n=15"]
    assert sorted(map(int, log.read_text().split())) == [0, 1, 2, 3, 4, 7, 8, 15, 16]  # nothing ran twice


def test_a_program_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, log = tmp_path / "jobs", tmp_path / "log"
    first = squares_up_to(10, str(log), file=file, workers=1)
    assert (first[0], first[1].resumed) == (2, 0)
    again = squares_up_to(100, str(log), file=file, workers=1)
    assert (again[0], again[1].resumed) == (8, 5)
    assert log.read_text().split() == ["1", "0", "2", "4", "3", "8", "7", "16", "15"]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_program_or_a_job_raises_leaves_what_has_finished(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "jobs"
    with (
        pytest.raises(ValueError, match="2 are enough"),
        jobs.open_runner(file=file, head=HEAD, workers=workers) as runner,
    ):
        raise ValueError(f"{len(runner.run(squares(2)))} are enough")
    with jobs.open_runner(file=file, head=HEAD, workers=workers) as runner:
        runner.run(squares(3))
        with pytest.raises(ValueError, match="-1 is negative"):
            runner.run([Job("bad", square, (-1,)), *squares(4)])
    assert jobs.run(squares(3), file=file, head=HEAD, workers=1).resumed == 3
