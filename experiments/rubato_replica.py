"""Our own policy on one replica, beside all others tuned: SLOs-Serve's six scenarios.

90 % of all requests offered, 95 % of all, 90 % of each tier. Lengths are learnt, steps are off by 5 %. Each system is
tuned for each measure on requests of one seed and measured on others. `adaserve`, `vllm_spec` and `smart_spec` need a
drafter, `ascendra` and `distserve` two replicas; `scorpio` and `qoserve` are in `baselines-today` alone and hold less
than `edf`; `prefill_first`, `sarathi` with a budget and `sa` held at most 0.95 of the best other on every scenario:
they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside
from experiments._rubato_runs import GRID, NOISE, ScenarioTried
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.capacity import rate_or_zero
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES

SOURCE = "ours; scenarios of SLOs-Serve, §6.1"
SECONDS = 2500.0

OURS = "rubato"
STARTS = {"chatbot": 4.5, "coder": 1.8, "summarizer": 3.0, "mixed": 4.8, "toolllm": 0.22, "reasoning": 0.8}
COUNT, LONGEST, FEWER = 600, "reasoning", 200  # requests of a run; of those that live for minutes
SEEDS, TUNED_ON = (1, 2, 3, 4), 0
LEAST = 0.05  # of the start, what counts where no rate was found

SYSTEMS: Mapping[str, tuple[str, ...]] = {
    OURS: (OURS,),
    "slos_serve": ("slos_serve", "slos_serve:max_batch_seconds=0.1", "slos_serve:max_batch_seconds=0.018"),
    "edf": (
        "edf", "edf:safety_margin=0", "edf:max_ttft_share=1", "edf:max_ttft_share=1,safety_margin=0",
        "edf:max_ttft_share=1,safety_margin=0,decode_lead=1",
    ),
    "sarathi": (
        *(f"sarathi:budget={b},reserve_kv=true" for b in (0, 256, 512, 1024)),
        "sarathi:min_prefill_chunk_tokens=64,reserve_kv=true",
    ),
    "vllm": (
        *(f"vllm:budget={b},reserve_kv=true" for b in (512, 2048, 8192)),
        *(f"vllm:max_num_queued_reqs={n}" for n in (32, 64)),
    ),
    "polyserve": ("polyserve@polyserve:mode=co",),
    "scorpio": (
        "scorpio:ttft_reserve=0,reserve_kv=true",
        *(f"scorpio:mixed=true,budget={b},ttft_reserve=0,reserve_kv=true" for b in (256, 512)),
    ),
    "qoserve": (
        "qoserve:reserve_kv=true", "qoserve:alpha=0.001,reserve_kv=true", "qoserve:margin=1,reserve_kv=true",
    ),
    "jitserve": (
        "jitserve:max_num_seqs=128,budget=1024", "jitserve:max_num_seqs=128", "jitserve:max_num_seqs=256,budget=2048",
    ),
}  # fmt: skip
LEFT_OUT = ("scorpio", "qoserve")
TODAY = (*LEFT_OUT, "jitserve")  # of `baselines-today`, which has their settings from here
REASONING = (OURS, "slos_serve")  # hundreds of requests run at once there, and a run takes 15 s


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        return [
            Job(f"coder {name}", measured, ("coder", name, settings(name)[:1], (1,), 20))
            for name in beside(("slos_serve", OURS), policy)
        ]
    names = beside(tuple(name for name in SYSTEMS if name not in LEFT_OUT), policy)
    made = [
        Job(f"{scenario} {name}", measured, (scenario, name, settings(name), SEEDS, COUNT))
        for scenario in STARTS for name in names if scenario != LONGEST
    ]  # fmt: skip
    return made + [
        Job(f"{LONGEST} {name}", measured, (LONGEST, name, settings(name), SEEDS[:1], FEWER))
        for name in beside(REASONING, policy)
    ]


def settings(name: str) -> Sequence[str]:
    return SYSTEMS.get(name, (name,))


def measured(
    load: str, name: str, choices: Sequence[str], seeds: Sequence[int], count: int, replicas: int = 1
) -> dict[str, Any]:
    """By measure: the setting that was best on the tuning's requests, and what it holds on each seed."""
    start = STARTS[load] * replicas
    tuning = ScenarioTried(load, TUNED_ON, count, replicas)
    used = [ScenarioTried(load, seed, count, replicas) for seed in seeds]
    found: dict[str, Any] = {}
    for measure in MEASURES:
        tuned, choice = tuning.best(choices, start, measure) if len(choices) > 1 else (start, choices[0])
        rates = [rate_or_zero(partial(each.goodput, choice, tuned or start, measure)) for each in used]
        shares = [each.near(choice, rate) for each, rate in zip(used, rates, strict=True) if rate]
        tiers = [tier for tier in (shares[0] if shares else ()) if tier not in ("all", "worst")]
        found[measure] = {
            "setting": choice, "goodput": rates, "tiers": {t: float(np.mean([s[t] for s in shares])) for t in tiers},
        }  # fmt: skip
    return {
        "load": load, "name": name, "seeds": list(seeds), "start": start, "measures": found,
        "tried": [each.listed() for each in (tuning, *used)],
    }  # fmt: skip


# --------------------------------------------------------------------------- what was found


class Table:
    """Goodput (requests/s) of each system by load, measure and seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = {(v["load"], v["name"]): v for v in values}
        self.loads = list(dict.fromkeys(v["load"] for v in values))

    def others(self, load: str) -> list[str]:
        return [name for known, name in self.values if known == load and name in SYSTEMS and name != OURS]

    def goodput(self, load: str, name: str, measure: str) -> Any:
        value = self.values[load, name]
        return np.maximum(value["measures"][measure]["goodput"], LEAST * value["start"])

    def best(self, load: str, measure: str) -> str:
        """Of the others, the one whose mean over seeds is the largest."""
        best: str = max(self.others(load), key=lambda name: float(np.mean(self.goodput(load, name, measure))))
        return best

    def logs(self, load: str, measure: str) -> Any:
        """Logarithms of ours over the best of the others, by seed."""
        best = self.best(load, measure)
        return np.log(self.goodput(load, OURS, measure) / self.goodput(load, best, measure))

    def ratio(self, load: str, measure: str) -> Estimate:
        return over_seeds([float(x) for x in self.logs(load, measure)]).exp()

    def mean(self, loads: Sequence[str], measure: str) -> Estimate:
        """Geometric mean over loads, by seed."""
        each = np.array([self.logs(load, measure) for load in loads])
        return over_seeds([float(x) for x in each.mean(axis=0)]).exp()


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    scenarios = [load for load in table.loads if load != LONGEST]
    estimates = {}
    for measure, name in zip(MEASURES, ("90", "95", "each"), strict=True):
        estimates[f"scenarios-{name}"] = table.mean(scenarios, measure)
        estimates[f"least-scenario-{name}"] = min(
            (table.ratio(load, measure) for load in table.loads), key=lambda ratio: ratio.value
        )
    given = {
        "systems": {name: list(own) for name, own in SYSTEMS.items()}, "count": COUNT, "noise": NOISE, "grid": GRID,
        "lengths": "conditional_mean",
    }  # fmt: skip
    return Found(estimates, list(values), SEEDS[:1] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """Losses first: ours over the best of the others, ascending; then requests/s of each system."""
    table = Table(data)
    parts = []
    for measure in MEASURES:
        rows = [["load", "over the best other", "which is", "ours, requests/s"]]
        for load in sorted(table.loads, key=lambda load: table.ratio(load, measure).value):
            ratio, best = table.ratio(load, measure), table.best(load, measure)
            setting = table.values[load, best]["measures"][measure]["setting"]
            own = float(np.mean(table.goodput(load, OURS, measure)))
            rows.append([load, ratio.shown(), f"`{setting}`", f"{own:.3g}"])
        parts.append(f"{measure}:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
