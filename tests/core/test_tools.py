"""Requests that wait for a tool: in no queue meanwhile, their KV kept while there is room."""

from dataclasses import replace

import pytest

from rubato.core.events import Demoted, Finished, Started, Tokens, ToolCallFinished
from rubato.core.plan import Emitted, Limits, Plan
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.simulation.simulate import simulate_events
from tests.core.test_replica import replica
from tests.kit import Linear, integrity, run_spec, run_step

PROMISE = SLO(ttft=1.0, tpot=0.1)


def asked(id: str = "a", prompt: int = 20, result: int = 10) -> Request:
    stages = (Stage(prompt, PROMISE, "</call>"), Stage(result, PROMISE, tool=True))
    return Request(id, stages, 0.0, sampling=Sampling(max_tokens=8))


def another(prompt: int) -> Request:
    return Request("b", (Stage(prompt),), 1.0, sampling=Sampling(max_tokens=1))


def called(**changes: object):
    """A replica whose one request has called its tool at 0.2: 21 tokens in KV, two full blocks and a part."""
    r = replica(**changes)
    r.submit(asked(), 0.0)
    run_step(r, {"a": 20}, 0.0, 0.1)
    (told,) = run_step(r, {"a": 1}, 0.1, 0.2, a=Emitted(1, "x", (1,), stage_done=True))
    assert isinstance(told, Tokens)
    assert told.stage_done
    return r


def test_nobody_sees_it_while_its_tool_runs_and_its_kv_is_free_for_others() -> None:
    r = called()
    view = r.view(0.2)
    assert (view.known, view.kv_free, r.idle, r.empty) == ({}, 8, True, False)


def test_it_returns_as_one_that_waits_and_finds_its_full_blocks() -> None:
    r = called()
    assert r.resume("a", 5.0) == [ToolCallFinished(5.0, "a")]
    (seq,) = r.view(5.0).waiting
    assert (seq.stage, seq.cached, seq.pending, seq.due) == (1, 16, 22 + 10 - 16, 6.0)
    assert run_step(r, {"a": 16}, 5.5, 5.6)[0] == Started(5.5, "a", cached=16)
    assert r.delays(r.running["a"])["queue"] >= 0.5
    (_, end) = run_step(r, {"a": 1}, 5.6, 5.7, a=Emitted(1, "x", (1,), finish="stop"))
    assert isinstance(end, Finished)
    assert (end.verdict.met, end.output, r.kv.free, r.empty) == (True, 4, 8, True)


def test_others_that_need_the_memory_get_it() -> None:
    r = called()
    r.submit(another(63), 0.3)
    run_step(r, {"b": 63}, 0.3, 0.4)
    r.resume("a", 0.5)
    (seq,) = r.view(0.5).waiting
    assert (seq.cached, seq.pending) == (0, 32)


def test_of_what_others_took_the_beginning_is_what_is_left() -> None:
    r = called()
    r.submit(another(55), 0.3)
    run_step(r, {"b": 55}, 0.3, 0.4)  # 7 of 8 blocks: the six that hold nothing first, then one of two
    r.resume("a", 0.5)
    assert r.view(0.5).waiting[0].cached == 8


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_ids_that_are_known_only_in_part_still_find_all(prefix_cache: bool) -> None:
    """Its prompt's blocks have names that others may share; those of its output, whose ids nobody told, its own."""
    r = replica(prefix_cache=prefix_cache)
    stages = (Stage(20, PROMISE, "</call>", tuple(range(20))), Stage(10, PROMISE, tool=True))
    r.submit(Request("a", stages, 0.0, sampling=Sampling(max_tokens=20)), 0.0)
    run_step(r, {"a": 20}, 0.0, 0.1, a=Emitted(1))
    for i in range(5):
        run_step(r, {"a": 1}, 0.1 + 0.1 * i, 0.2 + 0.1 * i, a=Emitted(1, stage_done=i == 4))
    r.resume("a", 1.0)
    assert r.view(1.0).waiting[0].cached == 24
    r.submit(replace(another(20), stages=(Stage(20, PROMISE, "eos", tuple(range(20))),)), 1.0)
    assert r.view(1.0).waiting[1].cached == (16 if prefix_cache else 0)


def test_cancelled_while_its_tool_runs() -> None:
    r = called()
    (end,) = r.cancel("a", 3.0, "client disconnected")
    assert isinstance(end, Finished)
    assert (end.outcome, end.output, r.empty, r.take_gone_ids()) == ("cancelled", 2, True, ["a"])
    assert r.resume("a", 4.0) == []
    integrity.check(r)


def test_an_engine_that_breaks_fails_it_too() -> None:
    r = called()
    (end,) = r.fail(3.0, "boom")
    assert isinstance(end, Finished)
    assert (end.outcome, r.empty) == ("failed", True)
    integrity.check(r)


def test_who_waits_for_no_tool_is_not_resumed() -> None:
    r = replica()
    r.submit(asked(), 0.0)
    assert r.resume("a", 0.1) == []
    assert r.resume("nobody", 0.1) == []
    assert [s.stage for s in r.waiting] == [0]


def test_the_round_is_decided_anew_by_slos_serve() -> None:
    """The second prompt cannot be done 15 ms after its tool: declined then and served late, nothing started over."""
    stages = (Stage(20, SLO(1.0, 0.1), "</call>"), Stage(80, SLO(0.015, 0.1), tool=True))
    late = Request("a", stages, 0.0, sampling=Sampling(max_tokens=8), on_decline="refuse")
    spec = run_spec(
        Linear(),
        Limits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=500, kv_blocks=40, block_size=10),
        "slos_serve",
    )
    events = simulate_events([late], {"a": (5, 3)}, spec, pauses={"a": (0.0, 2.0)})
    returned = next(e.at for e in events if isinstance(e, ToolCallFinished))
    assert returned == [e.at for e in events if isinstance(e, Tokens)][4] + 2.0
    (demoted,) = (e for e in events if isinstance(e, Demoted))
    assert demoted.at == returned
    (end,) = (e for e in events if isinstance(e, Finished))
    assert (end.outcome, end.output, end.best_effort) == ("completed", 8, True)


def test_drop_and_preempt_know_nothing_of_it() -> None:
    r = called()
    with pytest.raises(Exception, match="a"):
        r.apply(Plan(preempt=("a",)), 0.3, "test")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (lambda: (Stage(5, tool=True),), "begins with a tool"),
        (lambda: (Stage(5), Stage(0, tool=True)), "at least one token"),
    ],
)
def test_bad_stages(stages, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Request("a", stages(), 0.0)
