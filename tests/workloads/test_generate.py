"""Drawing: streams of their own, SLOs in seconds, stages, changing mixes, limits."""

import dataclasses

import numpy as np
import pytest

from rubato.core.request import SLO
from rubato.workloads import OfferedStage
from rubato.workloads.arrivals import Gamma, Poisson
from rubato.workloads.generate import BEST_EFFORT, make
from rubato.workloads.lengths import Normal, fixed
from rubato.workloads.request_kinds import FollowUp, Kind, MixChange

A = Kind("a", SLO(tpot=0.05), (100, 200), (10, 20), ttft_slowdown=3.0, share=2.0, acceptance=(0.5, 0.9))
B = Kind("b", SLO(ttft=1.0), (300, 400), (30, 40), tenant="acme")
TOOLS = Kind(
    "tools", SLO(tpot=0.05), (100, 200), (10, 20), ttft_slowdown=3.0, ends="</call>", pause=0.5,
    rounds=Normal(1.7, 1.1, most=8), then=(FollowUp((50, 60), (20, 30), SLO(tpot=0.1), 5.0, pause=1.0),),
)  # fmt: skip
REASONING = Kind("why", SLO(ttft=2.0, tpot=0.05), (100, 200), (500, 900), ends="</think>",
                 then=(FollowUp((50, 60), slo=SLO(tpot=0.1)),))  # fmt: skip


def prefill(tokens):
    return 0.01 + 0.001 * tokens


def made(*kinds, **changes):
    return make(
        "m", kinds or (A, B), **({"rate": 2.0, "count": 400, "seed": 3, "prefill": prefill, "texts": False} | changes)
    )


def column(load, *names):
    return [tuple(getattr(a, name) for name in names) for a in load.arrivals]


def test_every_purpose_has_a_stream_of_its_own():
    base = made()
    gamma = made(arrivals=Gamma(3.0), rate=9.0)
    assert column(gamma, "app", "prompt_tokens", "output_tokens", "slo", "acceptance") == column(
        base, "app", "prompt_tokens", "output_tokens", "slo", "acceptance"
    )
    longer = made(dataclasses.replace(A, output=(900, 999)), B)
    assert column(longer, "at", "app", "prompt_tokens", "acceptance") == column(
        base, "at", "app", "prompt_tokens", "acceptance"
    )
    surer = made(dataclasses.replace(A, acceptance=(0.9, 0.9)), B)
    assert column(surer, "at", "app", "prompt_tokens", "output_tokens") == column(
        base, "at", "app", "prompt_tokens", "output_tokens"
    )
    shares = made(dataclasses.replace(A, share=1.0, prompt=(300, 400), output=(30, 40)), B)
    assert column(shares, "at", "prompt_tokens") == column(
        made(dataclasses.replace(A, prompt=(300, 400), output=(30, 40)), B), "at", "prompt_tokens"
    )
    staged = made(dataclasses.replace(A, then=(FollowUp((5, 9)),)), B)
    assert [a.parts[0].output if a.parts else a.output_tokens for a in staged.arrivals] == [
        a.output_tokens for a in base.arrivals
    ]
    drawn = dataclasses.replace(A, ttft_slowdown=None, ttfts=(0.5, 1.0))
    assert column(made(drawn, B), "at", "app", "output_tokens") == column(base, "at", "app", "output_tokens")


@pytest.mark.parametrize("kinds", [(A, B), (TOOLS, REASONING), (dataclasses.replace(B, ttfts=(0.2, 1.0)),)])
def test_a_longer_run_begins_with_the_shorter_one(kinds):
    assert made(*kinds, count=400).arrivals[:150] == made(*kinds, count=150).arrivals
    assert (
        made(*kinds, count=None, duration=60.0).arrivals
        == made(*kinds).arrivals[: len(made(*kinds, count=None, duration=60.0).arrivals)]
    )


def test_slowdowns_become_seconds():
    load = made()
    for a in load.arrivals:
        assert load.slo(a) == (SLO(ttft=3.0 * prefill(a.prompt_tokens), tpot=0.05) if a.app == "a" else SLO(ttft=1.0))
        assert a.tenant == ("acme" if a.app == "b" else "default")
    assert {id(a.slo) for a in load.arrivals if a.prompt_tokens == 150} == {
        id(next(a.slo for a in load.arrivals if a.prompt_tokens == 150))
    }
    with pytest.raises(ValueError, match="give `prefill`"):
        made(prefill=None)
    with pytest.raises(ValueError, match=r"prefill\(\d+\) is 0.0 s"):
        made(prefill=lambda tokens: 0.0)


def test_ttfts_that_no_idle_replica_meets_are_not_promised():
    kind = Kind("c", SLO(tpot=0.02), (1, 1200), fixed(5), ttfts=(0.3, 0.5, 1.0))
    load = made(kind, count=3000)
    for a in load.arrivals:
        if a.tier == BEST_EFFORT:
            assert prefill(a.prompt_tokens) > 1.0
            assert load.slo(a) == SLO()
        else:
            assert load.slo(a).ttft >= prefill(a.prompt_tokens)
    short = [load.slo(a).ttft for a in load.arrivals if a.prompt_tokens < 290]
    assert [short.count(t) / len(short) for t in (0.3, 0.5, 1.0)] == pytest.approx([1 / 3] * 3, abs=0.06)
    unmet = sum(a.tier == BEST_EFFORT for a in load.arrivals)
    assert load.notes["best_effort"].startswith(f"{unmet} requests")
    assert load.tiers[BEST_EFFORT] == SLO()
    assert BEST_EFFORT not in made(kind, prefill=None).tiers  # nothing is known to be impossible


def test_tool_loops_have_their_rounds_and_pauses():
    load = made(TOOLS, count=3000)
    stages = [len(a.parts) for a in load.arrivals]
    assert np.mean(stages) == pytest.approx(2.7, abs=0.08)
    assert np.std(stages) == pytest.approx(1.1, abs=0.08)
    for a in load.arrivals:
        *rounds, last = a.parts
        assert last.slo == SLO(ttft=5.0 * prefill(last.prompt), tpot=0.1)
        assert (last.ends, last.pause) == ("eos", 1.0 if rounds else 0.0)
        assert 20 <= last.prompt <= 30
        for number, part in enumerate(rounds):
            assert part.slo == SLO(ttft=3.0 * prefill(part.prompt), tpot=0.05)
            assert (part.ends, part.pause) == ("</call>", 0.5 if number else 0.0)
        assert a.prompt_tokens == sum(part.prompt for part in a.parts)
    assert load.pauses().keys() == {a.id for a in load.arrivals if len(a.parts) > 1}
    assert len({part.prompt for a in load.arrivals for part in a.parts}) > 90  # each stage has draws of its own
    request = next(r for r in load.requests() if len(r.stages) == 3)
    assert [s.ends for s in request.stages] == ["</call>", "</call>", "eos"]
    assert request.sampling.max_tokens == sum(load.truth()[request.id])


def test_reasoning_goes_on_without_a_prompt():
    load = made(REASONING)
    for a, request in zip(load.arrivals, load.requests(), strict=True):
        thinking, response = a.parts
        assert (response.prompt, response.slo) == (0, SLO(tpot=0.1))
        assert load.truth()[a.id] == (thinking.output, response.output)
        assert [stage.prompt for stage in request.stages] == [a.prompt_tokens, 0]
    assert load.pauses() == {}


def test_a_mix_changes_with_the_request_or_the_second_said():
    flipped = made(A, changes=[MixChange((B,), request=150)], count=300)
    assert [a.app for a in flipped.arrivals] == ["a"] * 150 + ["b"] * 150
    later = made(A, changes=[MixChange((B,), at=40.0), MixChange((A,), at=80.0)], count=300)
    assert [a.app for a in later.arrivals] == ["b" if 40.0 <= a.at < 80.0 else "a" for a in later.arrivals]
    assert flipped.tiers == {"a": A.slo, "b": B.slo}
    assert column(flipped, "at") == column(later, "at")


def test_outputs_are_cut_to_the_context():
    load = made(B, max_model_len=400)
    assert all(a.prompt_tokens + a.output_tokens <= 400 for a in load.arrivals)
    cut = sum(a.output_tokens != b.output_tokens or a.prompt_tokens != b.prompt_tokens
              for a, b in zip(load.arrivals, made(B).arrivals, strict=True))  # fmt: skip
    assert cut > 0
    assert load.notes["max_model_len"] == f"{cut} requests cut to 400 tokens of prompt and output"
    with pytest.raises(ValueError, match="only kinds of one stage"):
        made(TOOLS, max_model_len=400)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ttfts": (1.0,), "ttft_slowdown": 3.0}, "ttfts go with neither"),
        ({"acceptance": (0.5, 1.5)}, "acceptance is"),
        ({"share": 0.0}, "share is 0"),
    ],
)
def test_contradictions_in_a_kind(arguments, says):
    with pytest.raises(ValueError, match=says):
        Kind("x", SLO(), (1, 2), (1, 2), **arguments)


def test_a_request_needs_a_prompt():
    with pytest.raises(ValueError, match="has no prompt"):
        made(dataclasses.replace(REASONING, rounds=fixed(0)))
    with pytest.raises(ValueError, match="give >= 0 and >= 1"):
        OfferedStage(3, 0)


def test_slo_scale_stretches_every_promise():
    load = made(A, B, TOOLS)
    wide = load.with_slo_scale(2.0)
    for a, b in zip(load.arrivals, wide.arrivals, strict=True):
        assert wide.slo(b).tpot == (None if load.slo(a).tpot is None else 2 * load.slo(a).tpot)
        assert wide.slo(b).ttft == 2 * load.slo(a).ttft
        assert len(b.parts) == len(a.parts)
    first = load.with_slo_scale(2.0, what="ttft")
    for a, b in zip(load.arrivals, first.arrivals, strict=True):
        for before, after in zip(load.parts(a), first.parts(b), strict=True):
            assert after.slo == dataclasses.replace(before.slo, ttft=before.slo.ttft and 2 * before.slo.ttft)
    with pytest.raises(ValueError, match="SLO scale is 0"):
        load.with_slo_scale(0.0)


def test_with_slos_replaces_slos_of_single_requests_but_not_of_stages():
    load = made().with_slos({"a": SLO(ttft=9.0)})
    assert {load.slo(a) for a in load.arrivals if a.tier == "a"} == {SLO(ttft=9.0)}
    with pytest.raises(ValueError, match="SLO for each stage"):
        made(TOOLS).with_slos({"tools": SLO()})


def test_rescaling_is_exact_whatever_the_process():
    load = made(arrivals=Gamma(2.0))
    twice = load.rescaled(4.0)
    assert [a.at for a in twice.arrivals] == [a.at / 2 for a in load.arrivals]
    assert (twice.rate, twice.duration) == (4.0, load.duration / 2)
    assert column(made(arrivals=Poisson(), rate=4.0), "at") == column(made().rescaled(4.0), "at")
