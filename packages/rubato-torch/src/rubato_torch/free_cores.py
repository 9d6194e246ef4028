"""How many threads a step computes with, on cores that other programs use too."""

from __future__ import annotations

from collections.abc import Callable

from rubato.core.clock import Clock


class FreeCores:
    """How many threads to compute with on cores that other programs use too.

    Threads that wait for each other are as slow as the one that shares its core: it runs only every other scheduler
    slice of some milliseconds, and each parallel region waits for it. So there are as many threads as cores are left,
    rounded: one is given up as soon as other programs take more than half a core, and comes back once they have taken
    less for `patience` seconds.
    """

    def __init__(self, most: int, clock: Clock, taken: Callable[[], float], cores: int, patience: float = 1.0) -> None:
        """most: threads on a quiet machine. taken: how many of the `cores` other programs take now."""
        self._most, self._clock, self._taken, self._cores, self._patience = most, clock, taken, cores, patience
        self._threads = most
        self._needed_until = clock.now()  # when so few were last called for

    def threads(self) -> int:
        free = int(self._cores - self._taken() + 0.5)
        wanted = max(1, min(self._most, free))
        now = self._clock.now()
        if wanted <= self._threads:
            self._threads, self._needed_until = wanted, now
        elif now - self._needed_until >= self._patience:
            self._threads = wanted
        return self._threads
