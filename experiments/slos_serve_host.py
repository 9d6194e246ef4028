"""SLOs-Serve's capacity over the best baseline's with the host's part of a step half, and 1.5 times, as long.

The host's part is the least certain number of a hardware profile. Scenarios, systems, tuning and search are those of
`slos-serve-capacity`, tuned anew for either host time, by the deadline rule at 90 %. Left out, because they take
longest: two scenarios, and `distserve`, the best baseline on Coder there. That figure has the capacities for the host
time as measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import Found
from experiments import slos_serve_capacity as capacity
from experiments.slos_serve_capacity import FULL, OPT, OURS, SMALL, Rates, Scale
from rubato.core.plan import Shape
from rubato.latency import profiles
from rubato.measure.confidence import Estimate
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.workloads import scenarios

SOURCE = "ours, on SLOs-Serve, Fig. 9"
SECONDS = 390.0

HOSTS = (0.5, 1.5)
BASELINES = ("prefill_first", "vllm", "sarathi")
JUDGE, TARGET = "deadline", 0.9
STEP = Shape(1, 1, 100)


def jobs(small: bool) -> list[Job]:
    return [
        Job("host", host_term, ()),
        *(
            Job(f"{scenario} {system} host={host}", held, (scenario, system, _scale(small, host)))
            for host in HOSTS
            for scenario in OPT
            for system in (OURS, *BASELINES)
        ),
    ]


def _scale(small: bool, host: float) -> Scale:
    return replace(SMALL if small else FULL, host=host)


def host_term() -> list[dict[str, float]]:
    """How much longer one decode is at the longest host than at the shortest, over what the host takes by itself."""
    low, high = (capacity.hardware(OPT[0], _scale(True, host)).model.step_time(STEP) for host in HOSTS)
    term = profiles.load(scenarios.get(f"slos-serve-{OPT[0]}").profile).host_term
    assert term is not None, "a profile of kernels"
    return [{"ratio": (high - low) / ((term.host + term.host_per_seq) * (HOSTS[1] - HOSTS[0]))}]


def held(scenario: str, system: str, scale: Scale) -> list[dict[str, Any]]:
    """As `slos_serve_capacity.measured`."""
    return [{"host": scale.host, **own} for own in capacity.measured(scenario, system, scale, [(JUDGE, TARGET)])]


def _ratio(values: Sequence[Mapping[str, Any]], host: float, scenario: str) -> Estimate:
    return Rates([v for v in values if v.get("host") == host]).ratio(scenario, BASELINES, JUDGE, TARGET)


def found(values: Sequence[Any], small: bool) -> Found:
    values = [value for own in values for value in own]
    estimates = {"host-term": Estimate.exact(next(v["ratio"] for v in values if "ratio" in v))}
    estimates |= {
        f"{scenario}-host-{100 * host:g}": _ratio(values, host, scenario) for host in HOSTS for scenario in OPT
    }
    scale = _scale(small, 1.0)
    settings = {"hosts": HOSTS, "target": TARGET, "tolerance": scale.tolerance, "lengths": "oracle"}
    return Found(estimates, list(values), scale.seeds, JUDGE, settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Ratios, and what the best baseline was."""
    rows = [["scenario", *(f"host × {host:g}" for host in HOSTS)]]
    for scenario in OPT:
        row = [scenario]
        for host in HOSTS:
            best = Rates([v for v in data if v.get("host") == host]).best(scenario, BASELINES, JUDGE, TARGET)
            ratio = _ratio(data, host, scenario)
            row.append(f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] of `{best}`")
        rows.append(row)
    return f"Runs are as long as those of `slos-serve-capacity`, whose warning holds here too.\n\n{markdown(rows)}"
