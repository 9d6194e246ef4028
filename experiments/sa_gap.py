"""SA's annealing against exhaustive search: how much of the best G it finds, for up to 8 requests at once.

Requests of `sa-mixed` (half chat, half code, lengths assumed), the paper's latency model, true output lengths. Each
instance is searched as printed, which stops early when every SLO is met in order of execution time (`early_exit`), and
without that. The gap is 1 - G / the best G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._exhaustive_mapping import exhaustive
from rubato.latency import bilinear
from rubato.measure.confidence import Estimate
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.policies.sa import Annealing, MappedRequest, Predicted, anneal
from rubato.workloads import scenarios

SOURCE = "SA, §5.2 and Fig. 7"
SECONDS = 53.0

SCENARIO = "sa-mixed"
COUNTS, BATCHES = (4, 6, 8), (1, 2, 4)
INSTANCES, PART = 200, 50  # of a cell, and of a job
EQUAL = 1e-9  # a gap below it is none: sums are taken in another order
_SEARCH = 71  # random stream


def jobs(small: bool) -> list[Job]:
    counts, parts = (COUNTS[:2], 1) if small else (COUNTS, INSTANCES // PART)
    return [
        Job(f"n={n} b={b} part={part}", searched, (n, b, part, 5 if small else PART))
        for n in counts
        for b in BATCHES
        for part in range(parts)
    ]


def instance(n: int, seed: int) -> list[MappedRequest]:
    """So many requests of the scenario, with their true lengths."""
    load = scenarios.make(SCENARIO, 1.0, count=n, seed=seed)
    return [MappedRequest(a.id, a.prompt_tokens, a.output_tokens, load.slo(a)) for a in load.arrivals]


def searched(n: int, b: int, part: int, instances: int) -> dict[str, Any]:
    model, evaluations = bilinear.Model(), 0
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(part * instances, (part + 1) * instances):
        given = Predicted.of(instance(n, seed), model, b)
        best = exhaustive(given)
        evaluations = best.evaluations
        for early, found in gaps.items():
            reached = anneal(given, Annealing(early_exit=early), np.random.default_rng([seed, _SEARCH])).g
            found.append(1.0 - reached / best.g if best.g else 0.0)
    return {"n": n, "b": b, "early_exit": gaps[True], "to_the_end": gaps[False], "evaluations": evaluations}


def _cells(values: Sequence[Any]) -> list[dict[str, Any]]:
    keys = dict.fromkeys((v["n"], v["b"]) for v in values)
    cells = []
    for n, b in keys:
        own = [v for v in values if (v["n"], v["b"]) == (n, b)]
        cell: dict[str, Any] = {"n": n, "b": b, "exhaustive": own[0]["evaluations"]}
        for how in ("early_exit", "to_the_end"):
            gaps = np.array([g for v in own for g in v[how]])
            cell["instances"] = len(gaps)
            cell[how] = {
                "equal": float(np.mean(gaps <= EQUAL)),
                "mean": 100.0 * float(np.mean(gaps)),
                "p95": 100.0 * float(np.quantile(gaps, 0.95)),
                "worst": 100.0 * float(np.max(gaps)),
            }
        cells.append(cell)
    return cells


def found(values: Sequence[Any], small: bool) -> Found:
    cells = _cells(values)

    def most(how: str, number: str) -> Estimate:
        return Estimate.exact(max(max(0.0, cell[how][number]) for cell in cells))

    estimates = {
        "mean-gap": most("to_the_end", "mean"),
        "mean-gap-aim": most("to_the_end", "mean"),
        "worst-gap": most("to_the_end", "worst"),
        "worst-gap-as-printed": most("early_exit", "worst"),
    }
    settings = {"scenario": SCENARIO, "instances": cells[0]["instances"]}
    return Found(estimates, cells, range(cells[0]["instances"]), "predicted", settings)


def tables(data: Any) -> str:
    rows = [
        ["requests", "max batch", "exhaustive, evaluations", "search", "equal", "gap: mean %", "p95 %", "worst %"],
        *(
            [
                str(cell["n"]), str(cell["b"]), f"{cell['exhaustive']:,}", name, f"{100 * cell[how]['equal']:.0f} %",
                *(f"{abs(cell[how][number]):.2f}" for number in ("mean", "p95", "worst")),
            ]
            for cell in data
            for how, name in (("early_exit", "as printed"), ("to_the_end", "no early exit"))
        ),
    ]  # fmt: skip
    return markdown(rows)
