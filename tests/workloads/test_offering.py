"""When requests are offered that wait for others: an `Offering` by itself, its file, and what else is done to it."""

import dataclasses

import pytest

from rubato.core.request import SLO, Request, Stage
from rubato.workloads import Arrival, Workload, WorkloadError, read, resample, write
from rubato.workloads.offering import Offering


def requests(*arrivals):
    return [Request(f"q{i}", (Stage(5),), at) for i, at in enumerate(arrivals)]


def told(offering, now):
    return [(r.id, r.arrival) for r in offering.due(now)]


def test_a_closed_loop_offers_the_next_when_one_ends_whatever_its_outcome():
    offering = Offering(requests(0.0, 0.0, 0.0, 9.0), concurrency=2)
    assert told(offering, 0.0) == [("q0", 0.0), ("q1", 0.0)]
    assert offering.next_at == float("inf")
    offering.record_end("q1", 3.0, "refused")
    assert told(offering, 3.5) == [("q2", 3.0)]  # the caller is late; the request is not
    offering.record_end("q0", 4.0, "failed")
    assert (offering.next_at, offering.remaining) == (9.0, 1)  # never before its own time
    assert told(offering, 9.0) == [("q3", 9.0)]


def test_a_turn_that_has_begun_goes_before_a_new_request():
    offering = Offering(requests(0.0, 0.0, 0.0), {"q2": ("q0", 0.0)}, concurrency=1)
    assert told(offering, 0.0) == [("q0", 0.0)]
    offering.record_end("q0", 2.0, "completed")
    assert told(offering, 2.0) == [("q2", 2.0)]


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("refused", "an earlier turn was refused"),
        ("failed", "an earlier turn failed"),
        ("cancelled", "an earlier turn was cancelled"),
    ],
)
def test_all_that_goes_on_from_a_turn_that_did_not_complete_is_dropped(outcome, why):
    offering = Offering(requests(0.0, 0.0, 0.0, 0.0), {"q1": ("q0", 1.0), "q2": ("q1", 1.0), "q3": ("q1", 1.0)})
    offering.due(0.0)
    offering.record_end("q0", 2.0, outcome)
    assert offering.dropped == dict.fromkeys(("q1", "q2", "q3"), (2.0, "not offered: " + why))
    assert (offering.remaining, offering.next_at) == (0, float("inf"))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="concurrency is 0: give 1 or more"):
        Offering(requests(0.0), concurrency=0)
    with pytest.raises(ValueError, match="'q0' goes on from 'q1', which does not come before it"):
        Offering(requests(0.0, 1.0), {"q0": ("q1", 0.0)})


TURNS = Workload(
    "turns", 0, 1.0, 10.0, {"t": SLO()},
    (
        Arrival("a", 0.0, "t", "", 5, 5), Arrival("a1", 1.5, "t", "", 5, 5, after="a", gap=1.5),
        Arrival("b", 2.0, "t", "", 5, 5), Arrival("a2", 3.0, "t", "", 5, 5, after="a1", gap=1.0),
    ),
    concurrency=3,
)  # fmt: skip


def test_turns_and_concurrency_survive_the_file(tmp_path):
    write(TURNS, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == TURNS
    good = (tmp_path / "w.jsonl").read_text()
    for wrong, says in (
        (good.replace('"after":"a1"', '"after":"b1"'), "line 5: after is 'b1', the id of no line above"),
        (good.replace(',"after":"a1"', ""), "line 5: gap is 1.0 s after no request"),
        (good.replace('"concurrency":3', '"concurrency":0'), "line 1: concurrency is 0"),
    ):
        (tmp_path / "bad.jsonl").write_text(wrong)
        with pytest.raises(WorkloadError, match=says):
            read(tmp_path / "bad.jsonl")


def test_another_rate_moves_sessions_and_leaves_the_time_between_turns():
    faster = dataclasses.replace(TURNS, concurrency=None).rescaled(2.0)
    assert [(a.id, a.at, a.gap) for a in faster.arrivals] == [
        ("a", 0.0, 0.0), ("b", 1.0, 0.0), ("a1", 1.5, 1.5), ("a2", 3.0, 1.0)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'turns' is a closed loop of 3 requests: their ends set its rate"):
        TURNS.rescaled(2.0)


def test_no_stretch_is_cut_out_of_them():
    for load in (TURNS, dataclasses.replace(TURNS, concurrency=None)):
        for cut in (
            lambda load: resample.window(load, (0.0, 1.0)),
            lambda load: resample.bootstrapped(load, 1),
            lambda load: resample.sampled(load, 0.5),
            lambda load: resample.busiest(load, 1.0),
        ):
            with pytest.raises(ValueError, match="'turns' has requests that"):
                cut(load)
        assert resample.window(load, None) is load
