"""SLOs-Serve's figures: who attains by either judge, capacities and their ratios, who was there when."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest

from experiments import claims
from experiments import slos_serve_capacity as capacity
from experiments._recording_slos_serve import PromiseLog, Scheduler
from experiments.slos_serve_capacity import Rates, RateTrials, verdicts
from experiments.slos_serve_coder_load import here
from experiments.slos_serve_margin import NOISES, RATES, found, kept
from rubato.core.events import Verdict
from rubato.core.request import SLO
from rubato.measure.records import BenchResult, Record
from rubato.workloads import Arrival, Workload
from tests.policies.test_tables import prompt, seen

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
    assert (verdicts(paused, "deadline"), verdicts(paused, "windowed")) == ([True], [False])
    late = run(1.05, 1.06, 1.07)
    assert (verdicts(late, "deadline"), verdicts(late, "windowed")) == ([False], [False])


SCALE = capacity.SMALL


def test_a_system_has_the_setting_that_holds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 tokens a batch no prompt is in time at any rate."""
    settings = (("vllm:budget=16", 1), ("vllm:budget=2048", 1), ("vllm:budget=17", 1))
    monkeypatch.setitem(capacity.SYSTEMS, "three", capacity.System(settings))
    assert capacity.tuned("chatbot", "three", "deadline", 0.9, replace(SCALE, tuned=3), {}) == settings[1]
    assert capacity.tuned("chatbot", "three", "deadline", 0.9, replace(SCALE, tuned=1), {}) == settings[0]


def value(scenario: str, system: str, seed: int, rate: float) -> dict[str, Any]:
    rates = {
        name: dict.fromkeys(map(str, capacity.TARGETS), own) for name, own in (("setting", system), ("capacity", rate))
    }
    return {"scenario": scenario, "system": system, "seed": seed, "found": dict.fromkeys(capacity.JUDGES, rates)}


def test_ratios_are_to_the_best_baseline_seed_by_seed() -> None:
    own = {"slos_serve": (4.0, 9.0), "slos_serve+drafts": (8.0, 8.0), "vllm": (2.0, 3.0), "sarathi": (1.0, 1.0)}
    rates = Rates([value("chatbot", s, seed, r) for s, all_ in own.items() for seed, r in enumerate(all_)])
    assert rates.best("chatbot", ("vllm", "sarathi"), "deadline", 0.9) == "vllm"
    ratio = rates.ratio("chatbot", ("vllm", "sarathi"), "deadline", 0.9)
    assert ratio.value == pytest.approx(exp((log(2.0) + log(3.0)) / 2))
    assert ratio.low < 2.0 < 3.0 < ratio.high
    assert rates.mean_ratio(("sarathi",), "windowed", 0.98, drafting=False).value == pytest.approx(6.0)
    assert rates.mean_ratio(("sarathi",), "windowed", 0.98).value == pytest.approx(8.0)


class Tried(RateTrials):
    """Attains 95 % up to one rate and all up to another, else half."""

    def __init__(self, most: float, all_: float) -> None:
        self.most, self.all, self.asked, self._start = most, all_, set[float](), 3.0

    def attained(self, rate: float) -> dict[str, float]:
        self.asked.add(rate)
        return {"deadline": 1.0 if rate <= self.all else 0.95 if rate <= self.most else 0.5}


def test_a_setting_is_tuned_for_its_target_and_a_better_one_must_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 90 % the second holds more, if not by the tolerance; the third does; at 98 % the first. The last never does,
    which one run tells; of the fifth none does."""
    holds = ((3.0, 2.0), (3.05, 1.0), (3.5, 0.0), (1.0, 0.5), (0.0, 0.0))
    settings = tuple((f"vllm:budget={16 + i}", 1) for i in range(len(holds)))
    monkeypatch.setitem(capacity.SYSTEMS, "five", capacity.System(settings))
    for target, best in ((0.9, 2), (0.98, 0)):
        known = {setting: Tried(*rates) for setting, rates in zip(settings, holds, strict=True)}
        scale = capacity.Scale(seeds=(99,))
        assert capacity.tuned("chatbot", "five", "deadline", target, scale, dict(known)) == settings[best]
        assert [len(known[s].asked) for s in settings[3:]] == [1, 1]
        assert len(known[settings[1]].asked) == 1
        worst_first = capacity.System(settings[::-1])
        monkeypatch.setitem(capacity.SYSTEMS, "reversed", worst_first)
        assert capacity.tuned("chatbot", "reversed", "deadline", target, scale, dict(known)) == settings[best]


def test_edf_is_held_against_by_itself_and_no_baseline() -> None:
    """It holds more than `vllm`, which stays the best of the baselines."""
    own = dict.fromkeys(capacity.SYSTEMS, 1.0) | {"slos_serve": 6.0, "edf": 4.0, "vllm": 3.0}
    values = [
        [value(scenario, s, seed, rate) | {"unfinished": 0, "differ": 0} for seed in (1, 2)]
        for s, rate in own.items()
        for scenario in capacity.SYSTEMS[s].scenarios
    ]
    estimates = capacity.found(values, True).estimates
    assert estimates["mixed-90-edf"].value == pytest.approx(1.5)
    assert estimates["toolllm-98-edf-windowed"].value == pytest.approx(1.5)
    assert estimates["mixed-90"].value == pytest.approx(2.0)
    assert estimates.keys() == claims()["slos-serve-capacity"].keys()


def test_tables_hold_rates_a_gpu() -> None:
    data = [value("chatbot", s, 1, r) for s, r in (("slos_serve", 4.0), ("vllm", 3.0), ("vllm_spec", 5.0))]
    text = capacity.tables(data)
    assert text.count("| chatbot") == 4  # two judges, with and without speculation
    assert "| 2 " in text  # OPT-13B's replica is two GPUs
    assert "summarizer" not in text


def test_who_is_here_has_arrived_and_not_had_its_last_token() -> None:
    records = [replace(run(*times).records[0], at=at) for at, times in ((0.0, (1.0, 2.0)), (1.5, (1.6, 4.0)))]
    assert here(records, [0.0, 1.5, 1.9, 2.0, 3.9, 4.0]) == [1, 2, 2, 1, 1, 0]
    assert here([], [0.0]) == [0]


def test_promises_broken_are_counted_over_all_scenarios_seed_by_seed() -> None:
    """Of each seed 100 promises and 200 offered a scenario; the first seed breaks 3 of each, the second none."""
    margins = ("0", "0.05", "0.1", "0.2", "default")
    one = {"offered": 200, "attained": 90, "promised": 100, "broken": 0, "unfinished": 0, "came_to": 0.1}
    values = [
        {**one, "scenario": s, "noise": noise, "margin": margin, "seed": seed, "broken": 3 if seed == 1 else 0}
        for s in RATES for noise in NOISES for margin in margins for seed in (1, 2)
    ]  # fmt: skip
    values += [{**values[-1], "scenario": "more", "promised": 300, "broken": 297, "seed": 2}]
    estimates = found(values, True).estimates
    assert estimates["broken-10-0.1"].value == pytest.approx(0.015)
    assert estimates["broken-20-default"].value == pytest.approx((0.03 + 297 / 600) / 2)
    assert estimates["default-10"].value == pytest.approx(1.0)
    assert estimates["attained-20"].value == pytest.approx(0.0)


def test_a_promise_that_was_given_up_is_still_counted() -> None:
    log = PromiseLog()
    scheduler = Scheduler(safety_margin=0.1, log=log)
    a = prompt("a", 60, ttft=0.1)
    scheduler.plan(seen([a], []))
    assert scheduler.plan(seen([a], [], now=0.05)).demote == ("a",)  # nothing was run, and 70 ms are needed
    assert not scheduler.promised
    assert log == PromiseLog({"a"}, [0.1, 0.1])


def test_what_a_run_kept() -> None:
    """Eight requests and two places: seven are promised, and kept, where steps are as predicted."""
    value = kept("chatbot", 0.0, None, 1, True)
    assert (value["offered"], value["unfinished"], value["came_to"]) == (8, 0, 0.0)
    assert (value["promised"], value["broken"], value["attained"]) == (7, 0, 7)
