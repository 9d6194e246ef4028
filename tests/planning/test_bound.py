"""Bounds: below step times, never under what a run attains, and what small instances can be seen to attain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest

from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO
from rubato.latency.affine import Model
from rubato.planning.bound import DRAINS, SHORT, BoundQuestion, OfferedWork, run
from rubato.planning.bound.minorant import minorants
from rubato.planning.bound.programme import ALIKE, grouped, largest_share
from rubato.planning.bound.rows import Windows
from rubato.planning.bound.work import work_of
from rubato.simulation.run_spec import Hardware, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload

from .machine import LIMITS, MACHINE, mix, spec

OPT = packaged_hardware("opt-13b-2xa100-40g")
# whose prompts cost less in entries of one token
QUADRATIC = replace(MACHINE, name="quadratic", model=Model(k=(1e-5, 2e-4), b=(0.01, 0.002), a=1e-9, d=2e-6, e=1e-6))
MACHINES = [MACHINE, QUADRATIC, OPT]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_no_step_takes_less_than_a_minorant_says(machine: Hardware) -> None:
    limits = machine.limits
    memory, rng = limits.kv_blocks * limits.block_size, np.random.default_rng(1)
    lines = minorants(machine.model, limits, limits.max_num_seqs / 4, memory)
    close = inf
    for _ in range(400):
        decodes = int(rng.integers(0, limits.max_num_seqs - 4))
        entries = [(1, int(k)) for k in rng.integers(0, 2 * memory // (decodes + 1), decodes) if k]
        entries += [(int(c), int(rng.choice([0, 900]))) for c in rng.choice([1, 2, 70, 250, 3000], rng.integers(0, 4))]
        shape = Shape().with_entries(entries)
        if entries and shape.tokens <= limits.max_num_batched_tokens and shape.kv <= memory:
            seconds = machine.model.step_time(shape)
            close = min(close, 1.0 - max(line.seconds(shape) for line in lines) / seconds)
    assert -1e-9 <= close < 0.02


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_prompt_is_charged_no_more_however_it_is_cut(machine: Hardware) -> None:
    rng = np.random.default_rng(2)
    for line in minorants(machine.model, machine.limits, 16.0, 5000.0):
        whole = line.prefill_seconds(500)
        for most in (1, 2, 40, 500):
            done, spent = 0, 0.0
            while done < 500:
                chunk = min(int(rng.integers(1, most + 1)), 500 - done)
                alone = line.fixed + (line.decode_fixed if chunk == 1 else 0.0)
                spent += line.seconds(Shape().plus(chunk, done)) - alone
                done += chunk
            assert spent >= whole[-1] - 1e-12


@pytest.mark.parametrize("machine", [MACHINE, OPT], ids=lambda machine: machine.name)
def test_decodes_in_full_batches_are_charged_what_their_steps_take(machine: Hardware) -> None:
    """As many equal requests as there is room for, from their first token to the last in step."""
    limits, prompt, output = machine.limits, 190 if machine is OPT else 30, 80
    together = min(limits.max_num_seqs, limits.kv_blocks // limits.blocks(prompt + output))
    work = work_of(offered([(0.0, prompt, output, SLO(e2e=9.0))] * together), machine, endless=False)
    charged = (work.own + work.spread)[:, ~work.prompt].sum(axis=1)
    taken = sum(machine.model.step_time(Shape(together, together, together * (prompt + i))) for i in range(1, output))
    assert 0.85 * taken < charged.max() <= taken


@pytest.mark.parametrize(
    ("policy", "replicas", "rate", "tight"),
    [
        ("edf", 1, 30.0, 0.9),
        ("slos_serve", 1, 30.0, 0.9),
        ("edf@least_loaded", 2, 60.0, 0.7),
        ("distserve@distserve:prefill=1,decode=1", 2, 60.0, 0.2),  # KV moves, each replica does a part of the work only
    ],
)
def test_no_row_forbids_what_a_run_attains(policy: str, replicas: int, rate: float, tight: float) -> None:
    load = mix(80).make(0).rescaled(rate)
    run = simulate(load, spec(policy, replicas=replicas), 0, causes=False)
    met = np.array([float(record.verdict.met) for record in run.records])
    windows = Windows(work_of(load, MACHINE, endless=False), replicas)
    assert tight < windows.fullest(met) <= 1.0
    assert windows.find_exceeded(met) == []
    assert windows.find_exceeded(np.ones(80))  # all of them are more than there is time for


# --------------------------------------------------------------------------- instances that can be tried out


TINY = replace(MACHINE, limits=replace(LIMITS, max_num_seqs=3, kv_blocks=60))


def offered(requests: Sequence[tuple[float, int, int, SLO]]) -> Workload:
    arrivals = tuple(
        Arrival(f"r{i}", at, "t", "chat", prompt, output, slo=slo)
        for i, (at, prompt, output, slo) in enumerate(requests)
    )
    return Workload("tiny", 0, 1.0, 1.0, {"t": SLO()}, arrivals)


def tiny(seed: int) -> list[tuple[float, int, int, SLO]]:
    rng = np.random.default_rng(seed)
    return [
        (0.0 if i == 0 else float(rng.uniform(0.0, 0.05)), int(rng.integers(50, 400)), int(rng.integers(1, 4)),
         SLO(float(rng.uniform(0.05, 0.2)), float(rng.uniform(0.012, 0.05))))
        for i in range(4)
    ]  # fmt: skip


def steps(done: Sequence[int], chosen: Sequence[tuple[float, int, int, SLO]]) -> Iterator[tuple[list[int], Shape]]:
    """Batches of whole prompts and decodes that limits allow, when so many tokens of each request are out."""
    limits: Limits = TINY.limits
    pending = [i for i, (_, _, output, _) in enumerate(chosen) if done[i] < output]
    for count in range(1, min(len(pending), limits.max_num_seqs) + 1):
        for batch in combinations(pending, count):
            begun = {i for i in pending if done[i]} | set(batch)
            entries = [(1, chosen[i][1] + done[i] - 1) if done[i] else (chosen[i][1], 0) for i in batch]
            shape = Shape().with_entries(entries)
            blocks = sum(limits.blocks(chosen[i][1] + done[i]) for i in begun)
            if blocks <= limits.kv_blocks and shape.tokens <= limits.max_num_batched_tokens:
                yield list(batch), shape


def attainable(chosen: Sequence[tuple[float, int, int, SLO]]) -> bool:
    """Whether some order of such batches keeps all deadlines: by the earliest time of each state of progress."""
    earliest = {tuple(0 for _ in chosen): 0.0}
    for done in product(*(range(output + 1) for _, _, output, _ in chosen)):
        if done not in earliest:
            continue
        for batch, shape in steps(done, chosen):
            begin = max(earliest[done], *(chosen[i][0] for i in batch))
            end = begin + TINY.model.step_time(shape)
            due = min(chosen[i][0] + (chosen[i][3].ttft or inf) + done[i] * (chosen[i][3].tpot or inf) for i in batch)
            after = tuple(n + (i in batch) for i, n in enumerate(done))
            if end <= due and end < earliest.get(after, inf):
                earliest[after] = end
    return tuple(output for _, _, output, _ in chosen) in earliest


def test_a_bound_is_never_below_the_best_of_all_schedules_and_often_is_that() -> None:
    equal = 0
    for seed in range(12):
        requests = tiny(seed)
        best = max(n for n in range(5) for some in combinations(requests, n) if attainable(some))
        work = work_of(offered(sorted(requests, key=lambda r: r[0])), TINY, endless=False)
        most = 4 * largest_share(work, 1, "anybody").share
        assert most >= best - 1e-6
        equal += int(most + 1e-6) == best
    assert equal >= 6


def test_what_one_request_may_take_is_what_an_idle_replica_takes() -> None:
    """Its prompt in one step, at the machine's own time, is the least TTFT there is."""
    seconds = MACHINE.model.step_time(Shape().plus(300, 0))
    for ttft, share in ((seconds, 1.0), (0.97 * seconds, 0.0)):
        work = work_of(offered([(0.0, 300, 1, SLO(ttft))]), MACHINE, endless=False)
        assert largest_share(work, 1, "anybody").share == share


# --------------------------------------------------------------------------- streams


def test_shares_fall_as_rates_rise_and_as_more_is_asked_to_be_alike() -> None:
    stream = OfferedWork(mix(40).make(0), MACHINE)
    shares = {alike: [stream.share(rate, alike).share for rate in (10.0, 20.0, 30.0)] for alike in ALIKE}
    for found in shares.values():
        assert found[0] > found[-1]
        assert all(a >= b - 1e-6 for a, b in pairwise(found))
    for looser, tighter in (("anybody", "deciles"), ("deciles", "lottery")):
        assert all(a >= b - 1e-6 for a, b in zip(shares[looser], shares[tighter], strict=True))
    assert shares["deciles"][2] < shares["anybody"][2] - 0.01


def test_n_replicas_hold_n_times_as_many_where_only_the_period_binds() -> None:
    requests = mix(60).make(0)
    loose = requests.with_slos({tier: SLO(60.0, 1.0) for tier in requests.tiers})
    one, four = (OfferedWork(loose, MACHINE, n).share(n * 40.0, "anybody") for n in (1, 4))
    assert one.share == pytest.approx(four.share)
    assert one.share < 0.9
    assert one.binds == pytest.approx({"period": 1.0})


def test_the_rate_is_the_first_that_is_out_of_reach_by_its_tolerance() -> None:
    stream = OfferedWork(mix(30).make(1), MACHINE)
    rate = stream.rate(0.9, "deciles", 0.1)
    assert stream.share(rate, "deciles").share < 0.9 <= stream.share(rate / 1.1, "deciles").share


def test_requests_of_equal_cost_are_in_one_decile() -> None:
    """Whichever of them a policy serves: else the last tenth to come would bound all of them."""
    cost = np.array([3.0, 1.0, 1.0, 2.0, 1.0, 2.0 + 1e-12, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    assert [sorted(group.tolist()) for group in grouped(cost, "deciles")] == [
        [1, 2, 4, 6, 7, 8, 9, 10], [3, 5], [0], [11],
    ]  # fmt: skip
    assert [len(g) for g in grouped(np.arange(25.0), "deciles")] == [3] * 5 + [2] * 5
    assert [len(grouped(cost, alike)) for alike in ("anybody", "lottery")] == [1, 12]
    bunched = [(float(i // 2) if i < 12 else i - 6.0, 300, 6, SLO(0.3, 0.03)) for i in range(60)]
    stream = OfferedWork(offered(bunched), MACHINE)
    shares = {alike: stream.share(20.0, alike).share for alike in ALIKE}
    assert shares["lottery"] < 0.98 * shares["deciles"]
    assert shares["deciles"] == pytest.approx(shares["anybody"])


@dataclass(frozen=True)
class Given:
    load: Workload

    def make(self, seed: int) -> Workload:
        return self.load

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def describe(self) -> str:
        return "given"


def test_a_target_that_some_can_never_reach_is_out_of_reach_at_every_rate() -> None:
    requests = [(float(i), 300, 6, SLO(1e-4 if i == 3 else 0.3, 0.03)) for i in range(30)]
    result = run(BoundQuestion(Given(offered(requests)), MACHINE, (0,), tolerance=0.1), workers=1)
    found = {alike: own.value for alike, own in result.estimates().items()}
    assert found["anybody"] > 0.0 == found["lottery"]
    assert "at no rate | some never can be" in " ".join(result.table().split())


def test_deadlines_that_are_long_for_the_period_are_noted() -> None:
    """What is late drains after the last copy: a run of three held twice the bound of the stream."""
    for e2e, noted in ((1.0, False), (60.0, True)):
        load = offered([(0.1 * i, 300, 6, SLO(e2e=e2e)) for i in range(40)])
        drains = OfferedWork(load, MACHINE).drains(10.0)
        assert drains == pytest.approx(e2e / 4.0)
        assert (drains > DRAINS) is noted
        result = run(BoundQuestion(Given(load), MACHINE, (0, 1), rate=10.0), workers=1)
        assert (SHORT.format(drains) in result.notes) is noted


def test_prompts_that_begin_alike_are_refused_where_there_is_a_prefix_cache() -> None:
    load = offered([(0.0, 600, 5, SLO(1.0, 1.0)), (1.0, 600, 5, SLO(1.0, 1.0))])
    alike = replace(load, arrivals=tuple(replace(a, blocks=(7, i)) for i, a in enumerate(load.arrivals)))
    apart = replace(load, arrivals=tuple(replace(a, blocks=(i, 7)) for i, a in enumerate(load.arrivals)))
    with pytest.raises(ValueError, match=r"prompts of 'r0' and 'r1' begin alike.*--set prefix_cache=false"):
        OfferedWork(alike, MACHINE, prefix_cache=True)
    for load, cache in ((alike, False), (apart, True)):
        assert OfferedWork(load, MACHINE, prefix_cache=cache).share(1.0, "anybody").share == 1.0


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([(0.0, 10, 5, SLO(1.0)), (1.0, 10, 5, SLO(1.0))], "'r0' has no deadline for its last token"),
        ([(0.0, 10, 5, SLO(tpot=1.0)), (1.0, 10, 5, SLO(1.0))], "'r0' has no deadline for its last token"),
        ([(0.0, 10, 5, SLO(1.0, 1.0))] * 2, "come at one instant"),
    ],
)
def test_requests_that_no_bound_is_worked_out_for(requests: list[tuple[float, int, int, SLO]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OfferedWork(offered(requests), MACHINE).work(1.0)


def test_times_that_follow_from_others_are_not_covered() -> None:
    load = offered([(0.0, 10, 5, SLO(1.0, 1.0)), (1.0, 10, 5, SLO(1.0, 1.0))])
    later = replace(load.arrivals[1], after="r0", gap=0.5)
    with pytest.raises(ValueError, match="follow from how others end"):
        OfferedWork(replace(load, arrivals=(load.arrivals[0], later)), MACHINE).work(1.0)
    loop = replace(load, arrivals=tuple(replace(a, at=0.0) for a in load.arrivals), concurrency=1)
    with pytest.raises(ValueError, match="closed loop of 1 requests"):
        OfferedWork(loop, MACHINE).work(1.0)


def test_stages_are_not_covered() -> None:
    load = offered([(0.0, 10, 5, SLO(e2e=1.0)), (1.0, 10, 5, SLO(e2e=1.0))])
    staged = replace(load.arrivals[0], parts=(OfferedStage(10, 2, SLO(1.0, 1.0)), OfferedStage(0, 3, SLO(tpot=1.0))))
    with pytest.raises(ValueError, match="has several stages"):
        OfferedWork(replace(load, arrivals=(staged, load.arrivals[1])), MACHINE).work(1.0)
