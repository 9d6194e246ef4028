"""Sessions of turns: what they are made of, how they run, and how they are judged."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.plan import Limits
from rubato.core.request import MIN_SLO_S, SLO
from rubato.measure.records import rejudged, summarise, summarise_sessions
from rubato.measure.results import table
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload, WorkloadError, read, scenarios, sessions, write
from rubato.workloads.lengths import Uniform, fixed
from tests.conftest import few
from tests.kit import Linear, run_spec


def test_agents_have_the_published_figures():
    load = scenarios.make("agent-sessions", 2.0, count=6000, seed=3)
    firsts = [a for a in load.arrivals if not a.after]
    assert len(load.arrivals) / len(firsts) == pytest.approx(2.7, rel=0.03)
    assert load.rate == pytest.approx(len(load.arrivals) / load.duration, rel=0.05)
    assert np.mean([a.prompt_tokens for a in load.arrivals]) == pytest.approx(8596, rel=0.05)  # Mooncake, Table 2
    assert np.mean([a.output_tokens for a in load.arrivals]) == pytest.approx(182, rel=0.05)
    before, found = {}, 0
    for a in load.arrivals:
        found += before.get(a.session, 1024)
        before[a.session] = a.prompt_tokens
    assert found / sum(a.prompt_tokens for a in load.arrivals) == pytest.approx(0.59, abs=0.03)
    gaps = [a.gap for a in load.arrivals if a.after]
    assert np.quantile(gaps, [0.5, 0.9]) == pytest.approx([0.3, 13.6], rel=0.15)  # TraceLab
    assert max(a.prompt_tokens + a.output_tokens for a in load.arrivals) <= 32768


def test_a_prompt_begins_with_the_prompt_before_and_leaves_room_for_its_answer():
    load = scenarios.make("agent-sessions", 2.0, count=300, seed=0)
    by_id = {a.id: (a, r.stages[0].token_ids) for a, r in zip(load.arrivals, load.requests(), strict=True)}
    starts = {ids[1024] for a, ids in by_id.values() if not a.after}
    assert len(starts) == sum(not a.after for a, _ in by_id.values())  # sessions share the system prompt alone
    for a, ids in by_id.values():
        assert ids[:1024] == (0,) * 512 + (1,) * 512
        if a.after:
            one, before = by_id[a.after]
            assert (one.session, ids[: len(before)]) == (a.session, before)
            assert a.prompt_tokens > one.prompt_tokens + one.output_tokens
            assert a.at == pytest.approx(one.at + a.gap)


MIX = sessions.Sessions(Uniform(1, 5), Uniform(1, 40), Uniform(1, 12), Uniform(0, 300), 0, 0.5)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400, kv_blocks=200, block_size=4)


@few
@given(seed=st.integers(0, 1000), policy=st.sampled_from(["vllm", "edf"]), concurrency=st.sampled_from([None, 2]))
def test_turns_follow_and_a_session_is_attained_when_it_ends_in_time(seed, policy, concurrency):
    load = replace(sessions.make("s", MIX, 20.0, count=15, seed=seed), concurrency=concurrency)
    run = simulate(load, run_spec(Linear(), LIMITS, policy, learns=False, prefix_cache=True), seed)
    ends, began, met = {}, {}, {}
    for a, r in zip(load.arrivals, run.records, strict=True):
        ends[a.id] = r.times[-1]
        began.setdefault(a.session, r.at)
        if a.after:
            assert r.at >= ends[a.after] + a.gap - 1e-9
        if a.after and concurrency is None:
            assert r.at == pytest.approx(ends[a.after] + a.gap)
    for a in load.arrivals:
        met[a.session] = max(met.get(a.session, 0.0), ends[a.id])
    seconds = load.session_e2es
    attained = sum(met[s] <= began[s] + seconds[s] + 1e-9 for s in seconds)
    found = summarise_sessions(run)
    assert (found.offered, found.met, found.turns) == (len(seconds), attained, len(load.arrivals))
    assert f"{attained} of {len(seconds)} sessions attained" in table([run])
    assert rejudged(rejudged(run, "mean"), "deadline").records == tuple(
        replace(r, verdict=replace(r.verdict, cause=None)) for r in run.records
    )


def test_a_turn_is_offered_with_what_remains_and_one_late_turn_loses_the_session():
    turns = tuple(
        Arrival(f"a{i}", float(i), "t", "", 8, 3, after=f"a{i - 1}" if i else "", session="a") for i in range(3)
    )
    load = Workload("w", 0, 1.0, 3.0, {"t": SLO()}, (replace(turns[0], session_e2e=2.0), *turns[1:]))
    offering = load.offering()
    (first,) = offering.due(0.0)
    offering.record_end("a0", 0.5, "completed")
    (second,) = offering.due(1.0)
    offering.record_end("a1", 2.5, "completed")
    (third,) = offering.due(2.5)
    assert [r.stages[0].slo.e2e for r in (first, second, third)] == [2.0, 1.0, MIN_SLO_S]
    run = simulate(load, run_spec(Linear(), LIMITS, "vllm", learns=False))
    assert [r.verdict.met for r in run.records] == [True, True, False]  # the last comes as the session's time ends
    assert (summarise(run)[-1].met, summarise_sessions(run).met) == (2, 0)
    in_time = load.with_slo_scale(2.0)
    assert summarise_sessions(simulate(in_time, run_spec(Linear(), LIMITS, "vllm"))).met == 1
    first, *later = in_time.arrivals
    broken = replace(in_time, arrivals=(replace(first, slo=SLO(ttft=0.001)), *later))  # which a turn promises besides
    run = simulate(broken, run_spec(Linear(), LIMITS, "vllm"))
    assert [r.verdict.met for r in run.records] == [False, True, True]
    assert summarise_sessions(run).met == 0


def test_no_turn_escapes_its_sessions_deadline(tmp_path):
    first = Arrival("a0", 0.0, "t", "", 8, 3, session="a", session_e2e=2.0)
    staged = replace(first, parts=(OfferedStage(8, 2), OfferedStage(4, 1, pause=30.0)))
    for arrivals, said in (
        ((first, Arrival("a1", 1.0, "t", "", 8, 3, after="a0")), "'a1' goes on from 'a0' of session 'a'"),
        ((first, Arrival("a1", 1.0, "t", "", 8, 3, after="a0", session="b")), "and is of session 'b'"),
        ((staged,), "'a0' has several stages, and its session 'a' a deadline"),
    ):
        with pytest.raises(ValueError, match=said):
            Workload("w", 0, 1.0, 3.0, {"t": SLO()}, arrivals)
    Workload("w", 0, 1.0, 3.0, {"t": SLO()}, (replace(staged, session_e2e=None),))


def test_sessions_survive_the_file(tmp_path):
    load = sessions.make("s", MIX, 20.0, count=6, seed=1)
    write(load, tmp_path / "w.jsonl")
    assert read(tmp_path / "w.jsonl") == load
    late = next(a for a in load.arrivals if a.after)
    wrong = replace(load, arrivals=tuple(replace(a, session_e2e=1.0) if a is late else a for a in load.arrivals))
    write(wrong, tmp_path / "bad.jsonl")
    with pytest.raises(WorkloadError, match="session_e2e stands with a request that is no session's first"):
        read(tmp_path / "bad.jsonl")


def test_a_session_ends_before_the_turn_that_does_not_fit():
    growing = replace(MIX, turns=fixed(5), new=fixed(40), output=fixed(10))
    assert [a.prompt_tokens for a in sessions.make("s", growing, 1.0, count=5, max_model_len=150).arrivals] == [
        40, 90, 140
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no turn fits"):
        sessions.make("s", growing, 1.0, count=5, max_model_len=49)
    with pytest.raises(ValueError, match="system is 100 tokens: give a multiple of 512"):
        replace(MIX, system=100)
