"""SA's largest gains, of its appendix: Qwen2.5-32B, 40 requests one at a time, and Qwen2.5-7B, 8 in batches of two.

The abstract's "up to 5 x" requests in SLO and "31.6 %" less latency are over LMDeploy on one A800. Here requests of
`sa-mixed`, all at once, on a simulated A800 of 80 GB (`operation_count`: an A100's arithmetic and memory, 5 ms a step
outside), served in order of arrival by vLLM's scheduler with as many sequences as the largest batch: LMDeploy batches
continuously, too, and is not simulated otherwise. The SLOs stay as they are (§5.1). SA knows lengths by a Gaussian of
400 earlier requests, a draw for each request as the paper has it, by their mean, or exactly; beside it the next
request whenever a place is free, and `edf`. The paper's figures are the best of its cells, of one run each: held
against them is the share of our runs of the cell that reach them, 1 in 10 or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import sa_gain as gain
from rubato.core.plan import Limits
from rubato.latency import operation_count
from rubato.latency.profiles.kernel_profiles import MODELS
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate_events

SOURCE = "SA, abstract and §5.2 (the appendix's figures)"
SECONDS = 240.0

CELLS: Mapping[tuple[int, int], str] = {(40, 1): "qwen2.5-32b", (8, 2): "qwen2.5-7b"}  # requests, batches of -> model
SEEDS = tuple(range(1, 41))
CARD, KEPT, BLOCK = 80 * 2**30, 3e9, 16  # bytes of memory, and of them for other than weights and KV; tokens
SYSTEMS: Mapping[str, gain.Served] = {
    "order of arrival": gain.ARRIVAL,
    "sa": gain.SA,
    "sa, mean lengths": gain.Served(lengths=gain.MEAN),
    "sa, exact lengths": gain.Served(lengths=gain.EXACT),
    "sa, a free place, mean lengths": gain.Served(settings=(("dispatch", "place"),), lengths=gain.MEAN),
    "edf": gain.Served("edf", "round_robin", lengths=gain.MEAN),
}


def jobs(small: bool) -> list[Job]:
    cells = {(4, b): model for (_, b), model in CELLS.items()} if small else CELLS
    return [
        Job(f"{name} n={n} b={b} seed={seed}", served, (name, model, n, b, seed))
        for (n, b), model in cells.items() for name in SYSTEMS for seed in (SEEDS[:2] if small else SEEDS)
    ]  # fmt: skip


def machine(model: str, batch: int) -> Hardware:
    """One A800 with so many sequences at once."""
    dims = MODELS[model].dims
    blocks = int((0.9 * CARD - dims.weight_bytes - KEPT) / dims.kv_bytes / BLOCK)
    limits = Limits(batch, 8192, 4096, blocks, BLOCK, max_running=batch)
    return Hardware(f"{model}, A800", operation_count.Model(dims), limits)


def served(name: str, model: str, n: int, b: int, seed: int) -> dict[str, Any]:
    how, load = SYSTEMS[name], gain.offered(n, seed)
    spec = RunSpec(
        machine(model, b), how.choice(), 1, "mean", lengths=lambda truth: gain.lengths(how.lengths, load, seed)
    )
    found = gain.measured(simulate_events(gain.longer(load), load.truth(), spec, seed))
    return {"name": name, "model": model, "n": n, "b": b, "seed": seed, **found}


def found(values: Sequence[Any], small: bool) -> Found:
    many, few = ((4, 1), (4, 2)) if small else CELLS
    estimates = {
        "attained-5-times": gain.reaching(values, "sa", [many], "attained", 5.0),
        "latency-31-6": gain.reaching(values, "sa", [few], "latency", 0.684),
    }
    seeds = sorted({v["seed"] for v in values})
    return Found(estimates, list(values), seeds, "mean", {"scenario": gain.SCENARIO, "gpu": "A800, simulated"})


def tables(data: Any) -> str:
    cells = list(dict.fromkeys((v["model"], v["n"], v["b"]) for v in data))
    head = [f"{model}, {n} at once, batches of {b}" for model, n, b in cells]
    rows = [["G × 1000, in SLO, mean latency", *head]]
    for name in SYSTEMS:
        row = [name]
        for _, n, b in cells:
            own = [v for v in data if (v["name"], v["n"], v["b"]) == (name, n, b)]
            mean = {key: np.mean([v[key] for v in own]) for key in ("g", "attained", "latency")}
            row.append(f"{1e3 * mean['g']:.1f} · {100 * mean['attained']:.0f} % · {mean['latency']:.1f} s")
        rows.append(row)
    return markdown(rows)
