"""Where a request's time went: as phases, and as one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rubato.core.events import Demoted, Event, Finished, Lost, Offered, Placed, Preempted, Started, Tokens, Verdict
from rubato.core.request import NOTHING, SLO, Cause, Outcome, Stage
from rubato.frontdoor.explanation import MAX_PHASES, cause_so_far, explain, lateness, phases
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.request_record import RequestRecord
from tests.kit import request


def record_of(*events: Event, **slo: float) -> RequestRecord:
    """Of request `a`, which came at 0."""
    history = RequestHistory()
    history(Offered(0.0, "a", request("a", **slo)))
    record = history.in_flight["a"]
    for event in events:
        history(event)
    return record


def explained(
    record: RequestRecord, now: float, counted_replicas: Collection[str] = (), names: Mapping[str, str] = NOTHING
) -> str:
    """A request whose next token is due as its own record says."""
    return explain(record, now, lateness(record, now, record.next_due(), counted_replicas), names)


def end(outcome: Outcome = "completed", cause: Cause | None = None, reason: str = "stop", **more: Any) -> Finished:
    return Finished(4.0, "a", outcome, reason, Verdict(cause is None, "deadline", cause, **more), 5)


SERVED = (Placed(0.25, "a", "r0"), Started(1.0, "a"), Tokens(1.5, "a", 1))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), [("queue", 5.0)]),
        (SERVED[:1], [("queue", 5.0)]),
        (SERVED[:2], [("queue", 1.0), ("prefill", 4.0)]),
        (SERVED, [("queue", 1.0), ("prefill", 0.5), ("decode", 3.5)]),
        ((*SERVED, end()), [("queue", 1.0), ("prefill", 0.5), ("decode", 2.5)]),
        (
            (*SERVED, Preempted(2.0, "a"), Started(3.0, "a", resumed=True)),
            [("queue", 1.0), ("prefill", 0.5), ("decode", 0.5), ("queue", 1.0), ("decode", 2.0)],
        ),
    ],
)
def test_phases_of_a_request_follow_one_another_until_now(events: Sequence[Event], expected: Any) -> None:
    assert phases(record_of(*events), 5.0) == expected


def test_phases_at_a_server_that_is_counted_do_not_tell_waiting_from_prefill() -> None:
    assert phases(record_of(*SERVED), 5.0, {"r0"}) == [
        ("queue", 0.25),
        ("remote", 0.75),
        ("prefill", 0.5),
        ("decode", 3.5),
    ]


def test_phases_end_now_though_the_record_goes_on() -> None:
    assert phases(record_of(*SERVED), 0.5) == [("queue", 0.5)]


def test_phases_of_a_long_story_are_the_latest() -> None:
    moves = [event for at in range(40) for event in (Preempted(2.0 + at, "a"), Started(2.5 + at, "a", resumed=True))]
    found = phases(record_of(*SERVED, *moves), 50.0)
    assert (len(found), found[-1]) == (MAX_PHASES, ("decode", 8.5))


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((), "Late by 4 s so far: queue for 5 s of 5 s. Has waited 5 s: held before a replica."),
        (SERVED[:1], "Late by 4 s so far: queue for 5 s of 5 s. Has waited 4.75 s at gpu-4: queue of a replica."),
        ((SERVED[0], Started(4.0, "a")), "Late by 4 s so far: queue for 4 s of 5 s. Its prompt runs at gpu-4."),
        (SERVED[:2], "Late by 4 s so far: it ran beside others for 4 s of 5 s (prefill or decode interference). "
         "Its prompt runs at gpu-4."),
        ((SERVED[0], Demoted(3.0, "a"), Placed(3.5, "a", "r1"), Started(4.0, "a")),
         "Late by 4 s so far: queue for 4 s of 5 s. Given up at gpu-4 3 s after it came: served as best effort since "
         "then. Its prompt runs at r1."),
        ((Demoted(3.0, "a"),), "Late by 4 s so far: queue for 5 s of 5 s. Given up by the router 3 s after it came: "
         "served as best effort since then. Has waited 5 s: held before a replica."),
        ((*SERVED[:2], Preempted(1.5, "a")), "Late by 4 s so far: preemption for 3.5 s of 5 s. Has waited 3.5 s: "
         "preempted."),
        (SERVED, "Decodes at gpu-4: 1 of at most 16 tokens."),
        ((*SERVED, end(cause="not reported", margin=-0.5)), "Late by 500 ms: its first token came 1.25 s after it was "
         "sent, and gpu-4 does not report how it spent the time."),
        ((*SERVED, end(margin=0.25)), "On time, with 250 ms to spare."),
        ((*SERVED, end(cause="queue", margin=-0.41)), "Late by 410 ms: waited 1 s at gpu-4."),
        ((*SERVED, end(cause="infeasible", margin=-1.5)),
         "Late by 1.5 s: not even an idle server could have met its SLO."),
        ((*SERVED, Lost(2.0, "a", "r0"), end(cause="queue", margin=-2.0)),
         "Late by 2 s: gpu-4 was lost, and it began again elsewhere."),
        ((end("refused", "refused", "rejected-saturated"),), "Refused: rejected-saturated."),
        ((end("cancelled", "client", "client disconnected"),), "Cancelled after 4 s: client disconnected."),
        ((end(unjudged=True),), "Completed; its first token and its pace were not measured."),
    ],
)  # fmt: skip
def test_the_sentence_says_how_it_stands_or_why_it_was_late(events: Sequence[Event], sentence: str) -> None:
    assert explained(record_of(*events, ttft=1.0), 5.0, names={"r0": "gpu-4"}) == sentence


def test_a_late_request_at_a_server_that_is_counted_says_that_nothing_is_reported() -> None:
    record = record_of(*SERVED[:2], ttft=1.0)
    assert cause_so_far(record, 5.0, {"r0"}) == ("not reported", 4.75)
    assert explained(record, 5.0, counted_replicas={"r0"}).startswith(
        "Late by 4 s so far: at its server for 4.75 s of 5 s, which does not report how it spends the time."
    )


def test_the_next_token_of_a_later_stage_is_due_by_the_stage_before_it() -> None:
    stages = (Stage(10, SLO(ttft=1.0, tpot=0.5), "</think>"), Stage(0, SLO(tpot=2.0)))
    history = RequestHistory()
    history(Offered(0.0, "a", replace(request("a"), stages=stages)))
    record, found = history.in_flight["a"], [history.in_flight["a"].next_due()]
    for told in (Tokens(0.5, "a", 2), Tokens(3.0, "a", 1, stage=1)):
        history(told)
        found.append(record.next_due())
    assert found == [1.0, 2.0, 5.5]  # 1.5 is due of the first stage's last


def test_the_sentence_counts_those_that_waited_ahead() -> None:
    history = RequestHistory()
    for name in "xyza":
        history(Offered(0.0, name, request(name, ttft=1.0)))
        history(Placed(0.0, name, "r0"))
    history(Started(0.0, "x"))
    record = history.in_flight["a"]
    assert explained(record, 1.0) == "Has waited 1 s behind 3 others at r0: queue of a replica."
    history(Started(3.0, "a"))
    history(Offered(4.0, "b", request("b")))
    history(Placed(4.0, "b", "r0"))
    assert history.in_flight["b"].queue_ahead == 2


def test_a_best_effort_request_is_neither_late_nor_on_time() -> None:
    assert explained(record_of(*SERVED, end()), 5.0) == "Completed as best effort in 4 s."
