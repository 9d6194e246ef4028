"""Summaries, the JSON and the picture, from runs made by hand."""

import json
from dataclasses import fields, replace

import orjson
import pytest

from rubato.core.request import SLO
from rubato.core.slo import judge
from rubato.measure import compare, pictures, plot, results
from rubato.measure.records import (
    BenchResult,
    ClientLoad,
    Record,
    TierSummary,
    fingerprint,
    rejudged,
    stages,
    summarise,
)
from rubato.workloads import Arrival, OfferedStage, Workload

TIERS = {"fast": SLO(ttft=1.0, tpot=0.1), "slow": SLO(e2e=10.0)}
CLIENT = ClientLoad(5.0, 1.0, 0.001, 0.002, 0.003, 0.001, 0.05)


def workload(name="w", count=8, gap=1.0):
    tiers = ("fast", "fast", "fast", "slow")
    arrivals = tuple(Arrival(f"{name}{i}", i * gap, tiers[i % 4], "chat", 10, 3) for i in range(count))
    return Workload(name, 3, 1 / gap, count * gap, TIERS, arrivals)


def run(label, fates, load=None, **changes):
    """fates: per request its TTFT in seconds (two more tokens follow 0.05 s apart), or the outcome it had instead."""
    load = load or workload(count=len(fates))
    records = []
    for arrival, request, fate in zip(load.arrivals, load.requests(), fates, strict=True):
        ended = isinstance(fate, str)
        times = () if ended else (arrival.at + fate, arrival.at + fate + 0.1)
        tokens = () if ended else (1, 3)  # the last two come in one chunk
        outcome = fate if ended else "completed"
        judged = judge(request, stages(arrival, times, tokens), outcome)
        record = Record(
            arrival.id, arrival.tier, "chat", arrival.at, outcome, judged, 3, tokens[-1] if tokens else 0, times, tokens
        )
        records.append(replace(record, sent=arrival.at + 0.001, reason="no room" if ended else ""))
    return BenchResult(label, load, tuple(records), "deadline", CLIENT, **changes)


def steady(label, late, load=None, **changes):
    """Every `late`-th request has its first token after 1.5 s instead of 0.2 s; the tier fast promises 1 s."""
    load = load or workload(count=240, gap=0.5)
    return run(label, [1.5 if i % late == 0 else 0.2 for i in range(240)], load, **changes)


FATES = [0.5, 0.9, 1.5, 2.0, "refused", 0.1, "failed", 12.0]


def test_a_summary_counts_every_offered_request():
    fast, slow, everything = summarise(run("p", FATES))
    assert (fast.tier, fast.offered, fast.met, fast.completed, fast.refused, fast.failed) == ("fast", 6, 3, 4, 1, 1)
    assert fast.attainment == 0.5
    assert (slow.offered, slow.met) == (2, 1)
    assert (everything.tier, everything.offered, everything.met) == ("all", 8, 4)
    assert everything.attained_rps == pytest.approx(4 / 8.0)
    assert everything.goodput_tokens_per_s == pytest.approx(4 * 3 / 8.0)
    assert fast.attainment_low < 0.5 < fast.attainment_high


def test_percentiles_are_over_what_was_measured():
    fast, slow, _ = summarise(run("p", FATES))
    assert fast.ttft_p50 == pytest.approx(0.7)  # of 0.1, 0.5, 0.9, 1.5
    assert fast.tpot_p50 == pytest.approx(0.05)
    assert slow.e2e_p50 == pytest.approx(7.1)
    nothing = summarise(run("p", ["refused"] * 4))[0]
    assert (nothing.ttft_p50, nothing.e2e_p50, nothing.met) == (None, None, 0)


def test_rounds_are_pooled():
    row = summarise([run("p", FATES), run("p", FATES)])[-1]
    assert (row.offered, row.met) == (16, 8)
    assert row.attained_rps == pytest.approx(0.5)
    with pytest.raises(ValueError, match="one rule"):
        summarise([run("p", FATES), replace(run("p", FATES), slo_rule="mean")])


def test_a_burst_has_no_rate():
    row = summarise(run("p", FATES, workload(gap=1e-9)))[-1]
    assert row.offered == 8
    burst = replace(workload(), duration=0.0)
    assert summarise(run("p", FATES, burst))[-1].attained_rps is None


def test_a_chunk_of_several_tokens_dates_them_all():
    load = workload()
    late = judge(next(load.requests()), stages(load.arrivals[0], (0.9, 1.25), (1, 3)))  # token 1 is due at 1.1
    assert not late.met
    assert late.margin == pytest.approx(-0.15)
    assert late.tpot == pytest.approx(0.175)


def test_a_run_can_be_judged_by_another_rule():
    stalled = run("p", [0.2] * 4)
    first = replace(stalled.records[0], times=(0.2, 1.05), tokens=(1, 3))  # due by 1.1, but 0.425 s a token
    stalled = replace(stalled, records=(first, *stalled.records[1:]))
    assert rejudged(stalled, "deadline").records[0].verdict.met
    assert not rejudged(stalled, "mean").records[0].verdict.met
    assert rejudged(stalled, "mean").slo_rule == "mean"


STAGED = Arrival(
    "q", 5.0, "fast", "", 12, 6, parts=(OfferedStage(10, 2), OfferedStage(0, 3), OfferedStage(2, 1, pause=0.5))
)  # fmt: skip


def test_stages_are_told_apart_by_their_outputs_and_pauses():
    first, second, third = stages(STAGED, (5.5, 5.6, 6.0, 7.0), (1, 3, 5, 6))
    assert (first.start, list(first.tokens)) == (5.0, [5.5, 5.6])
    assert (second.start, list(second.tokens)) == (5.6, [5.6, 6.0, 6.0])
    assert (third.start, list(third.tokens)) == (6.5, [7.0])
    assert len(stages(STAGED, (5.5,), (1,))) == 1
    assert [list(stage.tokens) for stage in stages(STAGED, (), ())] == [[]]


# --------------------------------------------------------------------------- files and text


def test_the_json_says_what_is_needed_to_judge_it(tmp_path):
    none = run("b", ["failed"] * 8, problems=("the load generator could not keep its schedule",))
    runs = [run("a", FATES, settings={"timeout": 600.0}, versions={"numpy": "2"}, notes=("odd",)), none]
    compared = compare.compare(*([compare.saved(one)] for one in runs)).to_json()
    results.write_json(tmp_path / "r.json", runs, [compared])
    data = json.loads((tmp_path / "r.json").read_text())
    assert set(data) == {
        "format", "attainment", "attained_rps", "goodput_tokens_per_s", "policies", "promises", "runs", "comparisons",
    }  # fmt: skip
    assert set(data["policies"]) == {"a", "b"}
    assert set(data["policies"]["a"][0]) == {field.name for field in fields(TierSummary)}
    first, second = data["runs"]
    assert set(first) == {
        "policy", "slo_rule", "valid", "problems", "notes", "workload", "goodput", "tiers", "requests", "client",
        "settings", "versions", "replica_seconds", "promises",
    }  # fmt: skip
    assert (first["slo_rule"], first["valid"], first["notes"]) == ("deadline", True, ["odd"])
    assert (second["valid"], len(second["problems"])) == (False, 1)
    assert first["workload"]["seed"] == 3
    assert first["workload"]["tiers"]["fast"] == {"ttft": 1.0, "tpot": 0.1, "e2e": None, "max_pause": None}
    assert first["workload"]["fingerprint"] == second["workload"]["fingerprint"]
    assert set(first["client"]) == {field.name for field in fields(ClientLoad)}
    compared = data["comparisons"][0]["tiers"]["all"]["attained"]
    assert (compared["met_a"], compared["met_b"], compared["ratio"]) == (4, 0, None)  # infinite: not JSON
    assert json.loads(results.dumps(runs)) == data | {"comparisons": []}


def test_raw_records_are_kept_one_a_line(tmp_path):
    results.write_records(tmp_path / "raw.jsonl", run("a", FATES))
    rows = [orjson.loads(line) for line in (tmp_path / "raw.jsonl").read_bytes().splitlines()]
    assert [row["outcome"] for row in rows] == ["completed"] * 4 + ["refused", "completed", "failed", "completed"]
    assert rows[0]["policy"] == "a"
    assert (rows[0]["tokens"], rows[0]["verdict"]["met"]) == ([1, 3], True)


def test_the_table_shows_each_policy_and_tier_and_what_is_wrong():
    text = results.table([run("a", FATES, notes=("odd counts",)), run("b", FATES, problems=("it lagged",))])
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["a", "fast"], ["slow", "e2e"]]
    assert "ttft 1000 tpot 100" in lines[2]
    assert "50.0 %" in lines[2]
    assert "a: 0.50 attained requests/s, 1.5 output tokens/s of attained requests" in text
    assert "a: odd counts" in text
    assert "INVALID b: it lagged" in text
    assert len({len(line) for line in lines[1:2]}) == 1


def test_equal_workloads_have_equal_fingerprints():
    assert fingerprint(workload()) == fingerprint(workload())
    assert fingerprint(workload()) != fingerprint(workload().rescaled(2.0))


def test_the_picture_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs.png"
    runs = [steady("a", 10), steady("a", 10), steady("b", 2), run("c", ["refused"] * 240, steady("b", 2).workload)]
    plot.picture_of_runs(runs).save(path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 20_000
    with pytest.raises(ValueError, match="one or more runs"):
        plot.picture_of_runs([])


def test_attainment_is_drawn_for_a_light_and_a_dark_page(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []
    for ink in (pictures.CLEAR, pictures.DARK, pictures.DARK):
        plot.picture_of_attainment([steady("a", 10), steady("b", 2)]).save(tmp_path / "runs.svg", ink)
        drawn.append((tmp_path / "runs.svg").read_text())
    light, dark, again = drawn
    assert "<svg" in light
    assert pictures.DARK.text.lower() in dark
    assert pictures.DARK.text.lower() not in light
    assert dark == again
    assert not any("<dc:date>" in svg for svg in drawn)
