"""SA's search: its time, its evaluations, and what annealing accepts.

CPU milliseconds of one mapping, the median of instances of `sa-mixed`, one request at a time: all 6,300 evaluations and
the two starts, or these alone where order of execution time meets every SLO (Algorithm 1 ends there). Two and four
instances are mapped one after the other, as the paper does. Exhaustive search evaluates one of the orders that differ
only within batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._exhaustive_mapping import exhaustive
from experiments.sa_gap import instance
from rubato.core.clock import process_cpu_time
from rubato.latency import bilinear
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policies.sa import Predictions
from rubato.policy_kit.annealing import Annealing, Solution, anneal

SOURCE = "SA, Table 1, §5.2 and §5.5"
SECONDS = 66.0
ALONE = True

COUNTS = (4, 6, 8, 10, 40)
TABLE = {4: 0.23, 6: 0.32, 8: 0.43, 10: 0.48}  # ms, the paper's
EXHAUSTIVE = {4: 1.2, 6: 39.0, 8: 88.2e3, 10: 287e3}  # ms, the paper's
SEVERAL = {2: 0.93, 4: 1.91}  # ms for so many instances of 10 requests, the paper's
BATCH = 1  # Table 1's
REPEATS = 30
SEEDS = tuple(range(1, 9))
HOW = Annealing()
_SEARCH = 73  # random stream


def jobs(small: bool) -> list[Job]:
    repeats = 3 if small else REPEATS
    made = [Job(f"n={n} seed={seed}", timed, (n, 1, seed, repeats)) for n in COUNTS for seed in SEEDS]
    made += [Job(f"instances={k} seed={seed}", timed, (10, k, seed, repeats)) for k in SEVERAL for seed in SEEDS]
    return [*made, *(Job(f"exhaustive n={n}", exhaustively, (n,)) for n in (COUNTS[:2] if small else COUNTS[:4]))]


def timed(n: int, instances: int, seed: int, repeats: int) -> dict[str, Any]:
    """Searches after one that does not count (it loads the compiled code)."""
    model, rng = bilinear.Model(), np.random.default_rng([seed, _SEARCH])
    ms: list[float] = []
    found: list[Solution] = []
    for repeat in range(repeats + 1):
        given = [Predictions().predict(instance(n, 1000 * seed + repeat), model, BATCH) for _ in range(instances)]
        begin = process_cpu_time()
        solutions = [anneal(each, HOW, rng) for each in given]
        ms.append(1e3 * (process_cpu_time() - begin))
        found.append(solutions[0])
    searched = [each.levels for each in found if len(each.levels)]
    temperatures, worse, accepted = sum(searched[1:], searched[0]).T if searched else np.empty((3, 0))
    return {
        "n": n, "instances": instances, "seed": seed, "ms": float(np.median(ms[1:])),
        "evaluations": max(each.evaluations for each in found), "searched": len(searched) / len(found),
        "temperatures": (temperatures / max(1, len(searched))).tolist(), "worse": worse.tolist(),
        "accepted": accepted.tolist(),
    }  # fmt: skip


def exhaustively(n: int) -> dict[str, Any]:
    given = Predictions().predict(instance(n, 1), bilinear.Model(), BATCH)
    exhaustive(Predictions().predict(instance(2, 1), bilinear.Model(), BATCH))  # loads the compiled code
    begin = process_cpu_time()
    evaluations = exhaustive(given).evaluations
    return {"n": n, "exhaustive": 1e3 * (process_cpu_time() - begin), "evaluations": evaluations}


def found(values: Sequence[Any], small: bool) -> Found:
    def ms(n: int, instances: int = 1) -> Estimate:
        return over_seeds([v["ms"] for v in values if v.get("instances") == instances and v["n"] == n])

    estimates = {
        "evaluations-10": Estimate.exact(next(v["evaluations"] for v in values if v["n"] == 10)),
        "ms-10-table": ms(10),
        "ms-2-instances": ms(10, 2),
        "ms-4-instances": ms(10, 4),
    }
    return Found(estimates, list(values), SEEDS, "none", {"max_batch": BATCH, "repeats": 3 if small else REPEATS})


def draw(data: Any, axes: Any) -> None:
    """The share of worse solutions that is accepted, by temperature."""
    for n in COUNTS:
        own = [v for v in data if v.get("instances") == 1 and v["n"] == n and v["temperatures"]]
        worse, accepted = (np.sum([v[name] for v in own], axis=0) for name in ("worse", "accepted"))
        if own:
            axes.plot(own[0]["temperatures"], 100 * accepted / np.maximum(1, worse), label=f"{n} requests")
    axes.invert_xaxis()
    name_axes(axes, "temperature", "worse solutions accepted (%)")


def tables(data: Any) -> str:
    def of(n: int, instances: int) -> list[Any]:
        return [v for v in data if v.get("instances") == instances and v["n"] == n]

    head = "requests; instances; evaluations at most; searched; ms; the paper's"
    rows = [[*head.split("; "), "exhaustive, ms", "evaluations", "the paper's"]]
    for n, instances in [*((n, 1) for n in COUNTS), *((10, k) for k in SEVERAL)]:
        own, beside = of(n, instances), [v for v in data if "exhaustive" in v and v["n"] == n and instances == 1]
        paper = TABLE.get(n, "") if instances == 1 else SEVERAL[instances]
        rows.append(
            [
                str(n), str(instances), f"{instances * max(v['evaluations'] for v in own):,}",
                f"{100 * np.mean([v['searched'] for v in own]):.0f} %",
                f"{np.median([v['ms'] for v in own]):.2f}", str(paper),
                *([f"{beside[0]['exhaustive']:.2f}", f"{beside[0]['evaluations']:,}", f"{EXHAUSTIVE[n]:g}"]
                  if beside else ["", "", ""]),
            ]
        )  # fmt: skip
    return markdown(rows)
