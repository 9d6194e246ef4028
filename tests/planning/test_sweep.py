"""Sweeps: every job once, the same requests under every policy and rate, the same numbers however they were run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import ALL
from rubato.measure.results import as_json
from rubato.planning import sweep
from rubato.planning.sweep import Sweep
from tests.planning.machine import mix, spec

ASKED = Sweep(mix(), (spec("sarathi"), spec("vllm@random:seed=3")), (2.0, 60.0), (0, 1))


@pytest.fixture(scope="module")
def serial() -> sweep.SweepResult:
    return sweep.run(ASKED, workers=1)


def numbers(outcome: sweep.SweepResult) -> list[object]:
    return [*outcome.job_results.values, *map(as_json, outcome.points())]


def test_parallel_equals_serial(serial: sweep.SweepResult, tmp_path: Path) -> None:
    assert numbers(sweep.run(ASKED, workers=2, file=tmp_path / "jobs")) == numbers(serial)


def test_each_job_stands_once_and_all_see_the_same_requests(serial: sweep.SweepResult) -> None:
    values = serial.job_results.values
    assert len({(v["policy"], v["rate"], v["seed"]) for v in values}) == len(values) == 8
    for seed in (0, 1):
        for rate in (2.0, 60.0):
            prints = {v["workload"]["fingerprint"] for v in values if (v["seed"], v["rate"]) == (seed, rate)}
            assert len(prints) == 1
    assert {v["workload"]["requests"] for v in values} == {60}
    assert all("requests" not in v and v["slo_rule"] == "deadline" for v in values)


def test_points_say_what_the_jobs_say(serial: sweep.SweepResult) -> None:
    points = {(p.policy, p.rate): p for p in serial.points()}
    assert points["sarathi", 2.0].attainment[ALL].value > points["sarathi", 60.0].attainment[ALL].value
    assert points["sarathi", 2.0].against.value == 0.0
    for (policy, rate), point in points.items():
        own = [v for v in serial.job_results.values if (v["policy"], v["rate"]) == (policy, rate)]
        rows = [next(row for row in v["tiers"] if row["tier"] == ALL) for v in own]
        assert point.attainment[ALL].value == pytest.approx(sum(r["attainment"] for r in rows) / 2)
        for rule in ("by_deadline", "by_windows"):
            shares = [r[f"met_{rule}"] / r["offered"] for r in rows]
            assert getattr(point, rule)[ALL] == pytest.approx(sum(shares) / 2)
        assert point.by_deadline[ALL] == pytest.approx(point.attainment[ALL].value)
        assert point.pause_max[ALL] == max(r["pause_max"] for r in rows)
        assert point.attainment[ALL].low <= min(r["attainment"] for r in rows)
        assert point.attainment[ALL].high >= max(r["attainment"] for r in rows)


def test_json_and_table_have_what_a_reader_needs(serial: sweep.SweepResult) -> None:
    data = serial.to_json()
    assert data["format"] == "rubato-sweep/3"
    assert (data["seeds"], data["slo_rule"]) == ((0, 1), "deadline")
    assert {"rubato-llm", "python", "numpy"} <= data["versions"].keys()
    assert all(job["wall"] > 0.0 and job["cpu"] >= 0.0 for job in data["jobs"])
    assert [s["policy"] for s in data["settings"]] == ["sarathi", "vllm@random:seed=3"]
    text = serial.tables()[0].markdown().splitlines()
    assert len(text) == 2 + 4
    assert "| by deadline / windows |" in text[0]
    assert "| pause p99 / max " in text[0]
    assert all(line.count("|") == text[0].count("|") for line in text)


def test_one_seed_has_the_interval_of_its_run() -> None:
    outcome = sweep.run(Sweep(mix(), (spec(),), (20.0,), (0,)), workers=1)
    (point,) = outcome.points()
    (row,) = [row for row in outcome.job_results.values[0]["tiers"] if row["tier"] == ALL]
    assert (point.attainment[ALL].low, point.attainment[ALL].high) == (row["attainment_low"], row["attainment_high"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rates": ()}, "at least one rate"),
        ({"rates": (1.0, 1.0)}, "each once"),
        ({"rates": (0.0,)}, "rate is 0.0 requests/s: give a positive number"),
        ({"seeds": (1, 1)}, "each once"),
        ({"specs": (spec(), spec())}, "at least one policy, and each once: got sarathi, sarathi"),
    ],
)
def test_impossible_sweeps(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sweep(**{**vars(ASKED), **changes})  # type: ignore[arg-type]


def test_a_policy_as_one_writes_it() -> None:
    choice = PolicyChoice.parse("sarathi:budget=256@random:seed=3")
    assert (choice.policy, choice.settings) == ("sarathi", {"budget": 256})
    assert (choice.router, choice.router_settings) == ("random", {"seed": 3})
    assert choice.label == "sarathi:budget=256@random:seed=3"
    assert PolicyChoice.parse("sarathi").label == "sarathi"
    assert PolicyChoice.parse("sarathi", "minimal").router == "minimal"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sarthi", "did you mean 'sarathi'"),
        ("vllm:budgt=1", "did you mean 'budget'"),
        ("vllm:budget", "write its settings as vllm:SETTING=VALUE"),
        ("vllm@edf", "has no Router"),
    ],
)
def test_a_policy_that_is_not_there(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PolicyChoice.parse(text)
