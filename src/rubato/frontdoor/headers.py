"""Reads the headers of a request, and selects those that are forwarded to a server or returned to a client."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from uuid import uuid4

from rubato.frontdoor.errors import REJECT_REASON, invalid
from rubato.frontdoor.paths import CHAT, MESSAGES, RESPONSES, TEXT

SESSION_HEADER = "x-session-id"  # vLLM reads it, too
TENANT_HEADER = "x-rubato-tenant"  # names the tenant for which an admin's key acts
# Headers of a client that a server gets. All others are dropped, above all keys, SLOs and tenants' names.
FORWARDED = frozenset(
    {
        "accept", "accept-language", "anthropic-beta", "anthropic-version", "baggage", "content-type", "openai-beta",
        "openai-organization", "openai-project", "traceparent", "tracestate", "user-agent", SESSION_HEADER,
    }
)  # fmt: skip
# Headers of a server that concern only its connection, or that we set ourselves.
NOT_RETURNED = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "x-request-id", "date", "server", "set-cookie", "proxy-connection",
        "location", "content-location",
    }
)  # fmt: skip
ID_PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", MESSAGES: "chatcmpl-", RESPONSES: "resp_"}  # of vLLM's responses
MAX_ID_CHARACTERS = 128  # characters of a client's X-Request-Id


def first_of_each(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns ASGI's headers by lower-case name; the first of several with one name, as vLLM reads it."""
    by_name: dict[str, str] = {}
    for name, value in headers:
        by_name.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return by_name


def is_ours(name: str) -> bool:
    """Returns whether a header is ours: an SLO, or from another part of Rubato."""
    return name.startswith(("x-rubato-", "x-slo-", "x-llm-d-slo-"))


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the headers of a client that a server gets."""
    return [(name, value) for name, value in headers if name.lower() in FORWARDED]


def returned_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the headers of a server that the client gets; of Rubato's own only the reason of a refusal."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() == REJECT_REASON
        or (name.lower() not in NOT_RETURNED and not name.lower().startswith(("x-rubato-", "x-ratelimit-")))
    ]


def session_name(headers: Mapping[str, str]) -> str:
    """Returns the client's session by its header, "" without one. Raises ApiError 400 for an invalid name."""
    name = headers.get(SESSION_HEADER)
    if name is not None and not re.fullmatch(r"[!-~]{1,128}", name):
        raise invalid(SESSION_HEADER, "give 1 to 128 visible ASCII characters without blanks.")
    return name or ""


def new_id(path: str, wished: str, taken: Container[str]) -> str:
    """Returns a new request id: the one the client wishes, if it is valid and not taken."""
    prefix = ID_PREFIXES[path]
    is_name = 0 < len(wished) <= MAX_ID_CHARACTERS and wished.isascii() and wished.replace("_", "").isalnum()
    id = f"{prefix}{wished}"
    if is_name and id not in taken and f"{id}-0" not in taken:
        return id
    return f"{prefix}{uuid4().hex}"
