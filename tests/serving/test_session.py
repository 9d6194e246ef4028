"""`x-session-id`: the client's name for a session, for routers that place its requests where their KV is."""

from __future__ import annotations

import pytest

from rubato.core.events import Offered
from tests.kit import on
from tests.kit.apps import Edge, edge


def sessions(at: Edge) -> list[str]:
    return [e.request.session for e in at.events if isinstance(e, Offered)]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_it_becomes_the_requests_session(at: Edge, endpoint: str) -> None:
    ask = getattr(at, endpoint)
    assert (await ask()).status_code == 200
    assert (await ask(headers={"x-session-id": "a" * 128}, n=2)).status_code == 200
    assert sessions(at) == ["", "a" * 128, "a" * 128]


@pytest.mark.parametrize("name", ["", "a b", "a" * 129, "b\u00e9", "a\tb"])
@on(edge)
async def test_what_is_no_name_is_a_400_that_names_the_header(at: Edge, name: str) -> None:
    answer = await at.complete(headers={"x-session-id": name.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-session-id"
    assert "visible ASCII" in answer.json()["error"]["message"]
    assert sessions(at) == []
