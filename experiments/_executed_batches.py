"""The batches that one replica executes on a scenario of SLOs-Serve: what is in each, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments._slos_serve_runs import drafter
from rubato.core.events import Stepped
from rubato.core.plan import Sample
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate_events
from rubato.workloads import scenarios


@dataclass(frozen=True)
class Replica:
    """profile: of its hardware. scenario: whose requests it serves, at `rate` requests/s. drafts: OPT-125M drafts."""

    profile: str
    scenario: str
    rate: float
    drafts: bool = False


def executed(replica: Replica, policy: str, count: int, seed: int, noise: float = 0.0) -> list[Sample]:
    """In order, of a run of `count` requests whose output lengths are known. noise: relative, of step times."""
    machine = packaged_hardware(replica.profile)
    made = scenarios.make(
        f"slos-serve-{replica.scenario}", replica.rate, count=count, seed=seed, prefill=machine.prefill
    )
    spec = RunSpec(
        machine, PolicyChoice.parse(policy), lengths=oracle_lengths, noise=noise,
        drafter=drafter() if replica.drafts else None,
    )  # fmt: skip
    events = simulate_events(list(made.requests()), made.truth(), spec, seed)
    return [Sample(e.shape, e.seconds) for e in events if isinstance(e, Stepped) and e.shape.tokens]


def jobs_of(
    names: Iterable[str], work: Callable[[str, int, int], Any], seeds: Sequence[int], count: int, few: int, small: bool
) -> list[Job]:
    """`work(name, requests, seed)` for each name and seed: `count` requests, or `few` of the first seed."""
    chosen, requests = (seeds[:1], few) if small else (seeds, count)
    return [Job(f"{name} seed={seed}", work, (name, requests, seed)) for name in names for seed in chosen]
