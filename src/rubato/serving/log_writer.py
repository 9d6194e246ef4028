"""Log lines on their way to stderr: a queue and a thread, so that a reader that stops reading holds up no request.

A line that finds the queue full is dropped and counted, and the next line that is written says how many were.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

MOST_WAITING = 10_000  # lines, of some 300 bytes: seconds of a busy server's log


class LogWriter(logging.Handler):
    """Writes formatted records to a file descriptor, from a thread of its own.

    The thread uses no buffered stream: the interpreter flushes those at its end, and would wait for a stuck write.
    """

    def __init__(self, descriptor: int, most_waiting: int = MOST_WAITING) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(most_waiting)
        self._told = 0  # of `dropped`, in a line
        threading.Thread(target=self._write_all, name="log writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:  # as it is now: its arguments may change
            message = record.getMessage()
        except Exception as error:  # as in logging itself, the caller does not pay for a line that cannot be made
            message = f"{record.msg!r} with {record.args!r:.200} ({type(error).__name__}: {error})"
        record.msg, record.args = message, None
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def drain(self, seconds: float) -> bool:
        """Wait until all is written, for at most so long. Returns whether it is."""
        queued = self._waiting
        with queued.all_tasks_done:
            return queued.all_tasks_done.wait_for(lambda: not queued.unfinished_tasks, seconds)

    def _write_all(self) -> None:
        while True:
            record = self._waiting.get()
            try:
                self._write(record)
            except Exception:  # a reader that is gone, a value that cannot be formatted: the line is lost, and counted
                self.dropped += 1
            finally:
                self._waiting.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        dropped = self.dropped
        if dropped > self._told:
            self._put(_note(record, f"{dropped - self._told} log lines were dropped: their reader did not keep up"))
            self._told = dropped
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        left = memoryview(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        while left:
            left = left[os.write(self._descriptor, left) :]


def _note(beside: logging.LogRecord, text: str) -> logging.LogRecord:
    """A warning of this module's own, with the time of another record."""
    return logging.makeLogRecord(
        {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text, "created": beside.created,
         "msecs": beside.msecs}
    )  # fmt: skip
