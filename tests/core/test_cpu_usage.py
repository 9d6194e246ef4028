"""How much of the cores other programs take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rubato.core import cpu_usage
from rubato.core.clock import WallClock
from rubato.core.cpu_usage import TakenCores

TICKS = os.sysconf("SC_CLK_TCK")


class Clock(WallClock):
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu_usage, "STAT", tmp_path / "stat")
    return tmp_path / "stat"


def write(stat: Path, busy: dict[int, float]) -> None:
    """So many seconds of use of each core, in thirds as user, irq and steal; always much idle and waiting."""
    rows = ["cpu  9 9 9 9 9 9 9 9 9 9"]
    for core, seconds in busy.items():
        third = int(seconds * TICKS / 3)
        rows.append(f"cpu{core} {third} 0 0 99999 777 {third} 0 {third} 0 0")
    stat.write_text("\n".join([*rows, "intr 1 2 3", "ctxt 5"]))


def test_what_others_take_is_what_is_used_less_what_we_use(stat: Path) -> None:
    clock, own = Clock(), [0.0]
    write(stat, {0: 30.0, 1: 30.0, 2: 30.0})
    taken = TakenCores(clock, {0, 2}, lambda: own[0], window=0.5)
    assert taken.now() == 0.0
    clock.time, own[0] = 1.0, 0.6
    write(stat, {0: 31.2, 1: 90.0, 2: 30.3})
    assert taken.now() == pytest.approx(0.9)
    clock.time = 1.4  # within the window nothing is read
    write(stat, {0: 60.0, 1: 90.0, 2: 30.3})
    assert taken.now() == pytest.approx(0.9)
    clock.time = 3.0
    assert taken.now() == 2.0  # ticks are coarse: never more than there are cores
    clock.time, own[0] = 4.0, 9.0
    assert taken.now() == 0.0


@pytest.mark.parametrize("text", [None, "cpu  1 2\ncpu0 1 2 3\n", "cpu\ncpux 1 2 3 4 5 6 7 8\n"])
def test_without_proc_nothing_is_known_and_all_cores_count_as_free(
    stat: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, not at every step."""
    caplog.set_level("INFO")
    if text is not None:
        stat.write_text(text)
    clock = Clock()
    taken = TakenCores(clock, {0, 1})
    for clock.time in range(5, 25):
        assert taken.now() == 0.0
    assert cpu_usage.busy_seconds({0}) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{stat} does not say what other programs take of the cores: they count as free"
    ]


def test_a_stat_file_that_goes_away_is_no_error(stat: Path) -> None:
    stat.write_text("cpu  0\ncpu0 0 0 0 0 0 0 0 0\n")
    clock = Clock()
    taken = TakenCores(clock, {0})
    stat.unlink()
    for clock.time in (1.0, 2.0):
        assert taken.now() == 0.0


def test_this_machine_says_what_this_process_uses() -> None:
    if not cpu_usage.STAT.exists():
        pytest.skip("no /proc here")
    found = cpu_usage.busy_seconds(cpu_usage.usable_cores())
    assert found is not None
    assert found > 0.0
    assert cpu_usage.cpu_seconds_of(os.getpid()) > 0.0
    with pytest.raises(OSError, match="999999999"):
        cpu_usage.cpu_seconds_of(999999999)
