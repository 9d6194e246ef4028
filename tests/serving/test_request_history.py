"""/debug/requests/{id}: what happened and why it waited, to its tenant and to admins only."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import pickle
from typing import Any

import pytest

from rubato.core.events import Demoted, Finished, Offered, Placed, Preempted, Promoted, Started, Tokens, Verdict
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Stage
from rubato.frontdoor import history as history_of_requests
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.request_record import MAX_STEPS, RequestRecord
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.policy_kit.fair_share import FairShare
from rubato.serving import logs
from tests.kit import on
from tests.kit.apps import STEP, Edge, edge
from tests.kit.asgi import key, tenant

TENANTS = [tenant("a"), tenant("b"), tenant("root", admin=True)]


async def page(at: Edge, id: str, who: str = "a") -> Any:
    answer = await at.http.get(f"/debug/requests/{id}", headers=key(who))
    assert answer.status_code == 200, answer.text
    return answer.json()


@on(edge, tenants=TENANTS, tiers=Tiers([Tier("good", SLO(5.0, 0.2))], "good"))
async def test_finished_request_is_shown_with_its_times(at: Edge) -> None:
    answer = (await at.chat(headers=key("a"), messages=[{"role": "user", "content": "a secret"}])).json()
    told = await page(at, answer["id"])
    assert (told["tenant"], told["tier"], told["state"]) == ("a", "good", "finished")
    assert told["slo"] == [{"until": "eos", "ttft_ms": 5000.0, "tpot_ms": 200.0, "e2e_ms": None}]
    (choice,) = told["choices"]
    assert [e["event"] for e in choice["events"]] == ["offered", "placed", "started", "tokens", "finished"]
    assert [e["at_ms"] for e in choice["events"]] == [0.0, 0.0, 0.0, 100.0, 300.0]
    assert choice["events"][3] == {"at_ms": 100.0, "event": "tokens", "stage": 0, "tokens": 3, "until_ms": 300.0}
    (due,) = choice["deadlines"]
    assert (due["first_token_due_ms"], due["then_every_ms"], due["first_token_ms"]) == (5000.0, 200.0, 100.0)
    assert choice["verdict"]["met"] is True
    assert choice["verdict"]["ttft_ms"] == answer["rubato"]["ttft_ms"]
    assert (choice["state"], choice["now"], choice["waited"], choice["output_tokens"]) == ("completed", None, [], 3)
    text = json.dumps(told)
    assert "secret" not in text
    assert answer["choices"][0]["message"]["content"].strip() not in text


@on(edge, tenants=TENANTS)
async def test_others_see_nothing_at_all(at: Edge) -> None:
    id = (await at.chat(headers=key("a"))).json()["id"]
    foreign = await at.http.get(f"/debug/requests/{id}", headers=key("b"))
    unknown = await at.http.get(f"/debug/requests/{id[:-1]}x", headers=key("b"))
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(id, "ID") == unknown.text.replace(f"{id[:-1]}x", "ID")
    assert (await page(at, id, "root"))["tenant"] == "a"


@on(edge, tenants=TENANTS, limits=Limits(2, 512, 256, 64, 16))
async def test_why_it_waits_for_a_place_in_the_batch(at: Edge) -> None:
    tasks = [asyncio.create_task(at.complete(headers=key("a"), max_tokens=10)) for _ in range(3)]
    await at.clock.sleep_until(2.5 * STEP, 0)
    ids = [e.id for e in at.events if isinstance(e, Offered)]
    pages = [await page(at, id) for id in ids]
    assert [p["state"] for p in pages] == ["in flight"] * 3
    choices = [p["choices"][0] for p in pages]
    assert sorted(c["state"] for c in choices) == ["queue of a replica", "running", "running"]
    late = next(c for c in choices if c["state"] != "running")
    assert late["now"]["in"] == "waiting"
    assert late["waited"] == [{"why": "queue of a replica", "at_ms": 0.0, "ms": 250.0}]
    runs = next(c for c in choices if c["state"] == "running")
    assert (runs["now"]["in"], runs["now"]["replica"], runs["now"]["of"]) == ("running", "r0", 2)
    await asyncio.gather(*tasks)
    waited = (await page(at, late["id"]))["choices"][0]["waited"]
    assert [w["why"] for w in waited] == ["queue of a replica"]
    assert waited[0]["ms"] >= 1000.0


@on(edge, tenants=TENANTS, fair=FairShare(window=1))
async def test_what_fair_share_holds_back_says_so(at: Edge) -> None:
    answers = await asyncio.gather(*(at.complete(headers=key("a"), max_tokens=5) for _ in range(3)))
    waits = [(await page(at, a.json()["id"]))["choices"][0]["waited"] for a in answers]
    assert sorted([w["why"] for w in waited] for waited in waits) == [
        [],
        ["held before a replica (fair share)"],
        ["held before a replica (fair share)"],
    ]


@on(edge, tenants=TENANTS)
async def test_best_effort_against_its_will(at: Edge) -> None:
    answer = (await at.complete(headers=key("a"), slo={"ttft_ms": 50})).json()
    (choice,) = (await page(at, answer["id"]))["choices"]
    at_ms = {e["event"]: e["at_ms"] for e in choice["events"]}
    assert choice["best_effort_ms"] == at_ms["finished"] - at_ms["demoted"] > 0


@on(edge, tenants=TENANTS)
async def test_all_choices_of_one_request(at: Edge) -> None:
    answer = (await at.complete(headers=key("a"), n=3)).json()
    told = await page(at, answer["id"])
    assert len(told["choices"]) == 3
    assert len({choice["id"] for choice in told["choices"]}) == 3


def test_only_the_last_are_kept_and_long_histories_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_of_requests, "MAX_ENDED_REQUESTS", 10)
    recorder = RequestHistory()
    for i in range(30):
        request = Request(f"q{i}", (Stage(1),), float(i))
        recorder(Offered(float(i), request.id, request))
        if i != 3:  # still in flight: kept
            recorder(Finished(float(i), request.id, "completed", "stop", Verdict(True, "deadline")))
    assert [i for i in range(30) if recorder.find(f"q{i}")] == [3, *range(20, 30)]
    recorder(Placed(30.0, "q3", "r0"))
    for i in range(500):
        recorder(Started(31.0 + 3 * i, "q3", resumed=i > 0))
        recorder(Tokens(32.0 + 3 * i, "q3", 1))
        recorder(Preempted(33.0 + 3 * i, "q3"))
    (record,) = recorder.find("q3")
    assert len(record.steps) == MAX_STEPS
    assert len(record.waits) <= MAX_STEPS
    assert record.omitted_steps == 2 + 1500 - MAX_STEPS
    assert (record.preemptions, record.output, record.steps[0]["event"]) == (500, 500, "offered")


def test_no_text_of_a_client_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Each of these may be as long as a body, the last thousand requests are remembered, and thousands of steps with
    those who were in them."""
    long, most, ids = "x" * 50_000, 3000, list(range(300, 3300))
    caplog.set_level(logging.INFO, "rubato")
    history = RequestHistory()

    async def scenario(at: Edge) -> None:
        at.cluster.listen(history)
        slo = {"stages": [{"until": f"{long}u", "ttft_ms": 50}, {"ttft_ms": 50}]}
        sent: dict[str, Any] = {"stop": [f"{long}s"], "slo": slo, "user": long, "metadata": {"a": long}}
        for headers in ({}, {"x-request-id": long}):
            assert (await at.complete(headers, prompt=ids, stop_token_ids=[1, 2], **sent)).status_code == 200
        assert (await at.chat({})).status_code == 200  # of what runs the last may be at hand still
        at.events.clear()
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o) is Request]
        assert not [o for o in alive if o.stages[0].token_ids == tuple(ids) or any(long in s for s in o.sampling.stop)]
        assert not [o for o in alive if any(long in stage.ends for stage in o.stages)]
        assert (await at.chat({}, max_tokens=most)).status_code == 200

    edge(
        scenario,
        limits=Limits(
            max_num_seqs=8, max_num_batched_tokens=20_000, max_model_len=20_000, kv_blocks=2000, block_size=16
        ),
    )
    (one, _, _, last) = [next(iter(records.values())) for records in history._answers.values()]
    assert (one.request.prompt, last.output) == (3000, most)
    assert [len(pickle.dumps(records)) < 4000 for records in history._answers.values()] == [True] * 4
    page = history_of_requests.page("id", [one], [], 10.0, has_fair_share=False)
    assert page["slo"][0]["until"] == "x" * 64
    assert len(caplog.records) == 4
    assert all(len(logs.TextFormatter().format(record)) < 600 for record in caplog.records)


def test_deadlines_of_a_later_stage_go_on_from_the_one_before() -> None:
    recorder = RequestHistory()
    stages = (Stage(5, SLO(1.0, 0.1), "x"), Stage(0, SLO(None, 0.2)))
    recorder(Offered(10.0, "q", Request("q", stages, 10.0)))
    recorder(Placed(10.0, "q", "r0"))
    recorder(Started(10.0, "q"))
    for at, stage in ((10.5, 0), (10.6, 0), (10.7, 1)):
        recorder(Tokens(at, "q", 1, stage=stage))
    told = history_of_requests.page("q", recorder.find("q"), [], 11.0, has_fair_share=False)["choices"][0]["deadlines"]
    assert [(d["first_token_due_ms"], d["then_every_ms"], d["tokens"]) for d in told] == [
        (1000.0, 100.0, 2),
        (1300.0, 200.0, 1),  # the last of the first stage was due at 1100
    ]


def test_one_json_line_a_finished_request() -> None:
    lines: list[Any] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(logs.JsonFormatter().format(record)))

    async def scenario(at: Edge) -> None:
        for _ in range(2):
            await at.complete(headers=key("a"), prompt="private " * 5, slo={"ttft_ms": 5000})
        await at.complete(headers=key("limited"))
        await at.complete(headers=key("limited"))

    handler = Keep()
    logs.requests.addHandler(handler)
    level = logs.requests.level
    logs.requests.setLevel(logging.INFO)
    try:
        edge(scenario, tenants=[*TENANTS, tenant("limited", requests_per_minute=1)], prefix_cache=True)
    finally:
        logs.requests.removeHandler(handler)
        logs.requests.setLevel(level)
    assert [(line["tenant"], line["outcome"]) for line in lines] == [
        ("a", "completed"),
        ("a", "completed"),
        ("limited", "completed"),
        ("limited", "refused"),
    ]
    assert [line["cached_tokens"] for line in lines] == [0, 32, 0, 0]
    second = lines[1]
    assert (second["logger"], second["level"], second["tier"], second["served"]) == (
        "rubato.requests",
        "info",
        "default",
        "slo",
    )
    assert (second["met"], second["prompt_tokens"], second["output_tokens"], second["replica"]) == (True, 40, 3, "r0")
    assert (second["ttft_ms"], second["margin_ms"]) == (100.0, 4900.0)
    assert lines[3]["reason"] == "rejected-rate-limit"
    assert "private" not in json.dumps(lines)
    assert "sk-" not in json.dumps(lines)


def test_best_effort_ends_with_the_request() -> None:
    asked = Request("a", (Stage(10, SLO(ttft=1.0)),), 0.0)
    record = RequestRecord(asked)
    for event in (
        Offered(0.0, "a", asked), Demoted(1.0, "a"), Promoted(1.5, "a"), Demoted(2.0, "a"),
        Finished(4.0, "a", "completed", "stop", Verdict(False, "deadline")),
    ):  # fmt: skip
        record.add(event)
    assert (record.best_effort, record.best_effort_since) == (2.5, None)
