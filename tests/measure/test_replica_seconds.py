"""Replica-seconds: what is charged to whom."""

from __future__ import annotations

from rubato.core.events import Event, Finished, HandedOff, Joined, Left, Lost, Offered, Placed, Verdict
from rubato.measure.replica_seconds import ReplicaSeconds, ReplicaSecondsMeter
from tests.kit import request


def offered(at: float, id: str, tier: str) -> Offered:
    return Offered(at, id, request(id, tier=tier))


def finished(at: float, id: str) -> Finished:
    return Finished(at, id, "completed", "stop", Verdict(True, "deadline"))


def metered(*events: Event) -> ReplicaSecondsMeter:
    meter = ReplicaSecondsMeter(["r0"])
    for event in events:
        meter(event)
    return meter


def test_a_replicas_time_is_divided_among_the_requests_that_are_there() -> None:
    """r0 alone: idle 1 s, a 2 s, a and b 2 s, b 1 s."""
    meter = metered(
        offered(1.0, "a", "chat"), Placed(1.0, "a", "r0"), offered(2.0, "b", "code"), Placed(3.0, "b", "r0"),
        finished(5.0, "a"), finished(6.0, "b"),
    )  # fmt: skip
    assert meter.until_last_end() == ReplicaSeconds(6.0, {"chat": 3.0, "code": 2.0}, 1.0, 0.0)
    assert meter.until(10.0) == ReplicaSeconds(10.0, {"chat": 3.0, "code": 2.0}, 5.0, 0.0)


def test_replicas_that_come_and_go_are_charged_from_their_start_to_when_they_left() -> None:
    """r1: starts 3 s, idle 1 s, serves a 3 s, and is lost; r0: idle 8 s, then a 2 s. What is after the end is not."""
    moved = request("a", tier="chat")
    meter = metered(
        offered(0.0, "a", "chat"), Joined(4.0, "r1", 3.0), Placed(5.0, "a", "r1"), Left(8.0, "r1"),
        Lost(8.0, "a", "r1"), Placed(8.0, "a", "r0"), HandedOff(9.0, "a", moved), Placed(9.0, "a", "r0"),
        finished(10.0, "a"), Left(30.0, "r0"),
    )  # fmt: skip
    assert meter.until_last_end() == ReplicaSeconds(17.0, {"chat": 5.0}, 9.0, 3.0)
