"""The log: one line a finished request and a line for what happens to the server, as text or as JSON.

No prompt, no output, no key is ever in it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from rubato.serving.log_writer import LogWriter
from rubato.serving.request_history import RequestRecord
from rubato.serving.slo_report import served, verdict

STDERR = 2

requests = logging.getLogger("rubato.requests")


def set_up(format: Literal["text", "json"], level: str) -> LogWriter:
    """Lines of this form on stderr, from now on. level: "debug", "info", "warning" or "error"."""
    handler = LogWriter(STDERR)
    handler.setFormatter(Lines() if format == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler


class Lines(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, and what the record carries as `fields`."""

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


class Text(logging.Formatter):
    """The same for people: `fields` as name=value behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        if not fields:
            return super().format(record)
        told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        return f"{super().format(record)} {told}"


def finished(record: RequestRecord) -> None:
    """The line of a request that has ended."""
    end, request = record.end, record.request
    assert end is not None, "the line is written at the end"
    if not requests.isEnabledFor(logging.INFO):
        return
    fields = {
        "id": request.id,
        "tenant": request.tenant,
        "tier": request.tier,
        "served": served(request, end),
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
