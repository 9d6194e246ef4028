"""Requests in time by load, from half to one and a half of what stock vLLM holds: stock, its best setting, ours.

The mix of `examples/mix.yaml` (chat, code completion, steps of agents, best effort) on Llama-3.1-8B on one A100. Load
1 is the rate at which stock vLLM serves 90 % of the requests that have an SLO in time. The best setting is chosen anew
for each load, on requests of one seed, and measured on others; ours runs as it comes. Lengths are learnt, steps are off
by 5 %. Every system serves the same requests; those that are refused count as missed. A share of all can be won by
giving up one kind of request: the share of the worst tier is beside it, for which the best setting is chosen anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments import Found
from experiments._rate_search import RateSearch, geometric
from experiments._rubato_runs import NOISE, learnt_lengths
from rubato.config import kinds_file
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.request_source import MixSource
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate

SOURCE = "ours"
SECONDS = 900.0

PROFILE, DURATION, START = "llama-3.1-8b-a100", 300.0, 8.0  # seconds of arrivals; requests/s
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
SHOWN = 1.5  # the largest load in the picture
SEEDS, TUNED_ON = (1, 2, 3, 4, 5, 6, 7, 8), 0
TARGET, GRID, BRACKET = 0.9, 1.02, 0.03
STOCK, OURS = "vllm", "rubato"
SETTINGS = (  # of vLLM: its budget, its queue's length, its priority scheduling
    STOCK,
    *(f"vllm:budget={tokens}" for tokens in (128, 256, 512, 1024, 8192)),
    *(f"vllm:max_num_queued_reqs={n}" for n in (16, 64)),
    *(f"priority:budget={tokens}" for tokens in (512, 2048)),
)
BEST, BEST_EACH = "vllm, best setting", "vllm, best setting for the worst tier"
MEASURES = {"all": BEST, "worst": BEST_EACH}  # the share asked for -> the tuned baseline
AT = {1.0: "capacity", 1.5: "overload"}


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    return [Job("capacity", capacity, (30.0 if small else DURATION,))]


def then(values: Sequence[Any], small: bool, policy: str | None = None) -> list[Job]:
    (rate,) = values
    loads, seeds, settings, duration = (
        ((1.3,), SEEDS[:2], SETTINGS[:2], 30.0) if small else (LOADS, SEEDS, SETTINGS, DURATION)
    )
    own = (OURS, *([policy] if policy else []))
    return [Job(f"load {load:g}", measured, (load, rate, settings, own, seeds, duration)) for load in loads]


class Mix(RateSearch):
    measures: Mapping[str, tuple[str, float]] = {"all": ("all", TARGET)}

    def __init__(self, seed: int, duration: float) -> None:
        super().__init__(GRID, BRACKET)
        self.seed, self.duration = seed, duration

    def run(self, choice: str, rate: float) -> dict[str, float]:
        return shares(choice, rate, self.seed, self.duration)


def capacity(duration: float) -> float:
    """Requests/s at which stock vLLM serves 90 % of the requests with an SLO in time."""
    return Mix(TUNED_ON, duration).goodput(STOCK, START, "all", GRID**4)


def measured(
    load: float, rate: float, settings: Sequence[str], own: Sequence[str], seeds: Sequence[int], duration: float
) -> dict[str, Any]:
    """Shares in time (0 to 1) by system and seed, and which settings were the best."""
    tuned = {choice: shares(choice, load * rate, TUNED_ON, duration) for choice in settings}
    best = {name: max(tuned, key=lambda choice: tuned[choice][share]) for share, name in MEASURES.items()}
    systems = {STOCK: STOCK, **best, **{name: name for name in own}}
    ran = {choice: [shares(choice, load * rate, seed, duration) for seed in seeds] for choice in {*systems.values()}}
    return {
        "load": load, "rate": load * rate, "best": best, "tuning": tuned,
        "shares": {name: ran[choice] for name, choice in systems.items()},
    }  # fmt: skip


@cache
def _kinds() -> Any:
    return tuple(kinds_file.read(Path(__file__).parents[1] / "examples" / "mix.yaml"))


def shares(choice: str, rate: float, seed: int, duration: float) -> dict[str, float]:
    """In time, of the requests that have an SLO; by tier; and of best effort the share that ended."""
    load = MixSource(_kinds(), 1.0, count=round(rate * duration)).make(seed).rescaled(rate)
    chosen = PolicyChoice.parse(choice)
    spec = RunSpec(
        packaged_hardware(PROFILE), chosen, lengths=learnt_lengths(chosen), learns=True, noise=NOISE,
        stated_max_tokens=2048,
    )  # fmt: skip
    records = simulate(load, spec, seed, causes=False).records
    tiers: dict[str, list[bool]] = {}
    for record in records:
        tiers.setdefault(record.tier, []).append(record.verdict.met and not record.best_effort)
    ended = [record.outcome == "completed" for record in records if record.tier == "nightly"]
    tiers.pop("nightly", None)
    with_slo = [met for tier in tiers.values() for met in tier]
    each = {tier: float(np.mean(met)) for tier, met in sorted(tiers.items())}
    return {"all": float(np.mean(with_slo)), "worst": min(each.values()), **each, "nightly": float(np.mean(ended))}


# --------------------------------------------------------------------------- what was found


class Curves:
    """Shares by load, system and seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.rows = sorted(values, key=lambda row: float(row["load"]))
        self.loads = [row["load"] for row in self.rows]
        self.names = list(self.rows[0]["shares"])

    def of(self, name: str, share: str) -> Any:
        """An array of loads by seeds."""
        return np.array([[seed[share] for seed in row["shares"][name]] for row in self.rows])

    def mean(self, name: str, load: float, share: str = "all") -> Estimate:
        """In percent."""
        return over_seeds([100 * float(x) for x in self.of(name, share)[self.loads.index(load)]])

    def gain(self, load: float) -> Estimate:
        """Points of ours over the best setting, by seed."""
        at = self.loads.index(load)
        return over_seeds([100 * float(x) for x in (self.of(OURS, "all") - self.of(BEST, "all"))[at]])

    def held(self, name: str, share: str) -> list[float]:
        """By seed, the load from which the share falls below the target, on the line between loads; the last load where
        it does not fall, the first where it begins below."""
        return [_crossing(self.loads, column) for column in self.of(name, share).T]

    def ratio(self, share: str) -> Estimate:
        """The load that ours holds over the one that the best setting does."""
        ours, best = self.held(OURS, share), self.held(MEASURES[share], share)
        return geometric([a / b for a, b in zip(ours, best, strict=True)])


def _crossing(loads: Sequence[float], shares: Any) -> float:
    below = [at for at, share in enumerate(shares) if share < TARGET]
    if not below:
        return loads[-1]
    if (at := below[0]) == 0:
        return loads[0]
    part = (shares[at - 1] - TARGET) / (shares[at - 1] - shares[at])
    return float(loads[at - 1] + part * (loads[at] - loads[at - 1]))


def found(values: Sequence[Any], small: bool) -> Found:
    _, *rows = values
    curves = Curves(rows)
    estimates = {f"ratio-{share}": curves.ratio(share) for share in MEASURES}
    for load, name in AT.items():
        load = load if load in curves.loads else curves.loads[-1]
        estimates[f"gain-{name}"] = curves.gain(load)
    given = {"mix": "examples/mix.yaml", "profile": PROFILE, "duration": DURATION, "settings": SETTINGS, "noise": NOISE}
    return Found(estimates, rows, SEEDS[:2] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """% in time by load, of all and of each tier; what ours gives up stands in its tiers."""
    curves = Curves(data)
    tiers = [name for name in data[0]["shares"][OURS][0] if name not in ("all", "worst", "nightly")]
    lines = [["load", "requests/s", "system", "all with an SLO", *tiers, "setting"]]
    for row in curves.rows:
        for name in curves.names:
            own = [curves.mean(name, row["load"], tier).value for tier in tiers]
            setting = f"`{row['best'].get(name, name)}`"
            share = curves.mean(name, row["load"]).shown(".1f")
            numbers = [share, *(f"{value:.1f}" for value in own)]
            lines.append([f"{row['load']:g}", f"{row['rate']:.1f}", name, *numbers, setting])
    return f"Load 1 is {data[0]['rate'] / data[0]['load']:.2f} requests/s.\n\n{markdown(lines)}"


def draw(data: Sequence[Any], axes: Any) -> None:
    """% in time over load, up to `SHOWN`, with intervals."""
    curves = Curves(data)
    loads = [load for load in curves.loads if load <= SHOWN] or curves.loads
    lines = {OURS: ("Rubato", "#2F8FD8"), BEST: ("vLLM, best of 10 settings", "#E69F00"), STOCK: ("vLLM", "#8A8A8A")}
    for name, (label, colour) in lines.items():
        estimates = [curves.mean(name, load) for load in loads]
        values = [e.value for e in estimates]
        axes.plot(loads, values, color=colour, linewidth=2.5, marker="o", markersize=4)
        axes.fill_between(loads, [e.low for e in estimates], [e.high for e in estimates], color=colour, alpha=0.2)
        axes.annotate(
            label, (loads[-1], values[-1]), xytext=(8, 0), textcoords="offset points", va="center", color=colour,
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel("load (1 = the rate at which stock vLLM serves 90 % on time)")
    axes.set_ylabel("requests on time (%), from 70")
    axes.set_ylim(70, 101)
