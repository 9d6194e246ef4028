"""SA's priority mapping by itself, and its router in front of simulated engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments._exhaustive_mapping import exhaustive
from rubato.core.events import Event, Finished, Placed
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.latency import affine, bilinear
from rubato.latency.whole_request import decode_seconds, prefill_seconds
from rubato.policies import PolicyError, load, load_router, router_for
from rubato.policies.sa import DISPATCHES, MappedRequest, Predictions, Router, order
from rubato.policy_kit.annealing import Annealing, Predicted, anneal, anneal_batches, evaluate
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.fleet.routers import Act, ends, serve
from tests.kit import Linear, run_spec
from tests.kit.fleets import Elsewhere


def predicted(seconds: Sequence[Sequence[float]], due: Sequence[float]) -> Predicted:
    """Jobs with these execution times by batch size, and end-to-end SLOs."""
    times = np.array(seconds, dtype=np.float64)
    return Predicted(times, np.array(due, dtype=np.float64)[:, None] - times, 0.0)


def worth(jobs: Predicted, batches: Sequence[Sequence[int]]) -> tuple[int, float]:
    """The number of jobs in SLO and the sum of latencies, written out (equations 2 to 13)."""
    met, total, wait = 0, jobs.waited, 0.0
    for batch in batches:
        b = len(batch) - 1
        met += sum(wait <= jobs.slack[j, b] for j in batch)
        total += sum(wait + jobs.seconds[j, b] for j in batch)
        wait += max(jobs.seconds[j, b] for j in batch)
    return met, total


# --------------------------------------------------------------------------- the paper's situations


def test_slos_decide_the_order_where_execution_times_would_not_do() -> None:
    """Figure 3: shortest first misses the SLO of the longest job; first in order, it is met, and all others are."""
    jobs = predicted([[3.0], [1.0], [2.0]], due=[3.5, 6.0, 6.0])
    assert worth(jobs, [[1], [2], [0]])[0] == 2
    found = anneal(jobs, Annealing(), np.random.default_rng(0))
    assert found.batches[0] == (0,)
    assert found.met == 3
    assert found.batches == exhaustive(jobs).batches == ((0,), (1,), (2,))


def test_a_loose_job_is_left_out_of_the_batch_that_it_would_slow() -> None:
    """Figure 4: three jobs fit into one batch, in which the two strict ones are too slow."""
    jobs = predicted([[1.0, 1.5, 2.0], [1.0, 1.5, 2.0], [1.0, 1.5, 2.0]], due=[1.6, 1.6, 9.0])
    assert worth(jobs, [[0, 1, 2]])[0] == 1
    found = anneal(jobs, Annealing(), np.random.default_rng(0))
    assert [set(batch) for batch in found.batches] == [{0, 1}, {2}]
    assert found.met == 3
    assert exhaustive(jobs).batches == ((0, 1), (2,))


def test_a_job_that_cannot_be_in_time_is_deferred() -> None:
    """Figure 5: with the strict job first the other one is lost, too."""
    jobs = predicted([[3.0], [2.0]], due=[2.5, 4.0])
    assert worth(jobs, [[0], [1]])[0] == 0
    found = anneal(jobs, Annealing(), np.random.default_rng(0))
    assert found.batches == exhaustive(jobs).batches == ((1,), (0,))
    assert found.met == 1


# --------------------------------------------------------------------------- search


@st.composite
def instances(draw: st.DrawFn) -> Predicted:
    """Execution times and slacks from few values (ties), also none that is ever met; longer in larger batches."""
    n, most = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    base = draw(st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=n, max_size=n))
    by_size = np.cumsum([0.0, *draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=most - 1, max_size=most - 1))])
    seconds = np.array(base)[:, None] + by_size[None, :]
    slack = np.array(draw(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.0, 4.0, np.inf]), min_size=n, max_size=n)))
    return Predicted(seconds[:, : min(n, most)], np.repeat(slack[:, None], min(n, most), axis=1), 0.5)


def splits(jobs: Sequence[int], most: int) -> list[list[tuple[int, ...]]]:
    if not jobs:
        return [[]]
    return [[tuple(jobs[:b]), *rest] for b in range(1, min(most, len(jobs)) + 1) for rest in splits(jobs[b:], most)]


@few
@given(jobs=instances())
def test_exhaustive_search_finds_the_best_of_every_order_and_split(jobs: Predicted) -> None:
    n, most = jobs.seconds.shape
    everything = [worth(jobs, batches) for o in itertools.permutations(range(n)) for batches in splits(list(o), most)]
    best = max((met / total, -total) for met, total in everything)
    found = exhaustive(jobs)
    assert (found.g, -found.latency) == pytest.approx(best)
    assert worth(jobs, found.batches) == pytest.approx((found.met, found.latency))


@few
@given(jobs=instances(), seed=st.integers(0, 3))
def test_a_mapping_is_a_permutation_in_batches_within_bounds(jobs: Predicted, seed: int) -> None:
    found = anneal(jobs, Annealing(iterations=20), np.random.default_rng(seed))
    n, most = jobs.seconds.shape
    assert sorted(j for batch in found.batches for j in batch) == list(range(n))
    assert all(1 <= len(batch) <= most for batch in found.batches)
    assert worth(jobs, found.batches) == pytest.approx((found.met, found.latency))
    best = exhaustive(jobs)
    assert found.g <= best.g + 1e-12
    full = [list(range(n))[i : i + most] for i in range(0, n, most)]
    met, total = worth(jobs, full)
    assert found.g >= met / total - 1e-12  # never worse than order of arrival


@few
@given(jobs=instances(), seed=st.integers(0, 3))
def test_the_compiled_search_is_the_one_that_is_written(jobs: Predicted, seed: int) -> None:
    n, most = jobs.seconds.shape

    def run(search: object, rng: np.random.Generator) -> object:
        sizes = np.zeros(n, dtype=np.int64)
        sizes[: n // most] = most
        sizes[n // most :][: n % most > 0] = n % most
        start, levels = np.arange(n, dtype=np.int64), np.outer(500.0 * 0.95 ** np.arange(5), [1.0, 0.0, 0.0])
        begin = evaluate(start, sizes, jobs.seconds, jobs.slack, jobs.waited)
        given = (*begin, jobs.seconds, jobs.slack, jobs.waited, 10, rng, levels)
        return *search(start, sizes, *given), start.tolist(), sizes.tolist(), levels.tolist()  # type: ignore[operator]

    if n > 1:
        plain = anneal_batches.py_func  # type: ignore[attr-defined]
        assert run(anneal_batches, np.random.default_rng(seed)) == run(plain, np.random.default_rng(seed))


def test_the_search_evaluates_as_often_as_the_paper_says_and_tells_what_it_accepted() -> None:
    rng = np.random.default_rng(0)
    jobs = Predicted(rng.uniform(1, 3, (10, 1)), rng.uniform(1, 9, (10, 1)), 0.0)
    found = anneal(jobs, Annealing(), rng)
    assert found.evaluations == 63 * 100 + 2  # levels from 500 to 20, and the two starts
    temperatures, worse, accepted = found.levels.T
    assert temperatures[:2].tolist() == pytest.approx([500.0, 475.0])
    assert np.all((accepted >= 0) & (accepted <= worse) & (worse <= 100))
    assert accepted[:20].sum() / worse[:20].sum() > accepted[-20:].sum() / worse[-20:].sum()


@pytest.mark.parametrize(
    ("seconds", "due", "searched"),
    [
        ([[1.0], [2.0]], [9, 9], False),
        ([[1.0], [2.0]], [9, 1], True),  # the second is late in order of execution time
        ([[1.0, 3.0], [2.0, 4.0]], [9, 9], True),  # one after the other is better than a full batch
    ],
)
def test_the_search_ends_early_one_by_one_with_every_slo_met_in_order_of_execution_time(
    seconds: list[list[float]], due: list[float], searched: bool
) -> None:
    jobs = predicted(seconds, due)
    found = anneal(jobs, Annealing(), np.random.default_rng(0))
    assert (found.evaluations > 2) is searched
    assert found.g == exhaustive(jobs).g


@pytest.mark.parametrize("due", [9.0, 30.0, 0.5])
def test_one_by_one_the_search_is_as_good_as_with_batches(due: float) -> None:
    """What it keeps of the order at hand, instead of evaluating all of it, is what an evaluation gives."""
    rng = np.random.default_rng(0)
    jobs = predicted(rng.uniform(1, 4, (8, 1)).tolist(), rng.uniform(0, due, 8).tolist())
    found = anneal(jobs, Annealing(), rng)
    assert worth(jobs, found.batches) == pytest.approx((found.met, found.latency))
    assert found.g == pytest.approx(exhaustive(jobs).g, rel=0.01)


def test_what_nobody_can_meet_is_still_sent_in_the_order_with_the_least_latency() -> None:
    jobs = predicted([[3.0], [1.0], [2.0]], due=[0.1, 0.1, 0.1])
    assert anneal(jobs, Annealing(), np.random.default_rng(0)).batches == ((1,), (2,), (0,))


# --------------------------------------------------------------------------- prediction, the library function


def test_times_are_the_papers_formulas() -> None:
    model = bilinear.Model()
    [[alone, both], _] = (
        Predictions()
        .predict([MappedRequest("a", 100, 10, SLO(e2e=1.0)), MappedRequest("b", 50, 5, SLO())], model, 4)
        .seconds
    )

    def prefill(b: int) -> float:
        return (0.1 * b * 100 + 5.7 * b + 0.01 * 100 + 43.67) / 1e3

    def step(b: int, n: int) -> float:
        return (0.0002 * b * n + 0.275 * b + 0.00088 * n + 15.85) / 1e3

    assert alone == pytest.approx(prefill(1) + sum(step(1, 100 + k) for k in range(1, 11)))
    assert both == pytest.approx(prefill(2) + sum(step(2, 100 + k) for k in range(1, 11)))


@pytest.mark.parametrize("output", [1, 2, 7, 100])
def test_any_other_model_is_asked_step_by_step(output: int) -> None:
    model = affine.Model()
    steps = sum(model.step_time(Shape(3, 3, 3 * (50 + k))) for k in range(1, output + 1))
    assert decode_seconds(model, 3, 50, output) == pytest.approx(steps)
    assert prefill_seconds(model, 2, 50) == model.step_time(Shape().plus(50, 0).plus(50, 0))


def test_slack_is_what_the_tightest_of_the_slos_leaves() -> None:
    model = bilinear.Model()

    def slack(slo: SLO, waited: float = 0.0) -> float:
        return float(Predictions().predict([MappedRequest("a", 100, 10, slo, waited)], model, 1).slack[0, 0])

    prefill, decode = prefill_seconds(model, 1, 100), decode_seconds(model, 1, 100, 10)
    assert slack(SLO()) == np.inf
    assert slack(SLO(ttft=1.0)) == 1.0 - prefill
    assert slack(SLO(e2e=1.0)) == pytest.approx(1.0 - prefill - decode)
    assert slack(SLO(ttft=1.0, tpot=0.001)) == -np.inf
    assert slack(SLO(ttft=1.0, tpot=1.0), waited=0.25) == pytest.approx(0.75 - prefill)


class Counted(affine.Model):
    """How often it is asked."""

    asked = 0
    speed = 1.0

    def step_time(self, shape: Shape) -> float:
        self.asked += 1
        return self.speed * super().step_time(shape)


def test_predictions_are_made_once_for_each_request_and_batch_size() -> None:
    model, kept = Counted(), Predictions()
    jobs = [MappedRequest(str(i), 100 + i, 50 + i, SLO(ttft=2.0, tpot=0.5)) for i in range(6)]

    def asked(given: Sequence[MappedRequest]) -> int:
        before, found, asked = model.asked, kept.predict(given, model, 4), model.asked
        fresh = Predictions().predict(given, model, 4)
        assert found.seconds == pytest.approx(fresh.seconds, rel=0.03)
        assert found.slack == pytest.approx(fresh.slack, rel=0.03)
        assert found.waited == fresh.waited
        return asked - before

    probe = asked([])
    one = (asked(jobs[:4]) - probe) // 16  # a request in a batch of one size
    assert one > 0
    later = [replace(job, waited=1.5) for job in jobs]
    assert asked(later[:4]) == probe
    assert asked(later) == probe + 2 * 4 * one
    assert asked([replace(later[0], output=51), *later[1:]]) == probe  # 2 % longer
    assert asked([replace(later[0], output=60), *later[1:]]) == probe + 4 * one
    assert asked([replace(later[0], output=60, prompt=200), *later[1:]]) == probe + 4 * one
    model.speed = 1.5  # what is kept is of an engine that was faster
    assert asked(later) == probe + 6 * 4 * one


@few
@given(turns=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 30)), max_size=4)))
def test_predictions_that_are_kept_are_those_that_would_be_made(turns: list[list[tuple[int, int, int]]]) -> None:
    kept, model = Predictions(), bilinear.Model()
    for turn in turns:
        jobs = [MappedRequest(str(i), p, o, SLO(e2e=9.0), waited=1.0) for i, (p, o) in {i: x for i, *x in turn}.items()]
        found, fresh = kept.predict(jobs, model, 3), Predictions().predict(jobs, model, 3)
        assert np.array_equal(found.seconds, fresh.seconds)  # lengths this short differ by more than is let pass
        assert np.array_equal(found.slack, fresh.slack)


def test_anyone_can_order_their_jobs() -> None:
    jobs = [MappedRequest(str(i), 100 + i, 50, SLO(ttft=2.0)) for i in range(5)]
    batches = order(jobs, bilinear.Model(), 2)
    assert sorted(job.id for batch in batches for job in batch) == [job.id for job in jobs]
    assert max(len(batch) for batch in batches) <= 2
    assert order([], bilinear.Model(), 2) == []
    assert order(jobs, bilinear.Model(), 2, seed=1) == order(jobs, bilinear.Model(), 2, seed=1)


def test_bad_input_is_named() -> None:
    jobs = [MappedRequest("a", 1, 1, SLO())]
    for jobs_given, wrong in ((jobs, 0), ([], 0), (jobs, 2.5)):
        with pytest.raises(ValueError, match=f"max_batch is {wrong}: give a whole number, 1 or more"):
            order(jobs_given, bilinear.Model(), wrong)  # type: ignore[arg-type]
    for tokens in (float("nan"), 12.5):
        with pytest.raises(ValueError, match="give 1 token or more of each, whole numbers"):
            MappedRequest("a", 1, tokens, SLO())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two requests have the same id"):
        order(jobs * 2, bilinear.Model(), 1)
    with pytest.raises(ValueError, match="request 'a': prompt 0"):
        MappedRequest("a", 0, 1, SLO())
    with pytest.raises(ValueError, match="12 jobs: an exhaustive search takes 10 at most"):
        exhaustive(predicted([[1.0]] * 12, [1.0] * 12))
    with pytest.raises(ValueError, match="threshold 0"):
        Annealing(threshold=0.0)
    with pytest.raises(ValueError, match="iterations 0: give"):
        Annealing(iterations=0)
    with pytest.raises(ValueError, match="temperature inf"):
        Annealing(temperature=float("inf"))
    with pytest.raises(ValueError, match=r"temperature 10\.0, .* a temperature no lower than the threshold"):
        Annealing(temperature=10.0)
    with pytest.raises(PolicyError, match="dispatch is 'never': give 'place' or 'interval' or 'batch_end'"):
        load_router("sa", {"dispatch": "never"})
    with pytest.raises(PolicyError, match="max_batch is -1"):
        load_router("sa", {"max_batch": -1})


# --------------------------------------------------------------------------- the router

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, kv_blocks=100, block_size=1, max_running=2)


def requests(*asked: tuple[str, int, float], at: float = 0.0) -> list[Request]:
    """(id, prompt tokens, TTFT)."""
    return [
        Request(id, (Stage(prompt, SLO(ttft=ttft)),), arrival=at, sampling=Sampling(max_tokens=2))
        for id, prompt, ttft in asked
    ]


def placed(offered: Sequence[Request], **changes: object) -> tuple[list[Placed], list[Event]]:
    """Where and when each was placed, and all events; two tokens of output each."""
    spec = run_spec(Linear(), LIMITS, "sa", **changes)  # type: ignore[arg-type]
    events = simulate_events(offered, {r.id: (2,) for r in offered}, spec)
    assert sorted(e.id for e in events if isinstance(e, Finished)) == sorted(r.id for r in offered)
    return [e for e in events if isinstance(e, Placed)], events


INTERVAL = {"dispatch": "interval"}


def test_batches_are_sent_a_tenth_of_a_millisecond_apart() -> None:
    sent, _ = placed(requests(*((f"q{i}", 8, 9.0) for i in range(5))), router_settings=INTERVAL)
    assert [round(e.at, 6) for e in sent] == [0.0, 0.0, 0.0001, 0.0001, 0.0002]


def test_asked_just_before_a_batch_is_due_it_sends_it() -> None:
    """Events come at any time, and no policy may ask to be woken within a microsecond."""
    late = requests(("late", 8, 9.0), at=0.0001 - 5e-7)
    sent, _ = placed([*requests(*((f"q{i}", 8, 9.0) for i in range(5))), *late], router_settings=INTERVAL)
    assert [e.at for e in sent[:4]] == pytest.approx([0.0, 0.0, 0.0001, 0.0001], abs=1e-6)


def test_or_when_the_batch_before_has_ended() -> None:
    sent, events = placed(requests(*((f"q{i}", 8, 9.0) for i in range(4))), router_settings={"dispatch": "batch_end"})
    ends = {e.id: e.at for e in events if isinstance(e, Finished)}
    times = sorted({e.at for e in sent})
    assert len(times) == 2
    for before, after in itertools.pairwise(times):
        assert max(ends[e.id] for e in sent if e.at == before) <= after


def test_or_the_next_one_when_a_place_is_free_in_an_order_found_anew() -> None:
    """Both places are taken at 0; the tight one that comes then passes all that wait, at the first end."""
    late = requests(("tight", 5, 0.5), at=0.001)
    offered = [*requests(*((f"q{i}", 8 + 4 * i, 9.0) for i in range(5))), *late]
    sent, events = placed(offered)
    ends = [e.at for e in events if isinstance(e, Finished)]
    assert [e.at for e in sent[:2]] == [0.0, 0.0]
    assert sent[2].id == "tight"
    for nth, e in enumerate(sent):  # never more than two there
        assert nth - sum(end <= e.at for end in ends) < 2
    assert [e.at for e in sent[2:]] == pytest.approx(sorted(ends)[: len(sent) - 2])  # and no place stays free


def test_each_replica_gets_its_share_of_memory_in_turns() -> None:
    sent, _ = placed(requests(*((f"q{i}", 40, 9.0) for i in range(6))), replicas=3)
    assert sorted(e.replica for e in sent) == ["r0", "r0", "r1", "r1", "r2", "r2"]


def test_the_tight_one_passes_those_that_came_before() -> None:
    offered = requests(("loose", 30, 9.0), ("tight", 5, 0.02))
    limits = replace(LIMITS, max_num_seqs=1, max_running=1)
    spec = run_spec(Linear(), limits, "sa")
    events = simulate_events(offered, {r.id: (2,) for r in offered}, spec)
    assert [e.id for e in events if isinstance(e, Placed)] == ["tight", "loose"]


def test_it_runs_on_vllms_scheduler_and_is_nothing_without_its_router() -> None:
    assert type(load("sa")).__module__ == "rubato.policies.vllm"
    with pytest.raises(PolicyError, match="'sa' is a router in front of another policy's scheduler: beside ro"):
        router_for("sa", "random")
    with pytest.raises(PolicyError, match="'dispatch' is a setting of the router: write sa@sa:dispatch=batch_end"):
        load("sa", {"dispatch": "batch_end"})


def test_short_requests_without_an_slo_go_first_for_the_sum_of_latencies() -> None:
    jobs = [MappedRequest("slo", 1500, 200, SLO(e2e=100.0)), MappedRequest("none", 50, 10, SLO())]
    assert [[job.id for job in batch] for batch in order(jobs, bilinear.Model(), 1)] == [["none"], ["slo"]]


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_cancelled_requests_are_forgotten_and_those_of_a_lost_replica_assigned_anew(dispatch: str) -> None:
    offered = requests(*((f"q{i}", 20, 9.0) for i in range(8)))
    acts: list[Act] = [
        (0.00005, lambda cluster: cluster.cancel("q7")),
        (0.02, lambda cluster: cluster.hosts["r1"].vanish()),  # type: ignore[attr-defined]
    ]
    router = Router(max_batch=1, dispatch=dispatch)
    events = serve("simulated", router, offered, acts=acts, host=Elsewhere, limits=replace(LIMITS, kv_blocks=200))
    outcomes = {id: end.outcome for id, end in ends(events).items()}
    assert outcomes == {f"q{i}": "completed" for i in range(7)} | {"q7": "cancelled"}
    assert not any(router._batches.values())
    assert not router._replica_of_sent
