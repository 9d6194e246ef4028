"""Capacity of DistServe by its prefill and decode devices, OPT-13B on H100s, over that of one of each (Fig. 4, App. A).

Requests/s a GPU at 90 % by the paper's judge, DistServe told output lengths. The paper shows an image and contradicts
itself: §2.3 gives ChatBot more decode devices and Coder more prefill devices, Appendix A the reverse; its equation of
the ideal ratio, (1 - C/TPOT) E[prompt]/E[output], has both above 1. Claims are §2.3's. Beside stands Appendix A's bound
on the capacity of each division, with the profile's most tokens/s and its time of one decode as the overhead C. It
counts a decode's token like a prompt's, so KV that decodes read is not in it, nor is their memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import bars
from experiments._rate_search import geometric
from experiments._slos_serve_runs import COARSE, PAPERS, CapacitySearch
from rubato.core.plan import Shape
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.simulation.run_spec import Hardware, packaged_hardware
from rubato.workloads import scenarios
from rubato.workloads.lengths import mean, of

SOURCE = "SLOs-Serve, Fig. 4, §2.3 and Appendix A"
SECONDS = 140.0

PROFILE = "opt-13b-h100@vllm-2024"
RATIOS = ((1, 1), (2, 1), (1, 2))  # prefill and decode devices
SCENARIOS = ("chatbot", "coder", "summarizer")
SEEDS, COUNT, FEW = (1, 2, 3), 1500, 30
FULL_BATCH = 2048  # tokens, with the most throughput


def jobs(small: bool) -> list[Job]:
    seeds, count = (SEEDS[:1], FEW) if small else (SEEDS, COUNT)
    return [
        Job(f"{scenario} {p}:{d} seed={seed}", measured, (scenario, p, d, count, seed))
        for scenario in SCENARIOS for p, d in RATIOS for seed in seeds
    ]  # fmt: skip


def measured(scenario: str, prefill: int, decode: int, count: int, seed: int) -> dict[str, Any]:
    """Requests/s a GPU that this division holds."""
    machine = packaged_hardware(PROFILE)
    source = ScenarioSource(f"slos-serve-{scenario}", machine, count=count)
    search = CapacitySearch(source.make(seed), machine, seed)
    choice = f"distserve@distserve:prefill={prefill},decode={decode},reserve_kv=true"
    rate = search.capacity(choice, PAPERS, bound(machine, scenario, prefill, decode) / 4, COARSE)
    seconds, p99 = search.lasted(choice, rate)
    return {"scenario": scenario, "ratio": [prefill, decode], "seed": seed, "rate": rate, "seconds": seconds,
            "e2e_p99": p99}  # fmt: skip


def ideal(machine: Hardware, scenario: str) -> float:
    """Prefill devices for each decode device (§2.3)."""
    prompt, output, share = _demand(machine, scenario)
    return share * prompt / output


def bound(machine: Hardware, scenario: str, prefill: int, decode: int) -> float:
    """Requests/s a device, at most (Appendix A)."""
    prompt, output, share = _demand(machine, scenario)
    fastest = FULL_BATCH / machine.model.step_time(Shape().plus(FULL_BATCH, 0))
    return fastest * min(prefill / prompt, share * decode / output) / (prefill + decode)


def _demand(machine: Hardware, scenario: str) -> tuple[float, float, float]:
    """Mean prompt and output tokens, and 1 - C/TPOT."""
    (kind,) = scenarios.get(f"slos-serve-{scenario}").kinds
    assert kind.slo.tpot is not None
    overhead = machine.model.step_time(Shape().plus(1, 1))
    return mean(of(kind.prompt)), mean(of(kind.output)), 1.0 - overhead / kind.slo.tpot


def _over_equal(values: Sequence[Mapping[str, Any]], scenario: str, ratio: tuple[int, int]) -> Estimate:
    """A division's capacity over that of one device each, paired by seed."""
    pair = [
        [v["rate"] for v in values if v["scenario"] == scenario and tuple(v["ratio"]) == own]
        for own in (ratio, RATIOS[0])
    ]
    return geometric([a / b for a, b in zip(*pair, strict=True)])


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {
        f"{scenario}-{p}-{d}": _over_equal(values, scenario, (p, d)) for scenario in SCENARIOS for p, d in RATIOS[1:]
    }
    machine = packaged_hardware(PROFILE)
    settings = {
        "machine": machine.describe(), "ratios": RATIOS, "count": FEW if small else COUNT, "lengths": "oracle",
        "ideal": {scenario: ideal(machine, scenario) for scenario in SCENARIOS},
    }  # fmt: skip
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "windowed", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Mean of the seeds; in brackets the bound."""
    machine = packaged_hardware(PROFILE)
    names = [f"{p} : {d}" for p, d in RATIOS]
    rows = [["scenario", "ideal ratio", *names, *(f"{name} over 1 : 1" for name in names[1:])]]
    for scenario in SCENARIOS:
        rates = []
        for ratio in RATIOS:
            own = [v["rate"] for v in data if v["scenario"] == scenario and tuple(v["ratio"]) == ratio]
            rates.append(f"{np.mean(own):.2f} ({bound(machine, scenario, *ratio):.2f})")
        over = [_over_equal(data, scenario, ratio) for ratio in RATIOS[1:]]
        rows.append([
            scenario, f"{ideal(machine, scenario):.1f} : 1", *rates,
            *(own.shown() for own in over),
        ])  # fmt: skip
    return f"Requests/s a GPU by prefill : decode devices, and Appendix A's bound in brackets:\n\n{markdown(rows)}"


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    heights = {
        f"{p} PF : {d} DCD": [_over_equal(data, scenario, (p, d)).value for scenario in SCENARIOS] for p, d in RATIOS
    }
    bars(axes, SCENARIOS, heights, "capacity a GPU, of 1 PF : 1 DCD")
