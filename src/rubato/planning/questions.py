"""What Python asks in a line: `simulate`, `sweep`, `capacity`, `bound` and `plan`, each answered by a Result.

They simulate as the verbs of the command line do: exact step times of a hardware profile, the production control plane
on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rubato import policies as known
from rubato.config import kinds_file, schema
from rubato.core.did_you_mean import nearest
from rubato.core.interfaces import Router, Scheduler
from rubato.engines.simulated.step_noise import Noise
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.runs import Runs
from rubato.planning import bound as bounds
from rubato.planning import capacity as capacities
from rubato.planning import fleet_size
from rubato.planning import sweep as sweeps
from rubato.planning.bound import BoundQuestion, BoundResult
from rubato.planning.capacity import TARGETS, CapacityQuestion, CapacityResult
from rubato.planning.fleet_size_model import FleetPlan, FleetQuestion
from rubato.planning.request_source import (
    FileSource,
    MixSource,
    RequestSource,
    ScenarioSource,
    TraceSource,
    WorkloadSource,
    count_of,
)
from rubato.planning.sweep import Sweep, SweepResult
from rubato.simulation.configured import hardware_of, run_spec_of
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate as simulate_run
from rubato.workloads import Workload, scenarios
from rubato.workloads.request_kinds import Kind
from rubato.workloads.traces import TraceOptions
from rubato.workloads.workload import check_rate

Policy = str | PolicyChoice | Scheduler | Router | type
Load = str | Path | Workload | list[Kind] | tuple[Kind, ...] | RequestSource
Config = str | Path | Mapping[str, Any] | None
OWN_REQUESTS = "count and duration are of a scenario, kinds or a trace: a workload has its own requests"


def simulate(
    policy: Policy | Sequence[Policy], load: Load, *, profile: str | Hardware, replicas: int | None = None,
    rate: float | None = None, count: int | None = None, duration: float | None = None, kinds: Sequence[Kind] = (),
    seeds: Sequence[int] = (0,), noise: Noise = 0.0, config: Config = None,
) -> Runs:  # fmt: skip
    """Simulate a load under one policy, or under each of several.

    Args:
        policy: `"edf"`, `"sarathi:budget=256@random"`, `"my_policy.py"`, or a Scheduler or Router, object or class.
        load: a workload, the name of a scenario, a file (a workload's, a trace's, or YAML of kinds), or kinds.
        profile: one of `profiles.names()`, the path of a profile's JSON, or a `Hardware`.
        replicas: of the fleet; default: the configuration's, or 1.
        rate: requests/s. Default: the load's own; of a scenario or kinds 1.
        count, duration: requests, or seconds of arrivals, of a scenario, kinds or a trace; default 1,000 requests.
        kinds: tiers of a trace that names none.
        seeds: a run for each; a workload, a file and a trace are resampled by blocks of 60 s for seeds above 0.
        noise: of step times, as `--noise` takes it: 0.05, `"replay:torch-busy"`.
        config: a server's YAML, or a mapping such as `{"lengths": "oracle", "slo_rule": "mean"}`.

    Returns:
        Runs, with each request's record, attainment by tier and `requests()`, a frame of all requests.

    Raises:
        ValueError: for a policy, load, profile or setting that is not there, or a policy that cannot run.
        OSError: for a file that cannot be opened.
    """
    asked = _Asked(profile, replicas, config, noise)
    source = asked.source(load, rate, count, duration, kinds)
    runs = []
    for spec in asked.specs(policy):
        spec.choice.checked()
        for seed in seeds:
            made = source.make(seed)
            runs.append(simulate_run(made if rate is None else made.rescaled(rate), spec, seed))
    return Runs(tuple(runs))


def sweep(
    policies: Policy | Sequence[Policy], load: Load, *, rates: Sequence[float], profile: str | Hardware,
    replicas: int | None = None, count: int | None = None, duration: float | None = None, kinds: Sequence[Kind] = (),
    seeds: Sequence[int] = (0, 1, 2, 3), noise: Noise = 0.0, config: Config = None, workers: int = 1,
    progress: bool = False,
) -> SweepResult:  # fmt: skip
    """Attainment of each policy at each rate, with intervals over seeds. All policies see the same requests.

    Args:
        rates: requests/s of the fleet.
        workers: processes; above 1 a script needs `if __name__ == "__main__":`, and policies are given by name.
        progress: show a bar.
        policies, load, profile, replicas, count, duration, kinds, seeds, noise, config: as `simulate` takes them.

    Raises:
        ValueError, OSError: as `simulate`; a policy that cannot run is left out, with a note, unless none can.
    """
    asked = _Asked(profile, replicas, config, noise)
    source = asked.source(load, None, count, duration, kinds)
    question = Sweep(source, asked.specs(policies, workers), tuple(rates), tuple(seeds))
    return sweeps.run(question, workers=workers, progress=progress)


def capacity(
    policies: Policy | Sequence[Policy], load: Load, *, profile: str | Hardware, targets: Sequence[float] = TARGETS,
    tolerance: float = 0.02, start: float | None = None, replicas: int | None = None, count: int | None = None,
    duration: float | None = None, kinds: Sequence[Kind] = (), seeds: Sequence[int] = (0, 1, 2, 3),
    noise: Noise = 0.0, config: Config = None, workers: int = 1, progress: bool = False,
) -> CapacityResult:  # fmt: skip
    """The largest rate at which each policy attains a share of the requests.

    Args:
        targets: shares to attain.
        tolerance: relative width of a search's last bracket.
        start: requests/s at which searches begin.
        policies, load, profile, replicas, count, duration, kinds, seeds, noise, config: as `simulate` takes them.
        workers, progress: as `sweep` takes them.

    Raises:
        ValueError, OSError: as `sweep`; also where an idle replica misses the targets.
    """
    asked = _Asked(profile, replicas, config, noise)
    source = asked.source(load, None, count, duration, kinds)
    specs = asked.specs(policies, workers)
    question = CapacityQuestion(source, specs, tuple(seeds), tuple(targets), tolerance, start)
    return capacities.run(question, workers=workers, progress=progress)


def plan(
    policy: Policy, load: Load, *, profile: str | Hardware, target: float = 0.9, rate: float | None = None,
    count: int | None = None, duration: float | None = None, kinds: Sequence[Kind] = (), window: float = 600.0,
    seeds: tuple[int, int] = (4, 16), exclude_infeasible: bool = False, price: float | None = None,
    noise: Noise = 0.0, config: Config = None, workers: int = 1, progress: bool = False,
) -> FleetPlan:  # fmt: skip
    """The smallest fleet that attains a share of a load, and what binds it.

    Args:
        target: the share to attain.
        rate: requests/s of a scenario or kinds.
        window: seconds of the busiest stretch, which the fleet is sized on.
        seeds: how many to begin with, and at most.
        exclude_infeasible: leave out, and count, what no idle replica can attain.
        price: of a GPU for an hour, in any currency.
        policy, load, profile, count, duration, kinds, noise, config: as `simulate` takes them.
        workers, progress: as `sweep` takes them.

    Raises:
        ValueError: as `simulate`; also when no number of replicas attains the target.
    """
    machine = _Asked(profile, 1, config, noise)
    source = machine.source(load, rate, count, duration, kinds, drawn=False)
    if rate is not None and not isinstance(source, ScenarioSource | MixSource):
        raise ValueError(f"rate={rate:g} is for a scenario or kinds: what was recorded has a rate of its own")
    specs = machine.specs(policy, workers)
    if len(specs) != 1:
        raise ValueError("a plan is for one policy: ask once for each")
    specs[0].choice.checked()
    question = FleetQuestion(source, specs[0], target, window, seeds, exclude_infeasible, price)
    return fleet_size.plan(question, workers=workers, progress=progress)


def bound(
    load: Load, *, profile: str | Hardware, target: float = 0.9, rate: float | None = None, replicas: int = 1,
    endless: bool = True, tolerance: float = 0.01, count: int | None = None, duration: float | None = None,
    kinds: Sequence[Kind] = (), seeds: Sequence[int] = (0, 1, 2, 3), workers: int = 1, progress: bool = False,
) -> BoundResult:  # fmt: skip
    """What no policy without drafts exceeds: the rate at which it attains a share, or its share at a rate. Needs SciPy.

    Args:
        target: the share to attain, unless a rate is given.
        rate: requests/s at which the share is asked for.
        endless: requests repeat end to end; else they come once, as in `capacity`.
        tolerance: relative width of a search's last bracket.
        load, profile, replicas, count, duration, kinds, seeds: as `simulate` takes them.
        workers, progress: as `sweep` takes them.

    Raises:
        ValueError: as `simulate`; also for requests that a bound does not cover (several stages, drafts).
    """
    asked = _Asked(profile, replicas, None, 0.0)
    source = asked.source(load, None, count, duration, kinds)
    question = BoundQuestion(source, asked.machine, tuple(seeds), replicas, rate, target, endless, tolerance)
    return bounds.run(question, workers=workers, progress=progress)


# --------------------------------------------------------------------------- what was asked


@dataclass(frozen=True)
class _Asked:
    """What the questions have in common: the replicas and what is configured of them."""

    profile: str | Hardware
    replicas: int | None
    config: Config
    noise: Noise

    @property
    def configured(self) -> schema.Config:
        found = schema.load({} if self.config is None else self.config)
        if found.autoscale is not None:
            raise ValueError("autoscale: a question is of a fleet as it is; leave it out of the configuration")
        return found

    @property
    def machine(self) -> Hardware:
        if isinstance(self.profile, Hardware):
            return self.profile
        return hardware_of(self.configured, self.profile)

    def specs(self, policies: Policy | Sequence[Policy], workers: int = 1) -> tuple[RunSpec, ...]:
        chosen = [_choice(one) for one in _each(policies)]
        if alone := [one.policy for one in chosen if workers != 1 and known.is_local(one.policy)]:
            raise ValueError(f"{alone[0]} is known to this process only: leave out workers, or give its file's name")
        config, machine = self.configured, self.machine
        replicas = config.replicas if self.replicas is None else self.replicas
        if replicas < 1:
            raise ValueError(f"{replicas} replicas: give 1 or more")
        specs = (run_spec_of(config, machine, choice, self.noise) for choice in chosen)
        return tuple(replace(spec, replicas=replicas) for spec in specs)

    def source(
        self, load: Load, rate: float | None, count: int | None, duration: float | None, kinds: Sequence[Kind],
        drawn: bool = True,
    ) -> RequestSource:  # fmt: skip
        """Where requests come from. Raises ValueError, OSError."""
        if rate is not None:
            check_rate(rate)
        if count is not None and count < 1:
            raise ValueError(f"count is {count}: give 1 or more requests")
        if duration is not None and not duration > 0.0:
            raise ValueError(f"duration is {duration}: give seconds above 0")
        if isinstance(load, str | Path):
            return self._named(load, rate or 1.0, count, duration, kinds, drawn)
        if isinstance(load, list | tuple):
            return MixSource(tuple(load), rate or 1.0, count_of(count, duration), duration)
        if count is not None or duration is not None:
            raise ValueError(OWN_REQUESTS)
        return WorkloadSource(load, drawn) if isinstance(load, Workload) else load

    def _named(
        self, load: str | Path, rate: float, count: int | None, duration: float | None, kinds: Sequence[Kind],
        drawn: bool,
    ) -> RequestSource:  # fmt: skip
        """A scenario or a file. Raises ValueError, OSError."""
        most, path = count_of(count, duration), Path(load)
        if isinstance(load, str) and load in scenarios.names():
            return ScenarioSource(load, self.machine, rate, most, duration)
        if not path.is_file():
            raise ValueError(f"no scenario and no file {str(load)!r}{nearest(str(load), scenarios.names())}")
        if path.suffix in (".yaml", ".yml"):
            return MixSource(tuple(kinds_file.read(path)), rate, most, duration)
        if not _is_workload_file(path):
            return TraceSource(str(path), tuple(kinds), 1.0, TraceOptions(seconds=duration, count=count), drawn)
        if count is not None or duration is not None:
            raise ValueError(OWN_REQUESTS)
        return FileSource(str(path), drawn)


def _each(policies: Policy | Sequence[Policy]) -> Sequence[Policy]:
    return policies if isinstance(policies, Sequence) and not isinstance(policies, str) else [policies]


def _choice(policy: Policy) -> PolicyChoice:
    if isinstance(policy, PolicyChoice):
        return policy
    if isinstance(policy, str):
        return PolicyChoice.read(policy)
    name, settings = known.register(policy)
    return PolicyChoice(name, settings)


def _is_workload_file(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"rubato-workload/' in file.readline(200)
