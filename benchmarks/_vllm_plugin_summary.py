"""What `vllm_plugin.py` has found, from the files of its cells: attainment and latency, capacities, ratios to stock."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from _capacity_estimate import capacities, crossing

from rubato.demo.runs import MEAN_OUTPUT_TOKENS, MEAN_PROMPT_TOKENS, UNLOADED_PROMPT_TOKENS, Unloaded
from rubato.measure import results
from rubato.measure.confidence import Estimate, attainment_over_seeds, over_seeds

STOCK = "stock"

Rows = Sequence[Mapping[str, Any]]  # cells as their files keep them


@dataclass
class Baseline:
    """What was found about stock before the cells. asked: settings that all cells share. tries: rate -> attainment."""

    asked: Mapping[str, Any]
    alone: Unloaded | None = None
    tries: dict[float, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, asked: Mapping[str, Any]) -> Baseline:
        """Raises SystemExit where the folder is of other settings."""
        if not path.exists():
            return cls(asked)
        found = json.loads(path.read_text())
        if found["asked"] != asked:
            raise SystemExit(f"{path} is of other settings: give another --out.\n{found['asked']}\n{dict(asked)}")
        return cls(asked, Unloaded(**found["alone"]), {float(r): a for r, a in found["tries"]})

    def write(self, path: Path) -> None:
        assert self.alone is not None
        path.write_bytes(
            results.as_json({"asked": self.asked, "alone": self.alone, "tries": list(self.tries.items())})
        )  # fmt: skip

    @property
    def start(self) -> float:
        """A first guess of the rate that is held."""
        assert self.alone is not None
        return guess(self.alone)

    def speed(self, alone: Unloaded) -> float:
        """Of the machine now, when stock unloaded takes that long, as a multiple of that at the search."""
        return guess(alone) / self.start

    def rate(self) -> float:
        """Raises SystemExit when no rate was held."""
        rates = sorted(self.tries)
        found, bound = crossing(rates, [self.tries[r] for r in rates])
        if bound == "at most":
            raise SystemExit(f"stock held none of {len(rates)} rates down to {found:.2f}/s: is something else running?")
        return found


def guess(alone: Unloaded) -> float:
    """Requests/s: prefills one after the other, decodes twenty at once."""
    return 1.0 / (MEAN_PROMPT_TOKENS * alone.ttft / UNLOADED_PROMPT_TOKENS + MEAN_OUTPUT_TOKENS * alone.step / 20)


def summary(rows: Rows, base: Baseline, rate: float, seeds: int, factors: Sequence[float]) -> dict[str, Any]:
    """As docs/measurements/README.md says."""
    assert base.alone is not None
    labels = list(dict.fromkeys(r["contender"] for r in sorted(rows, key=lambda r: (r["plugin"], r["contender"]))))
    values: dict[str, Any] = {
        "requests/s that stock holds, searched": rate,
        "attained at rates tried, share": {f"{r:.3g}": base.tries[r] for r in sorted(base.tries)},
        "stock unloaded, seconds": {
            f"TTFT of {UNLOADED_PROMPT_TOKENS} tokens": base.alone.ttft,
            "decode step": base.alone.step,
        },
        "SLOs, seconds": {tier: slo.bounds for tier, slo in base.alone.slos().items()},
        "settings": {name: value for name, value in base.asked.items() if value is not None},
        "cells": {
            f"{f:g} of it": {
                label: pooled(own)
                for label in labels
                if (own := [r for r in rows if (r["contender"], r["factor"]) == (label, f)])
            }
            for f in sorted(factors)
        },
        **capacity(rows, going_on(rows, labels), rate, seeds, factors),
    }
    for name in ("ttft", "tpot"):
        values[f"median {name.upper()} over stock's, paired by seed"] = {
            f"{f:g} of it": {label: spread(ratio) for label in labels if (ratio := paired(rows, label, f, name))}
            for f in sorted(factors)
            if f < 1.0
        }
    last = max(rows, key=lambda r: str(r["ended"]))
    told = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in told}
    flags = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in cpu.get("flags", "").split()]
    return {
        "format": "rubato-measurement/1",
        "date": last["ended"][:10],
        "commit": last["commit"],
        "machine": {
            "cpu": f"{cpu.get('model name')}, family {cpu.get('cpu family')}, {' '.join(flags)}",
            "cores": len(os.sched_getaffinity(0)),
            "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            "versions": [*sorted({f"vllm {r['vllm']}" for r in rows}), f"python {platform.python_version()}"],
            **({"gpu": gpu()} if base.asked["gpu"] else {}),
        },
        "command": shlex.join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]),
        "seeds": sorted({r["seed"] for r in rows}),
        "values": values,
        "notes": list(notes(rows)),
    }


@cache
def gpu() -> str:
    """The card's name, or why it is unknown."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def going_on(rows: Rows, labels: Sequence[str]) -> list[str]:
    """Without the values of one setting that met fewer SLOs with the first seed than its best value."""
    met: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["tuned"] and row["seed"] == 1:
            of = met.setdefault(row["tuned"], {})
            of[row["contender"]] = of.get(row["contender"], 0) + sum(row["run"]["requests"]["met"])
    left_out = {label for of in met.values() for label in of if label != max(of, key=lambda name: of[name])}
    return [label for label in labels if label not in left_out]


def notes(rows: Rows) -> Iterator[str]:
    yield "attained: met of offered, by the deadline rule; mean and interval over seeds, at least as wide as Wilson's"
    yield "capacity: 90 % attained, on a line between rates; interval by a bootstrap over seeds and blocks of requests"
    speeds = sorted({r["speed"] for r in rows})
    yield (
        "rates and SLOs follow the machine's speed, by stock unloaded before each rate and seed: "
        f"{speeds[0]:.2f} to {speeds[-1]:.2f} times that at the search"
    )
    yield "an end of an interval that is the lowest or highest rate measured is a bound"
    share = sorted(r["others"] for r in rows)
    yield f"other programs used {share[len(share) // 2]:.0%} of a core (median cell; at most {share[-1]:.0%})"
    if len(commits := {r["commit"] for r in rows}) > 1:
        yield f"cells are of {len(commits)} commits: {', '.join(sorted(commits))}"
    if changed := sum(r["changed"] for r in rows):
        yield f"{changed} of {len(rows)} cells ran with changes to their commit"
    for row in rows:
        for problem in row["run"]["problems"]:
            yield f"{row['contender']}, {row['factor']:g}, seed {row['seed']}: {problem}"


def pooled(own: Rows) -> dict[str, Any]:
    """One contender at one rate, its seeds together."""
    own = sorted(own, key=lambda r: int(r["seed"]))
    columns = [r["run"]["requests"] for r in own]
    met, offered = [sum(c["met"]) for c in columns], [len(c["met"]) for c in columns]
    tiers = [pair for c in columns for pair in zip(c["tier"], c["met"], strict=True)]
    values: dict[str, Any] = {
        "met, by seed": met,
        "offered, by seed": offered,
        "attained, percent": {k: 100 * v for k, v in spread(attainment_over_seeds(met, offered)).items()},
        "met and offered, by tier": {
            tier: [sum(m for t, m in tiers if t == tier), sum(t == tier for t, _ in tiers)]
            for tier in own[0]["run"]["workload"]["tiers"]
        },
        "failed or refused": sum(outcome != "completed" for c in columns for outcome in c["outcome"]),
        "client's lag p99, seconds": max(r["run"]["client"]["lag_p99"] for r in own),
        "others, share of a core": statistics.mean(r["others"] for r in own),
    }
    for name in ("ttft", "tpot"):
        if known := [v for c in columns for v in c[name] if v is not None]:
            for share in (0.5, 0.99):
                values[f"{name.upper()} p{100 * share:.0f}, seconds"] = float(np.quantile(known, share))
    if counts := {name: sum(r["plans"].get(name, 0.0) for r in own) for name in own[0]["plans"]}:
        values["plans"] = counts
    return values


def capacity(rows: Rows, labels: Sequence[str], rate: float, seeds: int, factors: Sequence[float]) -> dict[str, Any]:
    """Nothing while no seed has all its cells."""
    at = {(r["contender"], r["factor"], r["seed"]): r["run"]["requests"]["met"] for r in rows}
    done = [s for s in range(1, seeds + 1) if all((label, f, s) in at for label in labels for f in factors)]
    if not done or STOCK not in labels:
        return {}
    met = {label: {f * rate: [at[label, f, s] for s in done] for f in factors} for label in labels}
    own, ratios = capacities(met, [label for label in labels if label.partition(",")[0] == STOCK])
    return {
        "seeds of the capacities": done,
        "capacity, requests/s": {label: asdict(value) for label, value in own.items()},
        "capacity over the best stock's": {label: asdict(value) for label, value in ratios.items()},
    }


def paired(rows: Rows, label: str, factor: float, name: str) -> Estimate | None:
    """The median over stock's: the geometric mean of the seeds that both have, and its interval."""
    of: dict[str, dict[int, float]] = {STOCK: {}, label: {}}
    for r in rows:
        if r["factor"] == factor and r["contender"] in of:
            known = [v for v in r["run"]["requests"][name] if v is not None]
            if known:
                of[r["contender"]][r["seed"]] = statistics.median(known)
    both = sorted(of[STOCK].keys() & of[label].keys())
    if label == STOCK or len(both) < 2:
        return None
    return over_seeds([log(of[label][s] / of[STOCK][s]) for s in both]).exp()


def spread(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.value, "low": estimate.low, "high": estimate.high}


def shown(told: Mapping[str, Any]) -> str:
    """The summary as tables."""
    values = told["values"]
    lines = ["| rate | contender | attained, % | TTFT p50, p99, s | TPOT p50, p99, s | others |", "|---" * 6 + "|"]
    for at, cells in values["cells"].items():
        for label, v in cells.items():
            share, both = v["attained, percent"], [f"{n} p{q}, seconds" for n in ("TTFT", "TPOT") for q in (50, 99)]
            ttft, ttfts, tpot, tpots = (f"{v[key]:.3f}" if key in v else "-" for key in both)
            lines.append(
                f"| {at} | {label} | {share['mean']:.0f} [{share['low']:.0f}, {share['high']:.0f}] "
                f"| {ttft}, {ttfts} | {tpot}, {tpots} | {v['others, share of a core']:.0%} |"
            )
    for title in ("capacity, requests/s", "capacity over the best stock's"):
        lines += ["", f"{title}:"]
        for label, v in values.get(title, {}).items():
            lines.append(
                f"  {label}: {v['bound']} {v['value']:.2f} [{v['low']:.2f}, {v['high']:.2f}]".replace(":  ", ": ")
            )
    for title in (key for key in values if key.startswith("median")):
        for at, ratios in values[title].items():
            said = (f"{label} {r['mean']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for label, r in ratios.items())
            lines.append(f"{title}, {at}: {'; '.join(said)}")
    return "\n".join(lines)


def cost(rows: Rows) -> str:
    """CPU time of the engine core's thread, from cells of timed schedulers."""
    lines = [
        "| contender | steps | schedule µs | update µs | both, mean | both, p99 | tokens a step |",
        "|---" * 7 + "|",
    ]
    for label in dict.fromkeys(r["contender"] for r in rows):
        if steps := [line for r in rows if r["contender"] == label for line in r["steps"]]:
            both = sorted(1e6 * (s[1] + s[2]) for s in steps)
            plan, update, tokens = (statistics.mean(s[i] for s in steps) for i in (1, 2, 3))
            lines.append(
                f"| {label} | {len(steps)} | {1e6 * plan:.0f} | {1e6 * update:.0f} "
                f"| {statistics.mean(both):.0f} | {both[int(0.99 * len(both))]:.0f} | {tokens:.1f} |"
            )
    return "\n".join(lines)
