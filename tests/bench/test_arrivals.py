"""Workloads from traces: every layout, rescaling, tiers, and what is wrong with a file."""

import gzip

import pytest

from rubato import arrivals, workload
from rubato.arrivals import Offer, TraceError
from rubato.types import SLO

KINDS = [workload.chat(SLO(ttft=1.0), share=3.0), workload.code(SLO(tpot=0.1), tier="editor", share=1.0)]
OFFERS = [Offer(0.0, 50, 10), Offer(1.5, 200, 1), Offer(4.0, 30, 7)]


def file(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.csv", "at,prompt_tokens,output_tokens\n10,50,10\n11.5,200,1\n14,30,7\n"),
        ("own.jsonl", '{"at":0,"prompt_tokens":50,"output_tokens":10}\n\n{"at":1.5,"prompt_tokens":200,'
         '"output_tokens":0}\n{"at":4,"prompt_tokens":30,"output_tokens":7}\n'),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,50,10\n"
         "2023-11-16 18:15:48.1805900,200,1\n2023-11-16 18:15:50.6805900,30,7\n"),
        ("seconds.csv.gz", "t_s,input_tokens,output_tokens\r\n0.0,50,10\r\n1.5,200,1\r\n4.0,30,7\r\n"),
        ("mooncake.jsonl", '{"timestamp": 4000, "input_length": 30, "output_length": 7, "hash_ids": [0]}\n'
         '{"timestamp": 0, "input_length": 50, "output_length": 10, "hash_ids": [0]}\n'
         '{"timestamp": 1500, "input_length": 200, "output_length": 1, "hash_ids": [0, 2]}\n'),
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_offers(tmp_path, name, text):
    read = arrivals.read(file(tmp_path, name, text))
    assert [(o.prompt, o.output, o.tier) for o in read] == [(o.prompt, o.output, o.tier) for o in OFFERS]
    assert [o.at for o in read] == pytest.approx([o.at for o in OFFERS], abs=1e-6)


def test_a_part_of_a_trace(tmp_path):
    path = file(tmp_path, "own.csv", "at,prompt_tokens,output_tokens,tier\n5,50,10,chat\n6,20,1,editor\n9,30,7,\n")
    assert [o.tier for o in arrivals.read(path)] == ["chat", "editor", ""]
    assert len(arrivals.read(path, seconds=4.0)) == 2
    assert len(arrivals.read(path, count=1)) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "has the fields a, b: expected one of at, prompt_tokens"),
        ("at,prompt_tokens,output_tokens\n0,50,10\n1,many,3\n", "line 3: ValueError"),
        ("at,prompt_tokens,output_tokens\n0,0,10\n", "line 2: ValueError: 0 prompt"),
        ("at,prompt_tokens,output_tokens\n", "holds no requests"),
        ('{"at": 0}\n', "has the fields at"),
        ('{"at": 0\n', "line 1: not JSON"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path, text, says):
    with pytest.raises(TraceError, match=says):
        arrivals.read(file(tmp_path, "t", text))


def test_a_traces_times_are_kept_or_rescaled():
    made = arrivals.make("t", OFFERS, KINDS)
    assert [a.at for a in made.arrivals] == [0.0, 1.5, 4.0]
    assert made.rate == pytest.approx(2 / 4.0)
    faster = arrivals.make("t", OFFERS, KINDS, rate=1.0)
    assert [a.at for a in faster.arrivals] == pytest.approx([0.0, 0.75, 2.0])
    assert [a.messages for a in faster.arrivals] == [a.messages for a in made.arrivals]
    assert [a.output_tokens for a in made.arrivals] == [10, 1, 7]


def test_texts_have_the_traces_lengths():
    offers = [Offer(float(i), 60 + 40 * i, 5) for i in range(40)]
    made = arrivals.make("t", offers, KINDS, seed=4)
    off = [a.prompt_tokens - o.prompt for a, o in zip(made.arrivals, offers, strict=True)]
    assert sum(abs(o) <= 12 for o in off) >= 36
    assert len({a.messages for a in made.arrivals}) == 40


def test_arrivals_may_be_poissons_at_the_rate_asked_for():
    offers = [Offer(0.0, 40, 5)] * 400
    made = arrivals.make("t", offers, KINDS, poisson=True, rate=5.0, seed=1)
    gaps = [b.at - a.at for a, b in zip(made.arrivals, made.arrivals[1:], strict=False)]
    assert sum(gaps) == pytest.approx(399 / 5.0)
    mean = sum(gaps) / len(gaps)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.4)  # exponential
    assert made == arrivals.make("t", offers, KINDS, poisson=True, rate=5.0, seed=1)
    assert made.arrivals != arrivals.make("t", offers, KINDS, poisson=True, rate=5.0, seed=2).arrivals


def test_tiers_are_the_traces_or_drawn_by_share():
    named = arrivals.make("t", [Offer(0.0, 40, 5, "editor"), Offer(1.0, 40, 5, "chat")], KINDS)
    assert [(a.tier, a.app) for a in named.arrivals] == [("editor", "code"), ("chat", "chat")]
    drawn = arrivals.make("t", [Offer(float(i), 40, 5) for i in range(400)], KINDS)
    assert sum(a.tier == "chat" for a in drawn.arrivals) == pytest.approx(300, abs=35)
    with pytest.raises(ValueError, match="tier 'edtor', which no kind is of: did you mean 'editor'"):
        arrivals.make("t", [Offer(0.0, 40, 5, "edtor")], KINDS)
