"""Every error a client can see, in OpenAI's shape: `{"error": {message, type, param, code}}`.

Bad input is 400 with `param` naming the field (401 no or an unknown key, 404 unknown model, 413 body too large), no
capacity or a tenant's limit is 429 with `Retry-After`, an SLO that no retry will meet is 429 with `x-should-retry:
false`, a server that stops is 503, an engine that failed is 500. Nothing is ever 422.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import orjson
from fastapi.responses import Response

from rubato.core.events import Finished
from rubato.core.request import INFEASIBLE, LATE, SHUTTING_DOWN

REJECT_REASON = "x-rubato-reject-reason"  # header with the reason of a refusal


class ApiError(Exception):
    """A response other than 200. `param` is a path such as `messages[0].content`, or a header's name."""

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

    def response(self, more: Sequence[tuple[bytes, bytes]] = ()) -> Response:
        """The error as a response. more: further headers."""
        found = Response(self.body(), self.status, dict(self.headers), "application/json")
        found.raw_headers += more
        return found


def invalid(param: str, why: str) -> ApiError:
    """The error of a field or header with an impossible value. why: a sentence; a full stop is added if missing."""
    stop = "" if why.endswith((".", "?")) else "."
    return ApiError(400, f"{param}: {why}{stop}", param=param, code="invalid_value")


def too_long(most: int, asked: str, param: str) -> ApiError:
    """The error of a request that does not fit a context of `most` tokens."""
    message = f"This model's context is {most} tokens; you asked for {asked}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def no_room(most: int, prompt: str, where: str) -> ApiError:
    """The error of a prompt that fills the context of `most` tokens alone. prompt: its tokens."""
    return too_long(most, f"{prompt} of {where}, which leaves no room for output", where)


def from_finished(event: Finished, retry_after: float) -> ApiError:
    """The error of a request that did not complete. retry_after: seconds until room is expected."""
    if event.is_client_error:
        code = "invalid_value" if event.reason.startswith("rejected-invalid") else "context_length_exceeded"
        return ApiError(400, f"This model cannot run the request: {event.reason}.", code=code)
    if event.outcome == "refused":
        return _refused(event.reason, max(1, math.ceil(min(retry_after, 3600.0))))
    if event.outcome == "cancelled":
        return ApiError(503, f"The request was cut short: {event.reason}.", code="cancelled", kind="server_error")
    return ApiError(500, f"The server failed at this request: {event.reason}", code="engine_error", kind="server_error")


def _refused(reason: str, seconds: int) -> ApiError:
    """The error of a refusal. seconds: after which the request may be sent again, if the reason was lack of room."""
    kind, _, why = reason.partition(":")
    named = (REJECT_REASON, "".join(c if " " <= c <= "~" else "?" for c in kind))  # a policy may give any
    if kind == INFEASIBLE:
        message = f"No retry will meet this request's SLO here:{why or ' it cannot be met even alone'}."
        return ApiError(429, message, code=kind, kind="rate_limit_error", headers=(("x-should-retry", "false"), named))
    after = (("retry-after", str(seconds)), named)
    if kind == SHUTTING_DOWN:
        message = "This server is shutting down and takes no new requests: try again in 1 s."
        return ApiError(503, message, code=kind, kind="server_error", headers=(("retry-after", "1"), named))
    again = f"try again in {seconds} s."
    if kind == "rejected-rate-limit":
        message, code = f"This key's rate limit is used up: {again}", "rate_limit_exceeded"
    elif kind == LATE:
        message, code = f"This request's SLO cannot be met beside the requests that are here ({kind}): {again}", kind
    else:
        message, code = f"The server cannot take this request now ({reason}): {again}", kind
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=after)
