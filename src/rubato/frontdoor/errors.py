"""Every error a client can see, in OpenAI's shape: `{"error": {message, type, param, code}}`.

Bad input is 400 with `param` naming the field (401 no or an unknown key, 404 unknown model, 413 body too large), no
capacity or a tenant's limit is 429 with `Retry-After`, an engine that failed is 500. Nothing is ever 422.
"""

from __future__ import annotations

import math

import orjson
from fastapi.responses import Response

from rubato.core.events import Finished


class ApiError(Exception):
    """An answer other than 200. `param` is a path such as `messages[0].content`, or a header's name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = headers

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers), "application/json")


def invalid(param: str, why: str) -> ApiError:
    """The error of a field or header whose value cannot be."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


def too_long(most: int, asked: str, param: str) -> ApiError:
    """The error of what does not fit into a context of `most` tokens."""
    message = f"This model's context is {most} tokens; you asked for {asked}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def no_room(most: int, prompt: str, where: str) -> ApiError:
    """The error of a prompt, of so many tokens, that fills the context alone."""
    return too_long(most, f"{prompt} of {where}, which leaves no room for output", where)


def from_finished(event: Finished, retry_after: float) -> ApiError:
    """The error of a request that ended in anything but completion. `retry_after`: seconds until room is expected."""
    if event.is_client_error:
        code = "invalid_value" if event.reason.startswith("rejected-invalid") else "context_length_exceeded"
        return ApiError(400, f"This model cannot run the request: {event.reason}.", code=code)
    if event.outcome == "refused":
        seconds = max(1, math.ceil(min(retry_after, 3600.0)))
        limited = event.reason.startswith("rejected-rate-limit")
        printable = "".join(c if " " <= c <= "~" else "?" for c in event.reason)  # a policy may give any reason
        return ApiError(
            429,
            f"This key's rate limit is used up: try again in {seconds} s."
            if limited
            else f"The server cannot take this request now ({event.reason}): try again in {seconds} s.",
            code="rate_limit_exceeded" if limited else event.reason.partition(":")[0],
            kind="rate_limit_error",
            headers=(("retry-after", str(seconds)), ("x-rubato-reject-reason", printable)),
        )
    if event.outcome == "cancelled":
        return ApiError(503, f"The request was cut short: {event.reason}.", code="cancelled", kind="server_error")
    return ApiError(500, f"The server failed at this request: {event.reason}", code="engine_error", kind="server_error")
