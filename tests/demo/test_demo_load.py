"""The demo's load: its rate over a cycle, its mix, and the capacity that it is measured by."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import orjson
import pytest

from rubato.cli.main import main
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.demo.demo_load import (
    KINDS,
    MAX_LOAD,
    MIN_LOAD,
    STREAMED_TIERS,
    Bodies,
    capacity,
    cycle,
    fleet_capacity,
    mean_rate,
)
from rubato.demo.gateway_demo import settings
from rubato.latency import affine
from rubato.workloads import Arrival
from rubato.workloads.lengths import fixed
from rubato.workloads.request_kinds import Kind

PERIOD_S = 240.0
MANY = 20.0
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, kv_blocks=100_000, block_size=16)
STEP = affine.Model(k=(0.0, 1e-4), b=(0.0, 0.02))  # seconds: 0.02 a step and 0.0001 a token


@pytest.fixture(scope="module")
def busy() -> tuple[Arrival, ...]:
    """A cycle at so many times the rate that chance is below 5 % in 20 s."""
    return cycle(MANY * mean_rate(), 0, 0, PERIOD_S)


@pytest.mark.parametrize(
    ("begin", "end", "load"),
    [
        (0.0, 20.0, MIN_LOAD),
        (110.0, 130.0, MAX_LOAD),
        (220.0, 240.0, MIN_LOAD),
        (0.0, 240.0, (MIN_LOAD + MAX_LOAD) / 2),
    ],
)
def test_cycle_offers_the_load_of_its_part(
    busy: tuple[Arrival, ...], begin: float, end: float, load: float
) -> None:  # fmt: skip
    count = sum(begin <= arrival.at < end for arrival in busy)
    assert count / (end - begin) / (MANY * fleet_capacity()) == pytest.approx(load, rel=0.1)


def test_cycle_has_every_tier_in_its_share_and_repeats_with_its_seed() -> None:
    arrivals = cycle(50.0, 7, 1)
    shares = Counter(arrival.tier for arrival in arrivals)
    for kind in KINDS:
        assert shares[kind.tier] / len(arrivals) == pytest.approx(kind.share, abs=0.02)
    assert arrivals == cycle(50.0, 7, 1)
    assert arrivals != cycle(50.0, 7, 2)


@pytest.mark.parametrize(
    ("changes", "tpot", "expected"),
    [
        ({}, 0.04, 18 / (10 * 0.0398)),  # 18 decodes with 180 prompt tokens: 0.0398 s
        ({}, 0.03, 9 / (10 * 0.0299)),  # 9 with 90
        ({"max_num_batched_tokens": 110}, 0.04, 10 / (10 * 0.031)),  # 10 with 100
        ({"kv_blocks": 35}, 0.04, 5 / (10 * 0.0255)),  # 5 with 50: seven blocks each
    ],
)
def test_capacity_is_the_rate_at_the_tightest_tpot(changes: dict[str, int], tpot: float, expected: float) -> None:
    kinds = (Kind("chat", SLO(ttft=1.0, tpot=tpot), fixed(100), fixed(10)), Kind("batch", SLO(), fixed(100), fixed(10)))
    assert capacity(STEP, replace(LIMITS, **changes), kinds) == pytest.approx(expected)


def test_bodies_have_as_many_bytes_as_tokens_and_begin_unlike_each_other() -> None:
    bodies = Bodies.of("m", 0)
    texts = []
    for number, arrival in enumerate(cycle(5.0, 0, 0)):
        body = orjson.loads(bodies.body(arrival, number))
        (message,) = body["messages"]
        assert len(f"user: {message['content']}\n".encode()) == max(arrival.prompt_tokens, len("user: \n") + 1)
        assert body["stream"] is (arrival.tier in STREAMED_TIERS)
        assert (body["service_tier"], body["max_tokens"]) == (arrival.tier, arrival.output_tokens)
        texts.append(message["content"][:8])
    assert len(set(texts)) == len(texts) > 1000


def test_gateway_is_given_the_tiers_that_the_load_asks_for() -> None:
    tiers = settings(has_link=True)["tiers"]
    assert tiers["chat"] == {"ttft_ms": 2000.0, "tpot_ms": 80.0}
    assert list(tiers) == [kind.tier for kind in KINDS]
    assert tiers["batch"] == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--without-slos"], "give --demo too"),
        (["--demo", "--server", "http://10.0.0.7:8000"], "leave out --server"),
        (["--demo", "--without-slos", "--policy", "edf"], "leave out --policy"),
        (["--demo", "--policy", "distserve"], "needs kv_transfer"),
    ],
)
def test_demo_that_cannot_be_says_why_before_it_starts_anything(
    asked: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", *asked]) == 2
    assert message in capfd.readouterr().err
