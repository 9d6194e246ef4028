"""/metrics says what the events say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from rubato.server.prometheus import MOST_TENANTS
from rubato.server.slo_input import Tier, Tiers
from rubato.types import SLO, Stepped
from tests.server.conftest import STEP, Edge

Runs = Callable[..., None]
Key = tuple[str, frozenset[tuple[str, str]]]


async def scrape(at: Edge) -> Callable[..., float]:
    """value(name, label=..., ...) of a fresh scrape, summed over the series that have these labels."""
    answer = await at.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]

    def value(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    return value


def test_counts(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        await asyncio.gather(
            at.chat(service_tier="good", user="a"),
            at.chat(service_tier="good", user="b"),
            at.chat(service_tier="late", user="b"),
            at.chat(service_tier="never", user="b"),
            at.complete(),
        )
        value = await scrape(at)
        assert value("rubato_requests_offered_total") == 5
        assert value("rubato_requests_offered_total", tenant="b") == 3
        assert value("rubato_requests_offered_total", tier="good", tenant="a") == 1
        assert value("rubato_requests_finished_total", outcome="completed") == 4
        assert value("rubato_requests_finished_total", tier="never", outcome="refused") == 1
        assert value("rubato_slo_met_total") == value("rubato_slo_met_total", tier="good") + 1 == 3
        assert value("rubato_slo_missed_total", tier="never", cause="refused") == 1
        assert value("rubato_slo_missed_total") == 2
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

    tiers = Tiers([Tier("good", SLO(ttft=5.0)), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(ttft=0.001), "refuse")])
    edge(scenario, tiers=tiers)


def test_gauges_follow_requests_and_offered_is_always_finished_plus_in_flight(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        requests = [asyncio.create_task(at.chat(max_tokens=n)) for n in range(1, 13)]
        running = []
        while not all(task.done() for task in requests):
            await at.clock.sleep_until(at.clock.now() + STEP / 2, 0)
            value = await scrape(at)
            flight = value("rubato_requests_in_flight")
            assert value("rubato_requests_offered_total") == value("rubato_requests_finished_total") + flight
            assert (
                value("vllm:num_requests_running") + value("vllm:num_requests_waiting") <= flight
            )  # told a moment later
            running.append(value("vllm:num_requests_running"))
            used = 1 - value("rubato_kv_blocks_free") / value("rubato_kv_blocks_total")
            assert abs(value("vllm:kv_cache_usage_perc") - used) < 1e-9
        assert max(running) == 8  # the engine's limit, twelve came at once
        value = await scrape(at)
        assert value("vllm:kv_cache_usage_perc") == value("vllm:num_requests_running") == 0
        assert value("rubato_requests_offered_total") == 12

    edge(scenario)


def test_tenants_cannot_grow_the_server(edge: Runs) -> None:
    async def scenario(at: Edge) -> None:
        for i in range(MOST_TENANTS + 5):
            await at.complete(user=f"tenant {i}", max_tokens=1)
        value = await scrape(at)
        assert value("rubato_requests_offered_total", tenant="tenant 0") == 1
        assert value("rubato_requests_offered_total", tenant="other") == 5

    edge(scenario)
