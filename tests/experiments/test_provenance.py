"""What a run says of the policies that it measured, and when a figure is older than they are."""

from __future__ import annotations

import json

import pytest

import experiments
from experiments import golden, provenance
from rubato.policies import names


def test_what_a_job_loaded_is_said_with_its_value() -> None:
    import rubato.policies.sarathi as loaded

    ran = provenance.recorded(provenance.Job("one", max, (1, 2)))
    result = ran.work(*ran.args)
    assert provenance.values([result]) == [2]
    assert "sarathi" in result["policies"], loaded
    found = provenance.behaviour([result], ["latency"])
    assert found["sarathi"] == golden.recorded()["sarathi"]
    assert "latency" in found
    assert provenance.changed({"behaviour": found}) == []


@pytest.mark.parametrize(
    ("before", "now", "differ"),
    [
        ({"edf": {"one": "1", "two": "2"}}, {"edf": {"one": "1", "two": "2"}}, []),
        ({"edf": {"one": "1"}}, {"edf": {"one": "1", "two": "2"}, "sa": {}}, []),  # a new run, a new policy
        ({"edf": {"one": "1", "two": "2"}}, {"edf": {"one": "1", "two": "3"}}, ["edf"]),
        ({"edf": {"one": "1"}}, {"edf": {"two": "1"}}, ["edf"]),  # no run that both have
        ({"edf": {"one": "1"}, "sa": {"one": "1"}}, {"edf": {"one": "1"}}, ["sa"]),
    ],
)
def test_a_policy_differs_by_the_runs_that_both_have(before: object, now: object, differ: list[str]) -> None:
    assert golden.differing(before, now) == differ  # type: ignore[arg-type]


def test_every_policy_and_router_has_a_digest_and_each_figure_knows_what_it_measures() -> None:
    known = golden.recorded()
    assert known.keys() - {"latency"} == set(names())
    for name in experiments.names():
        assert set(getattr(experiments.load(name), "BEHAVIOURS", ())) <= known.keys()


def test_one_token_a_little_later_is_another_digest() -> None:
    name, about, run = next(golden.cases())
    result = run()
    assert golden.hashed(result) == golden.recorded()[name][about]
    record = result.records[3]
    records = list(result.records)
    records[3] = golden.replace(record, times=(*record.times[:-1], record.times[-1] + 1e-4))
    assert golden.hashed(golden.replace(result, records=tuple(records))) != golden.hashed(result)


def test_the_recorded_file_is_as_it_is_written() -> None:
    assert golden.RECORDED.read_text() == json.dumps(golden.recorded(), indent=1) + "\n"
