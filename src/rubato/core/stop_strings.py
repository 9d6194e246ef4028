"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Withholds text that may begin a stop string, and ends at the first complete one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._withheld = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Returns the text that is final by now, without any stop string, and whether one was complete."""
        if not self._stops:
            return text, False
        self._withheld += text
        starts = [at for stop in self._stops if (at := self._withheld.find(stop)) >= 0]
        if starts:
            final, self._withheld = self._withheld[: min(starts)], ""
            return final, True
        keep = max(_overlap(self._withheld, stop) for stop in self._stops)
        end = len(self._withheld) - keep
        final, self._withheld = self._withheld[:end], self._withheld[end:]
        return final, False

    def flush(self) -> str:
        """Returns the withheld text, for an output that ended without a stop string."""
        rest, self._withheld = self._withheld, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
