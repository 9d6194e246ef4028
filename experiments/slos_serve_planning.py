"""CPU time of a planning call of SLOs-Serve, by requests running and new (Fig. 15).

CPU time of whole calls, in states as a simulated replica runs into them: Llama-3.1-8B on an H200, requests that hold
about so many running with a promise, and bursts of so many at the same instant, whose TTFT, five times the prefill
alone, lets them be taken in part. One TPOT, or three. A declined request is refused. Counted are calls that find as
many new, or up to a fifth more, and as many running within a third; of 50 new such a call decides 16, and the next ones
the others. Without Python's search for cycles, as all simulations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._timed_slos_serve import Planned
from experiments.simulator_speed import loop_seconds
from rubato.core.events import Finished
from rubato.core.plan import Shape
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import gc_paused, simulate_events

SOURCE = "SLOs-Serve, Fig. 15 and §6.4"
SECONDS = 507.0
ALONE = True

PROFILE, POLICY = "llama-3.1-8b-h200@vllm-2024", "experiments._timed_slos_serve"
RUNNING, NEW = (10, 100, 500), (1, 10, 50)
TPOTS = {1: (0.1,), 3: (0.05, 0.1, 0.2)}  # seconds, by how many tiers there are
SLOWDOWN = 5.0  # TTFT of a burst's, of the prefill alone
LOOSE = 1.0  # TTFT of the others, seconds
BURSTY = 0.3  # the part that comes in bursts
TAKEN = {1: 0.6, 10: 0.6, 50: 0.3}  # of those, about
PROMPTS, OUTPUTS = (50, 250), (50, 250)  # tokens, uniform
SEEDS = (1, 2, 3)
BURSTS = {1: 60, 10: 60, 50: 20}
BAR = (100, 10)  # running and new, for which planning is to take 2 ms at most
AT_BAR, SEEDS_AT_BAR = 300, (1, 2, 3, 4, 5, 6)  # bursts: a p99 of each seed
_GAPS, _LENGTHS = 61, 62  # random streams


def jobs(small: bool) -> list[Job]:
    sizes = [(r, n) for r in RUNNING for n in NEW if not small or (r, n) in ((10, 1), BAR)]
    return [
        Job(f"running={running} new={new} tiers={tiers} seed={seed}", timed, (running, new, tiers, seed, bursts))
        for running, new in sizes
        for tiers in TPOTS
        for seed in (SEEDS[:1] if small else SEEDS_AT_BAR if (running, new) == BAR else SEEDS)
        for bursts in (5 if small else AT_BAR if (running, new) == BAR else BURSTS[new],)
    ]


@gc_paused()
def timed(running: int, new: int, tiers: int, seed: int, bursts: int) -> dict[str, Any]:
    """CPU milliseconds of each call in such a state."""
    requests, begin = load(running, new, tiers, seed, bursts)
    draw = np.random.default_rng([seed, _LENGTHS, 1])
    outputs = {r.id: (int(draw.integers(*OUTPUTS)),) for r in requests}
    log: list[Planned] = []
    spec = RunSpec(hardware(), PolicyChoice(POLICY, {"log": log}, "round_robin"), lengths=oracle_lengths)
    ends = [e for e in simulate_events(requests, outputs, spec) if isinstance(e, Finished)]
    of_state = [
        p for p in log if p.at >= begin and new <= p.new <= 1.2 * new and abs(p.running - running) <= running / 3
    ]
    return {
        "running": running, "new": new, "tiers": tiers, "seed": seed,
        "ms": [1e3 * p.seconds for p in of_state], "ran": [p.running for p in of_state],
        "requests": len(requests), "outcomes": Counter(e.outcome for e in ends),
        "missed": sum(e.outcome == "completed" and not e.verdict.met for e in ends),
        "loop": loop_seconds(),
    }  # fmt: skip


@lru_cache
def hardware() -> Hardware:
    return packaged_hardware(PROFILE, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=1024)


def load(running: int, new: int, tiers: int, seed: int, bursts: int) -> tuple[list[Request], float]:
    """Requests one by one, of which about so many run, and bursts of `new`; and the time from which on it is so."""
    machine = hardware()
    length = (sum(PROMPTS) + sum(OUTPUTS)) // 2
    life = sum(OUTPUTS) / 2 * machine.model.step_time(Shape(running, running, running * length))
    small = new <= running / 2  # else a burst comes when the one before has ended
    gap = life * (new / running / BURSTY if small else 1.5)
    begin = 2.0 * life
    end = begin + bursts * gap
    rate = running / life * (1.0 - TAKEN[new] * BURSTY if small else 1.0)
    singles = np.cumsum(np.random.default_rng([seed, _GAPS]).exponential(1.0 / rate, int(1.5 * rate * end) + 10))
    times = [(at, False) for at in singles[singles < end].tolist()]
    times += [(at, True) for at in np.repeat(np.arange(0.0, end, gap), new).tolist()]
    draw = np.random.default_rng([seed, _LENGTHS])
    made = []
    for i, (at, burst) in enumerate(sorted(times)):
        prompt, tpot = int(draw.integers(*PROMPTS)), TPOTS[tiers][int(draw.integers(tiers))]
        slo = SLO(SLOWDOWN * machine.prefill(prompt) if burst else LOOSE, tpot)
        sampling = Sampling(max_tokens=OUTPUTS[1])
        made.append(Request(f"q{i}", (Stage(prompt, slo),), at, sampling=sampling, on_decline="refuse"))
    return made, begin


def found(values: Sequence[Any], small: bool) -> Found:
    def over(quantile: float, tiers: int) -> Estimate:
        own = [v["ms"] for v in values if (v["running"], v["new"], v["tiers"]) == (*BAR, tiers)]
        return over_seeds([float(np.quantile(ms, quantile)) for ms in own])

    # the paper's scenarios: dozens to hundreds running, up to ten new
    typical = [v for v in values if v["new"] <= 10]
    seeds = sorted({v["seed"] for v in values})
    by_seed = [np.concatenate([v["ms"] for v in typical if v["seed"] == seed]) for seed in seeds]
    rows = table(values)
    estimates = {
        "states": Estimate.exact(sum(row["calls"] > 0 for row in rows) / len(rows)),
        "p99-1-tier": over(0.99, 1),
        "p99-3-tiers": over(0.99, 3),
        "p50-1-tier": over(0.5, 1),
        "p50-3-tiers": over(0.5, 3),
        "within-2-ms": over_seeds([float((ms <= 2.0).mean()) for ms in by_seed]),
        "within-10-ms": over_seeds([float((ms <= 10.0).mean()) for ms in by_seed]),
    }
    loop = float(np.median([v["loop"] for v in values]))
    settings = {
        "profile": PROFILE, "tpots": {str(n): tpots for n, tpots in TPOTS.items()}, "slowdown": SLOWDOWN,
        "loop": loop, "table": rows,
    }  # fmt: skip
    return Found(estimates, list(values), seeds, "deadline", settings)


def table(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Per state, all seeds together: calls, how many ran (mean), and CPU milliseconds."""
    states = dict.fromkeys((v["tiers"], v["running"], v["new"]) for v in values)
    rows = []
    for state in states:
        own = [v for v in values if (v["tiers"], v["running"], v["new"]) == state]
        ms, ran = (np.concatenate([v[key] for v in own]) for key in ("ms", "ran"))
        p50, p99 = np.quantile(ms, (0.5, 0.99)).round(3).tolist() if len(ms) else (None, None)
        names = dict(zip(("tiers", "running", "new"), state, strict=True))
        rows.append({**names, "calls": len(ms), "ran": float(ran.mean()) if len(ran) else None, "p50": p50, "p99": p99})
    return rows


def draw(data: Sequence[Any], axes: Any) -> None:
    for row in table(data):
        if row["calls"] and row["tiers"] == 3:
            axes.plot([row["ran"]] * 2, [row["p50"], row["p99"]], "o-", label=f"{row['new']} new")
    axes.axhline(2.0, ls=":", color="grey")
    name_axes(axes, "running (three tiers)", "CPU ms, p50 to p99", log="xy")
