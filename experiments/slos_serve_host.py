"""SLOs-Serve's capacity over the best baseline's with the host's part of a step half, and 1.5 times, as long.

The host's part is the least certain number of a hardware profile. Scenarios, systems, tuning and search are those of
`slos-serve-capacity` on OPT-13B, tuned anew for either host time, by the deadline rule at 90 %, without drafts. Left
out, because they take longest: two scenarios, and `distserve`. That figure has the capacities for the host
time as measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import Found
from experiments import slos_serve_capacity as capacity
from experiments._slos_serve_runs import FULL, OURS, SMALL_SEARCH, Scale, hardware
from experiments.slos_serve_capacity import CASES, OPT_ONE, PAPERS_TWO, PLAIN, Rates
from rubato.core.plan import Shape
from rubato.latency import profiles
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.workloads import scenarios

SOURCE = "ours, on SLOs-Serve, Fig. 9"
SECONDS = 550.0

HOSTS = (0.5, 1.5)
STEP = Shape(1, 1, 100)


def jobs(small: bool) -> list[Job]:
    return [
        Job("host", host_term, ()),
        *(
            Job(f"{case} {system} host={host}", held, (case, system, _scale(small, host)))
            for host in HOSTS
            for case in OPT_ONE
            for system in (PLAIN, *PAPERS_TWO)
        ),
    ]


def _scale(small: bool, host: float) -> Scale:
    return replace(SMALL_SEARCH if small else FULL, host=host)


def host_term() -> list[dict[str, float]]:
    """How much longer one decode is at the longest host than at the shortest, over what the host takes by itself."""
    low, high = (hardware("chatbot", _scale(True, host)).model.step_time(STEP) for host in HOSTS)
    term = profiles.load(scenarios.get("slos-serve-chatbot").profile).host_term
    assert term is not None, "a profile of kernels"
    return [{"ratio": (high - low) / ((term.host + term.host_per_seq) * (HOSTS[1] - HOSTS[0]))}]


def held(case: str, system: str, scale: Scale) -> list[dict[str, Any]]:
    """Capacities seed by seed, as `slos_serve_capacity.measured`."""
    found = capacity.tuned(case, system, scale, (OURS,))["tuned"]
    return [{"host": scale.host, **capacity.measured(case, system, found, s, scale, "")} for s in scale.seeds]


def _ratio(values: Sequence[Mapping[str, Any]], host: float, case: str) -> Estimate:
    return Rates([v for v in values if v.get("host") == host]).ratio([case], PAPERS_TWO, OURS, PLAIN)


def found(values: Sequence[Any], small: bool) -> Found:
    values = [value for own in values for value in own]
    estimates = {"host-term": Estimate.exact(next(v["ratio"] for v in values if "ratio" in v))}
    estimates |= {
        f"{CASES[case].scenario}-host-{100 * host:g}": _ratio(values, host, case) for host in HOSTS for case in OPT_ONE
    }
    scale = _scale(small, 1.0)
    settings = {"hosts": HOSTS, "target": OURS, "lengths": "oracle"}
    return Found(estimates, list(values), scale.seeds, "deadline", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Ratios, and what the best baseline was."""
    rows = [["scenario", *(f"host × {host:g}" for host in HOSTS)]]
    for case in OPT_ONE:
        row = [case]
        for host in HOSTS:
            best = Rates([v for v in data if v.get("host") == host]).best(case, PAPERS_TWO, OURS)
            ratio = _ratio(data, host, case)
            row.append(f"{ratio.shown()} of `{best}`")
        rows.append(row)
    return markdown(rows)
