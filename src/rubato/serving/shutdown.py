"""Ends the server on signals, and always in time.

A step that hangs in a thread keeps the interpreter from ending, and a policy that computes for ever blocks the event
loop. Signals are therefore handled outside the loop, and a timer in its own thread ends a process that does not end by
itself.
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

CLOSE_TIMEOUT_S = 9.0  # from the drain's end to the process's: the manual promises 10
LOG_DRAIN_S = 0.5  # for the last lines of the log to be written

log = logging.getLogger(__name__)


class Shutdown:
    """Sets `first_signal` at the first SIGTERM or SIGINT and `second_signal` at the next. Make it in the main thread,
    on the running event loop.

    Args:
        drain_seconds: how long requests may go on after the first signal.
        writer: of the log, written out before a forced exit.
    """

    def __init__(self, drain_seconds: float, writer: LogWriter) -> None:
        self.first_signal = asyncio.Event()
        self.second_signal = asyncio.Event()
        self._drain_seconds = drain_seconds
        self._writer = writer
        self._signals = 0
        self._timer: threading.Timer | None = None
        self._clock = WallClock()
        self._deadline = inf
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def end_within(self, seconds: float = CLOSE_TIMEOUT_S) -> None:
        """Exits with status 1 unless the process ends within `seconds`; an earlier deadline stays."""
        deadline = self._clock.now() + seconds
        if deadline >= self._deadline:  # further signals do not postpone the end
            return
        self._deadline = deadline
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._exit, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between two bytecodes, even if the event loop is blocked."""
        self._signals += 1
        first = self._signals == 1
        self.end_within(self._drain_seconds + CLOSE_TIMEOUT_S if first else CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe((self.first_signal if first else self.second_signal).set)

    def _exit(self, seconds: float) -> None:
        log.critical(
            "exit: the server has not ended by itself within %.0f s; a step, a policy or a start hangs", seconds
        )
        self._writer.drain(LOG_DRAIN_S)
        os._exit(1)
