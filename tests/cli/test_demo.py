"""The demo's arithmetic and words; `make test-full` runs it (tests/processes/test_demo.py)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rubato.core.events import Verdict
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.demo import demo
from rubato.demo import progress as demo_progress
from rubato.demo import runs as demo_runs
from rubato.demo.progress import LOAD_S, PhaseProgress
from rubato.demo.runs import (
    MIN_REQUESTS,
    OVERLOAD,
    SCALES,
    TIERS,
    DemoStage,
    Unloaded,
    burst_size,
    check_rate,
    sustained_rate,
)
from rubato.latency import affine
from rubato.latency.fit import FitReport
from rubato.measure.compare import compare, saved
from rubato.measure.http_client import BenchError
from rubato.measure.records import BenchResult, Record
from rubato.policies import PolicyError
from rubato.workloads import Workload

FAST = affine.Model(k=(0.0, 1e-4), b=(0.01, 0.0), a=1e-7)
SLOW = affine.Model(k=(0.0, 6e-3), b=(0.2, 0.0), a=1e-6)


@pytest.mark.parametrize(
    ("attained", "rate", "doubt"),
    [
        ({4.0: 1.0, 5.6: 0.7}, 4.0 + 1.6 / 3.0, ""),  # on the line between the two
        ({4.0: 0.9, 5.6: 0.7}, 4.0, ""),
        ({4.0: 0.7, 3.0: 1.0}, 3.0 + 1.0 / 3.0, ""),
        ({4.0: 1.0, 5.6: 0.95}, 5.6, "held both"),
        ({4.0: 0.5, 3.0: 0.8}, 2.4, "held neither"),
    ],
)
def test_two_tries_correct_the_simulated_rate(attained: dict[float, float], rate: float, doubt: str) -> None:
    tried: list[float] = []

    def attained_at(rate: float) -> float:
        tried.append(rate)
        return attained[round(rate, 9)]

    found, said = check_rate(attained_at, 4.0)
    assert found == pytest.approx(rate)
    assert doubt in said
    assert bool(said) is bool(doubt)
    assert tried == pytest.approx(list(attained))


@pytest.mark.parametrize(
    ("tries", "rate"),
    [
        ([(5.0, 0.7), (4.0, 1.0)], 4.0 + 1.0 / 3.0),  # on the line between the two
        ([(5.0, 0.7), (4.0, 0.9)], 4.0),
        ([(4.0, 1.0), (4.6, 0.95), (5.3, 0.85)], 4.95),
        ([(6.0, 0.2), (5.0, 0.6), (4.0, 1.0)], 4.25),  # the nearest above, not the first tried
        ([(4.0, 1.0), (4.6, 1.0)], 4.6),  # no end found: the highest that held
    ],
)
def test_the_rate_that_is_held(tries: list[tuple[float, float]], rate: float) -> None:
    assert sustained_rate(tries) == pytest.approx(rate)


def test_none_held() -> None:
    with pytest.raises(BenchError, match=r"none of 2 rates down to 4.00/s"):
        sustained_rate([(5.0, 0.5), (4.0, 0.8)])


def stage(tmp_path: Path, seed: int = 0) -> DemoStage:
    return DemoStage(tmp_path, "no model", seed, PhaseProgress("edf"))


@pytest.mark.parametrize("seed", range(12))
def test_every_class_is_in_the_load_and_the_rate_is_exact(tmp_path: Path, seed: int) -> None:
    load = stage(tmp_path, seed).load(
        MIN_REQUESTS / LOAD_S, LOAD_S, dict.fromkeys(TIERS, SLO(1.0, 0.1)), 1.0, texts=False
    )
    tiers = Counter(a.tier for a in load.arrivals)
    assert len(load.arrivals) == MIN_REQUESTS
    assert min(tiers[name] / (tier.share * MIN_REQUESTS) for name, tier in TIERS.items()) >= 0.5
    assert load.arrivals[-1].at == pytest.approx(LOAD_S * MIN_REQUESTS / (MIN_REQUESTS + 1))


@pytest.mark.parametrize(("model", "unloaded", "scaled"), [
    (FAST, Unloaded(0.03, 0.01), False), (SLOW, Unloaded(1.6, 0.2), True)
])  # fmt: skip
def test_a_slow_machine_gets_shorter_requests(
    tmp_path: Path, model: affine.Model, unloaded: Unloaded, scaled: bool
) -> None:
    scale, rate = stage(tmp_path)._find_scale(unloaded, model)
    assert (scale < 1.0) is scaled
    assert scale in SCALES
    assert OVERLOAD * rate * LOAD_S >= MIN_REQUESTS or scale == SCALES[-1]


def test_shorter_prompts_have_a_ttft_slo_of_their_own() -> None:
    whole = Unloaded(2.0, 0.2)
    half = whole.scaled(0.5, SLOW)
    assert half.step == whole.step
    part, all = (SLOW.step_time(Shape().plus(tokens, 0)) for tokens in (128, 256))
    assert half.ttft == pytest.approx(2.0 * part / all)
    assert half.slos()["chat"].ttft == pytest.approx(7 * half.ttft)


def test_bursts_take_seconds_on_any_machine() -> None:
    assert burst_size(Unloaded(0.05, 0.01)) == 36  # more would tell nothing new
    assert burst_size(Unloaded(0.3, 0.03)) == 12  # 7 s / (209 x 0.3 / 256 + 54 x 0.03 / 5)
    assert burst_size(Unloaded(9.0, 1.0)) == 8


def test_time_left_is_told_with_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PhaseProgress("edf")
    for _ in range(5):
        progress.begin()
    progress.seconds = 60.0
    progress.begin()
    lines = capsys.readouterr().out.splitlines()
    left = [60 * int(m) + int(s) for m, s in (line.split()[-2].split(":") for line in lines)]
    assert lines[0].startswith("[1/7] measuring TTFT")
    assert left[:5] == sorted(left[:5], reverse=True)
    assert left[0] < 240
    assert left[5] > left[4]  # more seconds of load than thought


@pytest.mark.parametrize("policy", ["vllm", "sarathi", "slos_serve"])
def test_a_baseline_may_be_set_against_the_baselines(policy: str) -> None:
    progress = PhaseProgress(policy)
    for _ in range(7):
        progress.begin()
    assert progress.phases_begun == len(progress.phases())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "eddf"}, "did you mean 'edf'"),
        ({"policy": "distserve"}, "needs"),
        ({"seconds": 0.0}, "--seconds is 0: give 1 to 3600"),
        ({"seconds": -5.0}, "--seconds is -5"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_measured(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises((BenchError, PolicyError), match=re.escape(said)):
        demo.demo(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def run(label: str, met: list[bool]) -> BenchResult:
    load = Workload("demo", 0, 1.0, float(len(met)), {"chat": SLO(1.0)}, ())
    records = tuple(
        Record(f"r{i}", "chat", "chat", float(i), "completed", Verdict(ok, "deadline"), 5, 5)
        for i, ok in enumerate(met)
    )
    return BenchResult(label, load, records, "deadline")


def test_the_sentence_and_the_intervals() -> None:
    runs = [run("vllm", [False] * 20), run("sarathi", [i % 2 == 0 for i in range(20)]), run("edf", [True] * 20)]
    assert demo.outcome_sentence(runs) == (
        "Under 1.3 x the load that vLLM's scheduling holds, edf met the SLO of 20 of 20 requests, vllm of 0 and "
        "sarathi of 10."
    )
    assert "that vLLM's scheduling may hold (see below), edf" in demo.outcome_sentence(runs, doubtful=True)
    _, sarathi, edf = ([saved(one)] for one in runs)
    assert demo.interval_sentence(compare(edf, sarathi)).startswith("edf against sarathi: +50 points of attainment")
    assert "too few requests to tell" in demo.interval_sentence(compare(edf, edf))
    assert demo.no_overload_warning(runs) == ""
    assert "attained 100% of a load that was to be 1.3 x" in demo.no_overload_warning(runs[2:])


def test_how_to_read_a_poor_fit_and_a_disturbed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_runs.poor_fit_warning(FitReport(0.99, 0.05, 0.3, 100)) == ""
    assert "half of them by over 20%" in demo_runs.poor_fit_warning(FitReport(0.5, 0.2, 0.4, 100))
    assert demo_runs.poor_fit_warning(FitReport(0.5, 0.05, 0.7, 100))
    progress = PhaseProgress("edf")
    assert progress.disturbance() == ""
    busy = iter([10.0, 10.0, 20.0, 21e9])
    monkeypatch.setattr("rubato.core.cpu_usage.busy_seconds", lambda cores: next(busy))
    monkeypatch.setattr(demo_progress, "cpu_seconds_of", lambda pid: 5.0)
    for _ in range(6):
        progress.begin()
    with progress.watch_cores(1):
        pass
    assert progress.disturbance() == ""
    progress.begin()
    with progress.watch_cores(1):
        pass
    assert "while serving under edf" in progress.disturbance()
    assert "sarathi" not in progress.disturbance()


def test_what_to_try_next_are_commands_that_exist(tmp_path: Path) -> None:
    from rubato.cli.main import parser as rubato_parser

    for line in demo.next_commands(tmp_path):
        words = line.split("#")[0].split()
        assert words[0].endswith("rubato")
        rubato_parser().parse_args(words[1:])
