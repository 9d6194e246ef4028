"""The board inside vLLM's API server: the page under /rubato/, and what the engines report as its JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rubato.core.events import Finished, Offered, Placed, Started, Tokens, Verdict
from rubato.engines.vllm import link
from rubato.engines.vllm.reports import REPLICA_NAME
from rubato.frontdoor import history
from rubato.serving.board_pages import FILES
from rubato.serving.board_snapshot import COLUMNS
from rubato.wire.messages import EngineState
from tests.kit import on, request
from tests.serving.test_board import named
from tests.serving.test_vllm_middleware import STATE, TENANTS, Client, run


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "a key")


def reports(client: Client, *, given_up: bool = False) -> None:
    """An engine has ended a late request of acme's, runs one, and holds one of bulk's back."""
    client.reports.block_size = 16
    now = client.reports.clock.now()
    late, runs, waits = (replace(request(n, ttft=1.0, arrival=now - 2.0, tier="chat"), tenant="acme") for n in "abc")
    waits = replace(waits, tenant="bulk")
    verdict = Verdict(False, "deadline", "queue", ttft=1.5, margin=-0.5)
    wire: Any = client.vllm.link
    wire.tell(*[Offered(now - 2.0, one.id, one) for one in (late, runs, waits)])
    for id in "ab":
        wire.tell(Placed(now - 2.0, id, REPLICA_NAME), Started(now - 1.0, id))
    wire.tell(Tokens(now - 0.5, "b", 3), Finished(now - 0.1, "a", "completed", "stop", verdict, 7))
    sequences = [("b", "running", 0, 1, 5, False, now + 0.25)]
    shown = {"at": now, "kv_free": 60, "kv_total": 80, "held": ["c"], "sequences": sequences, "open": ["b", "c"]}
    steps = {"planned": [], "batches": [(10, 2, 0.02), (2, 2, 0.04)]}
    wire.sent.append(EngineState(0, 1, {**STATE, "given_up": given_up, **steps, **shown}))


async def board(client: Client, key: str = "ops-key", query: str = "") -> Any:
    answer = await client.http.get(f"/rubato/board.json{query}", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@on(run, config={"tenants": TENANTS})
async def test_the_page_is_open_and_its_json_needs_a_key(client: Client) -> None:
    assert (await client.http.get("/rubato")).headers["location"] == "rubato/"
    for path, (_, kind) in FILES.items():
        answer = await client.http.get(f"/rubato/{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert (await client.http.get("/rubato/board.json")).status_code == 401
    assert client.vllm.scopes == []


@on(run, config={"tenants": TENANTS})
async def test_what_the_engines_report_is_shown_and_no_more(client: Client) -> None:
    reports(client)
    told = await board(client)
    (engine,) = told["replicas"]
    known = {"id": "0", "running": 1, "waiting": 0, "kv_used_tokens": 320, "kv_total_tokens": 1280, "steps": 3}
    assert {name: engine[name] for name in known} == known
    assert (engine["step_ms"], engine["link"], engine["state"]) == (30.0, "here", "busy")
    assert (told["router"], told["policy"], told["flags"]) == ("", "rubato", [])
    chat = next(tier for tier in told["tiers"] if tier["name"] == "chat")
    assert (chat["windows"]["300"]["missed"], chat["in_flight"], chat["now"]["running"]) == (1, 2, 1)
    (group,) = told["misses"]
    assert (group["tier"], group["cause"], group["latest"]["id"]) == ("chat", "queue", "a")
    rows = {row["id"]: row for row in named(told["requests"])}
    assert told["request_columns"] == list(COLUMNS)
    assert rows["b"]["why"] == "runs at 0: decode"
    assert rows["c"]["why"] == "held for its tenant's share, first in the queue"
    assert rows["b"]["due_in_ms"] in range(1, 251)
    assert (rows["b"]["replica"], rows["c"]["replica"]) == ("0", "")
    page = await client.http.get("/rubato/requests/b", headers={"authorization": "Bearer ops-key"})
    assert page.json()["choices"][0]["explanation"] == "Decodes at this server: 3 of at most 16 tokens."


@on(run, config={"tenants": TENANTS})
async def test_what_came_since_the_engines_last_report_is_shown(client: Client) -> None:
    reports(client)
    now = client.reports.clock.now()
    new = [replace(request(n, ttft=9.0, arrival=now, tier="chat"), tenant="acme") for n in ("waits", "runs", "decodes")]
    wire: Any = client.vllm.link
    wire.tell(*[Offered(now, one.id, one) for one in new], Placed(now, "waits", REPLICA_NAME))
    for one in new[1:]:
        wire.tell(Placed(now, one.id, REPLICA_NAME), Started(now, one.id))
    wire.tell(Tokens(now, "decodes", 1))
    told = await board(client)
    assert told["queue"] == {"in_flight": 5, "held": 1, "waiting": 1, "running": 3, "moving": 0}
    rows = {row["id"]: row for row in named(told["requests"])}
    assert [rows[one.id]["replica"] for one in new] == ["0"] * 3
    assert [rows[one.id]["due_in_ms"] // 1000 for one in new[:2]] == [8, 8]
    assert (rows["runs"]["why"], rows["decodes"]["why"]) == ("runs at 0: prefill, 10 tokens to go", "runs at 0: decode")


@pytest.mark.parametrize(
    ("reported", "due", "token", "shown", "is_late"),
    [
        (-2.0, -1.0, -3.0, "running", False),  # a decode: more tokens have come since it was reported
        (-0.5, -1.0, -3.0, "running", True),  # it was late then
        (-2.0, -1.0, None, "waiting", True),  # of a first token it would be known
        (-2.0, -1.0, -0.1, "running", False),  # which has come since
    ],
)
def test_what_happened_since_a_report_counts(
    reported: float, due: float, token: float | None, shown: str, is_late: bool
) -> None:
    @on(run)
    async def test(client: Client) -> None:
        now = client.reports.clock.now()
        one, wire = request("a", ttft=2.0, tpot=2.0, arrival=now - 4.0), client.vllm.link
        wire.tell(Offered(now - 4.0, "a", one), Placed(now - 4.0, "a", REPLICA_NAME))
        if token is not None:
            wire.tell(Started(now - 3.5, "a"), Tokens(now + token, "a", 1))
        fields = {"at": now + reported, "sequences": [("a", "waiting", 0, 10, 0, False, now + due)]}
        wire.sent.append(EngineState(0, 1, {**STATE, **fields, "planned": [], "batches": []}))
        client.reports.read()
        (view,) = client.reports.views()
        (seq,) = getattr(view, shown)
        assert (seq.due < view.now, seq.pending, view.as_of) == (is_late, 1 if token else 10, now + reported)
        page = history.page("a", client.reports.requests.find("a"), [view], view.now, has_fair_share=False)["choices"][
            0
        ]
        assert (page["so_far"] is not None, page["explanation"].startswith("Late by")) == (is_late, is_late)

    test()


@on(run)
async def test_an_engine_with_nothing_to_run_is_not_silent(client: Client) -> None:
    fields = {"at": client.reports.clock.now() - 60.0, "planned": [], "batches": [], "open": []}
    wire: Any = client.vllm.link
    wire.sent.append(EngineState(0, 1, {**STATE, **fields}))
    (engine,) = (await board(client))["replicas"]
    assert (engine["state"], engine["age_ms"]) == ("idle", 0.0)


@on(run, config={"tenants": TENANTS})
async def test_a_tenant_sees_its_own_requests_there(client: Client) -> None:
    reports(client)
    acme, bulk = [await board(client, key) for key in ("acme-key", "bulk-key")]
    assert [[row["id"] for row in named(told["requests"])] for told in (acme, bulk)] == [["b"], ["c"]]
    assert (acme["replicas"], acme["flags"], bulk["misses"]) == (None, [], [])


@on(run)
async def test_a_policy_that_gave_up_is_flagged_once(client: Client) -> None:
    reports(client, given_up=True)
    for _ in range(2):
        assert [(flag["kind"], flag["replica"]) for flag in (await board(client))["flags"]] == [("gave up", "0")]
    first = (await board(client))["history"]["first"]
    assert (await board(client, query="?since=9999999999"))["history"]["first"] > first
