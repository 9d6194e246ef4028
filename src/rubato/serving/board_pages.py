"""The board's files and JSON in the apps of our server and of the gateway."""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rubato.serving import openapi
from rubato.serving.app_state import AppState
from rubato.serving.board import Board, BoardSource

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


def add_board(app: FastAPI, state: AppState) -> None:
    """Mounts the board; it counts the cluster's requests from now on."""
    board = Board(_source(app, state))
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
    """Returns the response for a path of FILES."""
    name, kind = FILES[path]
    return Response(_read(name), media_type=kind, headers=HEADERS)


def json_answer(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def first_slice(since: str) -> int:
    """Returns the first slice that a client asks for; 0, all of the history, for anything but a number."""
    return int(since) if since.isascii() and since.isdecimal() and len(since) < 16 else 0


@cache
def _read(name: str) -> bytes:
    return (resources.files("rubato.serving") / PAGE_FOLDER / name).read_bytes()


def _source(app: FastAPI, state: AppState) -> BoardSource:
    """Returns what the board shows of the cluster of our server or of the gateway."""
    service = state.service
    cluster = service.cluster

    def lifecycle() -> str:
        if cluster.dead.is_set():
            return "dead"
        return "draining" if getattr(app.state, "is_draining", False) else "serving"

    return BoardSource(
        service.model,
        service.policy,
        cluster.router.partition(".")[0],  # `rubato.router` is the policy's own
        cluster.clock,
        {"request": "debug/requests/", "chat": "v1/chat/completions"},
        state.tenants,
        service.has_fair_share,
        state.requests,
        lambda: cluster.unplaced_requests,
        service.views,
        lifecycle,
        lambda: ("",) if cluster.dead.is_set() else (),
        lambda: cluster.draining_replicas,
        service.counted_replicas,
        service.urls,
    )
