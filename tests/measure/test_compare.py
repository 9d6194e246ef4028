"""Result files against each other: pairing, goodput, quantiles, and what cannot be compared."""

import dataclasses
import json

import pytest

from rubato.measure import compare, results
from rubato.measure.goodput import SLOBounds
from tests.measure.test_results import run, steady, workload


def written(tmp_path, name, *runs):
    path = tmp_path / f"{name}.json"
    results.write_json(path, runs)
    return compare.read(str(path))


def test_the_same_workload_is_paired(tmp_path):
    one, other = written(tmp_path, "a", steady("a", 10)), written(tmp_path, "b", steady("b", 2))
    report = compare.compare(one, other)
    assert report.paired
    assert report == compare.compare([compare.saved(steady("a", 10))], [compare.saved(steady("b", 2))])
    everything = report.tiers["all"].attained
    assert everything.difference == pytest.approx(0.4)
    assert everything.difference_low <= 0.4 <= everything.difference_high
    assert report.tiers["fast"].attained.offered_a == 180
    assert report.tiers["all"].good is None
    assert report.tiers["fast"].latency["ttft", 0.5] == pytest.approx((0.2, 1.5))
    assert report.tiers["all"].latency["tpot", 0.99] == pytest.approx((0.05, 0.05))
    assert report.notes == ()
    text = report.text()
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "tier by a: met b: met points [95 %] met per second [95 %]" in rows
    assert any(row.startswith("all deadline rule 216 of 240 120 of 240 +40.0 [") and "1.80× [" in row for row in rows)
    assert any(row.startswith("windowed rule 216 of 240 120 of 240 +40.0 [") for row in rows)
    assert any(row.startswith("fast ttft 200 / 1500 ") for row in rows)
    assert "pause 100 / 100 100 / 100 100 / 100 100 / 100" in rows


def test_rounds_pair_up_whatever_their_order(tmp_path):
    loads = [workload(name, 240, 0.5) for name in "xyz"]
    one = written(tmp_path, "a", *(steady("a", 10, load) for load in loads))
    other = written(tmp_path, "b", *(steady("b", 2, load) for load in reversed(loads)))
    report = compare.compare(one, other)
    assert (report.paired, report.tiers["all"].attained.offered_a) == (True, 720)


def test_different_workloads_are_compared_side_by_side(tmp_path):
    """At twice the rate b offers as many requests in half the time: met per second, it has 120/60 against 216/120."""
    slow, fast = workload("x", 240, 0.5), workload("y", 240, 0.25)
    report = compare.compare(
        written(tmp_path, "a", steady("a", 10, slow)), written(tmp_path, "b", steady("b", 2, fast))
    )
    assert not report.paired
    attained = report.tiers["all"].attained
    assert (attained.met_a, attained.met_b, attained.offered_b) == (216, 120, 240)
    assert attained.difference == pytest.approx(0.4)
    assert attained.difference_low <= attained.difference <= attained.difference_high
    assert attained.ratio == pytest.approx((216 / 120) / (120 / 60))
    assert attained.ratio_low <= attained.ratio <= attained.ratio_high


def test_rounds_of_one_workload_count_their_seconds_each(tmp_path):
    """Two rounds of x against one of y, all of 120 s and alike: the same number met per second."""
    twice = written(tmp_path, "a", *[steady("a", 10, workload("x", 240, 0.5))] * 2)
    attained = (
        compare.compare(twice, written(tmp_path, "b", steady("b", 10, workload("y", 240, 0.5)))).tiers["all"].attained
    )
    assert (attained.met_a, attained.met_b, attained.ratio) == (432, 216, 1.0)


def test_goodput_is_compared_under_the_same_bounds_only(tmp_path):
    bounded = [
        dataclasses.replace(steady(label, late), goodput=SLOBounds(ttft=2.0)) for label, late in (("a", 10), ("b", 2))
    ]
    one, other = (written(tmp_path, r.label, r) for r in bounded)
    good = compare.compare(one, other).tiers["all"].good
    assert (good.met_a, good.met_b, good.ratio) == (240, 240, 1.0)
    looser = written(tmp_path, "c", dataclasses.replace(bounded[1], goodput=SLOBounds(ttft=3.0)))
    report = compare.compare(one, looser)
    assert report.tiers["all"].good is None
    assert any("bounds differ" in note for note in report.notes)


def test_a_report_says_what_to_doubt(tmp_path):
    late = steady("b", 2, problems=("the load generator could not keep its schedule",))
    notes = compare.compare(written(tmp_path, "a", steady("a", 10)), written(tmp_path, "b", late)).notes
    assert any("INVALID" in note for note in notes)
    short = [run(label, [0.2] * 8) for label in "ab"]
    notes = compare.compare(*(written(tmp_path, r.label, r) for r in short)).notes
    assert any("only 8 s of arrivals" in note for note in notes)
    assert any("without width" in note for note in notes)


def test_the_json_is_json(tmp_path):
    never = run("b", ["failed"] * 240, workload(count=240, gap=0.5))
    report = compare.compare(written(tmp_path, "a", steady("a", 10)), written(tmp_path, "b", never))
    data = json.loads(results.as_json(report.to_json()))
    assert data["tiers"]["all"]["attained"]["ratio"] is None  # infinite
    assert data["tiers"]["all"]["latency"]["ttft"]["p50"] == [pytest.approx(0.2), None]


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = written(tmp_path, "a", steady("a", 10))
    with pytest.raises(ValueError, match="different rules \\(deadline, mean\\)"):
        compare.compare(one, written(tmp_path, "b", dataclasses.replace(steady("b", 2), slo_rule="mean")))
    other = steady("b", 2)
    with pytest.raises(ValueError, match="is in one of two runs"):
        compare.compare([compare.saved(dataclasses.replace(other, records=other.records[1:]))], one)
    with pytest.raises(ValueError, match="is in one of two runs"):
        compare.compare(one, [compare.saved(dataclasses.replace(other, records=other.records[1:]))])
    both = tmp_path / "both.json"
    results.write_json(both, [steady("a", 10), steady("b", 2)])
    with pytest.raises(ValueError, match=r"holds a, b: say which, as .*both.json:a"):
        compare.read(str(both))
    assert [kept.label for kept in compare.read(f"{both}:b")] == ["b"]
    with pytest.raises(ValueError, match="has no policy 'bb': did you mean 'b'"):
        compare.read(f"{both}:bb")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="its format is None"):
        compare.read(str(tmp_path / "other.json"))
    with pytest.raises(OSError, match=r"nowhere\.json"):
        compare.read("nowhere.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("runs"), "holds no runs"),
        (lambda data: data.update(runs=[]), "holds no runs"),
        (lambda data: data.update(runs={}), "holds no runs"),
        (lambda data: data.update(runs=[7]), "run 1: a part is not there"),
        (lambda data: data["runs"][0].pop("requests"), "run 1: a part is not there .'requests'."),
        (lambda data: data["runs"][0].pop("goodput"), "run 1: a part is not there .'goodput'."),
        (lambda data: data["runs"][0]["workload"].pop("duration"), "run 1: a part is not there .'duration'."),
        (lambda data: data["runs"][0]["requests"].pop("ttft"), "run 1: a part is not there .'ttft'."),
        (lambda data: data["runs"][0]["requests"]["met"].pop(), "run 1: its requests' columns"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, change, says):
    path = tmp_path / "a.json"
    results.write_json(path, [steady("a", 10)])
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=says) as error:
        compare.read(str(path))
    assert str(path) in str(error.value)
