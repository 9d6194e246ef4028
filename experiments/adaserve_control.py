"""AdaServe's adaptive depth and width against every fixed one, by load: is control worth having?

Llama-3.1-70B as in `adaserve-rate`, unequal acceptance, a TTFT of 2 s, at two rates, 30 s. Fixed (d, w): every tree
that is drafted has this depth and width, whatever the load. Adaptive: as deep as pays by the latency model, as wide as
equation 9 has it; and the paper's, equations 8 and 9 with the artifact's bounds and B at the model's knee. In all but
the last, how many nodes are verified, whether trees are drafted at all, and overload goes by what pays. The paper's
also without SLO-customised selection (needs 0).

Beside it, the constants c1 and c2 of these equations, which the paper found by search, with B1 at the knee and at the
artifact's 512, at the higher rate; how often needs change what is selected; and the chunk of prompts: 6.0 requests/s,
45 s, on seeds that chose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import JUDGE, KNEE, KNEE_NO_NEEDS, OURS, REAL, SEEDS, choice, offered, served
from experiments._counting_adaserve import Scheduler as Counting
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "AdaServe, §5.2 (adaptive control)"
SECONDS = 200.0
MODEL = "llama"
RATES = (4.8, 6.4)
DEPTHS, WIDTHS = (1, 2, 4, 8), (1, 3)
PLENTY = 1 << 14  # draft tokens of a step, so that every width fits
EQUATIONS, ALIKE = "equations 8 and 9", "equations 8 and 9, needs 0"
ADAPTIVE = (OURS, EQUATIONS, ALIKE)
NUMBERS = ("changed", "steps", "moved", "nodes", "lacking", "entries")
COUNTING = "experiments._counting_adaserve"
SEARCHED = [(b1, c1, c2) for b1 in (0, 512) for c1 in (0, 32, 96) for c2 in (0, -1)]  # B1 0: B
CHUNK, CHUNKS, CHUNK_RATE, CHUNK_SEEDS = 256, (128, 256, 512, 1024), 6.0, (6, 7, 8, 9, 10, 11)


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
    chunks, chunk_seeds, longer = (CHUNKS[1:3], CHUNK_SEEDS[:1], 2.0) if small else (CHUNKS, CHUNK_SEEDS, 45.0)
    return [
        *(
            Job(f"{name} {rate} seed={seed}", measured, (name, policy, rate, seconds, seed))
            for rate in rates
            for seed in seeds
            for name, policy in policies(small).items()
        ),
        *(Job(f"needs {rate} seed={seed}", counted, (rate, seconds, seed)) for rate in rates for seed in seeds),
        *(
            Job(f"constants {constants} seed={seed}", searched, (constants, rates[-1], seconds, seed))
            for constants in (SEARCHED[:2] if small else SEARCHED)
            for seed in seeds
        ),
        *(
            Job(f"chunk {chunk} seed={seed}", of_chunk, (chunk, longer, seed))
            for chunk in chunks
            for seed in chunk_seeds
        ),
    ]


def measured(name: str, policy: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    run = served(MODEL, policy, offered(MODEL, rate, seconds, seed), REAL, seed).summary()
    kept = {"share": run["share"][JUDGE], "goodput": run["goodput"][JUDGE], "accepted": run["accepted"]}
    return {"name": name, "rate": rate, "seed": seed, **kept}


def counted(rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """What needs change in the selection."""
    Counting.counts.clear()
    served(MODEL, COUNTING, offered(MODEL, rate, seconds, seed), REAL, seed)
    return {"rate": rate, "seed": seed, "counts": dict(Counting.counts)}


def searched(constants: tuple[int, int, int], rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """The paper's equations with these B1, c1 and c2."""
    knee = choice(MODEL, KNEE).partition(":")[2]
    words = ",".join(f"{name}={value}" for name, value in zip(("b1", "c1", "c2"), constants, strict=True))
    run = measured("", f"experiments._searched_adaserve:{knee},{words}", rate, seconds, seed)
    return run | {"constants": list(constants)}


def of_chunk(chunk: int, seconds: float, seed: int) -> dict[str, Any]:
    """Ours with so many prompt tokens a step."""
    return measured("", f"adaserve:prefill_chunk={chunk}", CHUNK_RATE, seconds, seed) | {"chunk": chunk}


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


def controlled(values: Sequence[Any]) -> list[Any]:
    """Without the runs of chunks, of constants, and of what needs change."""
    return [v for v in values if not {"chunk", "counts", "constants"} & v.keys()]


def chunk_shares(values: Sequence[Any]) -> dict[int, list[float]]:
    """Chunk -> share attained, by seed."""
    own = [v for v in values if "chunk" in v]
    return {chunk: [v["share"] for v in own if v["chunk"] == chunk] for chunk in dict.fromkeys(v["chunk"] for v in own)}


def of_constants(values: Sequence[Any]) -> dict[tuple[int, ...], list[float]]:
    """B1, c1, c2 -> share attained, by seed; the best in the mean first."""
    found: dict[tuple[int, ...], list[float]] = {}
    for v in values:
        if "constants" in v:
            found.setdefault(tuple(v["constants"]), []).append(v["share"])
    return dict(sorted(found.items(), key=lambda item: -float(np.mean(item[1]))))


def found(values: Sequence[Any], small: bool) -> Found:
    own = controlled(values)
    seeds = sorted({v["seed"] for v in own})
    each = [_by_rate(own, seed) for seed in seeds]
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
    searched = of_constants(values)
    best, unsearched = next(iter(searched.values())), searched[SEARCHED[0]]
    estimates["equations-searched"] = over_seeds([100.0 * (a - b) for a, b in zip(best, unsearched, strict=True)])
    chunks = chunk_shares(values)
    other = max((c for c in chunks if c != CHUNK), key=lambda c: float(np.mean(chunks[c])))
    for name, less in (("chunk", other), ("chunk-artifact", CHUNKS[-1])):
        pairs = zip(chunks[CHUNK], chunks.get(less, chunks[other]), strict=True)
        estimates[name] = over_seeds([100.0 * (a - b) for a, b in pairs])
    return Found(estimates, list(values), seeds, "mean", {"policies": policies(small), "chunk_seeds": CHUNK_SEEDS})


def tables(data: Any) -> str:
    parts = [_of_depths(controlled(data))]
    rows = [["requests/s", "steps in which needs change the nodes, %", "nodes that are others, %",
             "entries that need more than one token, %"]]  # fmt: skip
    counts = [v for v in data if "counts" in v]
    for rate in dict.fromkeys(v["rate"] for v in counts):
        of = {name: sum(v["counts"].get(name, 0) for v in counts if v["rate"] == rate) for name in NUMBERS}
        shares = [100.0 * of[part] / of[whole] for part, whole in (NUMBERS[:2], NUMBERS[2:4], NUMBERS[4:])]
        rows.append([f"{rate:g}", *(f"{share:.2f}" for share in shares)])
    rows_of_constants = [["B1 (0: B), c1, c2", "in SLO"]]
    rows_of_constants += [[str(own), f"{np.mean(shares):.3f}"] for own, shares in of_constants(data).items()]
    rows_of_chunks = [["tokens of prompts a step", "in SLO"]]
    rows_of_chunks += [[str(chunk), f"{np.mean(own):.3f}"] for chunk, own in chunk_shares(data).items()]
    return "\n\n".join([*parts, markdown(rows), markdown(rows_of_constants), markdown(rows_of_chunks)])


def _of_depths(data: Any) -> str:
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
    data = controlled(data)
    rates = sorted({v["rate"] for v in data})
    for name in dict.fromkeys(v["name"] for v in data):
        own = [np.mean([v["share"] for v in data if (v["name"], v["rate"]) == (name, rate)]) for rate in rates]
        axes.plot(rates, own, linewidth=2.5 if name in ADAPTIVE else 0.7, label=name)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("attained")
    axes.legend(fontsize=6, ncols=2)
