"""The board's files and JSON in the apps of our server and of the gateway."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rubato.core.clock import Clock
from rubato.core.interfaces import SeqView, View
from rubato.fleet.cluster import Cluster
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.request_record import RequestRecord
from rubato.frontdoor.tenants import Tenants
from rubato.serving import openapi
from rubato.serving.board import Board

PAGE_FOLDER = "board_page"  # the folder of the files below
FILES = {  # path below the page -> file, media type
    "": ("board.html", "text/html; charset=utf-8"),
    "board/board.css": ("board.css", "text/css; charset=utf-8"),
    "board/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"board/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in (
        "board", "charts", "dom", "fleet", "format", "panel", "promises", "requests", "send", "state",
    )},
}  # fmt: skip
# No other hosts, no inline code, no frames: a request's or tenant's name cannot become code.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class BoardService(Protocol):
    """The part of `AnyService` that the board uses."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def policy(self) -> str: ...
    @property
    def fair(self) -> bool: ...
    def views(self) -> Sequence[View]: ...
    def counted(self) -> Collection[str]: ...
    def urls(self) -> Mapping[str, str]: ...


class BoardState(Protocol):
    """The part of `AppState` that the board uses."""

    @property
    def service(self) -> BoardService: ...
    @property
    def tenants(self) -> Tenants: ...
    @property
    def recorder(self) -> RequestHistory: ...


def add_board(app: FastAPI, state: BoardState) -> None:
    """Mount the board; it counts the cluster's requests from now on."""
    board = Board(ClusterSource(app, state))
    state.service.cluster.listen(board.counts)

    @app.get("/board.json", responses=openapi.errors(401))
    async def json(http: Request) -> Response:
        """The board's data: tiers, replicas, requests in flight, misses, and their last 15 minutes. With `?since=N`
        the history begins with slice N. A tenant sees its own requests and no replicas, an admin everything."""
        return json_answer(
            board.json(state.tenants.authenticate(http.headers), first_slice(http.query_params.get("since", "")))
        )

    def add_file(path: str) -> None:
        async def file() -> Response:
            return file_answer(path)

        app.add_api_route(f"/{path}", file, methods=["GET", "HEAD"], include_in_schema=False)

    for path in FILES:
        add_file(path)


def file_answer(path: str) -> Response:
    """The response for a path of FILES."""
    name, kind = FILES[path]
    return Response(_read(name), media_type=kind, headers=HEADERS)


def json_answer(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def first_slice(since: str) -> int:
    """The first slice that a client asks for; 0, all of the history, for anything but a number."""
    return int(since) if since.isascii() and since.isdecimal() and len(since) < 16 else 0


@cache
def _read(name: str) -> bytes:
    return (resources.files("rubato.serving") / PAGE_FOLDER / name).read_bytes()


class ClusterSource:
    """A `BoardSource` that reads the cluster of our server or of the gateway."""

    def __init__(self, app: FastAPI, state: BoardState) -> None:
        self._app, self._state = app, state
        self.paths = {"request": "debug/requests/", "chat": "v1/chat/completions"}
        service = state.service
        self._cluster = service.cluster
        self.model, self.policy, self.fair = service.names[0], service.policy, service.fair
        self.router = self._cluster.router.partition(".")[0]  # `rubato.router` is the policy's own
        self.tenants = state.tenants
        self.views, self.counted, self.urls = service.views, service.counted, service.urls

    @property
    def clock(self) -> Clock:
        return self._cluster.clock

    @property
    def in_flight(self) -> Mapping[str, RequestRecord]:
        return self._state.recorder.in_flight

    @property
    def held_requests(self) -> Sequence[SeqView]:
        return self._cluster.held

    @property
    def draining(self) -> Collection[str]:
        return self._cluster.draining_replicas

    def state(self) -> str:
        if self._cluster.dead.is_set():
            return "dead"
        return "draining" if getattr(self._app.state, "draining", False) else "serving"

    def faulty_replicas(self) -> Collection[str]:
        return ("",) if self._cluster.dead.is_set() else ()
