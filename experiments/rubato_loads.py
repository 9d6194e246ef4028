"""Our own policy on the loads of other figures, and on one that it was not made with.

PolyServe's tier flip, fleets of 8 to 32 replicas and cost; Ascendra's three models on 3 replicas, judged by TTFT and
mean TPOT as there: the others' numbers are those of the figures `polyserve-flip`, `polyserve-scale`, `polyserve-cost`
and `ascendra-capacity`, on the same requests and seeds, without `scorpio`, `qoserve` and `lmetric`; ours is in its
default settings. `long`: Mooncake's conversations up to 30,000 tokens on 4 replicas of Llama-3.1-70B (4 A100 each),
TPOTs of 50 to 150 ms, a TTFT of three times the time of the prompt alone and 1 s at least (our choice), KV moving at 50
GB/s, steps off by 5 %, lengths learnt; ours in its default settings and, as the others, in the best of some. `loose`:
SLOs-Serve's Mixed on 8 replicas of OPT-13B, KV moving as fast. `single`: three of PolyServe's data sets on one replica,
each system tuned on other requests; there the tightest of four tiers is a tenth of the requests: giving it up is enough
for 90 % of all, so that 90 % of each tier is the measure. Of these three loads all systems are run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np

from experiments import Found, polyserve_cost, polyserve_scale
from experiments import _polyserve_runs as runs
from experiments import ascendra_capacity as ascendra
from experiments import polyserve_goodput as goodput
from experiments._guest import held
from experiments._rate_search import MEASURES, RateSearch, shares_of
from experiments._rubato_runs import hardware, recorded
from rubato.engines.simulated import Link
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.planning.sweep import markdown
from rubato.simulation.run_spec import Hardware, RunSpec, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios
from rubato.workloads.generate import BEST_EFFORT

SOURCE = "ours; loads of PolyServe, §5.3 to §5.5, and Ascendra, §8.2"
SECONDS = 1850.0

OURS, TUNED = "rubato", "rubato, tuned"
ALL, *_ = MEASURES

LONG_SEEDS, COUNT, START, REPLICAS = (1,), 600, 1.0, 4
LONGEST_PROMPT, TTFT_TIMES, LEAST_TTFT = 30_000, 3.0, 1.0
TPOTS = {0.02: 0.05, 0.03: 0.075, 0.05: 0.1, 0.1: 0.15}  # of PolyServe's, seconds
LONG_LINK = Link(kv_bytes=327_680, bandwidth=50e9)  # 80 layers, 8 KV heads of 128, 2 bytes
SCORPIO = "scorpio:mixed=true,budget=512,ttft_reserve=0,reserve_kv=true"
QOSERVE = "qoserve:reserve_kv=true"
LONG: Mapping[str, tuple[str, ...]] = {
    OURS: (OURS,),
    TUNED: (OURS, f"{OURS}@least_loaded"),
    "edf": (
        "edf@least_loaded", "edf:max_ttft_share=1,safety_margin=0@least_loaded",
        "edf:max_ttft_share=1,safety_margin=0@lmetric",
    ),
    "slos_serve": ("slos_serve",),
    "polyserve": tuple(f"polyserve@polyserve:mode={mode}" for mode in runs.MODES),
    "sarathi": tuple(f"sarathi:budget={b},reserve_kv=true@least_loaded" for b in (512, 1024, 2048)),
    "co_chunk": tuple(f"co_chunk:budget={b}@least_loaded" for b in (512, 1024, 2048)),
    "distserve": tuple(f"distserve@minimal:prefill={n},decode={REPLICAS - n}" for n in (1, 2, 3)),
    "scorpio": tuple(f"{SCORPIO}@{router}" for router in ("least_loaded", "lmetric")),
    "qoserve": tuple(f"{QOSERVE}@{router}" for router in ("least_loaded", "lmetric")),
}  # fmt: skip
LOOSE, LOOSE_REPLICAS, LOOSE_COUNT, LOOSE_START = "mixed", 8, 1000, 40.0
LOOSE_LINK = Link(kv_bytes=819_200, bandwidth=50e9)  # of OPT-13B: 40 layers, 40 KV heads of 128, 2 bytes
ON_LOOSE: Mapping[str, tuple[str, ...]] = {
    **{name: LONG[name] for name in (OURS, "edf", "polyserve", "sarathi", "scorpio", "qoserve")},
    "slos_serve": ("slos_serve", "slos_serve:max_batch_seconds=0.1"),
}
SINGLE = ("mooncake-conversation", "sharegpt", "uniform-4096-1024")
ON_ONE: Mapping[str, tuple[str, ...]] = {
    OURS: (OURS,),
    "edf": ("edf", "edf:max_ttft_share=1,safety_margin=0"),
    "slos_serve": ("slos_serve", "slos_serve:max_batch_seconds=0.05", "slos_serve:max_batch_seconds=0.02"),
    "polyserve": (runs.OURS["co"],),
    "sarathi": tuple(f"sarathi:budget={b},reserve_kv=true" for b in (256, 512, 1024)),
    "co_chunk": tuple(f"co_chunk:budget={b}" for b in (512, 1024, 2048)),
    "scorpio": ("scorpio:ttft_reserve=0,reserve_kv=true", SCORPIO),
    "qoserve": (QOSERVE, "qoserve:alpha=0.001,reserve_kv=true"),
}


def jobs(small: bool) -> list[Job]:
    if small:
        return [
            Job("flip", goodput.measured, ("flip", OURS, (OURS,), (1,), 0.3, 5, 0.1)),
            Job("scale 8", scaled, (8, 0.3, 0.1)),
            Job("cost 0.2 seed=1", costs, (0.2, 1, 0.3, 0.1)),
            *(Job(f"ascendra {case} seed=31", on_few, (case, 31, 20.0, 0.5)) for case in ascendra.CASES),
            *(Job(f"long {name} seed=1", searched, ("long", name, 1, 100)) for name in (OURS, TUNED, "sarathi")),
            *(Job(f"loose {name} seed=1", searched, ("loose", name, 1, 100)) for name in (OURS, "sarathi")),
            *(Job(f"single {name}", single, (SINGLE[0], name, 0.5, 0.2)) for name in (OURS, "sarathi")),
        ]
    return [
        Job("flip", goodput.measured, ("flip", OURS, (OURS,), goodput.SEEDS[:1])),
        *(Job(f"scale {n}", scaled, (n, polyserve_scale.STAYS, runs.BEFORE)) for n in polyserve_scale.SIZES),
        *(
            Job(f"cost {load} seed={seed}", costs, (load, seed, polyserve_cost.STAYS, runs.BEFORE))
            for seed in polyserve_cost.SEEDS
            for load in polyserve_cost.LOADS
        ),
        *(
            Job(f"ascendra {case} seed={seed}", on_few, (case, seed, ascendra.DURATION, ascendra.TOLERANCE))
            for case in ascendra.CASES
            for seed in ascendra.SEEDS[:1]
        ),
        *(
            Job(f"long {name} seed={seed}", searched, ("long", name, seed, COUNT))
            for seed in LONG_SEEDS
            for name in LONG
        ),
        *(
            Job(f"loose {name} seed={seed}", searched, ("loose", name, seed, LOOSE_COUNT))
            for seed in LONG_SEEDS
            for name in ON_LOOSE
        ),
        *(
            Job(f"single {data} {name}", single, (data, name, runs.COUNTED, runs.BEFORE))
            for data in SINGLE
            for name in ON_ONE
        ),
    ]


def scaled(size: int, stays: float, fill: float) -> dict[str, Any]:
    """Requests/s of a replica in a fleet of so many."""
    return {"load": "scale", **polyserve_scale.measured(OURS, size, 1, stays, fill)}


def costs(load: float, seed: int, stays: float, fill: float) -> dict[str, Any]:
    """Replica-seconds a request in SLO with more replicas than needed."""
    cost, attained = polyserve_cost.Window(load, seed, stays, fill).paid(OURS)
    return {"load": "cost", "of": load, "seed": seed, "cost": cost, "attained": attained}


def on_few(case: str, seed: int, duration: float, tolerance: float) -> dict[str, Any]:
    """The capacity of Ascendra's three replicas."""
    rate, _ = ascendra.Searched(ascendra.CASES[case], seed, duration, tolerance).capacity((OURS,))
    return {"load": "ascendra", "case": case, "seed": seed, "rate": rate}


@lru_cache
def large() -> Hardware:
    return packaged_hardware("llama-3.1-70b-4xa100@vllm-2024", max_model_len=LONGEST_PROMPT + 2048)


class LongPrompts(RateSearch):
    """Runs of the load `long`."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(1.06, 0.08)
        self.seed = seed
        prefill = large().prefill
        # without `prefill` no prompt is dropped for the data set's own TTFTs
        made = scenarios.make("polyserve-mooncake-conversation", 1.0, count=2 * count, seed=seed)
        kept = [a for a in made.arrivals if a.tier != BEST_EFFORT and a.prompt_tokens <= LONGEST_PROMPT][:count]
        arrivals = []
        for one in kept:
            ttft = max(LEAST_TTFT, TTFT_TIMES * prefill(one.prompt_tokens))
            slo = made.slo(one)
            arrivals.append(replace(one, slo=replace(slo, ttft=ttft, tpot=TPOTS[slo.tpot or 0.1])))
        self.load: Workload = replace(
            made, arrivals=tuple(arrivals), duration=arrivals[-1].at, rate=len(arrivals) / arrivals[-1].at
        )

    def run(self, choice: str, rate: float) -> dict[str, float]:
        spec = RunSpec(
            large(), PolicyChoice.parse(choice), REPLICAS, lengths=conditional_mean, noise=runs.NOISE, learns=True,
            link=LONG_LINK, stated_max_tokens=2048,
        )  # fmt: skip
        return shares_of(simulate(self.load.rescaled(rate), spec, self.seed, times=False, causes=False).records)


class LooseTiers(RateSearch):
    """Runs of the load `loose`."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(1.04, 0.05)
        self.seed = seed
        self.load = ScenarioSource(f"slos-serve-{LOOSE}", hardware(LOOSE), count=count).make(seed)

    def run(self, choice: str, rate: float) -> dict[str, float]:
        spec = RunSpec(
            hardware(LOOSE), PolicyChoice.parse(choice), LOOSE_REPLICAS, lengths=conditional_mean, noise=runs.NOISE,
            learns=True, link=LOOSE_LINK, stated_max_tokens=2048,
        )  # fmt: skip
        return shares_of(simulate(self.load.rescaled(rate), spec, self.seed, times=False, causes=False).records)


def searched(load: str, name: str, seed: int, count: int) -> dict[str, Any]:
    """What a policy holds, by measure, at the best of its settings on these requests."""
    tried: RateSearch = LongPrompts(seed, count) if load == "long" else LooseTiers(seed, count)
    choices, start = (LONG[name], START) if load == "long" else (ON_LOOSE[name], LOOSE_START)
    rates = {}
    for measure in MEASURES:
        rates[measure] = held(partial(lambda measure: tried.best(choices, start, measure)[0], measure))
    return {"load": load, "name": name, "seed": seed, "rates": rates, "tried": tried.listed()}


def single(data: str, name: str, stays: float, fill: float) -> dict[str, Any]:
    """What a policy holds on one replica, by measure."""
    return {"load": "single", **goodput.measured(data, name, ON_ONE[name], goodput.SEEDS[:1], stays, 1, fill)}


# --------------------------------------------------------------------------- beside the others


def ratio(ours: Mapping[int, float], by_name: Mapping[str, Mapping[int, float]]) -> tuple[str, Estimate]:
    """The best of the others, of those run on all seeds of ours, in the mean over seeds; ours over it, by seed."""
    own = {name: rates for name, rates in by_name.items() if rates.keys() >= ours.keys()}
    best = max(own, key=lambda name: float(np.mean([own[name][seed] for seed in ours])))
    return best, over_seeds([float(np.log(ours[seed] / own[best][seed])) for seed in ours]).exp()


def rows_of(values: Sequence[Any]) -> list[tuple[str, float, str, Estimate]]:
    """(load, ours, the best other, ratio) of each load; of cost, what others pay over what ours pays."""
    rows = []
    for value in (v for v in values if v.get("data") == "flip"):
        for measure in MEASURES:
            ours = dict(zip(value["seeds"], value["measures"][measure]["goodput"], strict=True))
            by_name = {
                v["name"]: dict(zip(v["seeds"], v["measures"][measure]["goodput"], strict=True))
                for v in recorded("polyserve-flip")
            }
            rows.append((f"flip, {measure}", float(np.mean(list(ours.values()))), *ratio(ours, by_name)))
    scale = recorded("polyserve-scale")
    for value in (v for v in values if v.get("load") == "scale"):
        by_name = {v["name"]: {v["seed"]: v["each"]} for v in scale if v["size"] == value["size"]}
        best, found = ratio({1: value["each"]}, by_name)
        rows.append((f"{value['size']} replicas, a replica", value["each"], best, found))
    for load in sorted({v["of"] for v in values if v.get("load") == "cost"}):
        paid = {v["seed"]: 1.0 / v["cost"] for v in values if v.get("load") == "cost" and v["of"] == load}
        by_name = {}
        for value in recorded("polyserve-cost"):
            for name, cost in value["cost"].items():
                if value["load"] == load:
                    by_name.setdefault(name, {})[value["seed"]] = 1.0 / cost
        best, found = ratio(paid, by_name)
        rows.append((f"cost at {load}, requests a replica-second", float(np.mean(list(paid.values()))), best, found))
    capacity = recorded("ascendra-capacity")
    for case in dict.fromkeys(v["case"] for v in values if v.get("load") == "ascendra"):
        ours = {v["seed"]: v["rate"] for v in values if v.get("load") == "ascendra" and v["case"] == case}
        by_name = {}
        for value in capacity:
            if value["case"] == case:
                by_name.setdefault(value["name"], {})[value["seed"]] = value["capacity"]
        rows.append((f"Ascendra, {case}", float(np.mean(list(ours.values()))), *ratio(ours, by_name)))
    for load, measure in product(("long", "loose"), MEASURES):
        by_name = {}
        for value in (v for v in values if v.get("load") == load):
            by_name.setdefault(value["name"], {})[value["seed"]] = max(value["rates"][measure], 1e-3)
        tuned = {f"{load}, tuned, {measure}": by_name.pop(TUNED)} if TUNED in by_name else {}
        for what, ours in ({f"{load}, {measure}": by_name.pop(OURS)} | tuned).items():
            rows.append((what, float(np.mean(list(ours.values()))), *ratio(ours, by_name)))
    for data in dict.fromkeys(v["data"] for v in values if v.get("load") == "single"):
        for measure in MEASURES:
            by_name = {
                v["name"]: {1: max(v["measures"][measure]["goodput"][0], goodput.LEAST * v["optimum"])}
                for v in values if v.get("load") == "single" and v["data"] == data
            }  # fmt: skip
            ours = by_name.pop(OURS)
            rows.append((f"one replica, {data}, {measure}", ours[1], *ratio(ours, by_name)))
    return rows


def found(values: Sequence[Any], small: bool) -> Found:
    rows = rows_of(values)
    estimates = {}
    for name, begins in (
        ("flip", "flip, 90 % of all"), ("scale", ""), ("cost", "cost"), ("ascendra", "Ascendra"), ("long", "long, 9"),
        ("long-tuned", "long, tuned"), ("loose", "loose"),
    ):  # fmt: skip
        own = [row[3] for row in rows if (row[0].startswith(begins) if begins else "replicas, a" in row[0])]
        estimates[name] = min(own, key=lambda estimate: estimate.value)
    for measure, name in zip(MEASURES, ("90", "95", "each"), strict=True):
        own = [row[3] for row in rows if row[0].startswith("one replica") and row[0].endswith(measure)]
        estimates[f"single-{name}"] = over_seeds([float(np.mean([np.log(one.value) for one in own]))]).exp()
    seeds = sorted({seed for v in values for seed in v.get("seeds", [v.get("seed")])})
    return Found(estimates, list(values), seeds, "deadline", {"measures": MEASURES, "tpots": list(TPOTS.values())})


def tables(values: Sequence[Any]) -> str:
    """Losses first."""
    rows = [["load", "ours over the best other", "which is", "ours, requests/s where nothing else is said"]]
    for what, ours, best, times in sorted(rows_of(values), key=lambda row: row[3].value):
        within = f"[{times.low:.2f}, {times.high:.2f}]" if times.low else "(one seed)"
        rows.append([what, f"{times.value:.2f} {within}", f"`{best}`", f"{ours:.3g}"])
    return markdown(rows)


def draw(values: Sequence[Any], axes: Any) -> None:
    """Ours over the best other, by load."""
    rows = rows_of(values)
    axes.plot([row[3].value for row in rows], range(len(rows)), "o")
    axes.axvline(1.0, color="gray")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=7)
    axes.set_xlabel("rubato over the best other")
