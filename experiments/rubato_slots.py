"""What it costs that a paused request keeps its slot, as in vLLM's V2 model runner: 64 slots beside a batch of 64.

A request that a plan leaves out keeps its KV. Where an engine counts slots (`Limits.max_running`, on GPUs as many as
`max_num_seqs`) it keeps one of these, too, and another cannot take its place in the batch. SLOs-Serve's mixed load and
PolyServe's of four TPOTs, on Llama-3.1-8B on one H100, step times off by 5 %, at about the rate at which `edf` attains
90 %, and at 1.5 times that: the same requests with slots and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

from experiments import Found
from experiments._rate_search import share
from rubato.core.events import Event, Finished, Preempted, Started
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate

SOURCE = "ours; scenarios of SLOs-Serve, §6.1, and PolyServe, §5.1"
SECONDS = 330.0
PROFILE, SLOTS, COUNT, SEEDS, NOISE = "llama-3.1-8b-h100", 64, 1000, (1, 2, 3, 4), 0.05
LOADS = {"mixed": ("slos-serve-mixed", 14.5), "tpots": ("polyserve-sharegpt", 13.5)}  # requests/s
POLICIES, TIMES = ("edf", "rubato"), (1.0, 1.5)
ENGINES = {"kv": None, "slots": SLOTS}


class Taken:
    """In which share of a run as many requests were under way as there are slots, from its events."""

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._seconds = self._now = 0.0

    @property
    def share(self) -> float:
        return self._seconds / self._now

    def __call__(self, event: Event) -> None:
        self._seconds += (event.at - self._now) * (len(self._running) >= SLOTS)
        self._now = event.at
        if isinstance(event, Started):
            self._running.add(event.id)
        elif isinstance(event, Preempted | Finished):
            self._running.discard(event.id)


def measured(load: str, policy: str, times: float, seed: int, count: int) -> dict[str, Any]:
    """By engine, without slots and with: the share attained, and of the time with as many requests under way as there
    are slots."""
    scenario, rate = LOADS[load]
    found: dict[str, Any] = {"load": load, "policy": policy, "times": times, "seed": seed}
    for name, slots in ENGINES.items():
        hardware = packaged_hardware(PROFILE, max_num_seqs=SLOTS)
        hardware = replace(hardware, limits=replace(hardware.limits, max_running=slots))
        offered, taken = ScenarioSource(scenario, hardware, count=count).make(seed).rescaled(times * rate), Taken()
        spec = RunSpec(hardware, PolicyChoice.parse(policy), noise=NOISE)
        run = simulate(offered, spec, seed, times=False, causes=False, listen=taken)
        found[name] = {"attained": share(run.records), "taken": taken.share}
    return found


def jobs(small: bool) -> list[Job]:
    count, seeds = (100, SEEDS[:2]) if small else (COUNT, SEEDS)
    return [
        Job(f"{load} {policy} {times:g} seed={seed}", measured, (load, policy, times, seed, count))
        for load, policy, times in ASKED for seed in seeds
    ]  # fmt: skip


ASKED = [*product(LOADS, POLICIES, TIMES)]


def _of(values: Sequence[Any]) -> Mapping[tuple[str, str, float], list[Any]]:
    return {asked: [v for v in values if (v["load"], v["policy"], v["times"]) == asked] for asked in ASKED}


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {
        f"{policy}-{load}-{100 * times:.0f}": over_seeds(
            [100 * (v["slots"]["attained"] - v["kv"]["attained"]) for v in own]
        )
        for (load, policy, times), own in _of(values).items()
    }
    settings = {"profile": PROFILE, "slots": SLOTS, "count": COUNT, "loads": LOADS, "times": TIMES, "noise": NOISE}
    return Found(estimates, values, SEEDS[:2] if small else SEEDS, "deadline", settings)


def tables(data: Sequence[Any]) -> str:
    """Means over seeds."""
    head = ["load", "policy", "times", "attained, no slots", "with slots"]
    head += ["time with 64 under way, no slots", "with slots"]
    rows = [
        [load, f"`{policy}`", f"{times:g}",
         *(f"{100 * mean(v[engine][what] for v in own):.1f} %" for what in ("attained", "taken") for engine in ENGINES)]
        for (load, policy, times), own in _of(data).items()
    ]  # fmt: skip
    return markdown([head, *rows])
