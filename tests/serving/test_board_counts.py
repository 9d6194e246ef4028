"""What the board counts of events: rings of slices, windows, percentiles, misses by cause, replicas and flags."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rubato.core.events import (
    Draining,
    Event,
    Finished,
    HandedOff,
    Joined,
    Left,
    Lost,
    Offered,
    Stepped,
    Tokens,
    Verdict,
)
from rubato.core.plan import NO_BATCH
from rubato.core.request import Cause, Handoff, Request, Sampling
from rubato.frontdoor.history import RequestHistory
from rubato.serving.board_counts import MAX_TIERS, OTHER_TIER, RING_S, SLICE_S, SLICES, BoardCounts
from tests.kit import Seq, request, view

OK, LATE = None, "queue"


def ended(id: str, at: float, cause: Cause | None = None, **measured: Any) -> Finished:
    """On time, unless it has a cause."""
    outcome = "refused" if cause == "refused" else "completed"
    return Finished(at, id, outcome, "stop", Verdict(cause is None, "deadline", cause, **measured), 10)


class Counts(BoardCounts):
    """Also records the requests, as the metrics do before the board is told."""

    def __init__(self, new_slice: Callable[[float], None] = lambda at: None) -> None:
        self.records = RequestHistory()
        super().__init__(self.records, new_slice)

    def __call__(self, event: Event) -> None:
        self.records(event)
        super().__call__(event)


def folded(*rows: tuple[float, float | None, Cause | None], tier: str = "chat") -> Counts:
    """rows: offered at, ended at (None: in flight), cause of its miss."""
    counts, events = Counts(), list[Event]()
    for i, (offered, end, cause) in enumerate(rows):
        one = request(f"q{i}", ttft=1.0, arrival=offered, tier=tier)
        events.append(Offered(offered, one.id, one))
        if end is not None:
            events.append(ended(one.id, end, cause))
    for event in sorted(events, key=lambda event: event.at):
        counts(event)
    return counts


def test_a_window_counts_what_ended_within_it() -> None:
    counts = folded((0.0, 1.0, None), (2.0, 290.0, LATE), (295.0, 299.0, None), (299.0, None, None))
    number = counts.advance(301.0)
    windows = counts.tiers["chat"].to_json(number)["windows"]
    expected = {"300": (2, 1, 1), "900": (4, 2, 1), "start": (4, 2, 1)}
    assert {name: (one["offered"], one["met"], one["missed"]) for name, one in windows.items()} == expected
    assert (windows["300"]["attainment"], windows["300"]["burn"], windows["300"]["budget_left"]) == (0.5, 5.0, -4.0)
    assert counts.tiers["chat"].in_flight == 1


def test_requests_in_flight_that_are_late_count_as_missed() -> None:
    """Else a queue that only grows would hide its misses."""
    tier = folded((0.0, 1.0, None), (0.0, None, None), (0.0, None, None)).tiers["chat"]
    assert [tier.to_json(0, late)["windows"]["300"]["attainment"] for late in (0, 1)] == [1.0, 0.5]


def test_nothing_that_ended_has_no_attainment_and_no_burn() -> None:
    (window, *_) = folded((0.0, None, None)).tiers["chat"].to_json(0)["windows"].values()
    assert [window[name] for name in ("attainment", "burn", "budget_left", "e2e_ms")] == [None] * 4


def test_the_history_is_a_row_of_slices_with_a_gap_where_nothing_happened() -> None:
    counts = folded((0.0, 1.0, None), (1.0, 3.0, LATE), (11.0, 12.0, "refused"), (12.0, 12.5, None))
    history = counts.tiers["chat"].history(0, counts.advance(16.0))
    assert (history["offered"], history["met"]) == ([2, 0, 2, 0], [1, 0, 1, 0])
    assert history["causes"] == {"queue": [1, 0, 0, 0], "refused": [0, 0, 1, 0]}


def test_the_ring_forgets_what_is_older_than_it_and_the_start_does_not() -> None:
    counts = folded(*[(at, at + 0.5, None) for at in range(0, round(3 * RING_S), 2)])
    number = counts.advance(3 * RING_S)
    tier = counts.tiers["chat"]
    assert tier.to_json(number)["windows"]["start"]["met"] == 1350
    assert sum(tier.history(0, number)["met"]) <= RING_S / 2
    assert len(tier._slices) == SLICES


@pytest.mark.parametrize("seconds", [0.0004, 0.012, 0.31, 2.0, 75.0])
def test_percentiles_are_within_five_percent(seconds: float) -> None:
    counts = Counts()
    for i in range(100):
        one = request(f"q{i}", ttft=1.0)
        counts(Offered(0.0, one.id, one))
        counts(ended(one.id, 1.0, ttft=seconds if i < 98 else 10 * seconds, tpot=seconds))
    window = counts.tiers["default"].to_json(0)["windows"]["start"]
    assert window["ttft_ms"] == [pytest.approx(1e3 * seconds, rel=0.05), pytest.approx(1e4 * seconds, rel=0.05)]
    assert window["tpot_ms"] == [pytest.approx(1e3 * seconds, rel=0.05)] * 2


def test_tokens_are_counted_as_they_come_and_once() -> None:
    counts = Counts()
    counts(Offered(0.0, "a", request("a", ttft=1.0)))
    for at, tokens in ((1.0, 4), (6.0, 5)):
        counts.records(Tokens(at, "a", tokens))
        counts.advance(at)
    counts(ended("a", 11.0))
    counts.advance(11.0)
    came = counts.tiers["default"].history(0, 2)["tokens"]
    assert came == [4, 5, 1]


def test_a_clients_mistake_is_neither_offered_nor_missed() -> None:
    counts = folded((0.0, None, None))
    verdict = Verdict(False, "deadline", "refused")
    counts(Finished(7.0, "q0", "refused", "rejected-invalid: a bad prompt", verdict))
    assert counts.tiers["chat"].to_json(1)["windows"]["start"]["offered"] == 0
    assert counts.misses.to_json(None, 7.0, 1) == []


def test_misses_are_grouped_by_tier_and_cause_the_frequent_first() -> None:
    counts = folded((0.0, 1.0, LATE), (1.0, 2.0, "preemption"), (2.0, 3.0, LATE), (3.0, RING_S + 100.0, "preemption"))
    rows = counts.misses.to_json(None, RING_S + 101.0, counts.number)
    assert [(row["cause"], row["recent"], row["count"], row["latest"]["id"]) for row in rows] == [
        ("preemption", 1, 2, "q3"),
        ("queue", 0, 2, "q2"),
    ]
    assert counts.misses.to_json("someone else", 0.0, 0) == []


def test_step_times_and_samples_of_a_replica_go_into_its_slices() -> None:
    counts = Counts()
    for at, seconds in ((1.0, 0.02), (2.0, 0.04), (11.0, 0.01)):
        counts(Stepped(at, "r0", NO_BATCH, seconds))
        if at == 2.0:
            counts.replicas.sample([view([Seq(request("b"))], running=[Seq(request("a"))])], 0)
    (found,) = counts.replicas.history({"r0": "http://a", "r9": "http://b"}, 0, 2).values()
    assert found["step_ms"] == [30.0, None, 10.0]
    assert (found["running"], found["waiting"]) == ([1, 1, 1], [1, 1, 1])
    assert counts.replicas.step_seconds("r0") == pytest.approx(0.07 / 3)


def test_what_happens_to_the_fleet_is_flagged_and_the_same_within_a_slice_is_counted() -> None:
    counts = Counts()
    moved: Request = replace(request("a"), handoff=Handoff("r1", "offloaded", 0.5, 0))
    prefilled = replace(request("b"), handoff=Handoff("r1", "prefilled", 0.5, 10))
    for event in (
        Offered(0.0, "a", request("a")), Offered(0.0, "b", request("b")), Left(1.0, "r0"), Lost(1.0, "a", "r0"),
        Lost(1.0, "b", "r0"), HandedOff(2.0, "a", moved),
        HandedOff(2.0, "b", prefilled), Joined(8.0, "r2"), Draining(9.0, "r1"), Left(9.5, "r1"),
    ):  # fmt: skip
        counts(event)
    flags = counts.replicas.flags_json(10.0, counts.number)
    assert [(flag["kind"], flag["replica"], flag["count"]) for flag in flags] == [
        ("lost", "r0", 1), ("placed again", "r0", 2), ("moved", "r1", 1), ("joined", "r2", 1), ("draining", "r1", 1),
        ("drained", "r1", 1),
    ]  # fmt: skip
    assert flags[0]["ago_ms"] == 9000.0
    assert list(counts.replicas.lost_at) == ["r0"]
    assert counts.replicas.flags_json(1000.0, counts.number + SLICES) == []


def test_a_server_that_is_back_goes_on_with_its_history_and_flags() -> None:
    counts = Counts()
    counts(Stepped(1.0, "r0", NO_BATCH, 0.02))
    counts(Left(6.0, "r0"))
    counts(Stepped(11.0, "r4", NO_BATCH, 0.03))
    counts.replicas.succeed("r0", "r4")
    assert counts.replicas.history({"r4": "a"}, 0, 2)["a"]["step_ms"] == [20.0, None, 30.0]
    assert [flag["replica"] for flag in counts.replicas.flags_json(12.0, 2)] == ["r4"]
    assert counts.replicas.lost_at == {}


def test_a_new_slice_asks_for_a_look_once() -> None:
    asked: list[float] = []
    counts = Counts(asked.append)
    for at in (0.0, 1.0, SLICE_S, SLICE_S + 1.0, 4 * SLICE_S):
        counts(Stepped(at, "r0", NO_BATCH, 0.01))
    assert asked == [0.0, SLICE_S, 4 * SLICE_S]


def test_what_is_kept_is_bounded_and_holds_no_text() -> None:
    counts = Counts()
    long = "x" * 100_000
    for i in range(MAX_TIERS + 50):
        one = replace(request(f"q{i}", 3, tier=f"t{i}"), sampling=Sampling(stop=(long,)))
        stage = replace(one.stages[0], token_ids=(1, 2, 3), ends=long)
        counts(Offered(0.0, one.id, replace(one, stages=(stage,))))
        counts(ended(one.id, 1.0, LATE))
        counts(Stepped(1.0, "r0", NO_BATCH, 0.1))
    assert len(counts.tiers) == MAX_TIERS + 1
    assert counts.tiers[OTHER_TIER].since_start.offered == 50
    assert len(counts.misses.to_json(None, 1.0, 0)) == 64
    assert len(pickle.dumps((counts.misses, counts.tiers, counts.replicas))) < 100_000
