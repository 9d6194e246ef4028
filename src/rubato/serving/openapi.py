"""Adds bodies, SLO headers, errors and keys to `/openapi.json`.

FastAPI does not see the bodies, since we parse them ourselves, for OpenAI's error shapes and for speed.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS
from rubato.frontdoor.headers import SESSION_HEADER
from rubato.frontdoor.slo_fields import SLO_HEADERS
from rubato.serving import schemas

_REFERENCE = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The request is malformed, or asks for what this model or server cannot do; `param` names the field.",
    401: "The API key is missing or unknown (only where tenants are configured).",
    404: "There is no such model, request or path.",
    413: "The body is larger than the server takes.",
    429: "No capacity, or a limit is used up: try again after `Retry-After` seconds.",
    500: "The engine failed at this request.",
    503: "The server is stopping, or the request was cut short.",
}
SCHEME = "key"


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetails


def completion(schema: type[schemas.Completion]) -> dict[str, Any]:
    """Returns keywords for FastAPI's route that document an endpoint with this body."""
    body_schema = schema.model_json_schema(ref_template=_REFERENCE)
    body_schema.pop("$defs")
    body = {"required": True, "content": {"application/json": {"schema": body_schema}}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {
        "openapi_extra": {"requestBody": body, "parameters": _headers()},
        "response_model": None,
        "responses": {
            200: {"description": "The answer: whole, or as server-sent events", "content": answer},
            **errors(400, 401, 404, 413, 429, 500, 503),
        },
    }


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route that may answer with these statuses."""
    return {status: {"description": _MEANINGS[status], "model": Error} for status in statuses}


def complete(app: FastAPI, *, keys: bool) -> None:
    """Adds the schemas that routes refer to, and the key if `keys`; call it once all routes exist."""
    document = app.openapi()
    parts = document.setdefault("components", {})
    by_name = parts.setdefault("schemas", {})
    for schema in (schemas.ChatCompletion, schemas.TextCompletion):
        by_name.update(schema.model_json_schema(ref_template=_REFERENCE)["$defs"])
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; every bad input is a 400 here
    for unused in ("HTTPValidationError", "ValidationError"):
        by_name.pop(unused, None)
    if keys:
        parts["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer"}}
        for name, path in document["paths"].items():
            if name.startswith(("/v1/", "/debug/", "/board.json")):
                for operation in path.values():
                    operation["security"] = [{SCHEME: []}]


def _headers() -> list[dict[str, Any]]:
    """Returns the headers of SLOs and session; FastAPI would check them as parameters, and answer 422."""
    time = {"type": "number", "minimum": MIN_SLO_MS, "maximum": MAX_SLO_MS}
    headers = [(name, time, f"{dimension}, milliseconds") for dimension, names in SLO_HEADERS.items() for name in names]
    session = "requests of one session go where its KV is, where the router has prefix_affinity"
    headers.append((SESSION_HEADER, {"type": "string", "pattern": "^[!-~]{1,128}$"}, session))
    return [
        {"name": name, "in": "header", "required": False, "schema": schema, "description": about}
        for name, schema, about in headers
    ]
