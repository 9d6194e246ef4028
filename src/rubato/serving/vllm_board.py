"""The board inside vLLM's API server, under `/rubato/`, with the page and the JSON of our own server.

The engines report their state once a second, and each of their steps. There is no router here, and KV is shown only
where the block size is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

from fastapi.responses import RedirectResponse, Response

from rubato.core.interfaces import SeqView
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.serving.board import Board, BoardSource
from rubato.serving.board_pages import FILES, file_answer, first_slice, json_answer
from rubato.serving.vllm_reports import EngineReports

HOME = "/rubato"
JSON = f"{HOME}/board.json"


class VllmBoard:
    """Serves the board of one API server.

    Args:
        reports: of the engines.
        tenants: who may see what.
        model: its name.
        policy: its name.
    """

    def __init__(self, reports: EngineReports, tenants: Tenants, model: str, policy: str) -> None:
        self._board = Board(_source(reports, tenants, model, policy))
        reports.add_listener(self._board.counts)

    def file(self, path: str, *, with_slash: bool) -> Response | None:
        """Returns one of the page's files, which need no key; None for another path.

        Args:
            path: canonical.
            with_slash: whether it was written with a slash at its end; the page's relative paths need it.
        """
        if path == HOME and not with_slash:
            return RedirectResponse("rubato/")
        name = path.removeprefix(HOME).removeprefix("/")
        return file_answer(name) if path.startswith(HOME) and name in FILES else None

    def json(self, tenant: Tenant, query: Mapping[str, str]) -> Response:
        return json_answer(self._board.json(tenant, first_slice(query.get("since", ""))))


def _source(reports: EngineReports, tenants: Tenants, model: str, policy: str) -> BoardSource:
    """Returns what the board shows of the engines' reports."""
    records, engines = reports.requests.in_flight, reports.engines

    def beyond_share() -> Sequence[SeqView]:
        """Returns the requests of tenants beyond their share."""
        ids = [id for fields in engines.values() for id in fields.get("held", ()) if id in records]
        return [cast(SeqView, SimpleNamespace(id=id, request=records[id].request, **_UNPLANNED)) for id in ids]

    return BoardSource(
        model,
        policy,
        "",
        reports.clock,
        {"request": "requests/", "chat": "../v1/chat/completions"},
        tenants,
        tenants.configured,
        reports.requests,
        beyond_share,
        reports.views,
        lambda: "serving",
        lambda: [str(engine) for engine, fields in engines.items() if fields.get("given_up")],
    )


_UNPLANNED = {"due": float("inf"), "missed": False}
