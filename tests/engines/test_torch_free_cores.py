"""How many threads are left for a step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from rubato.core.clock import WallClock
from rubato_torch.free_cores import FreeCores


class Clock(WallClock):
    time = 0.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("most", "cores", "taken", "threads"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.5, 2),
        (2, 2, 0.51, 1),  # what a busy program gets beside two threads of ours is 0.67
        (2, 2, 1.3, 1),
        (2, 2, 2.0, 1),  # never none
        (8, 8, 1.0, 7),
        (8, 8, 3.4, 5),
        (4, 8, 3.0, 4),  # more cores than threads: the others' are not ours
        (4, 8, 5.2, 3),
        (1, 1, 1.0, 1),
    ],
)
def test_as_many_threads_as_cores_are_left(most: int, cores: int, taken: float, threads: int) -> None:
    assert FreeCores(most, Clock(), lambda: taken, cores).threads() == threads


def test_a_thread_goes_at_once_and_comes_back_after_a_second() -> None:
    clock, taken = Clock(), [0.0]
    free = FreeCores(4, clock, lambda: taken[0], 4, patience=1.0)
    found = []
    for at, others in [(0.0, 0.0), (0.1, 2.0), (0.2, 0.0), (0.9, 1.0), (1.0, 2.0), (1.9, 0.0), (2.0, 0.0), (2.1, 3.0)]:
        clock.time, taken[0] = at, others
        found.append(free.threads())
    assert found == [4, 2, 2, 2, 2, 2, 4, 1]
