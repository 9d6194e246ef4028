"""Pauses between tokens where KV is short: what the deadline rule lets a request with a lead wait, and `max_pause`."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from rubato.core.events import Verdict
from rubato.core.request import SLO, Request, Stage
from rubato.engines.vllm.sequence import VllmSeq
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure import results
from rubato.measure.records import BenchResult, rejudged, summarise
from rubato.replica.sequence import Seq
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload


@cache
def short_of_kv(policy: str, max_pause: float | None = None, slo_rule: str = "deadline") -> BenchResult:
    """20 chats and as many requests without an SLO, of 1,600 tokens each, where KV holds 12."""
    arrivals = tuple(
        Arrival(
            id=f"r{i}", at=0.1 * i, tier="chat" if i % 2 else "batch", app="", prompt_tokens=400, output_tokens=1200
        )
        for i in range(40)
    )
    tiers = {"chat": SLO(ttft=2.0, tpot=0.05, max_pause=max_pause), "batch": SLO()}
    hardware = packaged_hardware("llama-3.1-8b-h200@vllm-2024", 20000)
    return simulate(
        Workload("short-of-kv", 0, 10.0, 4.0, tiers, arrivals),
        RunSpec(hardware, PolicyChoice.read(policy), slo_rule=slo_rule),
    )


def chats(run: BenchResult) -> list[Verdict]:
    return [record.verdict for record in run.records if record.tier == "chat"]


BOUNDED = Request("a", (Stage(5, SLO(ttft=2.0, tpot=0.05, max_pause=0.3)),), 0.0)


def test_next_token_under_max_pause_is_due_after_the_last_one() -> None:
    seq = Seq(BOUNDED, 0, 0.0)
    assert seq.due == 2.0
    seq.add_tokens([0.1])
    assert seq.due == pytest.approx(0.4)
    seq.add_tokens([0.2, 0.4, 1.75])  # the last was due at 0.7
    assert seq.missed
    assert seq.due == pytest.approx(2.05)
    seq.add_tokens([2.0])
    assert seq.due == pytest.approx(2.25)  # by its TPOT: 2.3 is later


def test_next_token_inside_vllm_under_max_pause_is_due_after_the_last_that_is_out() -> None:
    own: Any = SimpleNamespace(num_in_flight_tokens=1)
    kv: Any = SimpleNamespace()
    seq = VllmSeq(BOUNDED, own, kv, 0, None)
    seq.expected_tokens = 1
    assert seq.due == pytest.approx(2.05)  # nothing is out yet
    seq.add_tokens([0.1])
    assert seq.due == pytest.approx(0.4)
    assert not seq.missed
    seq.add_tokens([0.5])
    assert seq.missed


def test_edf_without_max_pause_lets_chats_it_meets_stand_still_for_seconds() -> None:
    run = short_of_kv("edf")
    paused = [v for v in chats(run) if v.met and v.pause is not None and v.pause > 1.0]
    assert paused
    assert not any(v.met_by_windows for v in paused)
    row = next(row for row in summarise(run) if row.tier == "chat")
    assert row.pause_max == max(v.pause for v in chats(run) if v.pause is not None)
    assert row.met_by_deadline == row.met > row.met_by_windows


@pytest.mark.parametrize("policy", ["edf", "rubato", "vllm"])
def test_chats_met_under_max_pause_have_no_longer_pause(policy: str) -> None:
    run = short_of_kv(policy, max_pause=1.0)
    met = [v for v in chats(run) if v.met]
    assert met
    assert all(v.pause is not None and v.pause <= 1.0 for v in met)
    assert [v.met for v in chats(run)] == [v.met_by_deadline for v in chats(run)]
    assert [r.verdict.met for r in rejudged(run, "deadline").records] == [r.verdict.met for r in run.records]


def test_edf_under_max_pause_meets_more_chats_than_were_met_without_such_a_pause() -> None:
    """It schedules by the bound, where a judge alone would only count."""
    free, bounded = chats(short_of_kv("edf")), chats(short_of_kv("edf", max_pause=1.0))
    assert sum(v.met for v in bounded) > sum(v.met and v.pause is not None and v.pause <= 1.0 for v in free)


def test_results_under_any_rule_have_attainment_by_both_rules() -> None:
    by_rule = {
        rule: results.run_json(short_of_kv("edf", slo_rule=rule))["tiers"] for rule in ("deadline", "mean", "windowed")
    }
    both = [[(row["met_by_deadline"], row["met_by_windows"]) for row in rows] for rows in by_rule.values()]
    assert both[0] == both[1] == both[2]
    assert [row["met"] for row in by_rule["deadline"]] == [row["met_by_deadline"] for row in by_rule["deadline"]]
    assert [row["met"] for row in by_rule["windowed"]] == [row["met_by_windows"] for row in by_rule["windowed"]]
