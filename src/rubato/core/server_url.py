"""Addresses of servers: which URLs may be given, how a host stands in one, and why a connection failed without them;
and the header by which a server knows a question of a gateway's own."""

from __future__ import annotations

import os
import re
import socket


def check_url(url: str, instead: str) -> None:
    """Raises ValueError for a URL that is not http:// or https://, or that holds a user or a password, which the error
    does not repeat. instead: what to give in their place, as the end of a sentence."""
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
    """A server's URL before the path of each request: without slashes at its end, and without the /v1 of what clients
    call a base URL. Raises ValueError as `check_url`, and for one with a query, a fragment or an odd path."""
    check_url(url, instead)
    parts = re.fullmatch(r"(https?://[^/\s?#]+)((?:/[\w~%-][\w.~%-]*)*)/*", url, re.ASCII)
    if parts is None:
        raise ValueError(f"give the address of a server, such as {EXAMPLE} or {EXAMPLE}/team-a")
    return parts[1] + parts[2].removesuffix("/v1")


def host_in_url(host: str) -> str:
    """A host as it stands in front of a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bare_host(url: str) -> str:
    """Host and port of a URL, and its path where it has one: as short as people name a server."""
    return url.partition("://")[2].rstrip("/")


def connection_failure(error: BaseException) -> str:
    """Why a connection failed, in words without an address and without anything that came over it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(getattr(error, "os_error", error), socket.gaierror):
        return "its name cannot be looked up"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__


VERSION_HEADER = "x-rubato-version"  # of `/v1/models`, at any server that takes SLOs: vLLM with the plug-in, too
PROBE = "x-rubato-probe"  # a server of ours counts no error of such a question as a client's
EXAMPLE = "http://10.0.0.7:8000"
