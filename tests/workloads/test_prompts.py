"""Texts for workloads of lengths, and what several stages are judged by."""

import dataclasses

import pytest

from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.latency import affine
from rubato.measure.records import rejudged
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload, prompts, scenarios
from rubato.workloads.generate import make
from rubato.workloads.prompts import with_texts
from rubato.workloads.request_kinds import Kind, chat, code
from tests.kit import run_spec

LIMITS = Limits(32, 1024, 16384, 8192, 16)


def spec(policy="vllm", **changes):
    return run_spec(affine.Model(k=(1e-4, 1e-4), b=(0.01, 0.01)), LIMITS, policy, **changes)


def test_texts_made_later_are_those_made_at_once():
    kinds = [chat(SLO(), share=2), code(SLO())]
    at_once = make("m", kinds, 2.0, count=30, seed=4)
    assert with_texts(make("m", kinds, 2.0, count=30, seed=4, texts=False)) == at_once
    assert with_texts(at_once, len).arrivals == at_once.arrivals  # what has a text keeps it


def test_an_app_without_texts_of_its_own_gets_those_of_chat():
    kinds = [Kind("agent", SLO(), (20, 2000), (10, 10)), code(SLO())]
    load = make("m", kinds, 2.0, count=30, seed=4)
    as_chat = make("m", [chat(SLO(), prompt=(20, 2000), output=(10, 10)), code(SLO())], 2.0, count=30, seed=4)
    assert [one.messages for one in load.arrivals] == [one.messages for one in as_chat.arrivals]
    assert {one.app for one in load.arrivals} == {"agent", "code"}


def test_a_scenario_gets_texts_of_its_lengths():
    bare = scenarios.make("polyserve-lmsys", 2.0, count=40, seed=1)
    load = with_texts(bare)
    for a, b in zip(bare.arrivals, load.arrivals, strict=True):
        assert b.prompt_tokens == prompts.estimate(b.messages[0][1])
        assert abs(b.prompt_tokens - a.prompt_tokens) <= max(40, 0.25 * a.prompt_tokens)
        assert (b.at, b.tier, b.slo, b.output_tokens) == (a.at, a.tier, a.slo, a.output_tokens)


def test_requests_of_several_stages_get_none():
    with pytest.raises(ValueError, match="2 stages: this workload can only be simulated"):
        with_texts(scenarios.make("slos-serve-reasoning", 2.0, count=3, prefill=lambda tokens: 0.1))


@pytest.mark.parametrize("slo_rule", ["deadline", "mean", "windowed"])
def test_stages_are_judged_one_by_one_also_afterwards(slo_rule):
    """Records hold the whole request's tokens; judging them again gives what the simulation said."""
    load = scenarios.make("slos-serve-toolllm", 2.0, count=40, seed=2, prefill=lambda tokens: 0.011 + 1e-4 * tokens)
    run = simulate(load, spec(slo_rule=slo_rule))
    assert [r.output for r in run.records] == [a.output_tokens for a in load.arrivals]
    again = rejudged(run, slo_rule)
    assert [r.verdict.met for r in again.records] == [r.verdict.met for r in run.records]
    assert [r.verdict.margin for r in again.records] == pytest.approx([r.verdict.margin for r in run.records])
    assert 0 < sum(r.verdict.met for r in run.records) < 40


def test_blocks_in_common_are_found_by_the_prefix_cache():
    """A prompt of 1,000 tokens takes 0.11 s; when the first 512 are there already, 488 take less than half of that."""
    first = Arrival("a", 0.0, "t", "", 1000, 2, blocks=(0, 1))
    second = dataclasses.replace(first, id="b", at=5.0, blocks=(0, 2))
    load = Workload("prefix", 0, 0.2, 10.0, {"t": SLO()}, (first, second))
    ttft = {
        cache: [r.verdict.ttft for r in simulate(load, spec(prefix_cache=cache)).records] for cache in (True, False)
    }
    assert ttft[False] == pytest.approx([0.11, 0.11])
    assert ttft[True] == pytest.approx([0.11, 0.01 + 1e-4 * 488])


def test_simulated_tools_take_their_time():
    """10 ms and 0.1 ms a token. The tool returns 2 s after the first round's last token, and TTFT runs from there: of
    24 tokens in KV those of the one full block are kept. The judge of records says of it what the replica said."""
    promise = SLO(ttft=0.0125, tpot=0.0101)
    parts = (OfferedStage(20, 5, promise, ends="</call>"), OfferedStage(10, 5, promise, pause=2.0))
    load = Workload("p", 0, 1.0, 1.0, {"t": SLO()}, (Arrival("a", 0.0, "t", "", 30, 10, parts=parts),))
    run = simulate(load, spec())
    (record,) = run.records
    first, second, decode = 0.01 + 20e-4, 0.01 + 19e-4, 0.01 + 1e-4
    returned = first + 4 * decode + 2.0
    rounds = [first + i * decode for i in range(5)], [returned + second + i * decode for i in range(5)]
    assert record.times == pytest.approx([*rounds[0], *rounds[1]])
    assert (record.outcome, record.verdict.met) == ("completed", True)
    (again,) = rejudged(run, "deadline").records
    assert again.verdict == record.verdict
