"""Our own policy with drafts: AdaServe's streams with a TTFT of 2 s, beside AdaServe and the other policies.

Chat, code and summaries of AdaServe's scenarios, whose TPOTs stay as they are, near what is held and beyond. Acceptance
of a drafted token: 0.7 for all; that of the suffix drafter, by application; and 0.7 on average, unequal by request and
token (assumed). Steps are off by 5 %, lengths are learnt, models go on learning. Judged by deadlines: token i is due at
TTFT + i * TPOT after arrival; beside it by the paper's judge, the mean TPOT, with the TTFT. The other whose mean over
seeds is the best in a cell counts; what is chosen so flatters the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import ACCEPTANCE, MODELS, fewer, hardware
from experiments._rate_search import geometric, shares_of
from rubato.engines.simulated import drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, conditional_mean
from rubato.simulation.simulate import simulate
from rubato.workloads import scenarios

SOURCE = "ours; streams and models of AdaServe, §6"
SECONDS = 604.0

TTFT = 2.0
RATES = {"llama": (5.0, 6.0), "qwen": (6.5, 8.0)}
EQUAL = "0.7"
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    EQUAL: ACCEPTANCE["0.7"],
    "suffix": ACCEPTANCE["suffix"],
    "unequal": {"alpha": 0.7, "spread": 0.15, "certainty": 2.0},
}
RUN, SEEDS, NOISE, MOST_TOKENS = 60.0, (4, 5, 6), 0.05, 2048  # RUN: seconds
OURS = "rubato"
OTHERS = (
    "adaserve", "adaserve:prefill_chunk=256", "vllm_spec:n=1", "vllm_spec:n=2,budget=512", "smart_spec", "slos_serve",
)  # fmt: skip


def jobs(small: bool) -> list[Job]:
    rates, seconds = ({model: own[:1] for model, own in RATES.items()}, 3.0) if small else (RATES, RUN)
    return [
        Job(f"{model} {accepted} {rate} seed={seed}", measured, (model, accepted, rate, seconds, seed))
        for model, own in rates.items() for accepted in list(DRAFTERS)[: 1 if small else None] for rate in own
        for seed in SEEDS[: 1 if small else None]
    ]  # fmt: skip


def measured(model: str, accepted: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Of each system the shares in SLO, by deadlines and by the mean TPOT, and of the worst tier."""
    load = scenarios.make(MODELS[model].scenario, rate, duration=seconds, seed=seed)
    load = load.with_slos({tier: replace(slo, ttft=TTFT) for tier, slo in load.tiers.items()})
    systems = {}
    for name in (OURS, *OTHERS):
        spec = RunSpec(
            hardware(model), PolicyChoice.parse(name), noise=NOISE, lengths=conditional_mean, learns=True,
            stated_max_tokens=MOST_TOKENS, drafter=drafter(MODELS[model].drafter, **DRAFTERS[accepted], seed=seed),
        )  # fmt: skip
        records = simulate(load, spec, seed, times=False, causes=False).records
        shares = shares_of(records)
        in_mean = [
            r.outcome == "completed" and (r.verdict.ttft or 0.0) <= TTFT
            and (r.verdict.tpot or 0.0) <= (load.tiers[r.tier].tpot or 0.0) for r in records
        ]  # fmt: skip
        systems[name] = {"all": shares["all"], "worst": shares["worst"], "mean": float(np.mean(in_mean))}
    given = {"model": model, "accepted": accepted, "rate": rate, "seed": seed}
    return given | {"requests": len(load.arrivals), "systems": systems}


def cells(values: Sequence[Any]) -> list[list[Any]]:
    """The runs of a cell, which differ in their seed."""
    keys = dict.fromkeys((v["model"], v["accepted"], v["rate"]) for v in values)
    return [[v for v in values if (v["model"], v["accepted"], v["rate"]) == key] for key in keys]


def share(cell: Sequence[Any], name: str, key: str = "all") -> float:
    """Percent, mean over seeds."""
    return 100.0 * float(np.mean([v["systems"][name][key] for v in cell]))


def best(cell: Sequence[Any], key: str = "all") -> str:
    return max(OTHERS, key=lambda name: share(cell, name, key))


def ahead(cell: Sequence[Any]) -> Estimate:
    """Points by which ours attains more than the best other."""
    other = best(cell)
    return over_seeds([100 * (v["systems"][OURS]["all"] - v["systems"][other]["all"]) for v in cell])


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {"least-cell": min(map(ahead, cells(values)), key=lambda points: points.value)}
    for model in RATES:
        own = [cell for cell in cells(values) if (cell[0]["model"], cell[0]["accepted"]) == (model, EQUAL)][-1]
        pairs = [(v["systems"][OURS]["all"], v["systems"][best(own)]["all"], v["requests"]) for v in own]
        estimates[f"{model}-violations"] = geometric([fewer(*pair) for pair in pairs])
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "deadline", {"ttft": TTFT})


def tables(values: Sequence[Any]) -> str:
    """Losses first."""
    rows = [["", "points ahead", "ours, worst tier", "the best other", "by mean TPOT: ours, the best other"]]
    for cell in sorted(cells(values), key=lambda cell: ahead(cell).value):
        shares = [f"{share(cell, n):.1f} %, {share(cell, n, 'worst'):.0f} %" for n in (OURS, best(cell))]
        by_mean = best(cell, "mean")
        rows.append([
            f"{cell[0]['model']}, acceptance {cell[0]['accepted']}, {cell[0]['rate']:g}/s", ahead(cell).shown("+.1f"),
            shares[0], f"{shares[1]} `{best(cell)}`",
            f"{share(cell, OURS, 'mean'):.1f} %, {share(cell, by_mean, 'mean'):.1f} % `{by_mean}`",
        ])  # fmt: skip
    return markdown(rows)
