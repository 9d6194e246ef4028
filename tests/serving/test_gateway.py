"""The gateway over stub servers, in one process on the virtual clock: HTTP in and out, and the link, by memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import orjson
import pytest

from rubato.config.schema import Config, ConfigError, load
from rubato.core.events import Finished, HandedOff, Offered, Placed
from rubato.fleet.server_replica import ServerReplica
from rubato.fleet.upstream import BrokenError, UnreachableError
from rubato.latency.affine import Model
from rubato.policy_kit.fair_share import FairShare
from rubato.serving.asgi_client import HEAD_TIME_KEY
from rubato.serving.board import REFRESH_S
from rubato.wire.messages import Report
from tests.kit import gateways, on
from tests.kit.asgi import Answer, call_asgi, chunks, key, tenant
from tests.kit.gateways import Fleet, gateway
from tests.stubs.vllm_server import FIRST_WORD_ID, STREAM_EVENTS, MemoryReply, StubServer, reply_of


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
@on(gateway, "linked")
async def test_an_answer_comes_as_the_server_gives_it_with_tier_and_verdict(
    fleet: Fleet, stream: bool, chat: bool
) -> None:
    ask = fleet.chat if chat else fleet.complete
    response = await ask(service_tier="chat", stream=stream, user="someone", logit_bias={"5": 1})
    assert response.status_code == 200
    unbuffered = (response.headers.get("cache-control"), response.headers.get("x-accel-buffering"))
    assert unbuffered == (("no-cache", "no") if stream else (None, None))
    last = chunks(response)[-1] if stream else response.json()
    assert last["service_tier"] == "chat"
    assert last["rubato"]["met"] is True
    assert last["rubato"]["targets"]["ttft_ms"] == 1000.0
    assert last["rubato"]["ttft_ms"] == pytest.approx(100.0)
    assert last["rubato"]["tpot_ms"] == pytest.approx(100.0)
    if stream:
        said = [c["choices"][0] for c in chunks(response)]
        text = "".join((c.get("delta") or c).get("content" if chat else "text", "") for c in said)
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
    assert text == "la ti do re "
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.output) == ("completed", 4)
    (body,) = [body for server in fleet.servers for body in server.bodies]
    assert body["user"] == "someone"
    assert body["logit_bias"] == {"5": 1}
    id = response.headers["x-request-id"]
    page = await fleet.http.get(f"/debug/requests/{last['id']}")
    assert last["id"].endswith(id)
    assert page.json()["choices"][0]["verdict"]["met"] is True


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_choices_of_one_answer_go_to_one_server_and_are_judged_together(fleet: Fleet) -> None:
    response = await fleet.complete(service_tier="chat", n=3)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert len(response.json()["rubato"]["choices"]) == 3
    streamed = await fleet.complete(service_tier="chat", n=2, stream=True)
    assert len(chunks(streamed)[-1]["rubato"]["choices"]) == 2
    assert len(fleet.of(Offered)) == 5
    assert {event.output for event in fleet.of(Finished)} == {4}


@on(gateway)
async def test_requests_are_shared_out_and_held_time_counts(fleet: Fleet) -> None:
    answers = await asyncio.gather(*(fleet.complete(prompt=[1] * 20) for _ in range(8)))
    assert all(answer.status_code == 200 for answer in answers)
    assert [len(server.bodies) for server in fleet.servers] == [4, 4]
    assert {answer.json()["rubato"]["ttft_ms"] for answer in answers} == {100.0}


@on(
    gateway,
    key="servers-key",
    tenants=[tenant("a", tiers=("chat",), requests_per_minute=1), tenant("b")],
    fair=FairShare({"a": 1.0, "b": 1.0}, None),
)
async def test_server_gets_the_gateways_key_and_no_slo(fleet: Fleet) -> None:
    assert (await fleet.complete(key("a"), service_tier="chat")).status_code == 200
    heads = [head for server in fleet.servers for head in server.heads]
    assert [head.get("authorization") for head in heads] == ["Bearer servers-key"]
    assert not any(name.startswith("x-slo") for name in heads[0])
    assert (await fleet.http.get("/v1/models", headers=key("b"))).json()["data"][0]["id"] == "stub"


class Failing:
    """Has servers answer the first completions otherwise. asked: how often all of them were."""

    def __init__(self, fleet: Fleet, how: str, fails: int = 1000) -> None:
        self.how, self.fails, self.asked = how, fails, 0
        for server in fleet.servers:
            server.respond = self.respond

    async def respond(self, path: str, body: bytes) -> MemoryReply | None:
        if "completions" not in path:
            return None
        self.asked += 1
        if self.fails <= 0:
            return None
        self.fails -= 1
        if self.how in ("broken", "refused"):
            raise (BrokenError if self.how == "broken" else UnreachableError)(self.how)
        return reply_of(b"{}", status=int(self.how))


@pytest.mark.parametrize("how", ["503", "500", "broken"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "servers", "linked")
async def test_choices_whose_server_fails_go_on_together(fleet: Fleet, how: str, n: int) -> None:
    failing = Failing(fleet, how, fails=1)
    answer = await asyncio.wait_for(fleet.complete(n=n), 60.0)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == n
    assert failing.asked == 2
    assert {event.outcome for event in fleet.of(Finished)} == {"completed"}


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=4)
async def test_choices_end_together_where_every_server_fails(fleet: Fleet) -> None:
    Failing(fleet, "503")
    answers = await asyncio.wait_for(asyncio.gather(*(fleet.complete(n=8) for _ in range(8))), 60.0)
    assert {answer.status_code for answer in answers} <= {429, 500, 503}


@on(gateway, servers=4)
async def test_servers_that_refuse_one_request_and_are_healthy_do_not_rest(fleet: Fleet) -> None:
    """One request has one word, also where its connections are refused."""
    Failing(fleet, "refused")
    assert (await fleet.complete()).status_code >= 500
    resting = [host.cooldown_until - fleet.clock.now() for host in fleet.cluster.hosts.values()]
    assert max(resting) < 0.1
    assert len(resting) == 4


@on(gateway, counted=1)
async def test_each_server_that_has_no_link_is_told_of_the_slo_by_headers(fleet: Fleet) -> None:
    await asyncio.gather(*(fleet.complete(service_tier="chat") for _ in range(4)))
    told = [{head.get("x-slo-ttft-ms") for head in server.heads} for server in fleet.servers]
    assert told == [{"1000"}, {None}]


@on(gateway)
async def test_request_that_a_scheduler_refuses_goes_to_no_other_server(fleet: Fleet) -> None:
    strict = await fleet.complete(service_tier="strict")  # 0.05 s, and a step takes 0.1 s
    assert strict.status_code == 429
    assert (strict.headers["x-should-retry"], "retry-after" in strict.headers) == ("false", False)
    streamed = await fleet.complete(service_tier="strict", stream=True)
    assert streamed.status_code == 429
    assert sum(len(server.bodies) for server in fleet.servers) == 2


@on(gateway)
async def test_what_a_server_still_says_of_a_refused_request_is_dropped(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    for ask in (fleet.chat, fleet.complete):
        for stream in (True, False):
            refused = await ask(service_tier="strict", stream=stream)
            assert refused.status_code == 429
            await asyncio.sleep(1.0)
    assert {event.outcome for event in fleet.of(Finished)} == {"refused"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("how", ["down", "broken"])
@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_what_a_server_fails_at_goes_elsewhere_while_nothing_was_streamed(fleet: Fleet, how: str) -> None:
    bad, good = fleet.servers
    if how == "down":
        bad.down = True
    else:
        bad.broken = 503
    answers = await asyncio.gather(*(fleet.complete(stream=True, service_tier="chat") for _ in range(4)))
    assert all(answer.status_code == 200 for answer in answers)
    assert len({placed.id for placed in fleet.of(Placed) if placed.replica == "r0"}) >= 1
    for answer in answers:  # of whatever try, the id is the one that it was given at first
        said = {chunk["id"] for chunk in chunks(answer)}
        assert said == {f"cmpl-{answer.headers['x-request-id']}"}
    assert all(event.request.handoff.reason == "failed" for event in fleet.of(HandedOff))
    assert {event.outcome for event in fleet.of(Finished)} == {"completed"}
    assert len(good.bodies) == 4
    assert any(head["x-request-id"].endswith("-t2") for head in good.heads)
    assert "r0" not in fleet.cluster.hosts or len(bad.bodies) < 3


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("chat", [True, False])
@on(gateway, "linked")
async def test_a_stream_that_breaks_off_goes_on_elsewhere_from_its_text(fleet: Fleet, chat: bool) -> None:
    fleet.servers[0].cut = 2
    ask = fleet.chat(stream=True) if chat else fleet.complete(stream=True, prompt="abc")
    response = await ask
    said = chunks(response)
    assert len({chunk["id"] for chunk in said}) == 1
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    (again,) = fleet.servers[1].bodies
    assert again["max_tokens"] == 2
    if chat:
        assert again["messages"][-1] == {"role": "assistant", "content": "la ti "}
        assert again["continue_final_message"] is True
        roles = [c for chunk in said for c in chunk["choices"] if c["delta"].get("role")]
        assert len(roles) == 1
    else:
        assert again["prompt"] == "abcla ti "
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.output) == ("completed", 4)


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_a_stream_whose_chunks_bring_several_tokens_goes_on_with_as_many_fewer(fleet: Fleet) -> None:
    fleet.servers[0].cut = fleet.servers[0].merged = 3
    response = await fleet.complete(stream=True, prompt="abc", max_tokens=8)
    assert chunks(response)[-1]["choices"][0]["finish_reason"] == "length"
    (again,) = fleet.servers[1].bodies
    assert (again["prompt"], again["max_tokens"]) == ("abcla ti do ", 5)
    for server in fleet.servers:
        server.cut = server.merged = 3
    await asyncio.sleep(5.0)
    await fleet.complete(stream=True)
    bodies = [body for server in fleet.servers for body in server.bodies[1:]]
    assert [1, 2, 3, FIRST_WORD_ID, FIRST_WORD_ID + 1, FIRST_WORD_ID + 2] in [body["prompt"] for body in bodies]


@on(gateway, linked=False)
async def test_chunks_whose_text_is_fewer_tokens_count_all_the_same(fleet: Fleet) -> None:
    fleet.servers[0].cut = 4
    fleet.servers[1].fuses = True
    await fleet.complete(stream=True, max_tokens=9)
    (again,) = fleet.servers[1].bodies
    assert (again["prompt"], again["max_tokens"]) == ([1, 2, 3, FIRST_WORD_ID, FIRST_WORD_ID + 1], 5)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@on(gateway, "linked")
async def test_streams_of_named_events_end_by_their_own_last_event(fleet: Fleet, path: str) -> None:
    message = {"role": "user", "content": "hi"}
    body = {"model": "stub", "messages": [message], "input": "hi", "max_tokens": 4, "stream": True}
    response = await fleet.http.post(path, json=body)
    events = [part.split(b"\n")[0][7:].decode() for part in response.content.split(b"\n\n") if part]
    text, last = STREAM_EVENTS[path]
    assert events == [text] * 4 + [last]
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.output) == ("completed", 4)
    for server in fleet.servers:
        server.cut = 2
    broken = await fleet.http.post(path, json=body)
    assert broken.content.count(b"event: ") == 3
    error = orjson.loads(broken.content.split(b"event: error\ndata: ")[1])
    assert error["type"] == "error"
    assert "cannot be continued elsewhere" in error["error"]["message"]


@on(gateway)
async def test_metrics_show_degraded_modes(fleet: Fleet) -> None:
    async def shown(name: str) -> list[float]:
        lines = (await fleet.http.get("/metrics")).text.splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"rubato_{name}")]

    assert await shown("server_linked") == [1.0, 1.0]
    fleet.servers[0].cut = 2
    assert (await fleet.complete(stream=True, prompt="abc")).status_code == 200
    assert (await shown("requests_placed_again_total"), await shown("streams_continued_total")) == ([1.0], [1.0])
    await asyncio.sleep(5.0)
    fleet.servers[0].broken = 503
    answers = await asyncio.gather(*(fleet.complete() for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (await shown("requests_placed_again_total"), await shown("streams_continued_total")) == ([2.0], [1.0])
    fleet.servers[0].broken = 0
    await asyncio.sleep(5.0)
    fleet.servers[1].core.silent = True
    asked = [asyncio.ensure_future(fleet.complete(prompt="abc", max_tokens=500)) for _ in range(4)]
    await asyncio.sleep(10.0)
    assert await shown("server_linked") == [1.0, 0.0]
    fleet.servers[0].down = fleet.servers[0].core.silent = True
    await asyncio.sleep(20.0)
    assert await shown("server_linked") == [0.0]
    assert (await fleet.http.get("/health")).status_code == 200
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4


@pytest.mark.parametrize(
    "body", [{"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"n": 2}]
)
@on(gateway)
async def test_a_stream_that_cannot_be_gone_on_with_ends_with_an_error_that_says_so(
    fleet: Fleet, body: dict[str, Any]
) -> None:
    fleet.servers[0].cut = 2
    response = await fleet.chat(stream=True, **body)
    assert not response.content.endswith(b"[DONE]\n\n")
    error = orjson.loads(response.content.strip().split(b"\n\n")[-1][6:])["error"]
    assert "cannot be continued elsewhere" in error["message"]
    assert {event.outcome for event in fleet.of(Finished)} == {"failed"}
    assert not fleet.servers[1].bodies


@on(gateway)
async def test_a_lost_server_gives_back_what_it_had_and_is_taken_back_when_it_answers_again(fleet: Fleet) -> None:
    lost = fleet.servers[0]
    asked = [asyncio.ensure_future(fleet.complete(prompt="abc", max_tokens=200, stream=True)) for _ in range(4)]
    await asyncio.sleep(0.35)
    lost.down = lost.core.silent = True
    await asyncio.sleep(20.0)
    assert list(fleet.cluster.hosts) == ["r1"]
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(chunks(answer)[-1]["choices"][0]["finish_reason"] == "length" for answer in answers)
    assert {event.output for event in fleet.of(Finished)} == {200}
    lost.down = lost.core.silent = False
    await asyncio.sleep(3.0)
    assert sorted(fleet.cluster.hosts) == ["r1", "r2"]
    before = len(lost.bodies)
    await asyncio.gather(*(fleet.complete() for _ in range(4)))
    assert len(lost.bodies) == before + 2


@on(gateway, servers=1)
async def test_without_any_server_requests_wait_for_one_and_the_gateway_lives_on(fleet: Fleet) -> None:
    (only,) = fleet.servers
    only.down = only.core.silent = True
    waiting = asyncio.ensure_future(fleet.complete())
    await asyncio.sleep(20.0)
    assert not fleet.cluster.hosts
    refused = await fleet.complete()
    assert (refused.status_code, refused.headers["x-rubato-reject-reason"]) == (429, "rejected-no-replica")
    assert (await fleet.http.get("/ready")).status_code == 503
    only.down = only.core.silent = False
    assert (await waiting).status_code == 200
    assert (await fleet.http.get("/ready")).status_code == 200
    only.down = only.core.silent = True
    waiting = asyncio.ensure_future(fleet.complete())
    await asyncio.sleep(100.0)
    assert (await waiting).status_code == 500
    assert "no replica has come back" in (await waiting).json()["error"]["message"]


@on(gateway)
async def test_a_link_that_falls_silent_is_made_up_for_by_counting(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.core.silent = True
    asked = [asyncio.ensure_future(fleet.complete(max_tokens=200, stream=True)) for _ in range(4)]
    await asyncio.sleep(10.0)
    assert len(fleet.cluster.hosts) == 2
    views = [host.view() for host in fleet.cluster.hosts.values()]
    assert sum(view.count for view in views) == 4
    assert all(view.as_of < view.now - 5.0 for view in views)
    assert (await fleet.complete()).json()["rubato"]["met"]  # it is placed all the same
    for server in fleet.servers:
        server.core.silent = False
    await asyncio.sleep(2.0)
    views = [host.view() for host in fleet.cluster.hosts.values()]
    assert all(view.as_of > view.now - 1.0 for view in views)
    assert {seq.output for view in views for seq in view.running} < set(range(115, 135))
    for answer in await asyncio.gather(*asked):
        assert chunks(answer)[-1]["rubato"]["met"]


@on(gateway)
async def test_a_client_that_leaves_takes_its_request_with_it(fleet: Fleet) -> None:
    asked = asyncio.ensure_future(fleet.complete(max_tokens=500, stream=True))
    await asyncio.sleep(0.5)
    asked.cancel()
    await asyncio.sleep(0.5)
    (end,) = fleet.of(Finished)
    assert end.outcome == "cancelled"
    assert all(server.core.host.replica.idle for server in fleet.servers if server.core.host.replica)
    assert all(view.count == 0 for view in [host.view() for host in fleet.cluster.hosts.values()])


@pytest.mark.parametrize(("policy", "router"), [("polyserve", "auto"), ("ascendra", "auto")])
def test_a_router_that_needs_step_times_is_refused_without_them_and_may_be_told_them(policy: str, router: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        assert (await fleet.complete(service_tier="chat")).status_code == 200

    with pytest.raises(ValueError, match="step_times"):
        gateway(scenario, linked=False, policy=policy, router=router)
    gateway(scenario, linked=False, policy=policy, router=router, profile=lambda: Model(b=(0.1, 0.0)))


FIVE_HUNDRED = [(True, 300), *(pytest.param(linked, None, marks=pytest.mark.full) for linked in (True, False))]


@pytest.mark.parametrize(("linked", "most"), FIVE_HUNDRED)
def test_five_hundred_streams_at_once_end_whole_or_with_an_error_that_says_why(linked: bool, most: int | None) -> None:
    """20 bodies of 3 MB among them, half of which are prompts that no server takes, and 50 clients that leave."""

    async def scenario(fleet: Fleet) -> None:
        body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        three_mb = "x" * (3 << 20)
        small, padded, long = (
            json.dumps({**body, **more}).encode() for more in ({}, {"user": three_mb}, {"prompt": three_mb})
        )
        leaving = {number for number in range(500) if number % 10 == 1}

        def client(number: int) -> Awaitable[Answer]:
            large = (padded, long)[number % 2] if number % 25 == 0 else small
            leaves = (lambda answer: answer.begun.wait()) if number in leaving else None
            return call_asgi(fleet.app, "/v1/completions", large, leaves=leaves)

        asked = asyncio.gather(*map(client, range(500)))
        await asyncio.sleep(1.0)
        assert (await fleet.http.get("/health")).status_code == 200
        assert 0 < await fleet.metric("rubato_requests_in_flight") <= (most or 500)
        answers = await asked
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) == ({200, 400, 429} if most else {200, 400})
        for number, answer in enumerate(answers):
            if answer.status != 200:
                assert answer.error["message"]
                assert (answer.error["code"] == "rejected-saturated") == (answer.status == 429)
            elif number not in leaving:
                assert answer.body.count(b"data: [DONE]\n\n") == 1
                said = chunks(answer.body)
                assert "".join(choice["text"] for chunk in said for choice in chunk["choices"]) == "la ti do re "
        ends = Counter(event.outcome for event in fleet.of(Finished))
        left = sum(answers[number].status == 200 for number in leaving)
        assert ends["completed"] == statuses[200] - left
        assert (ends["cancelled"], ends["failed"]) == (left, 0)
        assert ends["refused"] == statuses[429] + statuses[400]
        assert await fleet.metric("rubato_requests_offered_total") == 500 - statuses[400]
        assert await fleet.metric("rubato_requests_finished_total") == 500 - statuses[400]
        assert await fleet.metric("rubato_client_errors_total") == statuses[400]
        assert await fleet.metric("rubato_requests_in_flight") == 0
        assert all(not host.view().count for host in fleet.cluster.hosts.values())
        assert all(server.core.host.replica.idle for server in fleet.servers if server.core.host.replica)

    gateway(scenario, linked=linked, max_in_flight=most)


def test_servers_that_are_not_alike_or_not_there_are_said_at_the_start() -> None:
    async def scenario(fleet: Fleet) -> None:
        raise AssertionError("it has started")

    def other_version(servers: list[StubServer]) -> None:
        servers[1].version = "0.33.0"

    def down(servers: list[StubServer]) -> None:
        for server in servers:
            server.down = True

    for change, linked, words in (
        (other_version, False, "vLLM '0.33.0', and http://s0 '0.32.0'"),
        (down, True, "http://s0 is not there .* http://s1 is not there"),
    ):
        with pytest.raises(ValueError, match=words):
            gateway(scenario, change=change, linked=linked)


@on(gateway)
async def test_the_last_bytes_of_a_response_pass_when_the_gateway_closes(fleet: Fleet) -> None:
    """The link tells of an end before the stream brings it."""
    asked = asyncio.ensure_future(fleet.complete(stream=True))
    while not fleet.of(Finished):
        for server in fleet.servers:
            for reply in server.open_replies:
                reply.delay = 0.3
        await asyncio.sleep(0.01)
    await fleet.cluster.close()
    assert chunks(await asked)[-1]["choices"][0]["finish_reason"] == "length"


@on(gateway)
async def test_servers_that_take_no_more_are_a_429(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.broken = 429
    full = await fleet.complete()
    assert (full.status_code, full.headers["x-rubato-reject-reason"]) == (429, "rejected-saturated")


@on(gateway, linked=False)
async def test_a_servers_final_refusal_is_passed_on_and_no_reason_to_let_it_rest(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.broken, server.final = 429, True
    refused = await fleet.complete(slo={"tpot_ms": 3, "on_decline": "refuse"})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert refused.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
    assert refused.json() == {"error": {"message": "never"}}
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.verdict.cause) == ("refused", "infeasible")
    assert sorted(len(server.bodies) for server in fleet.servers) == [0, 1]
    assert {host.cooldown_until for host in fleet.cluster.hosts.values()} == {0.0}


@pytest.mark.parametrize("known", [True, False])
def test_a_miss_at_a_server_without_the_link_is_infeasible_only_where_step_times_are_known(known: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        answer = await fleet.complete(stream=True, max_tokens=50, slo={"ttft_ms": 200, "tpot_ms": 40})
        told = chunks(answer)[-1]["rubato"]
        assert (told["met"], told["cause"]) == (False, "infeasible" if known else "not reported")

    gateway(scenario, linked=False, profile=(lambda: gateways.STEP) if known else (lambda: None))


@on(gateway, linked=False, servers=1)
async def test_a_miss_at_a_server_without_the_link_is_put_down_to_what_is_known(fleet: Fleet) -> None:
    slo = {"ttft_ms": 50, "tpot_ms": 1000}  # of which it takes 100 ms
    assert (await fleet.complete(slo=slo)).json()["rubato"]["cause"] == "not reported"
    fleet.servers[0].down = True
    late = asyncio.create_task(fleet.complete(slo=slo))
    await asyncio.sleep(5.0)
    assert not fleet.cluster.hosts
    (gone,) = (await fleet.http.get("/board.json")).json()["replicas"]
    assert (gone["id"], gone["state"], gone["url"]) == ("r0", "lost", "http://s0")
    fleet.servers[0].down = False
    assert (await late).json()["rubato"]["cause"] == "queue"  # it waited in the gateway
    await asyncio.sleep(REFRESH_S)
    board = (await fleet.http.get("/board.json")).json()
    assert sorted(group["cause"] for group in board["misses"]) == ["not reported", "queue"]
    assert [(r["link"], r["url"], r["age_ms"]) for r in board["replicas"]] == [("counted", "http://s0", None)]
    assert [(flag["kind"], flag["replica"]) for flag in board["flags"]] == [
        ("lost", "r1"), ("placed again", "r1"), ("joined", "r1"),
    ]  # fmt: skip


@on(gateway, linked=False, servers=1)
async def test_a_request_that_decodes_at_a_server_without_the_link_is_shown_to_run(fleet: Fleet) -> None:
    asked = asyncio.create_task(fleet.complete(max_tokens=20))
    await asyncio.sleep(0.05)
    row = await fleet.row()
    assert (row["state"], row["why"]) == ("waiting", "sent to s0: nothing has come of it yet")
    assert row["phases"] == ["r", 50]
    await asyncio.sleep(0.6)
    row = await fleet.row()
    assert (row["state"], row["why"]) == ("running", "running at s0, 6 of 20")
    assert row["phases"] == ["r", 100, "d", 550]
    page = (await fleet.http.get(f"/debug/requests/{row['id']}")).json()
    now = page["choices"][0]["now"]
    assert (now["in"], now["pending_tokens"], now["kv_blocks"], now["position"]) == ("running", None, None, None)
    await asked


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@on(gateway, "linked")
async def test_a_request_arrives_when_its_head_has_come_in(fleet: Fleet, stream: bool) -> None:
    await asyncio.sleep(1.0)
    body = {"prompt": "abc", "max_tokens": 4, "stream": stream, "slo": {"ttft_ms": 300}}
    head_at = {"extensions": {HEAD_TIME_KEY: fleet.clock.now() - 0.25}}  # so long the event loop had else to do
    raw = (await call_asgi(fleet.app, "/v1/completions", orjson.dumps(body), **head_at)).body
    (end,) = fleet.of(Finished)
    assert (end.verdict.met, end.verdict.ttft) == (False, pytest.approx(0.35))
    assert b'"ttft_ms":350.0' in raw


@on(gateway, servers=1)
async def test_a_verdict_by_the_link_has_the_delay_of_what_the_gateway_passes_on(fleet: Fleet) -> None:
    slo = {"ttft_ms": 150, "tpot_ms": 150, "e2e_ms": 550}
    assert (await fleet.complete(stream=True, prompt="abc", slo=slo)).status_code == 200
    (host,) = fleet.cluster.hosts.values()
    assert isinstance(host, ServerReplica)
    assert host.session is not None
    hear, late = host.session.link.receive, asyncio.Event()

    async def receive() -> Any:
        told = await hear()
        if isinstance(told, Report) and late.is_set():
            await asyncio.sleep(0.2)
        return told

    host.session.link.receive = receive  # type: ignore[method-assign]
    await asyncio.sleep(1.0)  # the one that waits now
    asked = asyncio.create_task(fleet.complete(prompt="abc", slo=slo))
    await asyncio.sleep(0.35)
    late.set()
    told = (await asked).json()["rubato"]
    assert (told["met"], told["cause"]) == (False, "gateway")
    assert (told["ttft_ms"], told["e2e_ms"], told["margin_ms"]) == (100.0, 600.0, -50.0)
    assert await fleet.metric("rubato_slo_missed_total") == 1


@on(gateway, servers=1)
async def test_a_streams_first_token_counts_from_when_it_is_passed_on(fleet: Fleet) -> None:
    asked = asyncio.create_task(fleet.complete(stream=True, prompt="abc", max_tokens=9, slo={"ttft_ms": 150}))
    await asyncio.sleep(0.05)
    for reply in fleet.servers[0].open_replies:
        reply.flows.clear()
    await asyncio.sleep(0.25)
    for reply in fleet.servers[0].open_replies:
        reply.flows.set()
    told = chunks(await asked)[-1]["rubato"]
    assert (told["met"], told["cause"], told["ttft_ms"]) == (False, "gateway", 300.0)


def first_is_down(servers: list[StubServer]) -> None:
    servers[0].down = True


@on(gateway, change=first_is_down)
async def test_server_that_is_not_there_at_the_start_is_waited_for(fleet: Fleet) -> None:
    assert list(fleet.cluster.hosts) == ["r0"]
    assert (await fleet.complete()).status_code == 200
    assert not fleet.servers[0].bodies
    fleet.servers[0].down = False
    await asyncio.sleep(3.0)
    assert list(fleet.cluster.hosts) == ["r0", "r1"]
    await asyncio.gather(*(fleet.complete() for _ in range(4)))
    assert len(fleet.servers[0].bodies) == 2


@on(gateway)
async def test_an_error_within_a_stream_is_no_end_and_goes_on_elsewhere(fleet: Fleet) -> None:
    """vLLM ends the stream of an engine that died with an error chunk and [DONE]."""
    fleet.servers[0].says_error_after = 2
    fleet.servers[0].core.silent = True  # it died
    response = await fleet.complete(stream=True, prompt="abc")
    said = chunks(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == "la ti do re "
    (end,) = fleet.of(Finished)
    assert (end.outcome, end.output) == ("completed", 4)


@on(gateway)
async def test_what_a_server_of_ours_says_of_itself_is_not_said_twice(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.adds = {"service_tier": "theirs", "rubato": {"met": None}}
    response = await fleet.complete(stream=True, service_tier="chat")
    assert response.content.count(b'"rubato"') == response.content.count(b'"service_tier"') == 1
    assert chunks(response)[-1]["service_tier"] == "chat"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked")
async def test_a_query_goes_to_each_server_that_is_tried_and_the_path_is_known_all_the_same(
    fleet: Fleet, path: str
) -> None:
    body = {
        "model": "stub", "prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4, "service_tier": "chat", "stream": True,
    }  # fmt: skip
    fleet.servers[0].broken = 503
    query = "api-version=2026-01-01&beta=true&a=%2B%20"
    response = await fleet.http.post(f"{path}?{query}", json=body)
    assert response.status_code == 200
    assert (b'"rubato"' in response.content) == ("completions" in path)
    assert [server.queries for server in fleet.servers] == [[query], [query]]
    assert (await fleet.http.post(path, json={**body, "service_tier": None})).status_code == 200
    assert fleet.servers[1].queries[-1] == ""
    assert {event.outcome for event in fleet.of(Finished)} == {"completed"}


@on(gateway)
async def test_other_paths_go_to_some_server_and_the_board_is_there(fleet: Fleet) -> None:
    assert (await fleet.http.post("/tokenize", json={"prompt": "a"})).json()["count"] == 1
    assert (await fleet.http.get("/nothing")).status_code == 404
    assert (await fleet.http.get("/")).headers["content-type"].startswith("text/html")
    assert len((await fleet.http.get("/board.json")).json()["replicas"]) == 2
    assert "rubato_requests_offered_total" in (await fleet.http.get("/metrics")).text
    fleet.servers[0].down = True
    for _ in range(3):
        assert (await fleet.http.post("/tokenize", json={"prompt": "a"})).json()["count"] == 1


def test_servers_of_a_configuration_are_urls_with_links_and_keys() -> None:
    config: Config = load({"servers": ["http://a:1", {"url": "https://b", "link": "tcp://b:5557", "key_env": "KEY"}]})
    assert [server.url for server in config.servers] == ["http://a:1", "https://b"]
    with pytest.raises(ConfigError, match="holds no key"):
        _ = config.servers[1].key
    for wrong in (["a:1"], ["http://a:1", "http://a:1/v1/"], [{"url": "http://a", "links": "x"}], [{"url": "ftp://a"}]):
        with pytest.raises(ConfigError, match="servers"):
            load({"servers": wrong})


@on(gateway)
async def test_a_request_at_which_every_server_fails_keeps_no_server_from_the_others(fleet: Fleet) -> None:
    """A 500 may be the request's own fault: one other server is asked, and none rests."""
    for server in fleet.servers:
        server.broken = 500
    bad = await fleet.complete()
    assert bad.status_code == 500
    assert sum(len(server.bodies) for server in fleet.servers) == 2
    assert all(host.cooldown_until <= fleet.cluster.clock.now() + 1e-3 for host in fleet.cluster.hosts.values())
    for server in fleet.servers:
        server.broken = 0
    assert (await fleet.complete()).status_code == 200
