"""How the server ends: told by signals, and in any case in time.

A step that hangs in a thread keeps the interpreter from ending, and a policy that computes for ever keeps the event
loop from turning. Signals are therefore heard outside the loop, and a timer in a thread of its own ends the process
when it has not ended by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from math import inf
from types import FrameType

from rubato.core.clock import WallClock
from rubato.serving.logs import LogWriter

CLOSE_SECONDS = 9.0  # from the end of the drain to that of the process: the manual promises 10
LOG_SECONDS = 0.5  # for the last lines of the log to be taken

log = logging.getLogger(__name__)


class Shutdown:
    """told: set by the first SIGTERM or SIGINT; again: by the next. drain_seconds: how long requests may go on after
    the first. Made in the main thread, on the running event loop."""

    def __init__(self, drain_seconds: float, writer: LogWriter) -> None:
        self.told = asyncio.Event()
        self.again = asyncio.Event()
        self._drain_seconds = drain_seconds
        self._writer = writer
        self._signals = 0
        self._timer: threading.Timer | None = None
        self._clock = WallClock()
        self._deadline = inf
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)

    def end_within(self, seconds: float = CLOSE_SECONDS) -> None:
        """From now on: the process exits with status 1 unless it has ended before. A limit that ends sooner stays."""
        deadline = self._clock.now() + seconds
        if deadline >= self._deadline:  # however often it is told to end, that does not put its end off
            return
        self._deadline = deadline
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._exit, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """In the main thread between two bytecodes, whatever that thread is doing."""
        self._signals += 1
        first = self._signals == 1
        self.end_within(self._drain_seconds + CLOSE_SECONDS if first else CLOSE_SECONDS)
        self._loop.call_soon_threadsafe((self.told if first else self.again).set)

    def _exit(self, seconds: float) -> None:
        log.critical(
            "exit: the server has not ended by itself within %.0f s; a step, a policy or a start hangs", seconds
        )
        self._writer.drain(LOG_SECONDS)
        os._exit(1)
