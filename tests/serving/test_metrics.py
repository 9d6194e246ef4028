"""/metrics says what the events say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rubato.core.events import Event, Finished, Offered, Stepped, Tokens, Verdict
from rubato.core.request import SLO, Request, Stage
from rubato.frontdoor.metrics import MAX_REASONS
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.serving.server_metrics import Metrics
from tests.kit import on
from tests.kit.apps import STEP, Edge, edge
from tests.kit.asgi import key, tenant, values

Key = tuple[str, frozenset[tuple[str, str]]]


async def scrape(at: Edge) -> Callable[..., float]:
    """`values` of a fresh scrape."""
    answer = await at.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return values(answer.text)


@on(
    edge, tenants=[tenant("a"), tenant("b"), tenant("c")],
    tiers=Tiers([Tier("good", SLO(ttft=5.0)), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(ttft=0.001), "refuse")]),
)  # fmt: skip
async def test_metrics_count_what_was_served(at: Edge) -> None:
    await asyncio.gather(
        at.chat(service_tier="good", headers=key("a")),
        at.chat(service_tier="good", headers=key("b"), user="a"),
        at.chat(service_tier="late", headers=key("b")),
        at.chat(service_tier="never", headers=key("b")),
        at.complete(headers=key("c")),
    )
    value = await scrape(at)
    assert value("rubato_requests_offered_total") == 5
    assert value("rubato_requests_offered_total", tenant="b") == 3
    assert value("rubato_requests_offered_total", tier="good", tenant="a") == 1
    assert value("rubato_requests_finished_total", outcome="completed") == 4
    assert value("rubato_requests_finished_total", tier="never", outcome="refused") == 1
    assert value("rubato_slo_met_total", dimension="all") == 3
    assert value("rubato_slo_met_total", tier="good", dimension="all") == 2
    assert value("rubato_slo_met_total", tier="good", dimension="ttft") == 2
    assert value("rubato_slo_promised_total") == value("rubato_slo_promised_total", dimension="ttft") == 4
    assert value("rubato_slo_met_total", dimension="ttft") == 2
    assert value("rubato_pause_seconds_count", tier="good") == 2
    assert value("rubato_pause_seconds_sum", tier="good") >= 2 * STEP - 1e-9
    assert value("rubato_pause_seconds_count", tier="never") == 0
    assert value("rubato_requests_refused_total", tier="never") == 1
    assert value("rubato_tenant_tokens_total", tenant="b", kind="output") == 6
    assert value("rubato_tenant_tokens_total", kind="prompt") == 20 * 3 + 3
    assert value("rubato_slo_missed_total", tier="never", cause="infeasible") == 1
    assert value("rubato_slo_missed_total") == 2
    judged = ("slo_met_total", {"dimension": "all"}), ("slo_missed_total", {}), ("slo_unjudged_total", {})
    ends = sum(value(f"rubato_{name}", **labels) for name, labels in judged)
    assert ends == value("rubato_requests_finished_total") == 5
    assert value("rubato_demotions_total") == 1
    assert value("vllm:generation_tokens_total") == 12
    assert value("vllm:prompt_tokens_total") == 20 * 3 + 3
    assert value("vllm:request_success_total", finished_reason="length") == 4
    assert value("vllm:time_to_first_token_seconds_count") == 4
    assert value("vllm:inter_token_latency_seconds_count") == 8
    assert value("vllm:e2e_request_latency_seconds_count") == 4
    steps = [e.shape for e in at.events if isinstance(e, Stepped)]
    assert value("rubato_step_seconds_count") == len(steps)
    assert abs(value("rubato_step_seconds_sum") - STEP * len(steps)) < 1e-9
    assert value("rubato_step_seqs_sum", replica="r0") == sum(s.seqs for s in steps)
    assert value("rubato_step_tokens_sum", replica="r0") == sum(s.tokens for s in steps)


@on(edge)
async def test_gauges_follow_requests_and_offered_is_finished_plus_in_flight_that_began(at: Edge) -> None:
    requests = [asyncio.create_task(at.chat(max_tokens=n)) for n in range(1, 13)]
    running = []
    while not all(task.done() for task in requests):
        await at.clock.sleep_until(at.clock.now() + STEP / 2, 0)
        value = await scrape(at)
        flight = value("rubato_requests_in_flight")
        waiting = max(0, flight - 8)  # the engine's limit: what has not begun may yet be the client's mistake
        assert value("rubato_requests_offered_total") == value("rubato_requests_finished_total") + flight - waiting
        assert value("vllm:num_requests_running") + value("vllm:num_requests_waiting") <= flight  # told a moment later
        running.append(value("vllm:num_requests_running"))
        used = 1 - value("rubato_kv_blocks_free") / value("rubato_kv_blocks_total")
        assert abs(value("vllm:kv_cache_usage_perc") - used) < 1e-9
    assert max(running) == 8  # the engine's limit, twelve came at once
    value = await scrape(at)
    assert value("vllm:kv_cache_usage_perc") == value("vllm:num_requests_running") == 0
    assert value("rubato_requests_offered_total") == 12


@on(edge)
async def test_counters_of_attainment_are_zero_before_the_first_request_ends(at: Edge) -> None:
    """A counter that begins at 1 has no rate of its first."""
    asked = asyncio.create_task(at.chat(max_tokens=4))
    await at.clock.sleep_until(at.clock.now() + STEP / 2, 0)
    page = (await at.http.get("/metrics")).text
    assert 'rubato_slo_met_total{dimension="all",tenant="default",tier="default"} 0.0' in page
    assert 'rubato_requests_finished_total{outcome="completed",tenant="default",tier="default"} 0.0' in page
    await asked


@on(edge)
async def test_a_clients_words_make_no_labels(at: Edge) -> None:
    for i in range(20):
        await at.complete(user=f"user {i}", max_tokens=1, headers={"x-tenant": f"t{i}"})
    value = await scrape(at)
    assert value("rubato_requests_offered_total") == value("rubato_requests_offered_total", tenant="default") == 20


def test_reasons_of_refusal_are_bounded() -> None:
    metrics = Metrics("m", list, lambda: 0)
    for i in range(MAX_REASONS + 5):
        request = Request(f"q{i}", (Stage(1),), 0.0)
        metrics(Offered(0.0, request.id, request))
        metrics(
            Finished(0.0, request.id, "refused", f"reason {i}: said at length", Verdict(False, "deadline", "refused"))
        )
    text = metrics.text().decode()
    assert text.count("\nrubato_requests_refused_total{") == MAX_REASONS + 1
    assert 'rubato_requests_refused_total{reason="other",tier="default"} 5.0' in text
    assert "said at length" not in text


@on(edge)
async def test_replica_seconds_by_tier(at: Edge) -> None:
    assert (await at.chat()).status_code == 200
    await asyncio.sleep(0.01)
    now = at.cluster.clock.now()
    value = await scrape(at)
    assert value("rubato_replica_seconds_total", use="serving", tier="default") > 0.0
    assert value("rubato_replica_seconds_total", use="starting") == 0.0
    assert now <= value("rubato_replica_seconds_total") <= at.cluster.clock.now()


@on(edge)
async def test_a_listener_that_fails_is_counted(at: Edge) -> None:
    """Such as the event log on a full disk. No request ends for it."""

    def full(event: Event) -> None:
        raise OSError("No space left on device")

    asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
    at.cluster.listen(full)
    assert (await at.chat()).status_code == 200
    value = await scrape(at)
    assert value("rubato_listener_errors_total", listener=full.__qualname__) == len(at.events) > 3


def test_each_of_several_tokens_told_of_at_once_has_its_own_gap() -> None:
    metrics = Metrics("m", list, lambda: 0)
    metrics(Offered(0.0, "q", Request("q", (Stage(1),), 0.0)))
    metrics(Tokens(2.0, "q", 3, times=(1.0, 1.25, 2.0)))
    metrics(Tokens(2.5, "q", 1))
    text = metrics.text().decode()
    assert 'vllm:time_to_first_token_seconds_sum{model_name="m"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 3.0' in text
    assert 'vllm:inter_token_latency_seconds_sum{model_name="m"} 1.5' in text


def test_drafted_tokens_are_counted_by_what_became_of_them() -> None:
    metrics = Metrics("m", list, lambda: 0)
    metrics(Offered(0.0, "q", Request("q", (Stage(1),), 0.0)))
    for tokens, tried in (
        (1, 0),
        (1, 1),
        (3, 3),
        (4, 3),
        (0, 0),
    ):  # none; a wrong one; two right, a wrong one; all right
        metrics(Tokens(1.0, "q", tokens, tried=tried))
    text = metrics.text().decode()
    assert 'rubato_draft_tokens_total{outcome="accepted"} 5.0' in text
    assert 'rubato_draft_tokens_total{outcome="rejected"} 2.0' in text


@on(edge, prefix_cache=True)
async def test_the_prefix_cache_is_counted_in_tokens(at: Edge) -> None:
    for _ in range(2):
        await at.complete(prompt="x" * 40)
    await at.complete(prompt="y" * 40)
    value = await scrape(at)
    assert value("vllm:prefix_cache_queries_total") == 120
    assert value("vllm:prefix_cache_hits_total") == 32  # two full blocks of the second
    assert value("vllm:iteration_tokens_total_sum") == sum(e.shape.tokens for e in at.events if isinstance(e, Stepped))


@on(edge)
async def test_the_ttft_expected_at_placement_is_right_where_nothing_else_comes(at: Edge) -> None:
    await at.complete(prompt="x" * 200)
    value = await scrape(at)
    assert value("rubato_predicted_ttft_seconds_count") == 1
    assert value("rubato_predicted_ttft_seconds_sum") == value("vllm:time_to_first_token_seconds_sum")
