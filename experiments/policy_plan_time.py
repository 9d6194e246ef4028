"""CPU time of one plan by requests that wait, for every scheduler that ships.

The same views of a replica for all: Llama-3.1-8B on an H200, 64 decodes, and prompts of 100 to 500 tokens that wait, in
four situations: all can be in time; nine in ten are served as best effort, half of them late and half not to be in time
any more; all can be in time but KV is short, and half of the decodes are best effort; every second one is to be refused
rather than late, and has a TPOT and an e2e to keep. A scheduler's first plan, in which thousands arrive at once, is not
counted; then the clock goes on by 10 ms a plan. The exponent is the slope of log time over log number from 1,000 to
5,000, in the situation in which it is the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from experiments import Found
from experiments.simulator_speed import loop_seconds
from rubato.core.clock import measure_cost
from rubato.core.interfaces import View
from rubato.core.plan import ANY, Role, Tree
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policies import describe, load
from rubato.simulation.run_spec import Hardware, packaged_hardware
from rubato.simulation.simulate import gc_paused

SOURCE = "ours"
SECONDS = 318.0
ALONE = True

PROFILE = "llama-3.1-8b-h200@vllm-2024"
SITUATIONS = ("kept", "late", "kv", "refuse")
COUNTS, SMALL = (100, 1000, 2000, 5000), (50, 200)
SLOPE_FROM = 1000
OURS, BAR = ("edf", "rubato"), 2000  # waiting, for which our bar is set
RUNNING = 64
PROMPTS = (100, 500)
PLANS, STEP = 11, 0.01  # counted, after the first; seconds from one to the next
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
NOW = 1.0
TIERS = ("gold", "silver", "bronze")
PHASED = frozenset({"distserve"})  # has work for a queue where it prefills only
SUPPORTS = frozenset({"chunked", "mixed", "preempt", "draft", "tree", "handoff", "kv_transfer", "recall"})
_LENGTHS = 91  # random stream


@dataclass(eq=False, slots=True)
class Shown:
    """A sequence as schedulers see it (`SeqView`), in its first stage."""

    request: Request
    length: int
    cached: int
    blocks: int
    due: float
    demoted: bool
    output: int = 0
    first_token_at: float | None = None
    stage: int = 0
    stage_start: float = 0.0
    in_flight: int = 0
    missed: bool = False
    tool_seconds: float = 0.0
    predicted: float | None = None
    draft: Tree | None = None
    tried: int = 0
    acceptance: float | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.request.id

    @property
    def slo(self) -> SLO:
        return self.request.stages[self.stage].slo

    @property
    def pending(self) -> int:
        return self.length - self.cached

    @property
    def own_blocks(self) -> int:
        return self.blocks if self.cached else 0

    @property
    def best_effort(self) -> bool:
        return self.demoted or self.request.best_effort


def schedulers() -> list[str]:
    return sorted({name for name, kind, *_ in describe() if kind == "scheduler"})


def jobs(small: bool) -> list[Job]:
    counts = SMALL if small else COUNTS
    return [
        Job(f"{situation} seed={seed}", timed, (situation, counts, seed))
        for seed in (SEEDS[:1] if small else SEEDS)
        for situation in SITUATIONS
    ]


@gc_paused()
def timed(situation: str, counts: Sequence[int], seed: int) -> dict[str, Any]:
    """CPU milliseconds of a plan (median), by scheduler, at each number of waiting requests."""
    ms: dict[str, list[float]] = {name: [] for name in schedulers()}
    for count in counts:
        made = {name: load(name) for name in ms}
        views = {name: seen(situation, count, seed, Role("prefill") if name in PHASED else ANY) for name in ms}
        spent: dict[str, list[float]] = {name: [] for name in ms}
        for i in range(1 + PLANS):  # in turn: what else the machine does slows all of them
            for name, scheduler in made.items():
                view = replace(views[name], now=NOW + STEP * i)
                spent[name].append(measure_cost(lambda plan=scheduler.plan, view=view: plan(view))[1].cpu)  # type: ignore[misc]
        for name, seconds in spent.items():
            ms[name].append(1e3 * float(np.median(seconds[1:])))
    return {"situation": situation, "seed": seed, "counts": list(counts), "ms": ms, "loop": loop_seconds()}


def seen(situation: str, count: int, seed: int, role: Role) -> View:
    """A replica on which so many wait beside decodes that have had their first token."""
    machine = hardware()
    limits, running = machine.limits, []
    for i, prompt in _prompts(RUNNING, seed):
        free = situation == "kv" and i % 2 == 1
        slo = SLO() if free else SLO(2.0, 0.05)
        request = Request(f"r{i}", (Stage(prompt, slo),), 0.0, tier=TIERS[i % 3], sampling=Sampling(200))
        due = inf if free else 2.05
        running.append(Shown(request, prompt + 1, prompt, limits.blocks(prompt), due, False, 1, 0.05))
    used = sum(s.blocks for s in running)
    free_blocks = 4 if situation == "kv" else limits.kv_blocks - used
    limits = replace(limits, kv_blocks=used + free_blocks)
    return View(
        "r0", NOW, list(waiting(situation, count, seed)), running, free_blocks, limits.kv_blocks, limits, machine.model,
        SUPPORTS, role=role,
    )  # fmt: skip


def waiting(situation: str, count: int, seed: int) -> Iterator[Shown]:
    for i, prompt in _prompts(count, seed + 1000):
        arrival = NOW * i / count
        slo, demoted, refuse = (
            SLO(3600.0, 0.05),
            situation == "late" and i % 10 > 0,
            situation == "refuse" and i % 2 > 0,
        )
        if demoted:
            slo = SLO(0.001 if i % 2 else NOW - arrival + 0.2, 0.05)
        elif refuse:
            slo = SLO(3600.0, 0.05, 4000.0)
        request = Request(
            f"w{i}", (Stage(prompt, slo),), arrival, tier=TIERS[i % 3], sampling=Sampling(200),
            on_decline="refuse" if refuse else "best_effort",
        )  # fmt: skip
        yield Shown(request, prompt, 0, 0, arrival + (slo.ttft or inf), demoted)


def _prompts(count: int, seed: int) -> Iterator[tuple[int, int]]:
    return enumerate(np.random.default_rng([seed, _LENGTHS]).integers(*PROMPTS, count).tolist())


@lru_cache
def hardware() -> Hardware:
    return packaged_hardware(PROFILE, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=1024)


# --------------------------------------------------------------------------- what was found


def exponent(counts: Sequence[int], ms: Sequence[float]) -> float:
    """The slope of log time over log number, of the numbers that it is taken over."""
    used = [(n, t) for n, t in zip(counts, ms, strict=True) if n >= min(SLOPE_FROM, counts[0])][-3:]
    x, y = np.log(np.array(used)).T
    return float(np.polyfit(x, y, 1)[0])


def worst(values: Sequence[Any], of: Any) -> tuple[str, Estimate]:
    """The situation in which it is the largest, mean over seeds, and the estimate there."""
    each = {s: [of(v) for v in values if v["situation"] == s] for s in SITUATIONS}
    where = max(each, key=lambda s: float(np.mean(each[s])))
    return where, over_seeds(each[where])


def found(values: Sequence[Any], small: bool) -> Found:
    counts = values[0]["counts"]
    at = counts.index(BAR) if BAR in counts else len(counts) - 1
    estimates = {f"{name}-ms": worst(values, lambda v, name=name: v["ms"][name][at])[1] for name in OURS}
    loop = float(np.median([v["loop"] for v in values]))
    settings = {"profile": PROFILE, "running": RUNNING, "counts": counts, "plans": PLANS, "loop": loop}
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "deadline", settings)


def tables(data: Sequence[Any]) -> str:
    counts = data[0]["counts"]
    rows = [["scheduler", *(f"{n:,} waiting: ms" for n in counts), "exponent", "in situation"]]
    for name in data[0]["ms"]:
        where, slope = worst(data, lambda v, name=name: exponent(counts, v["ms"][name]))
        rows.append(
            [f"`{name}`", *(f"{_ms(data, name, i):.3g}" for i in range(len(counts))), f"{slope.value:.2f}", where]
        )
    return f"Each number in the situation in which it is the largest, mean over seeds:\n\n{markdown(rows)}"


def _ms(data: Sequence[Any], name: str, at: int) -> float:
    return worst(data, lambda v: v["ms"][name][at])[1].value
