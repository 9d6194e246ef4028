"""Workload files: the same seed gives the same requests, each purpose has its own stream, bad rows are named."""

import ast
import dataclasses
import re

import numpy as np
import orjson
import pytest

from rubato.core.request import SLO
from rubato.workloads import Arrival, OfferedStage, Workload, WorkloadError, prompts, read, request_kinds, write
from rubato.workloads.generate import make

CHAT, CODE, SUMMARY = SLO(ttft=1.0, tpot=0.08), SLO(tpot=0.05), SLO(e2e=20.0)
KINDS = (
    request_kinds.chat(CHAT, share=5),
    request_kinds.code(CODE, share=3),
    request_kinds.summary(SUMMARY, share=2, tier="batch"),
)


def mixed(**changes):
    return make("mix", KINDS, **({"rate": 2.0, "count": 60, "seed": 7} | changes))


def contents(load):
    return [(a.app, a.prompt_tokens, a.output_tokens, a.messages) for a in load.arrivals]


def test_a_written_workload_reads_back_equal(tmp_path):
    load = mixed()
    load = dataclasses.replace(load, arrivals=tuple(dataclasses.replace(a, temperature=0.5) for a in load.arrivals))
    write(load, tmp_path / "w.jsonl")
    again = read(tmp_path / "w.jsonl")
    assert again == load


def test_dialogues_seeds_and_bare_lengths_survive_the_file(tmp_path):
    talk = Arrival("a", 0.0, "t", "chat", 5, 6, (("system", "Be brief."), ("user", "Hä?")), 0.7, 3)
    bare = Arrival("b", 1.5, "t", "", 900, 30)
    load = Workload("two", 1, 1.0, 2.0, {"t": SLO()}, (talk, bare), counted=True)
    write(load, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == load


EVERYTHING = Workload(
    "all of it", 4, 2.0, 9.0, {"t": SLO(tpot=0.05), "free": SLO()},
    (
        Arrival("a", 0.0, "t", "chat", 1100, 6, slo=SLO(ttft=0.7, tpot=0.05), blocks=(0, 7, 8), tenant="acme"),
        Arrival("b", 0.5, "t", "tools", 150, 30, seed=3, acceptance=0.8, parts=(
            OfferedStage(100, 10, SLO(ttft=1.0, tpot=0.05), "</call>"), OfferedStage(50, 20, SLO(tpot=0.1), pause=1.5),
        )),
        Arrival("c", 9.0, "free", "", 5, 1),
    ),
    counted=True, notes={"skipped": "2 rows"}, profile="llama-3.1-8b-h200",
)  # fmt: skip


def test_every_feature_survives_the_file(tmp_path):
    write(EVERYTHING, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == EVERYTHING
    assert EVERYTHING.truth() == {"a": (6,), "b": (10, 20), "c": (1,)}
    assert EVERYTHING.pauses() == {"b": (0.0, 1.5)}
    assert EVERYTHING.acceptances() == {"b": 0.8}


def test_files_of_the_first_format_are_read(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_bytes(orjson.dumps(HEADER) + b"\n" + orjson.dumps(ROW))
    assert HEADER["format"] == "rubato-workload/1"
    assert read(path).arrivals == (Arrival("a", 0.5, "chat", "", 3, 4, (("user", "Hi"),)),)


def test_prompts_whose_blocks_begin_alike_have_token_ids_that_do():
    again = Arrival("d", 9.0, "t", "chat", 1024, 6, blocks=(0, 9))
    load = dataclasses.replace(EVERYTHING, arrivals=(EVERYTHING.arrivals[0], again))
    one, two = (request.stages[0].token_ids for request in load.requests())
    assert (len(one), len(two)) == (1100, 1024)
    assert one[:512] == two[:512]
    assert set(one[512:1024]).isdisjoint(two[512:])


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert mixed() == mixed()
    assert contents(mixed()) != contents(mixed(seed=8))


def test_changing_the_rate_changes_times_only():
    slow, fast = mixed(), mixed(rate=5.0)
    assert contents(slow) == contents(fast)
    assert [a.at * 2.0 for a in slow.arrivals] == pytest.approx([a.at * 5.0 for a in fast.arrivals])


def test_a_longer_run_begins_with_the_shorter_one():
    assert mixed(count=60).arrivals[:20] == mixed(count=20).arrivals


def test_changing_lengths_changes_neither_times_nor_kinds():
    longer = tuple(dataclasses.replace(kind, output=(500, 600)) for kind in KINDS)
    a, b = mixed(), make("mix", longer, 2.0, count=60, seed=7)
    assert [(x.at, x.app, x.messages) for x in a.arrivals] == [(x.at, x.app, x.messages) for x in b.arrivals]


def test_changing_the_tokenizer_changes_counts_only():
    a, b = mixed(), mixed(count_tokens=len)
    assert [x.messages for x in a.arrivals] == [x.messages for x in b.arrivals]
    assert [x.prompt_tokens for x in b.arrivals] == [len(x.messages[0][1]) for x in b.arrivals]
    assert b.counted
    assert not a.counted


def test_arrivals_are_poisson_at_the_rate_asked_for():
    load = make("p", (request_kinds.chat(CHAT),), 4.0, duration=250.0, seed=1)
    gaps = np.diff([a.at for a in load.arrivals])
    assert load.duration == 250.0
    assert load.arrivals[-1].at < 250.0
    assert len(load.arrivals) == pytest.approx(1000, abs=4 * 1000**0.5)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # exponential: deviation = mean


def test_kinds_come_in_their_shares_within_their_ranges():
    load = mixed(count=600)
    counts = {kind.tier: [a for a in load.arrivals if a.tier == kind.tier] for kind in KINDS}
    assert len(counts["chat"]) == pytest.approx(300, abs=50)
    assert len(counts["batch"]) == pytest.approx(120, abs=40)
    for kind in KINDS:
        outputs = [a.output_tokens for a in counts[kind.tier]]
        assert min(outputs) >= kind.output[0]
        assert max(outputs) <= kind.output[1]
    assert len({a.messages for a in load.arrivals}) == 600


def test_rescaled_is_what_make_gives_at_that_rate():
    scaled, made = mixed().rescaled(6.0), mixed(rate=6.0)
    assert [a.at for a in scaled.arrivals] == pytest.approx([a.at for a in made.arrivals])
    assert (scaled.rate, scaled.duration) == (6.0, pytest.approx(made.duration))
    assert contents(scaled) == contents(made)
    with pytest.raises(ValueError, match="rate is 0"):
        mixed().rescaled(0)


def test_with_slos_replaces_the_tiers_named():
    load = mixed().with_slos({"code": SLO(ttft=0.3)})
    assert load.tiers == {"chat": CHAT, "code": SLO(ttft=0.3), "batch": SUMMARY}
    assert load.arrivals == mixed().arrivals
    with pytest.raises(ValueError, match="no tier 'cod'"):
        mixed().with_slos({"cod": SLO()})


def test_requests_carry_lengths_and_slos_for_the_simulator():
    load = mixed()
    for arrival, request in zip(load.arrivals, load.requests(), strict=True):
        assert (request.id, request.arrival, request.tier) == (arrival.id, arrival.at, arrival.tier)
        assert request.stages[0].prompt == arrival.prompt_tokens
        assert request.stages[0].slo == load.tiers[arrival.tier]
        assert request.sampling.max_tokens == arrival.output_tokens
        assert request.sampling.ignore_eos


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": -1.0}, "rate is -1"),
        ({"duration": 3.0}, "either duration"),
        ({"count": None}, "either duration"),
        ({"count": None, "duration": 1e-9}, "is empty"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mixed(**arguments)


def test_kinds_that_contradict_are_refused():
    with pytest.raises(ValueError, match="share the tier"):
        make("x", (request_kinds.chat(CHAT), request_kinds.code(CODE, tier="chat")), 1.0, count=3)
    with pytest.raises(ValueError, match=r"output is \(9, 3\)"):
        request_kinds.chat(CHAT, output=(9, 3))


HEADER = {"format": "rubato-workload/1", "name": "n", "seed": 0, "tiers": {"chat": {"ttft": 1.0}}}
ROW = {"id": "a", "at": 0.5, "tier": "chat", "prompt_tokens": 3, "output_tokens": 4, "prompt": "Hi"}


STAGE = {"prompt_tokens": 3, "output_tokens": 4}
STAGED = {"id": "a", "at": 0.5, "tier": "chat"}


def without(row, field):
    return {key: value for key, value in row.items() if key != field}


@pytest.mark.parametrize(
    ("line", "rows", "message"),
    [
        (1, [], "has a header but no requests"),
        (1, [without(HEADER, "format"), ROW], "format is missing"),
        (1, [HEADER | {"format": "other"}, ROW], "format is 'other': should be 'rubato-workload/1' or"),
        (1, [HEADER | {"tiers": {}}, ROW], "tiers is {}: Dictionary should have at least 1 item"),
        (
            1,
            [HEADER | {"tiers": {"chat": {"ttft": -1}}}, ROW],
            "tiers.chat is {'ttft': -1}: slo.ttft is -1.0 s: give 1e-06 to",
        ),
        (1, [HEADER | {"tiers": {"chat": {"ttft_ms": 1}}}, ROW], "tiers.chat.ttft_ms is 1: Unexpected"),
        (1, [HEADER | {"sede": 3}, ROW], "sede is not a field here: did you mean 'seed'?"),
        (2, [HEADER, without(ROW, "id")], "id is missing"),
        (2, [HEADER, ROW | {"at": "soon"}], "at is 'soon': should be a valid number"),
        (2, [HEADER, ROW | {"at": -1}], "at is -1: should be greater than or equal to 0"),
        (2, [HEADER, ROW | {"tier": "vip"}], "tier is 'vip': the header has chat"),
        (2, [HEADER, ROW | {"output_tokens": 0}], "output_tokens is 0: should be greater than or equal to 1"),
        (2, [HEADER, ROW | {"prompt_tokens": True}], "prompt_tokens is True"),
        (2, [HEADER, ROW | {"otput_tokens": 5}], "otput_tokens is not a field here: did you mean 'output_tokens'?"),
        (2, [HEADER, ROW | {"messages": []}], "messages stands beside prompt"),
        (2, [HEADER, without(ROW, "prompt") | {"messages": [{"role": "user"}]}], r"messages\[0\].content is missing"),
        (3, [HEADER, ROW, ROW], "id is 'a', which an earlier line has"),
        (3, [HEADER, ROW, ROW | {"id": "b", "at": 0.1}], "at is 0.1 s, before the line above"),
        (2, [HEADER, ROW | {"slo": {"ttft": 0}}], "slo is {'ttft': 0}: slo.ttft is 0.0 s"),
        (2, [HEADER, ROW | {"slo": {"e2e": 1e300}}], r"slo is .*: slo.e2e is 1e\+300 s: give 1e-06 to 1e\+06 seconds"),
        (2, [HEADER, ROW | {"slo": 3}], "slo is 3: should be an object"),
        (2, [HEADER, ROW | {"blocks": [1, 2]}], "blocks has 2 ids for 3 prompt tokens"),
        (2, [HEADER, ROW | {"blocks": [-1]}], r"blocks\[0\] is -1: should be greater"),
        (2, [HEADER, ROW | {"acceptance": 1.5}], "acceptance is 1.5: should be less than or equal to 1"),
        (2, [HEADER, ROW | {"stages": [STAGE]}], "prompt_tokens stands beside stages"),
        (2, [HEADER, STAGED | {"stages": "two"}], "stages is 'two': should be a valid array"),
        (2, [HEADER, STAGED | {"stages": [STAGE | {"prompt_tokens": 0}]}], r"stages\[0\].prompt_tokens is 0"),
        (2, [HEADER, STAGED | {"stages": [STAGE, STAGE | {"paus": 1}]}], r"stages\[1\].paus is not a field here"),
        (2, [HEADER, STAGED | {"stages": [STAGE, STAGE | {"slo": {"tpot": "x"}}]}], r"stages\[1\].slo.tpot is 'x'"),
        (1, [HEADER | {"rate": 0}, ROW], "rate is 0"),
        (2, [HEADER, STAGED | {"stages": [STAGE, {"prompt_tokens": 0, "output_tokens": 1, "pause": 1}]}], "for a tool"),
        (2, [HEADER, without(ROW, "prompt_tokens")], "prompt_tokens is missing"),
        (2, [HEADER, b"{no json"], "not JSON"),
        (2, [HEADER, [1, 2]], "should be a JSON object"),
    ],
)
def test_malformed_rows_name_file_line_and_field(tmp_path, line, rows, message):
    path = tmp_path / "bad.jsonl"
    rows = rows or [HEADER]
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows))
    with pytest.raises(WorkloadError, match=message) as error:
        read(path)
    assert str(error.value).startswith(str(path))
    if "no requests" not in message:
        assert f"line {line}:" in str(error.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(WorkloadError, match=r"none\.jsonl is empty"):
        read(tmp_path / "none.jsonl")


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize(("app", "least", "most"), [("chat", 30, 200), ("code", 120, 400), ("summary", 400, 900)])
def test_texts_have_about_the_tokens_asked_for(app, least, most):
    rng = np.random.default_rng(0)
    for target in rng.integers(least, most, size=50):
        tokens = prompts.estimate(prompts.TEXTS[app](rng, int(target)))
        assert abs(tokens - target) <= max(16, 0.25 * target)


@pytest.mark.parametrize("app", prompts.TEXTS)
def test_texts_have_every_slot_filled_and_no_repeated_sentences(app):
    rng = np.random.default_rng(1)
    for _ in range(100):
        text = prompts.TEXTS[app](rng, 300)
        if app != "code":
            assert "{" not in text
            sentences = re.split(r"(?<=[.?!]) ", text)
            assert len(set(sentences)) >= 0.9 * len(sentences)


def test_code_prompts_are_python_up_to_the_break():
    rng = np.random.default_rng(2)
    for target in (100, 200, 300, 400) * 10:
        text = prompts.code(rng, target)
        source = text.split("```python\n")[1].removesuffix("\n```")
        tree = ast.parse(source)
        last = tree.body[-1]
        assert isinstance(last, ast.FunctionDef)
        assert len(last.body) == 1  # its docstring, and then it breaks off
