"""AdaServe's adaptive depth and width against every fixed one, by load: is control worth having?

Llama-3.1-70B as in `adaserve-rate`, unequal acceptance, a TTFT of 2 s, at two rates, 30 s. Fixed (d, w): every tree
that is drafted has this depth and width, whatever the load. Adaptive: as deep as pays by the latency model, as wide as
equation 9 has it; and the paper's, equations 8 and 9 with the artifact's bounds and B at the model's knee. In all but
the last, how many nodes are verified, whether trees are drafted at all, and overload goes by what pays. The paper's
also without SLO-customised selection (needs 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import JUDGE, KNEE, KNEE_NO_NEEDS, OURS, REAL, SEEDS, choice, offered, served
from rubato.measure.confidence import over_seeds
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown

SOURCE = "AdaServe, §5.2 (adaptive control)"
SECONDS = 134.0
MODEL = "llama"
RATES = (4.8, 6.4)
DEPTHS, WIDTHS = (1, 2, 4, 8), (1, 3)
PLENTY = 1 << 14  # draft tokens of a step, so that every width fits
EQUATIONS, ALIKE = "equations 8 and 9", "equations 8 and 9, needs 0"
ADAPTIVE = (OURS, EQUATIONS, ALIKE)


def fixed(depth: int, width: int) -> str:
    return f"{depth} x {width}"


def policies(small: bool) -> dict[str, str]:
    depths, widths = (DEPTHS[1:3], WIDTHS[:1]) if small else (DEPTHS, WIDTHS)
    adaptive = {OURS: choice(MODEL, OURS), EQUATIONS: choice(MODEL, KNEE), ALIKE: choice(MODEL, KNEE_NO_NEEDS)}
    return adaptive | {
        fixed(d, w): f"adaserve:min_depth={d},max_depth={d},max_width={w},draft_tokens={PLENTY}"
        for d in depths
        for w in widths
    }


def jobs(small: bool) -> list[Job]:
    rates, seeds, seconds = (RATES[:1], SEEDS[:1], 2.0) if small else (RATES, SEEDS, 30.0)
    return [
        Job(f"{name} {rate} seed={seed}", measured, (name, policy, rate, seconds, seed))
        for rate in rates
        for seed in seeds
        for name, policy in policies(small).items()
    ]


def measured(name: str, policy: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    run = served(MODEL, policy, offered(MODEL, rate, seconds, seed), REAL, seed).summary()
    kept = {"share": run["share"][JUDGE], "goodput": run["goodput"][JUDGE], "accepted": run["accepted"]}
    return {"name": name, "rate": rate, "seed": seed, **kept}


def _by_rate(values: Sequence[Any], seed: int) -> dict[float, dict[str, float]]:
    """Rate -> name -> share attained."""
    own = [v for v in values if v["seed"] == seed]
    return {rate: {v["name"]: v["share"] for v in own if v["rate"] == rate} for rate in {v["rate"] for v in own}}


def rank(shares: Mapping[str, float], name: str) -> float:
    """Its place among the fixed ones: 1 = none is better."""
    return 1.0 + sum(share > shares[name] for other, share in shares.items() if other not in ADAPTIVE)


def _behind(shares: Mapping[str, float], name: str) -> float:
    """Points below (negative) the best fixed one."""
    return 100.0 * (shares[name] - max(share for other, share in shares.items() if other not in ADAPTIVE))


def _single(of: Mapping[float, Mapping[str, float]], name: str) -> float:
    """Points, mean over rates, below the one fixed (d, w) that is best over all of them."""
    means = {n: float(np.mean([shares[n] for shares in of.values()])) for n in next(iter(of.values()))}
    return _behind(means, name)


def found(values: Sequence[Any], small: bool) -> Found:
    seeds = sorted({v["seed"] for v in values})
    each = [_by_rate(values, seed) for seed in seeds]
    estimates = {}
    for name, word in ((OURS, "adaptive"), (EQUATIONS, "equations")):
        for rate in RATES:
            runs = [of.get(rate) or next(iter(of.values())) for of in each]  # a small run has one rate
            estimates[f"{word}-{rate}"] = over_seeds([_behind(shares, name) for shares in runs])
        estimates[f"{word}-over-rates"] = over_seeds([_single(of, name) for of in each])
        estimates[f"{word}-rank"] = over_seeds(
            [float(np.mean([rank(shares, name) for shares in of.values()])) for of in each]
        )
    estimates["equations-selection"] = over_seeds(
        [float(np.mean([100.0 * (shares[EQUATIONS] - shares[ALIKE]) for shares in of.values()])) for of in each]
    )
    return Found(estimates, list(values), seeds, "mean", {"policies": policies(small)})


def tables(data: Any) -> str:
    rates = list(dict.fromkeys(v["rate"] for v in data))
    rows = [["depth x width", *(f"{rate:g} requests/s" for rate in rates), "mean", "goodput", "accepted"]]
    mean: Callable[[Sequence[float]], float] = lambda own: float(np.mean(own))  # noqa: E731
    lines = []
    for name in dict.fromkeys(v["name"] for v in data):
        own = [v for v in data if v["name"] == name]
        shares = [mean([v["share"] for v in own if v["rate"] == rate]) for rate in rates]
        right = [v["accepted"] for v in own if v["accepted"] is not None]
        lines.append((mean(shares), name, shares, mean([v["goodput"] for v in own]), mean(right) if right else 0.0))
    for over, name, shares, goodput, accepted in sorted(lines, reverse=True):
        rows.append([name, *(f"{s:.3f}" for s in shares), f"{over:.3f}", f"{goodput:.0f}", f"{accepted:.2f}"])
    return markdown(rows)


def draw(data: Any, axes: Any) -> None:
    """Share attained by rate, adaptive ones bold."""
    rates = sorted({v["rate"] for v in data})
    for name in dict.fromkeys(v["name"] for v in data):
        own = [np.mean([v["share"] for v in data if (v["name"], v["rate"]) == (name, rate)]) for rate in rates]
        axes.plot(rates, own, linewidth=2.5 if name in ADAPTIVE else 0.7, label=name)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("attained")
    axes.legend(fontsize=6, ncols=2)
