"""Canonical paths of requests, and who may use them, the same at each door."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from rubato.frontdoor.errors import ApiError

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MODELS = "/v1/models"
GENERATE = (CHAT, TEXT, RESPONSES, MESSAGES)
OPEN_PATHS = (  # need no key
    "/", "/health", "/ready", "/ping", "/version", "/metrics", "/load", "/docs", "/docs/oauth2-redirect", "/redoc",
    "/openapi.json",
)  # fmt: skip
SHARED_PATHS = (  # every tenant may use these and paths below them, which generate nothing
    MODELS, "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/embeddings", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
MAX_DECODINGS = 4  # of a path, each of which reads all of it
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def canonical_path(path: str) -> str:
    """Returns the one spelling of a path: decoded, with single slashes and none at its end.

    Raises:
        ApiError: 400 for a path that goes up (`..`), in whatever spelling, or has control characters: a server would
            make another path of it than the one that is judged here. Also for escapes within escapes without end.
    """
    for _ in range(MAX_DECODINGS):
        if (decoded := unquote(path)) == path:
            break
        path = decoded
    else:
        raise ApiError(400, "The path has escapes within escapes: write it with one % each.", code="invalid_path")
    if CONTROL_CHARACTER.search(path):
        raise ApiError(400, "The path has a control character in it: write it without.", code="invalid_path")
    parts = [part for part in path.replace("\\", "/").split("/") if part]
    if "." in parts or ".." in parts:
        raise ApiError(400, "The path has a part . or .. in it: write it without.", code="invalid_path")
    return "/" + "/".join(parts)


def written_path(path: str, query: str = "") -> str:
    """Returns a canonical path with its query, encoded for a request line."""
    return quote(path) + (f"?{query}" if query else "")


def is_internal(path: str) -> bool:
    """Returns whether a canonical path is for gateways and servers, and not for clients."""
    return path.startswith("/rubato")


def is_shared(path: str) -> bool:
    """Returns whether every tenant may use this canonical path, which generates nothing."""
    return any(path == shared or path.startswith(shared + "/") for shared in SHARED_PATHS)
