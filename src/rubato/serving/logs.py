"""The log: a line for each finished request and for the server's own events, as text or as JSON.

It contains no prompts, outputs or keys; only at level debug a gateway logs the errors of servers. Lines go to stderr
through a queue and a thread, so that a reader that stops reading holds up no request. A line that finds the queue full
is dropped, and the next line written reports how many were.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from rubato.frontdoor.request_record import RequestRecord
from rubato.frontdoor.verdict import served_as, verdict

STDERR = 2
MAX_QUEUED_LINES = 10_000  # of some 300 bytes each: seconds of a busy server's log

requests = logging.getLogger("rubato.requests")


def set_up(format: Literal["text", "json"], level: str) -> LogWriter:
    """Sends all log records to stderr in this format, from level "debug", "info", "warning" or "error" on."""
    handler = LogWriter(STDERR)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler


class JsonFormatter(logging.Formatter):
    """Makes one JSON object a line: time (ISO 8601, UTC), level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(row, default=str).decode()


class TextFormatter(logging.Formatter):
    """Makes a line for people: `fields` follow the message as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        if not fields:
            return super().format(record)
        pairs = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        return f"{super().format(record)} {pairs}"


def log_finished(record: RequestRecord) -> None:
    """Logs the line of a request that has ended."""
    end, request = record.end, record.request
    assert end is not None, "the line is written at the end"
    if not requests.isEnabledFor(logging.INFO):
        return
    fields = {
        "id": request.id,
        "tenant": request.tenant,
        "tier": request.tier,
        "served": served_as(request, end),
        "outcome": end.outcome,
        "reason": end.reason,
        **verdict(end),
        "prompt_tokens": request.prompt,
        "output_tokens": end.output,
        "cached_tokens": record.cached,
        "preemptions": record.preemptions,
        "replica": record.replicas[-1] if record.replicas else None,
    }
    requests.info("request %s", end.outcome, extra={"fields": fields})


class LogWriter(logging.Handler):
    """Writes formatted records to a file descriptor, from a thread of its own.

    The thread uses no buffered stream: the interpreter flushes those at its end, and would wait for a stuck write.
    """

    def __init__(self, descriptor: int, max_queued_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._queue: queue.Queue[logging.LogRecord] = queue.Queue(max_queued_lines)
        self._reported_dropped = 0  # part of `dropped` that was logged
        threading.Thread(target=self._write_all, name="log writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:  # format now: the arguments may change
            message = record.getMessage()
        except Exception as error:  # as in logging itself, the caller does not pay for a line that cannot be made
            message = f"{record.msg!r} with {record.args!r:.200} ({type(error).__name__}: {error})"
        record.msg, record.args = message, None
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def drain(self, seconds: float) -> bool:
        """Waits up to `seconds` until all lines are written. Returns whether they are."""
        lines = self._queue
        with lines.all_tasks_done:
            return lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, seconds)

    def _write_all(self) -> None:
        while True:
            record = self._queue.get()
            try:
                self._write(record)
            except Exception:  # a reader that is gone, a value that cannot be formatted: the line is lost, and counted
                self.dropped += 1
            finally:
                self._queue.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        dropped = self.dropped
        if dropped > self._reported_dropped:
            lost = f"{dropped - self._reported_dropped} log lines were dropped: their reader did not keep up"
            own = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": lost}
            self._put(logging.makeLogRecord({**own, "created": record.created, "msecs": record.msecs}))
            self._reported_dropped = dropped
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        left = memoryview(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        while left:
            left = left[os.write(self._descriptor, left) :]
