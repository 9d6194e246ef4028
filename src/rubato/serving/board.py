"""The board: `/`, a page to look at, and `/board.json`, what it shows.

The page is the same for everyone and holds nothing. Where tenants are configured the JSON needs a key: a tenant sees
its own requests and the tiers' totals, an admin all. How things stand is worked out once in `FRESH` seconds, however
many browsers look.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from math import inf
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from rubato.core.interfaces import View
from rubato.fleet.cluster import Cluster
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.frontdoor.verdict import in_ms
from rubato.serving import openapi
from rubato.serving.board_counts import WINDOW, BoardCounts, in_all
from rubato.serving.board_snapshot import RequestsInFlight, replica_shown

FRESH = 0.5  # seconds
PAGE = "board_page"  # the folder of the files below
FILES = {  # path -> file, media type
    "/": ("board.html", "text/html; charset=utf-8"),
    "/board/board.css": ("board.css", "text/css; charset=utf-8"),
    "/board/board.js": ("board.js", "text/javascript; charset=utf-8"),
    "/board/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/board/send.js": ("send.js", "text/javascript; charset=utf-8"),
    "/board/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing of another host, nothing inline, no frame around it: a request's or tenant's name cannot become code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class BoardService(Protocol):
    """What the board needs of `Service`."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def fair(self) -> bool: ...
    def views(self) -> Sequence[View]: ...
    def counted(self) -> Collection[str]:
        """Replicas that tell nothing of themselves: what is sent there is counted."""
        ...


class BoardState(Protocol):
    """What the board needs of an app's state."""

    @property
    def service(self) -> BoardService: ...
    @property
    def tenants(self) -> Tenants: ...
    @property
    def recorder(self) -> RequestHistory: ...


def add_board(app: FastAPI, state: BoardState) -> None:
    """Mount the board. The cluster's requests are counted from now on."""
    board = Board(app, state)

    @app.get("/board.json", responses=openapi.errors(401))
    async def json(http: Request) -> Response:
        """What the board shows: tiers, replicas, requests in flight and recent misses. Of requests a tenant sees its
        own, and of replicas nothing; an admin all."""
        content = board.json(state.tenants.of(http.headers))
        return Response(content, media_type="application/json", headers={"cache-control": "no-store"})

    def add_file(path: str, name: str, kind: str) -> None:
        async def file() -> Response:
            return Response(_read(name), media_type=kind, headers=HEADERS)

        app.add_api_route(path, file, methods=["GET", "HEAD"], include_in_schema=False)

    for path, (name, kind) in FILES.items():
        add_file(path, name, kind)


@cache
def _read(name: str) -> bytes:
    return (resources.files("rubato.serving") / PAGE / name).read_bytes()


class Board:
    """How things stood at most `FRESH` seconds ago, and what each tenant may see of that."""

    def __init__(self, app: FastAPI, state: BoardState) -> None:
        self._app, self._state = app, state
        self._counts = BoardCounts()
        self._cluster = state.service.cluster
        self._cluster.listen(self._counts)
        self._since = self._cluster.clock.now()
        self._at = -inf
        self._for_all: dict[str, Any] = {}
        self._replicas: list[dict[str, Any]] = []
        self._requests = RequestsInFlight({}, [], [], 0.0, fair=False)
        self._told: dict[str, bytes] = {}  # by tenant

    def json(self, tenant: Tenant) -> bytes:
        """What this tenant sees."""
        now = self._cluster.clock.now()
        if now >= self._at + FRESH:
            self._look(now)
        if tenant.name not in self._told:
            self._told[tenant.name] = orjson.dumps(self._shown(tenant))
        return self._told[tenant.name]

    def _look(self, now: float) -> None:
        service, cluster = self._state.service, self._cluster
        self._at, self._told = now, {}
        views, draining, counted = service.views(), cluster.draining_replicas, service.counted()
        self._replicas = [replica_shown(view, self._counts.step_seconds(view.id), draining, counted) for view in views]
        self._requests = RequestsInFlight(
            self._state.recorder.in_flight, cluster.held, views, now, fair=service.fair, counted=counted
        )
        tiers = {name: tier.shown(now) for name, tier in self._counts.tiers.items()}
        slos = {tier.name: in_ms(tier.slo) for tier in self._state.tenants.all_tiers.usable}
        self._for_all = {
            "model": service.names[0],
            "state": self._serving(),
            "serving_seconds": round(now - self._since, 1),
            "window_seconds": WINDOW,
            "keys": self._state.tenants.configured,
            "total": in_all(list(tiers.values())),
            "tiers": [{"name": name, "slo": slos.get(name), **tier} for name, tier in sorted(tiers.items())],
        }

    def _shown(self, tenant: Tenant) -> dict[str, Any]:
        whose = None if tenant.admin else tenant.name
        return {
            **self._for_all,
            "tenant": tenant.name,
            "admin": tenant.admin,
            "may_ask_for": [
                {"name": tier.name, "slo": in_ms(tier.slo)} for tier in self._state.tenants.tiers(tenant).usable
            ],
            "replicas": self._replicas if tenant.admin else None,
            **self._requests.shown(whose),
            "misses": self._counts.misses(whose, self._at),
        }

    def _serving(self) -> str:
        if self._cluster.dead.is_set():
            return "dead"
        return "draining" if getattr(self._app.state, "draining", False) else "serving"
