"""Cells: in parallel as in series, resumed where they stopped, and a file that is damaged or another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato import cells
from rubato.cells import Cell

HEAD = {"of": "a test"}


def square(number: int, log: str = "") -> dict[str, int]:
    if log:
        with open(log, "a") as file:
            file.write(f"{number}\n")
    if number < 0:
        raise ValueError(f"{number} is negative")
    return {"square": number * number}


def squares(count: int, log: str = "") -> list[Cell]:
    return [Cell(f"n={i}", square, (i, log)) for i in range(count)]


def test_parallel_equals_serial(tmp_path: Path) -> None:
    one = cells.run(squares(5), workers=1)
    several = cells.run(squares(5), workers=2, file=tmp_path / "cells", head=HEAD)
    assert one.values == several.values == [{"square": i * i} for i in range(5)]
    assert [result.key for result in several.results] == [f"n={i}" for i in range(5)]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    file, log = tmp_path / "cells", tmp_path / "log"
    with pytest.raises(ValueError, match="-1 is negative"):
        cells.run([*squares(3, str(log)), Cell("bad", square, (-1,))], file=file, head=HEAD, workers=1)
    done = cells.run(squares(5, str(log)), file=file, head=HEAD, workers=1)
    assert (done.resumed, done.dropped) == (3, 0)
    assert done.values == [{"square": i * i} for i in range(5)]
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]  # nothing ran twice
    again = cells.run(squares(5, str(log)), file=file, head=HEAD, workers=1)
    assert again.results == done.results
    assert "5 of 5 cells were in the file already" in again.notes[0]


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_a_half_written_last_line_is_dropped_and_counted(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "cells"
    cells.run(squares(3), file=file, head=HEAD, workers=1)
    file.write_bytes(file.read_bytes()[:-cut])
    done = cells.run(squares(3), file=file, head=HEAD, workers=1)
    assert (done.resumed, done.dropped) == (2, 1)
    assert done.values == [{"square": i * i} for i in range(3)]
    assert "1 half-written line dropped" in done.notes[1]
    assert cells.run(squares(3), file=file, head=HEAD, workers=1).dropped == 0  # the file is whole again


def test_a_half_written_head_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    file.write_bytes(b'{"format": "rub')
    assert cells.run(squares(2), file=file, head=HEAD, workers=1).dropped == 1
    assert cells.run(squares(2), file=file, head=HEAD, workers=1).resumed == 2


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    cells.run(squares(3), file=file, head=HEAD, workers=1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:10] + b"\n", lines[3]]))
    with pytest.raises(ValueError, match="cells, line 3: not JSON"):
        cells.run(squares(3), file=file, head=HEAD, workers=1)


def test_a_file_of_other_cells_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    cells.run(squares(1), file=file, head=HEAD, workers=1)
    with pytest.raises(ValueError, match="holds the cells of another run: of differ"):
        cells.run(squares(1), file=file, head={"of": "something else"}, workers=1)
    (tmp_path / "other").write_text('{"format": "rubato-workload/1"}\n')
    with pytest.raises(ValueError, match="is not a file of cells"):
        cells.run(squares(1), file=tmp_path / "other", head=HEAD, workers=1)


def test_keys_are_unique_and_workers_some() -> None:
    with pytest.raises(ValueError, match="two cells have the same key"):
        cells.run([*squares(1), *squares(1)])
    with pytest.raises(ValueError, match="0 workers: give 1 or more"):
        cells.run(squares(2), workers=0)
