"""Throughput, latency and time of the batches that SLOs-Serve executes, by their tokens (Fig. 2 and 10a).

Fig. 2: OPT-7B on an A100 of 40 GB and OPT-13B on an H100; each point is a batch with both prefill and decode tokens.
The paper shows an image without numbers and says of it that larger batches have more throughput, at the cost of
latency: here the quarter of the batches with the most tokens against that with the fewest. Scenario and rates are ours:
Mixed, at about 0.9 of what a replica holds. Step times are those of the profiles, which are of single kernels.

Fig. 10a: OPT-7B on Summarizer at 3.0 requests/s. The paper says (§6.1) that SLOs-Serve, which drafts with OPT-125M,
spends up to a quarter of the time in batches of more than 512 tokens, and that Sarathi's end at 512. The rate is that
of one GPU (the paper does not say of how many).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._executed_batches import Replica, executed, jobs_of
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "SLOs-Serve, Fig. 2, Fig. 10(a), §2.2 and §6.1"
SECONDS = 40.0

REPLICAS = {
    "opt-7b-a100": Replica("opt-6.7b-a100-40g@vllm-2024", "mixed", 3.0),
    "opt-13b-h100": Replica("opt-13b-h100@vllm-2024", "mixed", 5.0),
}
POLICY = "slos_serve"
SEEDS, COUNT, FEW = (1, 2, 3), 300, 20
POINTS = 300  # of a replica that the picture has, of the first seed

EDGE = 512  # tokens
SIZED = {"slos-serve": ("slos_serve", True), "sarathi": (f"sarathi:budget={EDGE},reserve_kv=true", False)}  # drafts
SIZED_COUNT, SIZED_FEW = 500, 12
SIZES = (32, 64, 128, 256, 384, EDGE, 768, 1024, 1536, 2048)  # tokens


def jobs(small: bool) -> list[Job]:
    return [
        *jobs_of(REPLICAS, measured, SEEDS, COUNT, FEW, small),
        *jobs_of(SIZED, sized, SEEDS, SIZED_COUNT, SIZED_FEW, small),
    ]


def measured(name: str, count: int, seed: int) -> dict[str, Any]:
    """Means of the quarters of its batches, from the fewest tokens to the most; some of them for the picture."""
    samples = executed(REPLICAS[name], POLICY, count, seed)
    mixed = [(s.shape.tokens, s.seconds) for s in samples if s.shape.chunks and s.shape.seqs > s.shape.chunks]
    mixed.sort()
    quarters = [np.array(part) for part in np.array_split(np.array(mixed), 4)]
    step = max(1, len(mixed) // POINTS)
    return {
        "replica": name, "seed": seed, "batches": len(mixed),
        "tokens": [float(q[:, 0].mean()) for q in quarters],
        "seconds": [float(q[:, 1].mean()) for q in quarters],
        "throughput": [float(q[:, 0].sum() / q[:, 1].sum()) for q in quarters],
        "points": [[int(tokens), round(seconds, 5)] for tokens, seconds in mixed[::step]] if seed == SEEDS[0] else [],
    }  # fmt: skip


def sized(name: str, count: int, seed: int) -> dict[str, Any]:
    """The share of execution time spent in batches of at most so many tokens, for each of `SIZES`."""
    policy, drafts = SIZED[name]
    samples = executed(Replica("opt-6.7b-a100-40g@vllm-2024", "summarizer", 3.0, drafts), policy, count, seed)
    tokens, seconds = (np.array(column) for column in zip(*((s.shape.tokens, s.seconds) for s in samples), strict=True))
    within = [float(seconds[tokens <= size].sum() / seconds.sum()) for size in SIZES]
    return {"policy": name, "seed": seed, "batches": len(samples), "largest": int(tokens.max()), "within": within}


def _of(values: Sequence[Mapping[str, Any]], key: str, name: str) -> list[Mapping[str, Any]]:
    return [v for v in values if v.get(key) == name]


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {
        f"{name}-{measure}": over_seeds([v[of][-1] / v[of][0] for v in _of(values, "replica", name)])
        for name in REPLICAS for measure, of in (("throughput", "throughput"), ("latency", "seconds"))
    }  # fmt: skip
    edge = SIZES.index(EDGE)
    for name in SIZED:
        shares = [1.0 - v["within"][edge] for v in _of(values, "policy", name)]
        estimates[f"{name}-above-{EDGE}"] = over_seeds(shares)
    settings = {
        "policy": POLICY, "count": FEW if small else COUNT, "policies": {name: own for name, (own, _) in SIZED.items()},
        "replicas": {name: [own.profile, own.scenario, own.rate] for name, own in REPLICAS.items()},
    }  # fmt: skip
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "none", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Each quarter's mean tokens, latency and throughput, and the time by size; means of the seeds."""
    rows = [["replica", "quarter", "tokens", "ms", "tokens/s"]]
    for name in REPLICAS:
        own = _of(data, "replica", name)
        for i, quarter in enumerate(("fewest tokens", "second", "third", "most tokens")):
            mean = {key: np.mean([v[key][i] for v in own]) for key in ("tokens", "seconds", "throughput")}
            rows.append([
                name, quarter, f"{mean['tokens']:.0f}", f"{1e3 * mean['seconds']:.1f}", f"{mean['throughput']:.0f}",
            ])  # fmt: skip
    sizes = [["policy", *(f"≤ {size}" for size in SIZES), "largest batch"]]
    for name in SIZED:
        own = _of(data, "policy", name)
        shares = np.mean([v["within"] for v in own], axis=0)
        sizes.append([name, *(f"{100 * share:.0f} %" for share in shares), f"{max(v['largest'] for v in own)} tokens"])
    return (
        f"Batches with prefill and decode tokens, by their tokens:\n\n{markdown(rows)}\n\n"
        f"Share of execution time in batches of at most so many tokens:\n\n{markdown(sizes)}"
    )


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """A point a batch: its latency and its throughput."""
    for value in data:
        if value.get("points"):
            tokens, seconds = np.array(value["points"]).T
            axes.plot(1e3 * seconds, tokens / seconds, ".", markersize=3, label=value["replica"])
    name_axes(axes, "latency of a batch (ms)", "throughput (tokens/s)")
