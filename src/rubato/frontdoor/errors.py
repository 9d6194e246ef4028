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
    """Describes a response other than 200. `param` is a path such as `messages[0].content`, or a header's name."""

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
        """Returns the error as a response with these further headers."""
        response = Response(self.body(), self.status, dict(self.headers), "application/json")
        response.raw_headers += more
        return response


def invalid(param: str, why: str) -> ApiError:
    """Returns the error of a field or header with an impossible value; a full stop is added to `why` if missing."""
    stop = "" if why.endswith((".", "?")) else "."
    return ApiError(400, f"{param}: {why}{stop}", param=param, code="invalid_value")


def too_long(max_model_len: int, size: str, param: str) -> ApiError:
    """Returns the error of a request that does not fit the model's context of `max_model_len` tokens."""
    message = f"This model's context is {max_model_len} tokens; you asked for {size}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def no_room(max_model_len: int, prompt: str, where: str) -> ApiError:
    """Returns the error of a prompt that fills the model's context alone.

    Args:
        max_model_len: tokens of the context.
        prompt: tokens of the prompt, in words.
        where: the prompt's field.
    """
    return too_long(max_model_len, f"{prompt} of {where}, which leaves no room for output", where)


def from_finished(event: Finished, retry_after: float) -> ApiError:
    """Returns the error of a request that did not complete; room is expected in `retry_after` seconds."""
    if event.is_client_error:
        code = "invalid_value" if event.reason.startswith("rejected-invalid") else "context_length_exceeded"
        return ApiError(400, f"This model cannot run the request: {event.reason}.", code=code)
    if event.outcome == "refused":
        return _refused(event.reason, max(1, math.ceil(min(retry_after, 3600.0))))
    if event.outcome == "cancelled":
        return ApiError(503, f"The request was cut short: {event.reason}.", code="cancelled", kind="server_error")
    return ApiError(500, f"The server failed at this request: {event.reason}", code="engine_error", kind="server_error")


def _refused(reason: str, seconds: int) -> ApiError:
    """Returns the error of a refusal; after lack of room the request may be sent again in this many seconds."""
    kind, _, why = reason.partition(":")
    reason_header = (REJECT_REASON, "".join(c if " " <= c <= "~" else "?" for c in kind))  # a policy may give any
    if kind == INFEASIBLE:
        message = f"No retry will meet this request's SLO here:{why or ' it cannot be met even alone'}."
        headers = (("x-should-retry", "false"), reason_header)
        return ApiError(429, message, code=kind, kind="rate_limit_error", headers=headers)
    after = (("retry-after", str(seconds)), reason_header)
    if kind == SHUTTING_DOWN:
        message = "This server is shutting down and takes no new requests: try again in 1 s."
        return ApiError(503, message, code=kind, kind="server_error", headers=(("retry-after", "1"), reason_header))
    again = f"try again in {seconds} s."
    if kind == "rejected-rate-limit":
        message, code = f"This key's rate limit is used up: {again}", "rate_limit_exceeded"
    elif kind == LATE:
        message, code = f"This request's SLO cannot be met beside the requests that are here ({kind}): {again}", kind
    else:
        message, code = f"The server cannot take this request now ({reason}): {again}", kind
    return ApiError(429, message, code=code, kind="rate_limit_error", headers=after)
