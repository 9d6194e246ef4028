"""SLOs-Serve's figures: who attains by either judge, capacities and their ratios, who was there when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiments
from experiments import _slos_serve_runs as runs
from experiments import claims
from experiments import slos_serve_capacity as capacity
from experiments import slos_serve_disaggregation as disaggregation
from experiments._executed_batches import Replica, executed
from experiments._rate_search import RateSearch
from experiments._slos_serve_runs import JUDGES, PAPERS, CapacitySearch
from experiments.slos_serve_capacity import Rates
from experiments.slos_serve_coder_load import here
from rubato.core.events import Verdict
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.latency.affine import Model
from rubato.measure.records import BenchResult, Record, rejudged
from rubato.planning.capacity import AlwaysAttained, NoCapacity
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Arrival, Workload, scenarios

SCALE = runs.SMALL
TWO = SLO(ttft=1.0, tpot=0.1)


def run(*times: float) -> BenchResult:
    arrival = Arrival("q", 0.0, "chat", "", 10, len(times))
    load = Workload("one", 0, 1.0, 1.0, {"chat": TWO}, (arrival,))
    record = Record(
        "q", "chat", "", 0.0, "completed", Verdict(True, "deadline"), len(times), len(times), times,
        tuple(range(1, len(times) + 1)),
    )  # fmt: skip
    return BenchResult("x", load, (record,), "deadline")


def test_the_papers_judge_sees_a_pause_of_what_a_decode_is_ahead() -> None:
    """First token 0.8 s early: a pause of 0.5 s keeps every deadline, and not ten tokens in 1 s, or two in 0.2."""
    paused = run(0.2, 0.3, 0.8)
    assert [rejudged(paused, rule).records[0].verdict.met for rule in JUDGES] == [False, True]
    late = run(1.05, 1.06, 1.07)
    assert [rejudged(late, rule).records[0].verdict.met for rule in JUDGES] == [False, False]


class Tried(CapacitySearch):
    """Each setting attains 95 % up to one rate and all up to another, else half."""

    def __init__(self, holds: Mapping[str, tuple[float, float]]) -> None:
        RateSearch.__init__(self, runs.GRID, runs.GRID - 1.0 + 1e-6)
        self.holds, self.asked = holds, list[tuple[str, float]]()

    def run(self, choice: str, rate: float) -> dict[str, float]:
        self.asked.append((choice, rate))
        most, all_ = self.holds[choice]
        share = 1.0 if rate <= all_ else 0.95 if rate <= most else 0.5
        return {"windowed": share, "deadline": share}


HOLDS = {"a": (3.0, 2.0), "b": (3.05, 1.0), "c": (3.5, 0.1), "d": (1.0, 0.5), "e": (0.0, 0.0)}


@pytest.mark.parametrize(("target", "best", "rate"), [(PAPERS, "c", 3.5), (capacity.STRICT, "a", 2.0)])
@pytest.mark.parametrize("order", [tuple(HOLDS), tuple(HOLDS)[::-1]])
@pytest.mark.parametrize("start", [0.3, 2.9, 30.0])
def test_a_setting_is_tuned_for_its_target_from_any_start(
    target: str, best: str, rate: float, order: tuple[str, ...], start: float
) -> None:
    tried = Tried(HOLDS)
    assert tried.tuned(order, target, start) == (best, pytest.approx(rate, rel=0.09))


def test_a_setting_that_holds_less_costs_one_run() -> None:
    tried = Tried(HOLDS)
    tried.tuned(("c", "d", "a", "e"), PAPERS, 2.0)
    assert [sum(choice == own for choice, _ in tried.asked) for own in ("d", "a", "e")] == [1, 1, 1]


def test_targets_share_runs_and_a_near_start_takes_few() -> None:
    tried = Tried(HOLDS)
    rates = [tried.capacity("a", target, 2.9) for target in (PAPERS, runs.OURS)]
    assert rates[0] == rates[1] == pytest.approx(3.0, rel=0.09)
    assert len(tried.asked) <= 4
    assert tried.capacity("e", PAPERS, 1.0) == 0.0


@pytest.mark.parametrize("start", [0.5, 1.0, 2.9, 9.0, 20.0])
def test_a_start_far_from_what_is_held_finds_it_all_the_same(start: float) -> None:
    """In steps of the grid, of 8 %, twelve tries end at 2.5 times the start, and at that part of it."""
    tried = Tried(HOLDS)
    assert tried.goodput("a", start, PAPERS, runs.GRID) == pytest.approx(3.0, rel=0.09)
    with pytest.raises(AlwaysAttained):
        Tried({"all": (inf, inf)}).goodput("all", start, PAPERS, runs.GRID)
    with pytest.raises(NoCapacity):
        tried.goodput("e", start, PAPERS, runs.GRID)


def test_the_capacity_of_a_replica_and_of_pools_is_a_replicas() -> None:
    """A run lasts by its own rate, and is the longer the fewer replicas are asked."""
    machine = runs.hardware("chatbot", runs.SMALL)
    search = CapacitySearch(runs.load("chatbot", 1, runs.SMALL), machine, 1, replicas=3)
    for choice, replicas in (("sarathi@least_loaded", 3), ("distserve@distserve:prefill=1,decode=1", 2)):
        search.run(choice, 2.0)
        assert search.lasted(choice, 2.0)[0] == pytest.approx(8 / (2.0 * replicas))
    assert search.unfinished == search.differ == 0


def value(case: str, system: str, seed: int, rate: float, arrivals: str = "stand-in") -> dict[str, Any]:
    rates = dict.fromkeys(capacity.CASES[case].targets, rate)
    return {
        "case": case, "system": system, "seed": seed, "rates": rates, "arrivals": arrivals, "seconds": 50.0,
        "e2e_p99": 9.0, "unfinished": 0, "differ": 0, "begun": {"windowed": (100, 1), "deadline": (100, 0)},
    }  # fmt: skip


def values(own: Mapping[str, float], seeds: Sequence[int] = (1, 2)) -> list[dict[str, Any]]:
    """Every system at its rate, else 1, wherever it runs."""
    return [
        value(case, name, seed, own.get(name, 1.0))
        for name, system in capacity.SYSTEMS.items() for case in system.cases for seed in seeds
    ]  # fmt: skip


def test_ratios_are_to_the_best_baseline_seed_by_seed() -> None:
    own = {
        "slos_serve": (4.0, 9.0),
        "slos_serve+drafts": (8.0, 8.0),
        "prefill_first": (2.0, 3.0),
        "sarathi": (1.0, 1.0),
    }
    rates = Rates([value("chatbot-13b", s, seed, r) for s, all_ in own.items() for seed, r in enumerate(all_)])
    two = capacity.PAPERS_TWO
    assert rates.best("chatbot-13b", two, PAPERS) == "prefill_first"
    ratio = rates.ratio(["chatbot-13b"], two, ours="slos_serve")
    assert ratio.value == pytest.approx(exp((log(2.0) + log(3.0)) / 2))
    assert ratio.low < 2.0 < 3.0 < ratio.high
    assert rates.ratio(["chatbot-13b"], ("sarathi",), ours="slos_serve").value == pytest.approx(6.0)
    assert rates.ratio(["chatbot-13b"], ("sarathi",)).value == pytest.approx(8.0)  # as published: it drafts


def test_a_scenario_counts_once_however_many_models_it_has() -> None:
    one = {"slos_serve": 3.0, "slos_serve+drafts": 3.0, "sarathi": 1.5}
    made = [v if v["case"] != "toolllm" else {**v, "rates": dict.fromkeys(v["rates"], 1.5)} for v in values(one)]
    estimates = capacity.found(made, True).estimates
    assert estimates["chatbot"].value == estimates["coder"].value == pytest.approx(2.0)
    assert estimates["toolllm"].value == pytest.approx(1.0)
    assert estimates["five"].value == estimates["five-one-replica"].value == pytest.approx(2.0 ** (4 / 5))
    assert estimates["six"].value == pytest.approx(2.0 ** (5 / 6))
    assert estimates["chatbot-routing"].value == pytest.approx(1.0)


def test_edf_is_held_against_by_itself_and_no_baseline() -> None:
    """It holds more than `prefill_first`, which stays the better of the paper's two."""
    own = {"slos_serve": 6.0, "slos_serve+drafts": 6.0, "edf": 4.0, "prefill_first": 3.0}
    estimates = capacity.found(values(own), True).estimates
    assert estimates["mean-edf"].value == estimates["toolllm-edf-deadline"].value == pytest.approx(1.5)
    assert estimates["mixed-13b"].value == pytest.approx(2.0)
    assert estimates.keys() == claims()["slos-serve-capacity"].keys()
    assert estimates["short-runs"].value == 0


def test_no_scheduler_keeps_more_of_reasoning_than_its_decodes_allow() -> None:
    """Less the tenth that need not be served, a step of all that decode at once lasts the TPOT at most."""
    machine, load = runs.hardware("reasoning", runs.FULL), runs.load("reasoning", 0, runs.FULL)
    output = float(np.mean([a.output_tokens for a in load.arrivals]))
    kv = float(np.mean([a.prompt_tokens for a in load.arrivals])) + output / 2
    at_once = 0.9 * capacity.most_by_decodes() * output * 0.05  # Little's law, each for `output` tokens of 50 ms
    for more, fits in ((0.95, True), (1.15, False)):
        n = int(more * min(at_once, machine.limits.max_num_seqs))
        within = n <= machine.limits.max_num_seqs and machine.model.step_time(Shape(n, n, int(n * kv))) <= 0.05
        assert within is fits


def test_runs_are_short_whose_arrivals_do_not_last_five_times_a_request() -> None:
    made = values({})
    made[0]["seconds"] = 44.0
    assert capacity.found(made, True).estimates["short-runs"].value == 1


def test_tables_hold_rates_a_gpu_and_the_traces_arrivals_apart() -> None:
    data = [
        value("chatbot-13b", s, 1, r) for s, r in (("slos_serve+drafts", 4.0), ("sarathi", 3.0), ("prefill_first", 1.0))
    ]
    data += [{**v, "arrivals": "azure", "rates": dict.fromkeys(v["rates"], 6.0)} for v in data]
    text = capacity.tables(data)
    assert "| 2 " in text  # OPT-13B's replica is two GPUs
    assert [line.count("| azure ") for line in text.split("\n") if "| azure " in line] == [1, 1, 1]  # a line a target
    assert "1.33" in text
    assert "summarizer" not in text


def test_what_is_measured_follows_from_what_was_tuned(tmp_path: Path) -> None:
    for name in ("azure_conv.csv", "azure_code.csv"):
        (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    found = {PAPERS: ("sarathi:budget=0", 2.0)}
    tuning = [{"case": case, "system": "sarathi", "tuned": found} for case in ("chatbot-13b", "coder-13b", "mixed-13b")]
    plain = capacity.then(tuning, False)
    assert [job.key for job in plain[:3]] == [f"chatbot-13b sarathi seed={seed}" for seed in (1, 2, 3)]
    more = capacity.then(tuning, False, trace=str(tmp_path))
    assert more[: len(plain)] == plain
    added = [(job.key, Path(job.args[-1]).name) for job in more[len(plain) :]]
    assert added[0] == ("chatbot-13b sarathi azure seed=1", "azure_conv.csv")
    assert added[-1] == ("coder-13b sarathi azure seed=3", "azure_code.csv")
    assert len(added) == 6  # Mixed has no trace


TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:00.0,100,10
2023-11-16 18:17:01.0,100,10
2023-11-16 18:17:01.5,100,10
2023-11-16 18:17:05.0,100,10
"""


def test_azures_traces_are_known_by_their_names(tmp_path: Path) -> None:
    code = tmp_path / "AzureLLMInferenceTrace_code.csv"
    code.write_text(TRACE)
    assert runs.trace_files(code) == runs.trace_files(tmp_path) == {"code": code}
    (tmp_path / "azure_code.csv").write_text(TRACE)
    with pytest.raises(ValueError, match=r"several Azure traces of 'code'"):
        runs.trace_files(tmp_path)
    other = tmp_path / "mooncake.jsonl"
    other.write_text("")
    with pytest.raises(ValueError, match=r"is no Azure trace and holds none"):
        runs.trace_files(other)


def test_the_content_of_a_folder_of_traces_is_that_of_all_its_files(tmp_path: Path) -> None:
    code, conv = tmp_path / "azure_code.csv", tmp_path / "azure_conv.csv"
    code.write_text(TRACE)
    conv.write_text(TRACE)
    before = experiments._digest(tmp_path)
    code.write_text(TRACE + TRACE)
    assert experiments._digest(tmp_path) != before


def test_a_scenarios_lengths_come_at_the_traces_times_from_another_place_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "azure_code.csv"
    file.write_text(TRACE)
    scale = replace(runs.SMALL, count=4)
    loads = [runs.load("coder", seed, scale, arrivals=runs.replayed(str(file), seed)) for seed in (0, 5)]
    gaps = [np.diff([a.at for a in load.arrivals]) for load in loads]
    assert gaps[0] / gaps[0][0] == pytest.approx([1.0, 0.5, 3.5])
    assert gaps[1] / gaps[1][0] == pytest.approx([1.0, 5 / 3 / 3.5, 1 / 3.5])  # from the third on; 5/3 s: a mean gap
    plain = runs.load("coder", 0, scale)
    assert [a.prompt_tokens for a in plain.arrivals] == [a.prompt_tokens for a in loads[0].arrivals]
    search = CapacitySearch(loads[0], runs.hardware("coder", scale), 0)
    assert search._load.rescaled(2.0).duration == pytest.approx(2.0)  # four requests at two a second


def test_the_ideal_ratio_and_the_bound_are_the_papers_equations() -> None:
    """A machine of 1,000 tokens/s and an overhead of 10 ms; 763 prompt and 266 output tokens, TPOT 100 ms."""
    machine = Hardware(
        "1,000 tokens/s", Model(k=(1e-3, 1e-3), b=(0.009, 0.009)), runs.hardware("chatbot", SCALE).limits
    )
    share = 1.0 - 0.01 / 0.1
    prompt, output, found = disaggregation._demand(machine, "chatbot")
    assert (prompt, output, found) == (pytest.approx(763, rel=0.01), pytest.approx(266, rel=0.01), pytest.approx(share))
    assert disaggregation.ideal(machine, "chatbot") == pytest.approx(share * prompt / output)
    fastest = 2048 / (2048e-3 + 0.009)
    assert disaggregation.bound(machine, "chatbot", 2, 1) == pytest.approx(
        fastest * min(2 / prompt, share / output) / 3
    )


def test_batches_are_those_that_a_replica_ran() -> None:
    samples = executed(Replica("opt-6.7b-a100-40g", "chatbot", 2.0), "sarathi:budget=256", 6, 1)
    assert max(s.shape.tokens for s in samples) == 256
    prompts = sum(s.shape.tokens - (s.shape.seqs - s.shape.chunks) for s in samples)
    load = scenarios.make("slos-serve-chatbot", 2.0, count=6, seed=1, prefill=lambda tokens: 1.0)
    assert prompts == sum(a.prompt_tokens for a in load.arrivals)
    assert all(s.seconds > 0.0 for s in samples)


def test_who_is_here_has_arrived_and_not_had_its_last_token() -> None:
    records = [replace(run(*times).records[0], at=at) for at, times in ((0.0, (1.0, 2.0)), (1.5, (1.6, 4.0)))]
    assert here(records, [0.0, 1.5, 1.9, 2.0, 3.9, 4.0]) == [1, 2, 2, 1, 1, 0]
    assert here([], [0.0]) == [0]
