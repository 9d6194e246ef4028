"""`rubato fit --server`: a stub server's true model is found again, over its link and from its metrics alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache

import pytest

from rubato.core.clock import ARRIVAL, Clock, VirtualClock, run_virtual
from rubato.core.plan import Limits, Sample, Shape
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request, Sampling, Stage
from rubato.fleet.server_metrics import Scrape, fit_scrapes, read_page, scrape
from rubato.fleet.server_steps import collect_steps, fit_steps
from rubato.latency.affine import Model
from rubato.latency.fit import error_report
from rubato.wire.messages import FromCore, Refused, Report, ToCore, TokensRow
from tests.stubs.vllm_server import MemoryLink, StubCore, StubServer

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, kv_blocks=4000, block_size=16)
TRUE = Model(k=(0.0, 4e-5), b=(0.0, 6e-3), a=2e-7, host_per_seq=1e-4)
SECONDS = 100.0
RATES = (1.0, 3.0, 6.0, 9.0, 12.0)  # requests/s
URL = "http://server"
PAGE = """# HELP vllm:iteration_tokens_total tokens of a step
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="m"}} 7
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}
vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} {gaps}
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {gap_seconds}
vllm:prefix_cache_hits_total{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} {kv}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="4000"}} 1.0
"""


class Counters:
    """What vLLM's own metrics would say of a core's steps. As there, a prompt counts when its first token comes."""

    def __init__(self, server: StubServer) -> None:
        self.server = server
        self.said = {"steps": 0.0, "tokens": 0.0, "generated": 0.0, "gaps": 0.0, "gap_seconds": 0.0, "kv": 0.0}
        self.last: dict[str, float] = {}
        self.prompts: dict[str, int] = {}

    def hear(self, message: FromCore) -> None:
        assert isinstance(message, Report)
        came = [row.id for row in message.events if isinstance(row, TokensRow)]
        for id in came:
            if id in self.last:
                self.said["gaps"] += 1
                self.said["gap_seconds"] += message.at - self.last[id]
            else:
                self.said["tokens"] += self.prompts[id]
            self.last[id] = message.at
        self.said["steps"] += message.done is not None
        self.said["generated"] += len(came)
        self.said["tokens"] += len(came)
        self.said["kv"] = 1.0 - message.kv / LIMITS.kv_blocks
        self.server.metrics = PAGE.format(**self.said)


async def offer(core: StubCore, counters: Counters, clock: Clock) -> None:
    """Poisson arrivals, at each of the rates for the same time; prompts and outputs of many lengths."""
    rng = random.Random(3)
    for part, rate in enumerate(RATES):
        while clock.now() < (part + 1) * SECONDS / len(RATES):
            await clock.sleep_until(clock.now() + rng.expovariate(rate), ARRIVAL)
            id, prompt = f"q{len(counters.prompts)}", rng.choice((20, 100, 300))
            counters.prompts[id] = prompt
            sampling = Sampling(max_tokens=rng.choice((30, 60, 120)), ignore_eos=True)
            core.submit(Request(id, (Stage(prompt),), clock.now(), sampling=sampling), lambda event: None)


async def measured() -> tuple[list[Sample], list[Scrape]]:
    clock = VirtualClock()
    core = StubCore(TRUE, LIMITS, clock, "sarathi", ReplicaOptions(causes=False), noise=0.02, settings={"budget": 512})
    await core.start()
    server = StubServer(core)
    counters = Counters(server)
    server.metrics = PAGE.format(**counters.said)
    core.peers.append(counters.hear)
    link, pages = MemoryLink(core), list[Scrape]()

    async def scraped() -> None:
        pages.extend(await scrape(server, clock, SECONDS))

    clock.spawn(offer(core, counters, clock), "load")
    clock.spawn(scraped(), "scrape")
    steps = await collect_steps(link, clock, SECONDS + 2.0, URL)
    link.close()
    return steps, pages


@cache
def varied() -> tuple[list[Sample], list[Scrape]]:
    return run_virtual(measured())


def batches() -> list[Shape]:
    """Decodes at several depths, alone and with a chunk of a prompt."""
    alone = [Shape(n, n, n * kv) for n in (1, 8, 24) for kv in (50, 200)]
    return [*alone, *(one.plus(100, 0) for one in alone)]


def test_steps_over_the_link_give_the_servers_model() -> None:
    steps, _ = varied()
    found = fit_steps(steps, "affine", URL)
    assert len(steps) > 3000
    assert re.search(r"# nine of ten steps ran 1 to \d+ sequences; \d+ of \d+ ran prompts", found.text())
    assert found.held_out.p50 < 0.03
    for shape in batches():
        assert found.model.step_time(shape) == pytest.approx(TRUE.step_time(shape), rel=0.05), shape


def test_metrics_alone_give_the_servers_model_and_its_error() -> None:
    steps, pages = varied()
    found = fit_scrapes(pages, URL)
    assert found.held_out.p50 < 0.03
    for part in (steps, [step for step in steps if step.shape.chunks]):
        assert error_report(found.model, part).p50 < 0.05
        assert error_report(found.model, part).p95 < 0.1
    for shape in batches():
        assert found.model.step_time(shape) == pytest.approx(TRUE.step_time(shape), rel=0.15), shape
    text = found.text()
    assert "every fifth of 20 windows" in text
    assert "# from /metrics of http://server alone: its errors are of means over 5 s" in text
    assert not found.residuals


def pages_of(decodes: Sequence[float], prompts: Sequence[float]) -> list[Scrape]:
    """Pages after every 100 steps, of so many decodes and prompt tokens each."""
    found = [Scrape(0, 0, 0, 0, 0, 0, 0, 0)]
    for n, prompt in zip(decodes, prompts, strict=True):
        s, seconds = found[-1], 100 * (6e-3 + 1e-4 * n + 5e-5 * prompt)
        counts = (s.steps + 100, s.tokens + 100 * (n + prompt), s.generated + 100 * n, s.gaps + 100 * n)
        found.append(Scrape(s.at + seconds, *counts, s.gap_seconds + n * seconds, 0, 50 * n))
    return found


RISE = [2.0 + 0.2 * i for i in range(100)]


@pytest.mark.parametrize(
    ("decodes", "prompts", "says"),
    [
        ([9.0] * 100, RISE, "the load did not vary enough: sequences a step were between 9.0 and 9.0 in nine of ten"),
        (RISE, [9.0] * 100, "the load did not vary enough: prompt tokens a step were between 9.0 and 9.0"),
        (RISE, [0.0] * 100, "the load did not vary enough: prompt tokens a step were between 0.0 and 0.0"),
        (RISE, RISE[::-1], "the load did not vary enough: sequences and prompt tokens of a step changed together"),
        (RISE, [5.0 + 10.0 * (i // 5 % 3) for i in range(100)], None),
    ],
)
def test_a_load_that_does_not_vary_is_refused(decodes: list[float], prompts: list[float], says: str | None) -> None:
    pages = pages_of(decodes, prompts)
    if says is None:
        found = fit_scrapes(pages, URL)
        assert found.model.step_time(Shape(30, 10, 500)) == pytest.approx(6e-3 + 1e-4 * 10 + 5e-5 * 20, rel=0.01)
        assert "what each of them takes was not told apart" in found.text()
        return
    with pytest.raises(ValueError, match=says):
        fit_scrapes(pages, URL)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        (
            [Scrape(i, 10.0 * i, 20.0 * i, 9.0 * i, 9.0 * i, i, 0, 0) for i in range(12)],
            "2 windows of 5 s with 10 steps or more, and 15 are needed",
        ),
        ([Scrape(i, 10.0 * i, 20.0 * i, 9.0 * i, 9.0 * i, i, i, 0) for i in range(12)], "the server drafts tokens"),
        ([Scrape(i, 10.0 * (i % 4), 0, 0, 0, 0, 0, 0) for i in range(12)], "counters went back"),
    ],
)
def test_metrics_that_tell_too_little_are_refused(pages: list[Scrape], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_scrapes(pages, URL)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([], "ran no step: put it under load meanwhile; offer little, then much"),
        ([Sample(Shape(3, 3, 90), 0.01)] * 20, "20 steps of http://server: no sample runs a chunk of prefill"),
    ],
)
def test_steps_that_tell_too_little_are_refused_with_what_to_do(steps: list[Sample], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        fit_steps(steps, "affine", URL)
    assert f"rubato bench {URL} --duration 300 --rate RATE" in str(caught.value)


def test_too_short_a_duration_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="/metrics alone needs 75 s or more"):
        run_virtual(scrape(StubServer(None), VirtualClock(), 60.0))


def test_pages_of_metrics_are_read_over_engines_and_versions() -> None:
    page = PAGE.format(steps=10, tokens=90, generated=30, gaps=20, gap_seconds=0.5, kv=0.25)
    assert read_page(page, 7.0) == Scrape(7.0, 10, 90, 30, 20, 0.5, 0, 16_000)
    older = page.replace("inter_token_latency", "time_per_output_token")
    older = older.replace('hits_total{engine="0"} 0.0', "hits_total 8")
    two = older + older.replace("hits_total 8", "")
    newer = older + "vllm:prompt_tokens_cached_total 8\n"
    assert (read_page(older, 7.0).tokens, read_page(newer, 7.0).tokens) == (90 - 8, 90)
    assert read_page(two, 7.0) == Scrape(7.0, 20, 180 - 8, 60, 40, 1.0, 0, 16_000, engines=2)
    with pytest.raises(ValueError, match="/metrics has no vllm:iteration_tokens_total_count: give a vLLM server"):
        read_page("rubato_requests_offered_total 3\n", 7.0)


class DeafLink:
    """is_refused: as by a core with another token. says: its answer to everything."""

    def __init__(self, is_refused: bool, says: FromCore | None) -> None:
        self.is_refused, self._says = is_refused, says

    def send(self, message: ToCore) -> None: ...

    async def receive(self) -> FromCore:
        if self._says is None or not (said := self._says):
            await VirtualClock().sleep_until(1e9, ARRIVAL)
        self._says = None
        return said

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("link", "says"),
    [
        (DeafLink(False, None), "does not answer on the link within 5 s"),
        (DeafLink(True, None), "set RUBATO_LINK_TOKEN to one secret for both"),
        (DeafLink(False, Refused("protocol 2")), "does not let this gateway in: protocol 2"),
    ],
)
def test_a_core_that_does_not_answer_is_named(link: DeafLink, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_virtual(collect_steps(link, VirtualClock(), 30.0, URL))
