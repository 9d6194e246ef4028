"""The life of a sequence in a replica, by hand: events, KV, deadlines, causes of misses."""

import pytest

from rubato.core.events import Finished, Preempted, Started, Tokens
from rubato.core.length_prediction import RunningMean
from rubato.core.plan import Emitted, Limits, Plan, StepResult, Work
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.replica.replica import Replica
from tests.kit import Linear, integrity, request, run_step

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, kv_blocks=8, block_size=8)


def replica(**changes: object) -> Replica:
    return Replica("r0", LIMITS, Linear(), ReplicaOptions(**changes))  # type: ignore[arg-type]


def test_a_life() -> None:
    r = replica()
    assert r.submit(request("a", 20, ttft=1.0, tpot=0.1), 0.0) == []
    (seq,) = r.waiting
    assert (seq.pending, seq.due) == (20, 1.0)
    assert run_step(r, {"a": 12}, 0.5, 0.6) == [Started(0.5, "a")]
    assert (seq.cached, seq.blocks, seq.pending) == (12, 2, 8)
    assert run_step(r, {"a": 8}, 0.6, 0.7) == [Tokens(0.7, "a", 1, "x", (7,))]
    assert (seq.length, seq.pending, seq.due) == (21, 1, 1.1)
    (_, end) = run_step(r, {"a": 1}, 0.7, 0.8, a=Emitted(1, "y", (2,), finish="stop"))
    assert isinstance(end, Finished)
    assert (end.outcome, end.reason, end.output, end.verdict.met) == ("completed", "stop", 2, True)
    assert end.verdict.ttft == pytest.approx(0.7)
    assert r.empty
    assert r.kv.free == 8
    assert r.take_gone_ids() == ["a"]


def test_a_latency_model_is_told_how_long_nothing_ran_since_the_replica_began() -> None:
    """The clock may count from the machine's start: before the first view nobody was idle."""
    told: list[float] = []

    class Told(Linear):
        def idle(self, seconds: float) -> None:
            told.append(seconds)

    r = Replica("r0", LIMITS, Told())
    r.view(10_000.0)
    r.submit(request("a", 8), 10_003.0)
    r.view(10_003.0)
    batch, _ = r.apply(Plan((Work("a", 8),)), 10_003.0, "test")
    r.view(10_003.5)  # busy: not told
    r.commit(batch, StepResult({"a": Emitted(1, "x", (7,))}, 1.0), 10_004.0)
    r.view(10_009.0)
    assert told == [0.0, 3.0, 5.0]


def test_preemption_keeps_tokens_and_gives_back_kv() -> None:
    r = replica()
    r.submit(request("a", 20), 0.0)
    run_step(r, {"a": 20}, 0.0, 0.1)
    batch, events = r.apply(Plan(preempt=("a",)), 0.1, "test")
    assert events == [Preempted(0.1, "a")]
    assert not batch.entries
    (seq,) = r.waiting
    assert (seq.length, seq.cached, seq.pending, r.kv.free) == (21, 0, 21, 8)
    events = run_step(r, {"a": 21}, 0.5, 0.6)
    assert events[0] == Started(0.5, "a", resumed=True)
    assert r.delays(seq)["preemption"] >= 0.4


def test_waiting_is_in_order_of_submission_also_after_preemption() -> None:
    """Whenever they arrived: the order is the router's to choose."""
    r = replica()
    for id, arrival in (("b", 1.0), ("a", 0.0), ("c", 0.5)):
        r.submit(request(id, 4, arrival=arrival), 1.0)
    assert [s.id for s in r.waiting] == ["b", "a", "c"]
    run_step(r, {"a": 4, "b": 4}, 1.0, 1.1)
    r.apply(Plan(preempt=("a",)), 1.1, "test")
    assert [s.id for s in r.waiting] == ["a", "c"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [(request("a", 90, most=11), "rejected-too-long"), (request("a", 60, most=5), "rejected-exceeds-kv")],
)
def test_what_could_never_run_is_refused_at_once(asked: Request, reason: str) -> None:
    r = replica()
    (end,) = r.submit(asked, 0.0)
    assert isinstance(end, Finished)
    assert (end.outcome, end.reason, r.empty) == ("refused", reason, True)


def test_cancel_in_flight_ends_now_and_frees_kv_at_commit() -> None:
    r = replica()
    r.submit(request("a", 8), 0.0)
    batch, _ = r.apply(Plan((Work("a", 8),)), 0.0, "test")
    (end,) = r.cancel("a", 0.05, "client disconnected")
    assert isinstance(end, Finished)
    assert (end.outcome, end.verdict.cause, r.kv.free) == ("cancelled", "client", 7)
    assert r.cancel("a", 0.06, "again") == []
    assert r.commit(batch, StepResult({"a": Emitted(1)}, 0.1), 0.1) == []
    assert r.kv.free == 8
    assert r.empty
    integrity.check(r)


def test_fail_ends_everything_once() -> None:
    r = replica()
    for id in "abc":
        r.submit(request(id, 8), 0.0)
    r.apply(Plan((Work("a", 8), Work("b", 8))), 0.0, "test")
    r.cancel("b", 0.05, "gone")
    ends = r.fail(0.1, "boom")
    assert sorted((e.id, e.outcome) for e in ends if isinstance(e, Finished)) == [("a", "failed"), ("c", "failed")]
    assert r.empty
    assert r.kv.free == 8


def test_stages_continue_the_deadlines() -> None:
    r = replica()
    stages = (Stage(8, SLO(ttft=1.0, tpot=0.1), "</think>"), Stage(0, SLO(tpot=0.5)))
    r.submit(Request("a", stages, 0.0, sampling=Sampling(max_tokens=8)), 0.0)
    (seq,) = r.waiting
    run_step(r, {"a": 8}, 0.0, 0.1, a=Emitted(1, "</think>", (1,), stage_done=True))
    assert (seq.stage, seq.output, seq.due) == (1, 0, 1.5)
    run_step(r, {"a": 1}, 0.1, 0.2)
    assert seq.due == 2.0


CAUSES = [("queue", {"a": 8}, 2.0, 2.1), ("prefill interference", {"a": 8, "long": 40}, 0.0, 2.0)]


@pytest.mark.parametrize(("cause", "work", "start", "end"), CAUSES)
def test_cause_of_a_miss(cause: str, work: dict[str, int], start: float, end: float) -> None:
    r = replica()
    r.submit(request("a", 8, ttft=0.5, most=2), 0.0)
    r.submit(request("long", 40), 0.0)
    events = run_step(r, work, start, end, a=Emitted(1, finish="length"))
    verdict = next(e for e in events if isinstance(e, Finished)).verdict
    assert (verdict.met, verdict.cause) == (False, cause)


@pytest.mark.parametrize(
    ("slo", "cause"),
    [  # 10 ms and 1 ms a token: 18 ms for the prompt, 11 for a decode; but it waits 2 s
        ({"ttft": 0.017}, "infeasible"),
        ({"ttft": 0.018}, None),
        ({"ttft": 0.02, "tpot": 0.005}, "infeasible"),  # the second comes at 29 ms, and is due at 25
        ({"ttft": 0.025, "tpot": 0.005}, None),  # the TTFT makes up for it
        ({"e2e": 0.028}, "infeasible"),
        ({"e2e": 0.03}, None),
    ],
)
def test_a_miss_that_would_be_one_alone_is_infeasible_however_long_it_waited(
    slo: dict[str, float], cause: str | None
) -> None:
    r = replica()
    r.submit(request("a", 8, **slo, most=2), 0.0)
    run_step(r, {"a": 8}, 2.0, 2.02)
    events = run_step(r, {"a": 1}, 2.02, 2.04, a=Emitted(1, finish="length"))
    verdict = next(e for e in events if isinstance(e, Finished)).verdict
    assert (verdict.met, verdict.cause) == (False, cause or "queue")


def test_a_decode_that_others_slow_down() -> None:
    r = replica()
    for id in ("a", "b", "c", "d"):
        r.submit(request(id, 8, ttft=5.0, tpot=0.01, most=3), 0.0)
    run_step(r, dict.fromkeys("abcd", 8), 0.0, 5.0)
    events = run_step(r, dict.fromkeys("abcd", 1), 5.0, 5.9, a=Emitted(1, finish="stop"))
    verdict = next(e for e in events if isinstance(e, Finished)).verdict
    assert not verdict.met
    assert verdict.cause in ("prefill interference", "decode interference")


def test_prediction_comes_from_the_lengths_seen() -> None:
    lengths = RunningMean(least=1)
    r = replica(lengths=lengths)
    r.submit(request("a", 4), 0.0)
    assert r.waiting[0].predicted is None
    run_step(r, {"a": 4}, 0.0, 0.1)
    run_step(r, {"a": 1}, 0.1, 0.2, a=Emitted(1, finish="stop"))
    r.submit(request("b", 4), 0.2)
    assert r.waiting[0].predicted == 2.0


def test_ids_are_unique() -> None:
    r = replica()
    r.submit(request("a"), 0.0)
    with pytest.raises(ValueError, match="unique"):
        r.submit(request("a"), 0.0)


def test_steps_that_no_present_request_ran_in_are_forgotten_and_no_wait_with_them() -> None:
    r = replica()
    r._max_kept_steps = 0  # look after each end
    r.submit(request("a", 4), 0.0)
    run_step(r, {"a": 4}, 0.0, 0.1)
    r.submit(request("b", 4), 0.1)
    run_step(r, {"a": 1}, 0.3, 0.4)
    run_step(r, {"a": 1, "b": 4}, 0.5, 0.6, a=Emitted(1, "y", (2,), finish="stop"))
    assert (r.steps.tick, r.steps.count) == (3, 2)  # what `b` ran in, and the end before it
    run_step(r, {"b": 1}, 0.6, 0.7)
    assert r.delays(r.seqs["b"])["queue"] == pytest.approx(0.4)
