"""AdaServe's selection against the best of all selections: Algorithm 2, Algorithm 1 and brute force.

Random forests of up to three requests with up to six candidates each, chances in eighths so that sums are exact, half
of them with children that add up to no more than their parent. Where the candidates are whole, every need can be met
and n_max does not bind, Algorithm 2 must be the best; elsewhere the distribution of what it gives away is shown. Trees
of beam search are held against the same tokens' trees of any depth and width, which Algorithm 1 chooses from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._exhaustive_selection import NOTHING, UNBOUND, brute_force, met, optimal, total
from rubato.core.plan import Tree
from rubato.engines.simulated.acceptance import AcceptanceProcess
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policy_kit.draft_tree import select

SOURCE = "AdaServe, §4.2, Algorithms 1 and 2"
SECONDS = 3.8
BEHAVIOURS = ("adaserve",)

FORESTS, PARTS = 9000, 6
BEAMS = ((2, 1), (4, 1), (4, 2), (4, 3), (8, 3))  # depth, width; the last two are the artifact's
CERTAINTY = 2.0  # of simulated drafts (`Acceptance`)
_FORESTS, _BEAMS = 74, 75  # random streams
CASES = {
    "infeasible": "not every need can be met",
    "n_max": "n_max (1 to 3) binds and changes what is chosen",
    **{f"beam {d} x {w}": f"beam search, depth {d}, width {w}, n_max {d + 1}" for d, w in BEAMS},
}


def jobs(small: bool) -> list[Job]:
    count = 150 if small else FORESTS // PARTS
    parts = range(1 if small else PARTS)
    return [
        *(Job(f"forests {part}", forests, (part, count)) for part in parts),
        *(Job(f"beams {part}", beams, (part, count)) for part in parts),
    ]


def forest(rng: np.random.Generator, proper: bool) -> Tree:
    """proper: children of a node are right with no more than its own probability together."""
    parents: list[int] = []
    paths: list[float] = []
    left: dict[int, int] = {}  # eighths
    for node in range(int(rng.integers(0, 7))):
        parent = int(rng.integers(-1, node))
        eighths = int(rng.integers(0, left.get(parent, 8) + 1 if proper else 9))
        left[parent] = left.get(parent, 8) - eighths
        parents.append(parent)
        paths.append((paths[parent] if parent >= 0 else 1.0) * eighths / 8.0)
    return Tree(tuple(parents), tuple(paths))


def forests(part: int, count: int) -> dict[str, Any]:
    """Where the algorithms are wrong, and what Algorithm 2 gives away elsewhere."""
    rng = np.random.default_rng([part, _FORESTS])
    counts = {"forests": 0, "feasible": 0, "invalid_wrong": 0, "algorithm_1": 0, "algorithm_2": 0}
    lost: dict[str, list[list[float]]] = {"infeasible": [], "n_max": []}
    for number in range(count):
        trees = [forest(rng, number % 2 == 0) for _ in range(int(rng.integers(1, 4)))]
        n = len(trees)
        needed = [int(rng.integers(4, 23)) / 8.0 for _ in trees]
        budget = int(rng.integers(max(0, n - 1), n + 11))
        best, any_, most = brute_force(trees, needed, budget)
        found, chosen = optimal(trees, needed, budget), select(trees, needed, budget, UNBOUND)
        counts["forests"] += 1
        counts["invalid_wrong"] += (found is None) != (best == NOTHING)
        if best == NOTHING:
            if n <= budget:
                lost["infeasible"].append([1.0 - total(trees, chosen) / any_, float(most - met(trees, chosen, needed))])
            continue
        counts["feasible"] += 1
        counts["algorithm_1"] += found is None or total(trees, found) != best
        counts["algorithm_2"] += total(trees, chosen) != best or met(trees, chosen, needed) < n
        bound = select(trees, needed, budget, int(rng.integers(1, 4)))
        if bound != chosen:
            lost["n_max"].append([1.0 - total(trees, bound) / best, float(n - met(trees, bound, needed))])
    return {"counts": counts, "lost": lost}


def beams(part: int, count: int) -> dict[str, Any]:
    """What a finite depth and width, with n_max = d + 1, gives away where every need can be met without them."""
    rng = np.random.default_rng([part, _BEAMS])
    lost: dict[str, list[list[float]]] = {f"beam {d} x {w}": [] for d, w in BEAMS}
    for _ in range(count):
        n, nodes = int(rng.integers(1, 5)), int(rng.integers(1, 13))
        drafters = [AcceptanceProcess(rng, float(rng.uniform(0.3, 0.9)), CERTAINTY) for _ in range(n)]
        needed = [float(rng.uniform(1.0, 3.5)) for _ in range(n)]
        # the most probable so many nodes lie within that depth, and within the so many most probable of their layer
        whole = [drafter.draft(0, nodes, nodes).tree for drafter in drafters]
        best = optimal(whole, needed, n + nodes)
        if best is None:
            continue
        for d, w in BEAMS:
            cut = [drafter.draft(0, d, w).tree for drafter in drafters]
            chosen = select(cut, [min(need, d + 1.0) for need in needed], n + nodes, d + 1)
            short = n - met(cut, chosen, needed)
            lost[f"beam {d} x {w}"].append([1.0 - total(cut, chosen) / total(whole, best), float(short)])
    return {"lost": lost}


def _cells(values: Sequence[Any]) -> list[dict[str, Any]]:
    cells = []
    for case, says in CASES.items():
        own = np.array([pair for v in values for pair in v["lost"].get(case, ())])
        gaps, short = own[:, 0], own[:, 1]
        cells.append({
            "case": case, "says": says, "forests": len(own), "equal": float(np.mean(np.abs(gaps) < 1e-9)),
            "mean": 100.0 * float(np.mean(gaps)), "p95": 100.0 * float(np.quantile(gaps, 0.95)),
            "worst": 100.0 * float(np.max(gaps)), "least": 100.0 * float(np.min(gaps)),
            "short": float(np.mean(short > 0)), "requests": float(np.mean(short)),
        })  # fmt: skip
    return cells


def found(values: Sequence[Any], small: bool) -> Found:
    counts: dict[str, int] = {}
    for value in values:
        for name, number in value.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + number
    cells = _cells(values)
    by = {cell["case"]: cell for cell in cells}
    estimates = {
        "forests": Estimate.exact(counts["feasible"]),
        "algorithm-2": Estimate.exact(counts["algorithm_2"]),
        "algorithm-1": Estimate.exact(counts["algorithm_1"]),
        "invalid": Estimate.exact(counts["invalid_wrong"]),
        "infeasible-gap": Estimate.exact(by["infeasible"]["mean"]),
        "beam-gap": Estimate.exact(by["beam 4 x 3"]["mean"]),
        "beam-short": Estimate.exact(100.0 * by["beam 4 x 3"]["short"]),
    }
    data = {"counts": counts, "cells": cells}
    return Found(estimates, data, range(len(values) // 2), "expected tokens", {"certainty": CERTAINTY})


def tables(data: Any) -> str:
    """gap: expected tokens below the best's, % (negative: more, as some request's need is not met)."""
    rows = [["Algorithm 2, where", "forests", "equal", "gap: mean %", "p95 %", "worst %", "least %", "someone short",
             "requests short"]]  # fmt: skip
    for cell in data["cells"]:
        numbers = [f"{cell[key]:.2f}" for key in ("mean", "p95", "worst", "least")]
        shares = [f"{100 * cell['short']:.1f} %", f"{cell['requests']:.2f}"]
        rows.append([cell["says"], str(cell["forests"]), f"{100 * cell['equal']:.0f} %", *numbers, *shares])
    counts = data["counts"]
    return f"{counts['feasible']:,} of {counts['forests']:,} forests are feasible.\n\n{markdown(rows)}"
