"""Checks servers' URLs, takes parts of them, and words connection errors without addresses; names the headers by which
servers and gateways recognise each other.
"""

from __future__ import annotations

import os
import re
import socket


def check_url(url: str, instead: str) -> None:
    """Checks that a URL is http:// or https:// and holds no user or password.

    Args:
        url: to check.
        instead: advice that ends the error's sentence, which repeats no password.

    Raises:
        ValueError: for any other URL.
    """
    if "@" in url:
        raise ValueError(
            f"a URL must not hold a user or a password (what stands before @), since URLs are shown: leave them out; "
            f"{instead}"
        )
    if re.match(r"https?://[^/\s?#]", url):
        return
    bare = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?(/[\w./-]*)?", url)
    raise ValueError(f"a URL begins with http:// or https://: give {f'http://{url}' if bare else EXAMPLE}")


def server_base_url(url: str, instead: str) -> str:
    """Returns a server's URL without slashes at its end and without the /v1 of OpenAI clients' base URL.

    Raises:
        ValueError: as `check_url`, and for a URL with a query, a fragment or an odd path.
    """
    check_url(url, instead)
    parts = re.fullmatch(r"(https?://[^/\s?#]+)((?:/[\w~%-][\w.~%-]*)*)/*", url, re.ASCII)
    if parts is None:
        raise ValueError(f"give the address of a server, such as {EXAMPLE} or {EXAMPLE}/team-a")
    return parts[1] + parts[2].removesuffix("/v1")


def host_in_url(host: str) -> str:
    """Returns the host as written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bare_host(url: str) -> str:
    """Returns host, port and path of a URL, the short name of a server."""
    return url.partition("://")[2].rstrip("/")


def connection_failure(error: BaseException) -> str:
    """Says why a connection failed, without its address and without received data."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(getattr(error, "os_error", error), socket.gaierror):
        return "its name cannot be looked up"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__


VERSION_HEADER = "x-rubato-version"  # in `/v1/models`, of any server that takes SLOs, also vLLM with the plug-in
PROBE = "x-rubato-probe"  # in a gateway's own requests, whose errors our servers do not count as a client's
EXAMPLE = "http://10.0.0.7:8000"
