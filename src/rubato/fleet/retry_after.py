"""When a client that was refused is to come back: Retry-After, from the rate at which requests completed of late."""

from __future__ import annotations

from collections import deque

RECENT = 64  # completions that are looked back on


class RetryAfter:
    def __init__(self) -> None:
        self._completed: deque[float] = deque(maxlen=RECENT)

    def completed(self, at: float) -> None:
        self._completed.append(at)

    def seconds(self, in_flight: int) -> float:
        """Until about half of what is in flight will have finished."""
        times = self._completed
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        rate = (len(times) - 1) / (times[-1] - times[0])
        return max(1.0, in_flight / 2 / rate)
