"""A progress bar on a terminal, and plain lines where standard error is a file or a pipe."""

from __future__ import annotations

import io
import sys
from typing import Any

from tqdm import tqdm

from rubato.core.clock import WallClock

LINE_S = 10.0  # between two lines at least


class ProgressBar(tqdm):  # type: ignore[misc]  # no stubs
    """`tqdm` whose bar, redrawn in place, becomes a line at the start, every 10 s and at each end of `total`, where it
    cannot be."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._clock = WallClock()
        self._is_plain = not sys.stderr.isatty()
        self._last_line = (-1, 0.0)  # the count and the time of the last line
        drawn = {"file": io.StringIO()} if self._is_plain else {}  # for the line feed at its end
        super().__init__(*args, **drawn, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draw the bar, or write a line where that is due."""
        if not self._is_plain:
            return super().display(msg, pos)  # type: ignore[no-any-return]
        count, at = self._last_line
        now = self._clock.now()
        if self.total and self.n != count and (count < 0 or self.n >= self.total or now - at >= LINE_S):
            self._last_line = (self.n, now)
            print(f"{(self.desc or '').removesuffix(': ')}: {self.n} of {self.total} {self.unit}s", file=sys.stderr)
        return True
