"""The cores that this process may run on, and how much of them other programs take (known on Linux only)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rubato.core.clock import Clock, process_cpu_time

log = logging.getLogger(__name__)

STAT = Path("/proc/stat")


def usable_cores() -> frozenset[int]:
    """Returns the numbers of the cores that the operating system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_seconds(cores: Collection[int]) -> float | None:
    """Returns the CPU seconds that everything (programs, the kernel, other virtual machines) has taken of these cores
    since the machine started; None where the operating system does not say.
    """
    try:
        return _ticks(STAT.read_text().splitlines(), cores) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):  # there is no such file, it may not be read, or it is not what Linux writes
        return None


def _ticks(lines: Sequence[str], cores: Collection[int]) -> int:
    """Sums the busy ticks of these cores over the lines of /proc/stat."""
    ticks = 0
    for line in lines[1:]:  # the first line is the sum of all cores
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if int(name[3:]) in cores:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks


def cpu_seconds_of(pid: int) -> float:
    """Returns the CPU seconds that a process has used, all its threads. Raises OSError if it is not in /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TakenCores:
    """Measures how many of `cores` other programs use: 0.0 to len(cores), 0.0 where the operating system does not say.

    Args:
        clock: tells the time, in seconds.
        cores: numbers of cores; None: all that this process may run on.
        own: returns the CPU seconds used so far by programs that do not count as others (default: this process).
        window: seconds between two readings, at least; the kernel counts in ticks of 10 ms.
    """

    def __init__(
        self,
        clock: Clock,
        cores: Collection[int] | None = None,
        own: Callable[[], float] = process_cpu_time,
        window: float = 0.25,
    ) -> None:
        self._clock, self._own, self.window = clock, own, window
        self._cores = usable_cores() if cores is None else frozenset(cores)
        self._value = 0.0
        self._before = self._read()
        if self._before is None:
            log.info("%s does not say what other programs take of the cores: they count as free", STAT)

    def _read(self) -> tuple[float, float, float] | None:
        busy = busy_seconds(self._cores)
        return None if busy is None else (self._clock.now(), busy, self._own())

    def now(self) -> float:
        """Returns the mean number of cores over the last `window` seconds or more."""
        if self._before is None or self._clock.now() - self._before[0] < self.window:
            return self._value
        reading = self._read()
        if reading is None:
            return 0.0
        passed, busy, own = (new - old for new, old in zip(reading, self._before, strict=True))
        self._before = reading
        self._value = min(max(0.0, (busy - own) / passed), float(len(self._cores)))
        return self._value
