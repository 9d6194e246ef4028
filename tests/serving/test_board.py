"""/board.json: all that was offered is counted, tenants see their own requests, and names are only data."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest

from rubato.core.events import Offered, Placed, Preempted, Started, Tokens
from rubato.core.plan import Limits, Role
from rubato.core.request import SLO, Cause, Handoff, Request
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.policy_kit.fair_share import FairShare
from rubato.serving import board, board_pages
from rubato.serving.board_snapshot import COLUMNS, MAX_SHOWN_REQUESTS, RequestsInFlight, replica_json, role_words
from tests.kit import Seq, on, request, shown, view
from tests.kit.apps import STEP, Edge, edge
from tests.kit.asgi import key, tenant

TENANTS = [tenant("a"), tenant("b"), tenant("root", admin=True)]
TIGHT = Limits(2, 512, 256, 64, 16)  # two at a time
CAUSES = get_args(Cause)
MARKUP = '<img src=x onerror="alert(1)">'


async def seen(at: Edge, who: str | None = None, query: str = "") -> Any:
    """The board's JSON, with its requests by column."""
    answer = await at.http.get(f"/board.json{query}", headers=key(who) if who else {})
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    told = answer.json()
    assert told["request_columns"] == list(COLUMNS)
    return {**told, "requests": named(told["requests"])}


def named(rows: Any) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def assert_counted(told: Any) -> None:
    starts = [(tier["windows"]["start"], tier) for tier in told["tiers"]]
    for counts, tier in [(told["total"], told["total"]), *starts]:
        assert counts["offered"] == counts["met"] + counts["missed"] + tier["in_flight"]
    for name in ("offered", "met", "missed"):
        assert told["total"][name] == sum(counts[name] for counts, _ in starts)
    assert told["total"]["in_flight"] == sum(tier["in_flight"] for tier in told["tiers"])
    states = {name: told["queue"][name] for name in ("held", "waiting", "running", "moving")}
    assert told["queue"]["in_flight"] == sum(states.values())


@on(edge, limits=TIGHT)
async def test_all_that_was_offered_is_counted_and_each_request_has_its_place(at: Edge) -> None:
    assert (await seen(at))["total"] == {"offered": 0, "met": 0, "missed": 0, "unjudged": 0, "in_flight": 0}
    tasks = [asyncio.create_task(at.complete(max_tokens=10, slo={"ttft_ms": 5000})) for _ in range(4)]
    await at.clock.sleep_until(2.5 * STEP, 0)
    await at.http.post("/v1/completions", json={"model": "simulated", "prompt": "a", "service_tier": "no such"})
    await at.clock.sleep_until(board.REFRESH_S + 0.5 * STEP, 0)
    told = await seen(at)
    assert_counted(told)
    assert (told["total"]["offered"], told["total"]["in_flight"]) == (at.cluster.offered, at.cluster.in_flight)
    assert told["queue"] == {"in_flight": 4, "held": 0, "waiting": 2, "running": 2, "moving": 0}
    assert [row["why"] for row in told["requests"]] == [
        "runs at r0: decode",
        "runs at r0: decode",
        "waits for its turn at r0, first in the queue",
        "waits for its turn at r0, behind 1 other",
    ]
    last = told["requests"][-1]
    assert (last["due_in_ms"], last["age_ms"], last["phases"]) == (4450, 550, ["q", 550])
    assert told["requests"][0]["phases"] == ["p", 100, "d", 450]
    assert told["tiers"][0]["now"] == {"waiting": 2, "running": 2, "late": 0, "oldest_wait_ms": 550.0}
    assert [row["output_tokens"] for row in told["requests"]] == [5, 5, 0, 0]
    (replica,) = told["replicas"]
    assert (replica["running"], replica["waiting"], replica["state"]) == (2, 2, "busy")
    assert (replica["step_ms"], replica["age_ms"], replica["role"]) == (100.0, 0.0, "prefill and decode")
    assert 0 < replica["kv_used_tokens"] < replica["kv_total_tokens"] == 64 * 16
    await asyncio.gather(*tasks)
    await at.clock.sleep_until(3.0, 0)
    told = await seen(at)
    assert_counted(told)
    assert told["total"]["offered"] == told["total"]["met"] == at.cluster.finished == 4
    assert (told["requests"], told["misses"]) == ([], [])


@on(edge)
async def test_misses_have_their_cause_and_what_was_measured(at: Edge) -> None:
    assert (await at.chat(slo={"ttft_ms": 20})).status_code == 200
    refused = await at.chat(slo={"ttft_ms": 20, "on_decline": "refuse"})
    assert refused.status_code == 429
    told = await seen(at)
    assert_counted(told)
    (tier,) = told["tiers"]
    for window in tier["windows"].values():
        assert (window["offered"], window["met"], window["attainment"]) == (2, 0, 0.0)
        assert window["causes"] == {"infeasible": 2}
    assert tier["outcomes"] == {"completed": 1, "refused": 1}
    (group,) = told["misses"]
    assert [group[name] for name in ("tier", "cause", "recent", "count")] == ["default", "infeasible", 2, 2]
    latest = group["latest"]
    assert (latest["outcome"], latest["ttft_ms"], latest["slo"]["ttft_ms"]) == ("refused", None, 20.0)
    assert latest["reason"].startswith(f"{refused.headers['x-rubato-reject-reason']}: ")


@on(edge, tenants=TENANTS)
async def test_a_tenant_sees_its_own_requests_and_the_totals_an_admin_all(at: Edge) -> None:
    late = {"ttft_ms": 20}
    await at.complete(key("b"), slo=late)
    tasks = [asyncio.create_task(at.complete(key(who), max_tokens=20)) for who in ("a", "b", "b")]
    await at.clock.sleep_until(board.REFRESH_S * 2, 0)
    ids = {t: [e.id for e in at.events if isinstance(e, Offered) and e.request.tenant == t] for t in "ab"}
    a, b, root = [await seen(at, who) for who in ("a", "b", "root")]
    assert [row["id"] for row in a["requests"]] == ids["a"]
    assert [row["id"] for row in b["requests"]] == ids["b"][1:]
    assert {row["id"] for row in root["requests"]} == {*ids["a"], *ids["b"][1:]}
    assert (a["misses"], a["replicas"], b["replicas"]) == ([], None, None)
    assert [[group["latest"]["id"] for group in who["misses"]] for who in (b, root)] == [ids["b"][:1]] * 2
    assert (a["history"]["replicas"], a["flags"], list(root["history"]["replicas"])) == ({}, [], ["r0"])
    assert not [id for id in ids["b"] if id in str(a)]
    assert [told["queue"]["in_flight"] for told in (a, b, root)] == [1, 2, 3]
    assert a["tiers"] == b["tiers"] == root["tiers"]
    assert a["total"]["offered"] == 4
    assert [(told["tenant"], told["admin"]) for told in (a, root)] == [("a", False), ("root", True)]
    assert len(root["replicas"]) == 1
    await asyncio.gather(*tasks)


@on(edge, tenants=TENANTS)
async def test_without_a_key_there_is_the_page_and_nothing_on_it(at: Edge) -> None:
    await at.complete(key("a"))
    for headers in ({}, {"authorization": "Bearer nobody"}):
        assert (await at.http.get("/board.json", headers=headers)).status_code == 401
    page = await at.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "simulated" not in page.text
    head = await at.http.head("/")
    assert (head.status_code, head.headers["content-length"]) == (200, page.headers["content-length"])
    paths = (await at.http.get("/openapi.json")).json()["paths"]
    assert paths["/board.json"]["get"]["security"] == [{"key": []}]
    assert not [path for path in paths if path == "/" or path.startswith("/board/")]


@on(
    edge, tiers=Tiers([Tier("fast", SLO(1.0)), Tier("slow", SLO(9.0))], "fast"),
    tenants=[tenant("limited", tiers=("slow",)), tenant("root", admin=True)],
)  # fmt: skip
async def test_a_tenant_is_offered_the_tiers_that_it_may_ask_for(at: Edge) -> None:
    limited, all_of_them = [await seen(at, who) for who in ("limited", "root")]
    assert [tier["name"] for tier in limited["may_ask_for"]] == ["slow", "flex"]
    assert [tier["name"] for tier in all_of_them["may_ask_for"]] == ["fast", "slow", "flex"]
    assert limited["may_ask_for"][0]["slo"] == {"ttft_ms": 9000.0, "tpot_ms": None, "e2e_ms": None}


@on(edge, tenants=TENANTS)
async def test_how_things_stand_is_worked_out_once_in_half_a_second(at: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    class Counted(RequestsInFlight):
        def __init__(self, *args: Any, **more: Any) -> None:
            looks.append(args[3])
            super().__init__(*args, **more)

    monkeypatch.setattr(board, "RequestsInFlight", Counted)
    first = await seen(at, "root")
    task = asyncio.create_task(at.complete(key("a"), max_tokens=20))
    await at.clock.sleep_until(board.REFRESH_S * 0.9, 0)
    assert await seen(at, "root") == first
    assert (await seen(at, "a"))["total"] == first["total"]
    assert looks == [0.0]
    await at.clock.sleep_until(board.REFRESH_S * 1.1, 0)
    for who in ("root", "a", "b", "root"):
        assert (await seen(at, who))["total"]["in_flight"] == 1
    assert len(looks) == 2
    await task


@on(edge, tenants=[tenant(MARKUP)], tiers=Tiers([Tier(MARKUP, SLO(0.01))], MARKUP))
async def test_names_that_look_like_markup_are_data(at: Edge) -> None:
    await at.complete(key(MARKUP), service_tier=MARKUP, slo={"ttft_ms": 20})
    answer = await at.http.get("/board.json", headers=key(MARKUP))
    assert answer.headers["content-type"] == "application/json"
    (tier,) = answer.json()["tiers"]
    (group,) = answer.json()["misses"]
    assert tier["name"] == group["tier"] == group["latest"]["tenant"] == MARKUP


@on(edge, tenants=TENANTS, fair=FairShare(window=1))
async def test_what_fair_share_holds_says_so(at: Edge) -> None:
    tasks = [asyncio.create_task(at.complete(key("a"), max_tokens=10)) for _ in range(3)]
    await at.clock.sleep_until(STEP, 0)
    told = await seen(at, "a")
    assert told["queue"]["held"] == 2
    assert told["requests"][2]["why"] == "held by the router or for its tenant's share, behind 1 other"
    await asyncio.gather(*tasks)


# --------------------------------------------------------------------------- where requests are, and why


def rows(records: RequestHistory, held: Any = (), views: Any = (), now: float = 1.0) -> Any:
    return named(RequestsInFlight(records.in_flight, held, views, now, has_fair_share=False).to_json(None)["requests"])


def history(*requests: Request) -> RequestHistory:
    found = RequestHistory()
    for one in requests:
        found(Offered(one.arrival, one.id, one))
    return found


def test_why_a_request_is_where_it_is() -> None:
    one = request("a")
    moved = replace(one, handoff=Handoff("r0", "prefilled", 0.5, 10))
    records = history(one)
    (row,) = rows(records, held=shown(one))
    assert row["why"] == "held by the router, first in the queue"
    (row,) = rows(records, held=shown(moved))
    assert row["why"] == "handed off by r0 (prefilled): held until another replica takes it"
    records(Placed(0.1, "a", "r0"))
    (row,) = rows(records)
    assert (row["state"], row["why"]) == ("moving", "on its way to r0")
    records(Started(0.1, "a"))
    running = [view(running=[Seq(one, length=100, cached=20)])]
    named_ = RequestsInFlight(records.in_flight, [], running, 1.0, has_fair_share=False).to_json(
        None, {"r0": "gpu-4:8000"}
    )
    assert named(named_["requests"])[0]["why"] == "runs at gpu-4:8000: prefill, 80 tokens to go"
    (row,) = rows(records, views=running)
    assert (row["state"], row["why"]) == ("running", "runs at r0: prefill, 80 tokens to go")
    records(Preempted(0.2, "a"))
    (row,) = rows(records, views=[view([Seq(one)])])
    assert (row["why"], row["phases"][-2:]) == ("preempted, waits to go on at r0, first in the queue", ["q", 800])
    records(Placed(0.3, "a", "r1"))
    (row,) = rows(records, views=[replace(view(), moving=[Seq(moved)])])
    assert (row["state"], row["replica"], row["why"]) == ("moving", "r1", "on its way to r1")


def test_a_late_token_is_late_now_or_was() -> None:
    requests = [request(name) for name in "abc"]
    records = history(*requests)
    seqs = [Seq(requests[0], due=0.5), Seq(requests[1], due=5.0, missed=True), Seq(requests[2], due=5.0)]
    assert [row["late"] for row in rows(records, views=[view(running=seqs)])] == [True, True, False]


def test_of_many_the_most_urgent_are_shown_and_all_are_counted() -> None:
    requests = [request(f"q{i}", arrival=float(i)) for i in range(MAX_SHOWN_REQUESTS + 100)]
    seqs = [Seq(one, due=float(-i)) for i, one in enumerate(requests)]  # the last offered is due first
    board_ = RequestsInFlight(history(*requests).in_flight, [], [view(seqs)], 0.0, has_fair_share=False)
    told = board_.to_json(None)
    assert told["queue"]["waiting"] == told["queue"]["in_flight"] == MAX_SHOWN_REQUESTS + 100
    assert [row[0] for row in told["requests"]] == [one.id for one in requests[100:]]
    assert board_.to_json("someone else")["requests"] == []


def test_a_replica_says_how_old_its_view_is_and_what_it_is_for() -> None:
    told = replica_json(replace(view(now=10.0, kv_free=750), as_of=8.5), 0.02, ["r0"])
    assert (told["age_ms"], told["state"], told["kv_used_tokens"], told["step_ms"]) == (1500.0, "draining", 4000, 20.0)
    assert role_words(Role("decode", "chat", "g1", "hp")) == "decode only, tier chat, group g1, kind hp"


def test_of_a_replica_that_is_counted_the_board_shows_what_is_known_and_no_more() -> None:
    one, two = request("a"), request("b")
    records = history(one, two)
    for told in (Placed(0.1, "a", "r0"), Placed(0.1, "b", "r0"), Started(0.2, "a"), Tokens(0.3, "a", 2)):
        records(told)
    there = view([Seq(two)], running=[Seq(one, length=100, cached=0)])
    shown_ = RequestsInFlight(
        records.in_flight, [], [there], 1.0, has_fair_share=False, counted_replicas={"r0"}
    ).to_json(None)
    most = one.sampling.max_tokens
    assert [row["why"] for row in named(shown_["requests"])] == [
        f"running at r0, 2 of {most}", "sent to r0: nothing has come of it yet",
    ]  # fmt: skip
    known = {"running": 1, "waiting": 1, "state": "busy", "link": "counted"}
    told = replica_json(there, None, [], {"r0"})
    assert {name: told[name] for name in known} == known
    assert [told[name] for name in ("age_ms", "steps", "step_ms", "kv_used_tokens")] == [None] * 4
    assert replica_json(replace(there, kv_free=750), None, [], {"r0"})["kv_used_tokens"] == 4000
    assert replica_json(view([Seq(two)]), None, [], {"r0"})["state"] == "busy"
    assert [replica_json(there, None, [], url=url)["link"] for url in ("", "http://a")] == ["here", "linked"]


# --------------------------------------------------------------------------- the page


def files() -> dict[str, str]:
    folder = resources.files("rubato.serving") / board_pages.PAGE_FOLDER
    return {name: (folder / name).read_text(encoding="utf-8") for name, _ in board_pages.FILES.values()}


def test_every_file_is_served_under_a_strict_policy() -> None:
    async def scenario(at: Edge) -> None:
        for path, (name, kind) in board_pages.FILES.items():
            answer = await at.http.get(f"/{path}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert answer.text == files()[name]
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert not re.search(r"unsafe|http|\*|data:", policy)

    edge(scenario)
    folder = resources.files("rubato.serving") / board_pages.PAGE_FOLDER
    assert {file.name for file in folder.iterdir()} == {name for name, _ in board_pages.FILES.values()}


def test_the_page_names_every_cause_as_the_manual_does_in_a_colour_of_its_own() -> None:
    page, manual = files(), (Path(__file__).parents[2] / "docs/concepts.md").read_text(encoding="utf-8")
    hues = {
        name: re.search(rf"\.hue\.{name.replace(' ', '-')} {{ --fill: var\((.*?)\)", page["board.css"])
        for name in CAUSES
    }
    assert not [name for name in CAUSES if f'"{name}"' not in page["charts.js"] or f"`{name}`" not in manual]
    assert len({hue and hue[1] for hue in hues.values()} - {None}) == len(CAUSES)


def test_the_page_has_nothing_inline_nothing_foreign_and_no_way_from_text_to_markup() -> None:
    class Page(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            assert not [name for name in given if name == "style" or name.startswith("on")]
            assert (tag == "script") <= ("src" in given)
            assert tag != "style"
            for name in ("src", "href"):
                assert (given.get(name) or "board/").startswith("board/")  # from wherever the page is

    texts = files()
    Page().feed(texts["board.html"])
    for name, text in texts.items():
        code = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", code), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", code), name
        assert not re.search(r"@import|url\(", code), name
