"""PolyServe's limits: the largest batch and the cost of a request by TPOT, prompt, output and mode (Fig. 2, 3, 4).

Worked out by the paper's formulas (`planning/optimum.py`) for both terms of the host that fit some of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from experiments import Found
from experiments._axes import name_axes
from experiments._polyserve_runs import HOSTS, hardware
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.optimum import COSTS, StepParts, decode_limit

SOURCE = "PolyServe, §3.4 to §3.6, Fig. 2, 3 and 4"
SECONDS = 0.1

LENGTHS = ((1000, 4000), (4000, 1000), (512, 512), (4096, 1024), (100, 300))  # prompt, output; the first is §3.6's
TPOTS = (0.016, 0.018, 0.02, 0.025, 0.03, 0.04, 0.05, 0.07, 0.1)
TTFT = 0.7  # Fig. 4


def jobs(small: bool) -> list[Job]:
    return [Job(host, limits, (host,)) for host in HOSTS]


def limits(host: str) -> dict[str, Any]:
    made = hardware(host)
    parts = StepParts(made.model, made.limits)
    rows = []
    for prompt, output in LENGTHS:
        for tpot in TPOTS:
            costs = {mode: cost(parts, prompt, output, TTFT, tpot) for mode, cost in COSTS.items()}
            rows.append({
                "prompt": prompt, "output": output, "tpot": tpot,
                "batch": {mode: c.limit.batch for mode, c in costs.items()},
                "reason": {mode: c.limit.reason for mode, c in costs.items()},
                "cost": {mode: c.seconds for mode, c in costs.items()},
                "late": {mode: c.late for mode, c in costs.items()},
            })  # fmt: skip
    floor = decode_limit(parts, 1, 1, inf)
    return {"host": host, "rows": rows, "one_token": parts.gemm(1, 1), "largest": floor.batch}


def found(values: Sequence[Any], small: bool) -> Found:
    estimates: dict[str, float] = {}
    for value in values:
        name = value["host"].replace(" ", "-")
        by_tpot = {row["tpot"]: row for row in value["rows"] if (row["prompt"], row["output"]) == LENGTHS[0]}
        estimates[f"{name}-floor"] = 1e3 * value["one_token"]
        estimates[f"{name}-batch-20-ms"] = by_tpot[0.02]["batch"]["pd"]
        estimates[f"{name}-batch-40-ms"] = by_tpot[0.04]["batch"]["pd"]
        estimates[f"{name}-cost-20-over-40-ms"] = by_tpot[0.02]["cost"]["pd"] / by_tpot[0.04]["cost"]["pd"]
        falls = [
            after["cost"][mode] - before["cost"][mode]
            for before, after in zip(value["rows"], value["rows"][1:], strict=False)
            for mode in COSTS
            if after["tpot"] > before["tpot"]
        ]
        estimates[f"{name}-cost-rises"] = float(sum(change > 1e-9 for change in falls))
    settings = {"ttft": TTFT, "hosts": HOSTS}
    return Found({k: Estimate.exact(v) for k, v in estimates.items()}, list(values), [], "none", settings)


def draw(data: Any, axes: Any) -> None:
    """Seconds a request against TPOT, solid co-located, dashed apart, first host (Fig. 4)."""
    for place, (prompt, output) in enumerate(LENGTHS):
        own = [r for r in data[0]["rows"] if (r["prompt"], r["output"]) == (prompt, output)]
        for mode, style in (("co", "-"), ("pd", "--")):
            label = f"({prompt}, {output})" if mode == "co" else None
            costs = [r["cost"][mode] for r in own]
            axes.plot([1e3 * r["tpot"] for r in own], costs, style, color=f"C{place}", label=label)
    name_axes(axes, "TPOT, ms", "replica-seconds a request", log="y")


def tables(data: Any) -> str:
    parts = []
    for value in data:
        rows = [["prompt, output", *(f"{1e3 * tpot:g} ms" for tpot in TPOTS)]]
        for prompt, output in LENGTHS:
            own = [r for r in value["rows"] if (r["prompt"], r["output"]) == (prompt, output)]
            rows.append([f"{prompt}, {output}", *(f"{r['batch']['pd']} / {r['batch']['co']}" for r in own)])
        parts.append(f"Host {value['host']}: decodes apart / tokens co-located, by TPOT:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
