"""What a tenant may use at most; what is refused for it is offered, refused, and told how long to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rubato.core.events import Finished, Offered
from rubato.frontdoor.rate_limits import TENANT_SATURATED, Bucket, TenantUsage
from rubato.frontdoor.tenants import Quota
from tests.kit import on
from tests.kit.apps import STEP, Edge, edge
from tests.kit.asgi import key, tenant
from tests.serving.test_metrics import scrape


def test_bucket_refills_and_is_never_more_than_full() -> None:
    bucket = Bucket(60.0)
    bucket.take(50, 0.0)
    assert bucket.wait_seconds(10, 0.0) == 0.0
    assert bucket.wait_seconds(20, 0.0) == pytest.approx(10.0)
    assert bucket.wait_seconds(20, 10.0) == 0.0
    bucket.take(-1000, 10.0)  # never more than full
    assert bucket.level == 60.0
    assert bucket.wait_seconds(600, 10.0) == 0.0  # more than it holds passes when it is full,
    bucket.take(600, 10.0)
    assert bucket.wait_seconds(1, 10.0) == pytest.approx(541.0)  # and is paid for afterwards
    assert bucket.wait_seconds(1, 5.0) == pytest.approx(541.0)  # time does not run backwards


def test_prompts_beyond_the_places_of_a_tenant_are_charged_as_one() -> None:
    usage = TenantUsage(Quota(requests_per_minute=100, max_in_flight=2))
    usage.in_flight = 1
    assert usage.enter(0.0) == 0.0
    assert usage.charge(2, 10, 0.0) == (TENANT_SATURATED, 0.0)
    assert usage.requests.level == 99.0


@on(edge, tenants=[tenant("a", tokens_per_minute=100)])
async def test_tokens_per_minute_count_the_prompt_and_what_came_out(at: Edge) -> None:
    first = asyncio.create_task(at.complete(headers=key("a"), prompt="x" * 20, max_tokens=60))
    await at.clock.sleep_until(STEP / 2, 0)
    assert (await at.complete(headers=key("a"), prompt="x" * 10, max_tokens=11)).status_code == 429
    second = await at.complete(headers=key("a"), prompt="x" * 10, max_tokens=10)
    assert second.status_code == 200
    assert second.headers["x-ratelimit-limit-tokens"] == "100"
    assert (await first).status_code == 200


@on(edge, tenants=[tenant("a", tokens_per_minute=210)])
async def test_what_did_not_come_out_is_given_back(at: Edge) -> None:
    task = asyncio.create_task(at.complete(headers=key("a"), prompt="x" * 10, max_tokens=200))
    await at.clock.sleep_until(4.5 * STEP, 0)
    task.cancel()  # four of two hundred are out
    with pytest.raises(asyncio.CancelledError):
        await task
    await at.clock.sleep_until(5 * STEP, 0)
    end = next(e for e in at.events if isinstance(e, Finished))
    used = 10 + end.output
    assert end.output < 10
    answer = await at.complete(headers=key("a"), prompt="x" * 10, max_tokens=210 - 10 - used)
    assert answer.status_code == 200


@on(edge, tenants=[tenant("a", max_in_flight=2)])
async def test_tenant_has_no_more_in_flight_than_it_may(at: Edge) -> None:
    answers = await asyncio.gather(*(at.complete(headers=key("a"), max_tokens=20) for _ in range(5)))
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429]
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["x-rubato-reject-reason"] == "rejected-tenant-saturated"
            assert int(answer.headers["retry-after"]) >= 1
    again = await asyncio.gather(*(at.complete(headers=key("a"), max_tokens=20) for _ in range(2)))
    assert [a.status_code for a in again] == [200, 200]


@on(edge, tenants=[tenant("a", tokens_per_minute=100)])
async def test_every_choice_is_charged_before_any_may_pass(at: Edge) -> None:
    first = asyncio.create_task(at.complete(headers=key("a"), max_tokens=7))
    await at.clock.sleep_until(STEP / 2, 0)
    assert (await at.complete(headers=key("a"), max_tokens=80, n=8)).status_code == 429
    assert (await at.complete(headers=key("a"), max_tokens=29, n=3)).status_code == 200  # 3 + 7, then 3 + 87
    assert (await first).status_code == 200


@on(edge, tenants=[tenant("a", requests_per_minute=3)])
async def test_a_refusal_for_a_limit_is_offered_and_refused_in_every_book(at: Edge) -> None:
    sums = []
    tasks = [asyncio.create_task(at.complete(headers=key("a"), max_tokens=n)) for n in range(1, 9)]
    while not all(task.done() for task in tasks):
        value = await scrape(at)
        ended = value("rubato_requests_finished_total") + value("rubato_requests_in_flight")
        sums.append((value("rubato_requests_offered_total"), ended))
        await at.clock.sleep_until(at.clock.now() + STEP / 2, 0)
    assert all(offered == ended for offered, ended in sums)
    value = await scrape(at)
    assert value("rubato_requests_offered_total", tenant="a") == 8
    assert value("rubato_requests_finished_total", outcome="refused") == 5
    assert value("rubato_requests_refused_total", reason="rejected-rate-limit") == 5
    assert value("rubato_slo_missed_total", cause="refused") == 5
    assert value("rubato_slo_met_total", dimension="all") == 3
    offered = [e.id for e in at.events if isinstance(e, Offered)]
    assert sorted(offered) == sorted(e.id for e in at.events if isinstance(e, Finished))
    assert len(offered) == 8


@on(edge, tenants=[tenant("a", requests_per_minute=2)])
async def test_bad_input_is_charged_and_beyond_the_rate_no_body_is_read(at: Edge) -> None:
    read: list[str] = []

    async def body(name: str, content: bytes) -> AsyncIterator[bytes]:
        read.append(name)
        yield content

    async def post(name: str, content: bytes, **headers: str) -> tuple[int, str]:
        answer = await at.http.post("/v1/completions", content=body(name, content), headers=headers)
        return answer.status_code, answer.headers.get("x-ratelimit-remaining-requests", "")

    assert await post("no key", b"{") == (401, "")
    assert await post("another's key", b"{", **key("z")) == (401, "")
    assert await post("first", b"{", **key("a")) == (400, "1")
    assert await post("second", b'{"model": "simulated", "prompt": []}', **key("a")) == (400, "0")
    assert await post("third", b"{", **key("a")) == (429, "0")
    assert read == ["first", "second"]
    value = await scrape(at)
    assert value("rubato_requests_offered_total", tenant="a", tier="default") == 1  # neither 400 was a request
    assert value("rubato_requests_refused_total", reason="rejected-rate-limit") == 1
    assert [type(e) for e in at.events] == [Offered, Finished]
    await at.clock.sleep_until(at.clock.now() + 30, 0)
    assert (await at.complete(headers=key("a"))).status_code == 200
