"""What our own policy promises and keeps: at 0.8 to 3 times capacity, with a model that is wrong, and with slow bursts;
and what it costs below capacity.

A request is promised when its first token is in time and it was not declined before; a promise is broken when a later
token is late: reported as a share of the promised, those kept and those broken. Conditions: steps off by 5 %; beside
that a latency model that says 15 % too little, or too much, for ever (the scenarios' profiles do not learn); and
bursts, one in 400 steps on average, of five steps three times as long. Lengths are learnt. Below capacity: mean TTFT
and e2e beside those of `vllm`, in the setting that holds most, at shares of the rate that it holds (`rubato-replica`);
one's seeds with the other's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from experiments import Found
from experiments._rubato_runs import MOST_TOKENS, NOISE, USUALLY, hardware, recorded, served
from rubato.core.events import Demoted, Event
from rubato.core.interfaces import LatencyModel, Line
from rubato.core.plan import Shape
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.model_wrapper import ModelWrapper
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import Record
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.planning.sweep import markdown
from rubato.simulation.run_spec import RunSpec, conditional_mean
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload

SOURCE = "ours"
SECONDS = 1480.0

CAPACITY = {"chatbot": 4.65, "coder": 2.0, "summarizer": 3.35, "mixed": 5.3}  # requests/s that attain 90 %, about
MULTIPLES = (0.8, 1.0, 1.5, 3.0)
CONDITIONS = ("plain", "too fast", "too slow", "bursts")
POLICIES = (
    "rubato", "slos_serve", "edf:max_ttft_share=1,safety_margin=0", "qoserve:reserve_kv=true",
    "scorpio:mixed=true,budget=512,ttft_reserve=0,reserve_kv=true",
)  # fmt: skip
COUNT, SEEDS = 3000, (1,)
EVERY, LENGTH, FACTOR = 400, 5, 3.0  # steps from burst to burst, of a burst, and how many times as long these are
WRONG = {"too fast": 0.85, "too slow": 1.15}
SHARES, BELOW_COUNT, BELOW_SEEDS = (0.5, 0.7), 1000, (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Scaled(ModelWrapper):
    """A model that says so many times what another says."""

    factor: float = 1.0

    def step_time(self, shape: Shape) -> float:
        return self.factor * self.model.step_time(shape)

    def seconds_of(self, *features: int) -> float:
        return self.factor * self.model.seconds_of(*features)

    def line(self, seqs: int, kv: int) -> Line | None:
        return None

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return self.model.largest_chunk(seconds / self.factor, base, cached, most)


@dataclass(frozen=True)
class Bursts(ModelWrapper):
    """The truth of a machine that is slow now and then: asked once a step."""

    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    left: list[int] = field(default_factory=lambda: [0])

    def step_time(self, shape: Shape) -> float:
        return self._factor() * self.model.step_time(shape)

    def seconds_of(self, *features: int) -> float:
        return self._factor() * self.model.seconds_of(*features)

    def line(self, seqs: int, kv: int) -> Line | None:
        return None

    def _factor(self) -> float:
        if not self.left[0] and self.rng.random() < 1.0 / EVERY:
            self.left[0] = LENGTH
        if not self.left[0]:
            return 1.0
        self.left[0] -= 1
        return FACTOR


def jobs(small: bool) -> list[Job]:
    count, seeds = (30, (1,)) if small else (COUNT, SEEDS)
    scenarios, policies = (("coder",), POLICIES[:2]) if small else (tuple(CAPACITY), POLICIES)
    uncrowded = (BELOW_SEEDS[:2], count) if small else (BELOW_SEEDS, BELOW_COUNT)
    return [
        Job(f"{scenario} {condition} {policy} {seed}", measured, (scenario, condition, policy, seed, count))
        for scenario in scenarios for condition in CONDITIONS for policy in policies for seed in seeds
    ] + [
        Job(f"{scenario} below", below, (scenario, *uncrowded)) for scenario in scenarios
    ]  # fmt: skip


def measured(scenario: str, condition: str, policy: str, seed: int, count: int) -> list[dict[str, Any]]:
    """At each multiple of the capacity."""
    return [tried(scenario, condition, policy, seed, count, multiple) for multiple in MULTIPLES]


def tried(scenario: str, condition: str, policy: str, seed: int, count: int, multiple: float) -> dict[str, Any]:
    machine = hardware(scenario)
    load = ScenarioSource(f"slos-serve-{scenario}", machine, count=count).make(seed)
    load = load.rescaled(CAPACITY[scenario] * multiple)
    believed: LatencyModel = machine.model
    if condition in WRONG:
        believed = Scaled(machine.model, WRONG[condition])
    if condition == "bursts":
        machine = replace(machine, model=Bursts(machine.model, np.random.default_rng(seed)))
    declined: dict[str, float] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Demoted):
            declined.setdefault(event.id, event.at)

    spec = RunSpec(
        machine, PolicyChoice.parse(policy), 1, lengths=conditional_mean, learns=True, noise=NOISE, believed=believed,
        stated_max_tokens=MOST_TOKENS.get(scenario, USUALLY),
    )  # fmt: skip
    records = simulate(load, spec, seed, causes=False, listen=listen).records
    ttfts = {a.tier: load.slo(a).ttft or np.inf for a in load.arrivals}
    met = {r.id: r.verdict.met and not r.best_effort for r in records}
    promised = [r for r in records if in_time(r, ttfts) and declined.get(r.id, np.inf) > r.at + (r.verdict.ttft or 0.0)]
    tiers = {tier: float(np.mean([met[r.id] for r in records if r.tier == tier])) for tier in ttfts}
    longest = sorted(records, key=lambda r: r.output)[-(len(records) // 10) :]
    demoted = [r for r in records if r.best_effort]
    return {
        "scenario": scenario, "condition": condition, "policy": policy, "seed": seed, "multiple": multiple,
        "attained": float(np.mean(list(met.values()))), "tiers": tiers,
        "longest": float(np.mean([met[r.id] for r in longest])),
        "broken": sum(not met[r.id] for r in promised) / len(records),
        "unfinished": sum(r.outcome != "completed" for r in records),
        "demoted": len(demoted) / len(records),
        "demoted_e2e": max([r.verdict.e2e or 0.0 for r in demoted], default=0.0),
        "seconds": records[-1].at,
    }  # fmt: skip


def below(scenario: str, seeds: Sequence[int], count: int) -> list[dict[str, Any]]:
    """By share of what `vllm` holds: the means of ours over its own, by seed, and what attains of each."""
    named = {(v["load"], v["name"]): v["measures"]["90 % of all"] for v in recorded("rubato-replica")}
    vllm = named[scenario, "vllm"]
    cells = []
    for share in SHARES:
        pairs = []
        for seed in seeds:
            load = ScenarioSource(f"slos-serve-{scenario}", hardware(scenario), count=count).make(seed)
            load = load.rescaled(share * float(np.mean(vllm["goodput"])))
            pairs.append([means(load, scenario, policy, seed) for policy in ("rubato", vllm["setting"])])
        e2e, ttft, attained = np.moveaxis(np.array(pairs), 2, 0)  # each by seed, and by policy
        cells.append({
            "scenario": scenario, "share": share, "e2e": (e2e[:, 0] / e2e[:, 1]).tolist(),
            "ttft": (ttft[:, 0] / ttft[:, 1]).tolist(), "attained": attained.mean(axis=0).tolist(),
        })  # fmt: skip
    return cells


def means(load: Workload, scenario: str, policy: str, seed: int) -> Any:
    """Mean e2e and TTFT, and what attains."""
    verdicts = [r.verdict for r in served(load, scenario, policy, seed)]
    return np.mean([(v.e2e or 0.0, v.ttft or 0.0, v.met) for v in verdicts], axis=0)


def in_time(record: Record, ttfts: Mapping[str, float]) -> bool:
    return record.verdict.ttft is not None and record.verdict.ttft <= ttfts[record.tier]


def of_promised(run: Mapping[str, Any]) -> float:
    """The share of promises that is broken."""
    return float(run["broken"]) / max(1e-9, float(run["broken"]) + float(run["attained"]))


def found(values: Sequence[Any], small: bool) -> Found:
    cells = [cell for own in values for cell in own if "share" in cell]
    runs = [run for own in values for run in own if "share" not in run]
    ours = [run for run in runs if run["policy"] == "rubato"]
    estimates = {}
    for condition in CONDITIONS:
        own = [run for run in ours if run["condition"] == condition]
        estimates[f"broken-{condition.replace(' ', '-')}"] = Estimate.exact(100.0 * max(map(of_promised, own)))
    behind = [run["attained"] - min(run["tiers"].values()) for run in ours]
    estimates["worst-tier"] = Estimate.exact(100.0 * max(behind))
    estimates["longest-outputs"] = Estimate.exact(100.0 * max(run["attained"] - run["longest"] for run in ours))
    estimates["unfinished"] = Estimate.exact(sum(run["unfinished"] for run in ours))
    for name in ("e2e", "ttft"):
        estimates[f"below-{name}"] = max([over_seeds(cell[name]) for cell in cells], key=lambda each: each.value)
    given = {
        "capacity": CAPACITY, "count": COUNT, "noise": NOISE, "lengths": "conditional_mean",
        "bursts": [EVERY, LENGTH, FACTOR],
    }  # fmt: skip
    return Found(estimates, [*runs, *cells], SEEDS[:1] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """Attained and broken by scenario, condition and multiple; means over seeds. What it costs below capacity."""
    parts = []
    cells, data = [v for v in data if "share" in v], [v for v in data if "share" not in v]
    for policy in dict.fromkeys(run["policy"] for run in data):
        rows = [["scenario", "condition", *(f"{m:g} ×: attained, broken of the promised" for m in MULTIPLES)]]
        for scenario in dict.fromkeys(run["scenario"] for run in data):
            for condition in CONDITIONS:
                shown = []
                for multiple in MULTIPLES:
                    own = [
                        run for run in data
                        if (run["policy"], run["scenario"], run["condition"], run["multiple"])
                        == (policy, scenario, condition, multiple)
                    ]  # fmt: skip
                    attained = 100.0 * float(np.mean([r["attained"] for r in own]))
                    shown.append(f"{attained:.1f}, {100.0 * float(np.mean([of_promised(r) for r in own])):.2f}")
                rows.append([scenario, condition, *shown])
        parts.append(f"`{policy}`, %:\n\n{markdown(rows)}")
    rows = [["scenario", "share of `vllm`'s rate", "mean TTFT over `vllm`'s", "mean e2e", "attained, `vllm`'s"]]
    for cell in sorted(cells, key=lambda cell: -float(np.mean(cell["ttft"]))):
        ratios = [over_seeds(cell[name]) for name in ("ttft", "e2e")]
        rows.append([
            cell["scenario"], f"{cell['share']:g}", *(ratio.shown(".3f") for ratio in ratios),
            ", ".join(f"{100.0 * share:.1f} %" for share in cell["attained"]),
        ])  # fmt: skip
    parts.append(f"Below capacity:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
