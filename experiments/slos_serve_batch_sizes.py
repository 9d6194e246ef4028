"""Time that SLOs-Serve and Sarathi spend in batches of each size, OPT-7B on Summarizer at 3.0 requests/s (Fig. 10a).

The paper says (§6.1) that SLOs-Serve spends up to a quarter of the time in batches of more than 512 tokens, and that
Sarathi's end at 512, which is the most that keeps its tightest TPOT on the paper's machine; on our profile that is more
(`sarathi:budget=0` finds it), and stands beside. SLOs-Serve drafts with OPT-125M, as in the paper. The rate is that of
one GPU (the paper does not say of how many).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._executed_batches import Replica, executed, jobs_of
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "SLOs-Serve, Fig. 10(a) and §6.1"
SECONDS = 26.0

PROFILE, SCENARIO, RATE = "opt-6.7b-a100-40g@vllm-2024", "summarizer", 3.0
EDGE = 512  # tokens
POLICIES = {  # and whether the engine drafts
    "slos-serve": ("slos_serve", True),
    "slos-serve-undrafted": ("slos_serve", False),
    "sarathi": (f"sarathi:budget={EDGE},reserve_kv=true", False),
    "sarathi-largest": ("sarathi:budget=0,reserve_kv=true", False),
}
SEEDS, COUNT, FEW = (1, 2, 3), 500, 12
SIZES = (0, 32, 64, 128, 256, 384, EDGE, 768, 1024, 1536, 2048)  # tokens, of the curve


def jobs(small: bool) -> list[Job]:
    return jobs_of(POLICIES, measured, SEEDS, COUNT, FEW, small)


def measured(name: str, count: int, seed: int) -> dict[str, Any]:
    """The share of execution time spent in batches of at most so many tokens, for each of `SIZES`."""
    policy, drafts = POLICIES[name]
    samples = executed(Replica(PROFILE, SCENARIO, RATE, drafts), policy, count, seed)
    tokens, seconds = (np.array(column) for column in zip(*((s.shape.tokens, s.seconds) for s in samples), strict=True))
    within = [float(seconds[tokens <= size].sum() / seconds.sum()) for size in SIZES]
    return {"policy": name, "seed": seed, "batches": len(samples), "largest": int(tokens.max()), "within": within}


def found(values: Sequence[Any], small: bool) -> Found:
    edge = SIZES.index(EDGE)
    estimates = {
        f"{name}-above-{EDGE}": over_seeds([1.0 - v["within"][edge] for v in values if v["policy"] == name])
        for name in POLICIES
    }
    settings = {
        "profile": PROFILE, "scenario": SCENARIO, "rate": RATE, "count": FEW if small else COUNT,
        "policies": {name: policy for name, (policy, _) in POLICIES.items()}, "sizes": SIZES,
    }  # fmt: skip
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "none", settings)


def _mean(data: Sequence[Mapping[str, Any]], name: str) -> Any:
    return np.mean([v["within"] for v in data if v["policy"] == name], axis=0)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Mean of the seeds."""
    rows = [["policy", *(f"≤ {size}" for size in SIZES[1:]), "largest batch"]]
    for name, (policy, drafts) in POLICIES.items():
        largest = max(v["largest"] for v in data if v["policy"] == name)
        label = f"`{policy}`{', drafts' if drafts else ''}"
        rows.append([label, *(f"{100 * share:.0f} %" for share in _mean(data, name)[1:]), f"{largest} tokens"])
    return f"Share of execution time in batches of at most so many tokens:\n\n{markdown(rows)}"


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    for name in POLICIES:
        axes.plot(SIZES, 100 * _mean(data, name), label=name)
    axes.axvline(EDGE, color="grey", linewidth=0.8)
    axes.set_xlabel("tokens of a batch")
    axes.set_ylabel("cumulative execution time (%)")
    axes.legend()
