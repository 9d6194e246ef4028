"""Pauses between tokens where KV is short: what the deadline rule lets a request with a lead wait."""

from functools import cache

from rubato.core.events import Verdict
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure import results
from rubato.measure.records import BenchResult, summarise
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload


@cache
def short_of_kv(policy: str, slo_rule: str = "deadline") -> BenchResult:
    """20 chats and as many requests without an SLO, of 1,600 tokens each, where KV holds 12."""
    arrivals = tuple(
        Arrival(
            id=f"r{i}", at=0.1 * i, tier="chat" if i % 2 else "batch", app="", prompt_tokens=400, output_tokens=1200
        )
        for i in range(40)
    )
    tiers = {"chat": SLO(ttft=2.0, tpot=0.05), "batch": SLO()}
    hardware = packaged_hardware("llama-3.1-8b-h200@vllm-2024", 20000)
    return simulate(
        Workload("short-of-kv", 0, 10.0, 4.0, tiers, arrivals),
        RunSpec(hardware, PolicyChoice.read(policy), slo_rule=slo_rule),
    )


def chats(run: BenchResult) -> list[Verdict]:
    return [record.verdict for record in run.records if record.tier == "chat"]


def test_edf_lets_chats_it_meets_stand_still_for_seconds() -> None:
    run = short_of_kv("edf")
    paused = [v for v in chats(run) if v.met and v.pause is not None and v.pause > 1.0]
    assert paused
    assert not any(v.met_by_windows for v in paused)
    row = next(row for row in summarise(run) if row.tier == "chat")
    assert row.pause_max == max(v.pause for v in chats(run) if v.pause is not None)
    assert row.met_by_deadline == row.met > row.met_by_windows


def test_results_under_any_rule_have_attainment_by_both_rules() -> None:
    by_rule = {
        rule: results.run_json(short_of_kv("edf", slo_rule=rule))["tiers"] for rule in ("deadline", "mean", "windowed")
    }
    both = [[(row["met_by_deadline"], row["met_by_windows"]) for row in rows] for rows in by_rule.values()]
    assert both[0] == both[1] == both[2]
    assert [row["met"] for row in by_rule["deadline"]] == [row["met_by_deadline"] for row in by_rule["deadline"]]
    assert [row["met"] for row in by_rule["windowed"]] == [row["met_by_windows"] for row in by_rule["windowed"]]
