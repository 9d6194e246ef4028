"""JITServe's mix of chats, deadlines and tasks: requests and tokens in SLO over those offered, of it and others.

Scenario `jitserve-mixed` on Llama-3.1-8B on one A100, at the rate of the authors' script, 12 requests/s with all turns,
and at half of it. Their engine has 32 seats, for all systems; beside it the profile's 256. Lengths are learnt, steps
are off by 5 %. A task counts when all its turns end by its deadline; a prompt's token counts 1, an output token 8, as
there. Each system is tuned for each measure at each rate on requests of one seed and measured on others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside
from experiments._rate_search import geometric
from experiments._rubato_runs import NOISE, learnt_lengths
from experiments.rubato_replica import TUNED_ON, settings
from rubato.core.request import NOTHING
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate
from rubato.measure.records import Record
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policies.jitserve import OUTPUT_WEIGHT
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios

SOURCE = "ours; mix and SLOs of JITServe's scripts/benchmark_mixed.sh"
SECONDS = 400.0

SCENARIO, COUNT, SEEDS = "jitserve-mixed", 500, (1, 2, 3)
RATES, SEATS = (6.0, 12.0), (32, 256)  # requests/s; the scripts' seats, and the profile's
SYSTEMS = ("vllm", "sarathi", "edf", "qoserve", "slos_serve", "jitserve", "rubato")
SMALL = ("vllm", "edf", "qoserve", "slos_serve", "jitserve", "rubato")
MEASURES = ("requests", "tokens")
TIERS = ("chat", "code", "research")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm:max_num_queued_reqs=32", "vllm:max_num_queued_reqs=64"),
    "sarathi": ("sarathi:reserve_kv=true", "sarathi:min_prefill_chunk_tokens=128,reserve_kv=true"),
    "slos_serve": ("slos_serve:max_batch_seconds=0.1",),  # a run takes 10 to 30 s
    "jitserve": ("jitserve", "jitserve:penalty_factor=1", "jitserve:max_num_seqs=256"),
}


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    names, rates, seats, count, seeds = (
        (SMALL, RATES[-1:], SEATS, 30, SEEDS[:1]) if small else (SYSTEMS, RATES, SEATS, COUNT, SEEDS)
    )
    return [
        Job(f"{n} seats {rate:g}/s {name}", measured, (n, rate, name, choices(name)[: small or None], seeds, count))
        for n in seats for rate in rates for name in beside(names, policy)
    ]  # fmt: skip


def choices(name: str) -> Sequence[str]:
    return CHOICES.get(name, settings(name))


def measured(seats: int, rate: float, name: str, tried: Sequence[str], seeds: Sequence[int], count: int) -> Any:
    """By measure: the setting that was best on the tuning's requests, and its shares (0 to 1) by seed."""
    tuning = {c: shares(seats, rate, c, TUNED_ON, count) for c in tried} if len(tried) > 1 else {tried[0]: NOTHING}
    best = {measure: max(tuning, key=lambda c: tuning[c].get(measure, 0.0)) for measure in MEASURES}
    ran = {
        choice: [shares(seats, rate, choice, seed, count) for seed in seeds] for choice in dict.fromkeys(best.values())
    }
    found = {
        measure: {
            "setting": choice, "shares": [each[measure] for each in ran[choice]],
            "tiers": {tier: float(np.mean([each[tier] for each in ran[choice]])) for tier in TIERS},
        }
        for measure, choice in best.items()
    }  # fmt: skip
    return {"seats": seats, "rate": rate, "name": name, "seeds": list(seeds), "measures": found}


def shares(seats: int, rate: float, choice: str, seed: int, count: int) -> dict[str, float]:
    """In SLO over offered: of requests, tasks as one; of their tokens; and of requests by tier."""
    load = scenarios.make(SCENARIO, rate, count=count, seed=seed)
    hardware = packaged_hardware(load.profile, max_num_seqs=seats)
    hardware = replace(hardware, limits=replace(hardware.limits, max_running=seats))
    chosen = PolicyChoice.parse(choice)
    spec = RunSpec(
        hardware, chosen, lengths=learnt_lengths(chosen), learns=True, noise=NOISE, stated_max_tokens=2048
    )  # fmt: skip
    return in_slo(load, simulate(load, spec, seed, causes=False).records)


def in_slo(load: Workload, records: Sequence[Record]) -> dict[str, float]:
    met: dict[str, bool] = {}
    tokens: defaultdict[str, float] = defaultdict(float)
    tiers: defaultdict[str, list[str]] = defaultdict(list)
    for arrival, record in zip(load.arrivals, records, strict=True):
        unit = arrival.session or arrival.id
        if unit not in met:
            tiers[arrival.tier].append(unit)
        met[unit] = met.get(unit, True) and record.verdict.met and not record.best_effort
        tokens[unit] += arrival.prompt_tokens + OUTPUT_WEIGHT * arrival.output_tokens
    return {
        "requests": sum(met.values()) / len(met),
        "tokens": sum(tokens[unit] for unit in met if met[unit]) / sum(tokens.values()),
        **{tier: sum(met[unit] for unit in units) / len(units) for tier, units in tiers.items()},
    }


# --------------------------------------------------------------------------- what was found


class Shares:
    """In SLO, by seats, rate and system."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = {(v["seats"], v["rate"], v["name"]): v for v in values}
        self.cells = list(dict.fromkeys(key[:2] for key in self.values))
        self.names = list(dict.fromkeys(key[2] for key in self.values))

    def of(self, seats: int, rate: float, name: str, measure: str) -> Any:
        """By seed; at least one in a thousand, so that there are ratios."""
        return np.maximum(self.values[seats, rate, name]["measures"][measure]["shares"], 1e-3)

    def over(self, name: str, base: str, measure: str) -> Estimate:
        """At the scripts' rate and seats."""
        return geometric(self.of(SEATS[0], RATES[-1], name, measure) / self.of(SEATS[0], RATES[-1], base, measure))

    def best(self, measure: str) -> str:
        others = [name for name in self.names if name in SYSTEMS and name != "rubato"]
        best: str = max(others, key=lambda name: float(np.mean(self.of(SEATS[0], RATES[-1], name, measure))))
        return best


def found(values: Sequence[Any], small: bool) -> Found:
    table, estimates = Shares(values), {}
    for measure in MEASURES:
        estimates[f"rubato-over-best-{measure}"] = table.over("rubato", table.best(measure), measure)
    given = {
        "systems": {name: list(choices(name)) for name in SYSTEMS}, "count": COUNT, "noise": NOISE, "seats": SEATS,
        "rates": RATES,
    }  # fmt: skip
    return Found(estimates, list(values), SEEDS[:1] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """% in SLO of what was offered, the best first; of requests by tier, too."""
    table, parts = Shares(data), []
    for seats, rate in table.cells:
        for measure in MEASURES:
            rows = [["system", measure, "chat", "code (e2e)", "research (tasks)", "setting"]]
            held = {name: float(np.mean(table.of(seats, rate, name, measure))) for name in table.names}
            for name in sorted(held, key=lambda name: -held[name]):
                own = table.values[seats, rate, name]["measures"][measure]
                tiers = [f"{100 * own['tiers'][tier]:.0f}" for tier in TIERS]
                rows.append([f"`{name}`", f"{100 * held[name]:.1f}", *tiers, f"`{own['setting']}`"])
            parts.append(f"{seats} seats, {rate:g} requests/s, % of {measure} in SLO:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
