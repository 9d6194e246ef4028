"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back what may be the beginning of a stop string, and ends at the first one that is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """What is final by now, and whether a stop string has been found (it, and what follows it, are left out)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            final, self._held = self._held[: min(found)], ""
            return final, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        final, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return final, False

    def flush(self) -> str:
        """What was held back, for an output that ended otherwise."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
