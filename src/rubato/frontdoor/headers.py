"""Headers of a request: what is read of them, and which of them go on to a server."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from uuid import uuid4

from rubato.frontdoor.errors import REJECT_REASON, invalid
from rubato.frontdoor.paths import CHAT, MESSAGES, RESPONSES, TEXT

SESSION = "x-session-id"  # vLLM reads it, too
TENANT = "x-rubato-tenant"  # by which an admin's key speaks for another tenant
# Of a client's headers, those that a server gets. All others stay here, above all keys, SLOs and tenants' names.
FORWARDED = frozenset(
    {
        "accept", "accept-language", "anthropic-beta", "anthropic-version", "baggage", "content-type", "openai-beta",
        "openai-organization", "openai-project", "traceparent", "tracestate", "user-agent", SESSION,
    }
)  # fmt: skip
# Of a server's response, what concerns only the way to here, or is said by this side.
NOT_RETURNED = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "x-request-id", "date", "server", "set-cookie", "proxy-connection",
        "location", "content-location",
    }
)  # fmt: skip
ID_PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", MESSAGES: "chatcmpl-", RESPONSES: "resp_"}  # of vLLM's responses
MAX_ID = 128  # characters of a client's X-Request-Id


def first_of_each(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """ASGI's headers by lower-case name; of one that comes several times the first, as vLLM reads it."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def is_ours(name: str) -> bool:
    """Whether a header is for this side alone: an SLO, or the word of another part of it."""
    return name.startswith(("x-rubato-", "x-slo-", "x-llm-d-slo-"))


def forwarded(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of a client's headers, those for a server."""
    return [(name, value) for name, value in headers if name.lower() in FORWARDED]


def returned(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of a server's headers, those for the client: of our own only why it refused."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() == REJECT_REASON
        or (name.lower() not in NOT_RETURNED and not name.lower().startswith(("x-rubato-", "x-ratelimit-")))
    ]


def session(headers: Mapping[str, str]) -> str:
    """The name of the client's session that a header states, "" without one. Raises ApiError 400 for what is no
    name."""
    name = headers.get(SESSION)
    if name is not None and not re.fullmatch(r"[!-~]{1,128}", name):
        raise invalid(SESSION, "give 1 to 128 visible ASCII characters without blanks.")
    return name or ""


def new_id(path: str, wished: str, taken: Container[str]) -> str:
    """The id of a request: as its client names it, where that is a name and no other request has it."""
    prefix = ID_PREFIXES[path]
    is_name = 0 < len(wished) <= MAX_ID and wished.isascii() and wished.replace("_", "").isalnum()
    id = f"{prefix}{wished}"
    if is_name and id not in taken and f"{id}-0" not in taken:
        return id
    return f"{prefix}{uuid4().hex}"
