"""Agents' sessions with a deadline for the whole: our own policy beside others, on one replica and on four.

Scenario `agent-sessions`: turns follow from each other's ends, each begins with the prompt before it and is offered
with what remains of its session's e2e. Prefix cache on, lengths are learnt, steps are off by 5 %. A session is attained
when all its turns are, over all sessions offered. On four replicas every system has prefix affinity, and one router
also runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from experiments._guest import beside
from experiments._rubato_runs import NOISE
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import summarise, summarise_sessions
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import scenarios

SOURCE = "ours; lengths of Mooncake (FAST'25, Table 2), tools of TraceLab"
SECONDS = 180.0

OURS = "rubato"
SCENARIO = "agent-sessions"
RATES = (3.0, 4.5, 6.0)  # turns/s a replica: vllm attains most sessions at the first and about half at the last
SEEDS, TURNS, FLEET_TURNS = (1, 2, 3), 400, 1200
REPLICA = ("vllm", "sarathi", "edf", "slos_serve", OURS)
REPLICAS, FLEET_RATE = 4, 4.5  # turns/s a replica
WITHOUT = "edf@least_loaded"
FLEET = {
    WITHOUT: WITHOUT,
    "edf@least_loaded, affinity": "edf@least_loaded:prefix_affinity=true",
    "edf@lmetric, affinity": "edf@lmetric:prefix_affinity=true",
    "polyserve, affinity": "polyserve@polyserve:mode=co,prefix_affinity=true",
    "rubato, affinity": "rubato@rubato:prefix_affinity=true",
}
WITH, OUR_FLEET = "edf@least_loaded, affinity", "rubato, affinity"
SMALL_FLEET = [WITHOUT, WITH, OUR_FLEET]
MEASURES = ("sessions", "turns")


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    one, fleet = (("vllm", "edf", OURS), SMALL_FLEET) if small else (REPLICA, list(FLEET))
    rates, seeds, turns = (RATES[:1], SEEDS[:1], (8, 24)) if small else (RATES, SEEDS, (TURNS, FLEET_TURNS))
    asked = [(1, name, name, rate, turns[0]) for name in beside(one, policy) for rate in rates]
    asked += [(REPLICAS, name, FLEET[name], FLEET_RATE, turns[1]) for name in fleet]
    return [
        Job(f"{n} x {name} rate={rate} seed={seed}", measured, (n, name, choice, rate, seed, offered))
        for n, name, choice, rate, offered in asked
        for seed in seeds
    ]


def hardware() -> Hardware:
    return packaged_hardware(scenarios.get(SCENARIO).profile)


def measured(replicas: int, name: str, choice: str, rate: float, seed: int, turns: int) -> dict[str, Any]:
    """Shares of sessions and of turns attained at `rate` turns/s a replica."""
    load = scenarios.make(SCENARIO, rate * replicas, count=turns, seed=seed)
    spec = RunSpec(
        hardware(), PolicyChoice.parse(choice), replicas, lengths=conditional_mean, learns=True, noise=NOISE,
        stated_max_tokens=2048, prefix_cache=True,
    )  # fmt: skip
    run = simulate(load, spec, seed, causes=False)
    sessions = summarise_sessions(run)
    assert sessions is not None
    ends: dict[str, list[float]] = {}
    began: dict[str, float] = {}
    met: dict[str, bool] = {}
    for arrival, record in zip(load.arrivals, run.records, strict=True):
        began.setdefault(arrival.session, record.at)
        ends.setdefault(arrival.session, []).append(record.times[-1] if record.times else record.at)
        met[arrival.session] = met.get(arrival.session, True) and record.verdict.met
    due = load.session_e2es
    return {
        "replicas": replicas, "policy": name, "rate": rate, "seed": seed,
        "sessions": sessions.attainment, "turns": summarise(run)[-1].attainment, "offered": sessions.offered,
        "not_offered": sum(record.reason.startswith("not offered") for record in run.records),
        "late": sum(met[s] and max(ends[s]) > began[s] + due[s] + 1e-6 for s in due),
    }  # fmt: skip


# --------------------------------------------------------------------------- what was found


class _Runs:
    """Shares, in points, by system, rate and seed."""

    def __init__(self, values: Sequence[Any], replicas: int) -> None:
        own = [v for v in values if v["replicas"] == replicas]
        self.names = list(dict.fromkeys(v["policy"] for v in own))
        self.rates = list(dict.fromkeys(v["rate"] for v in own))
        self._own = own

    def points(self, name: str, rate: float, measure: str) -> list[float]:
        return [100.0 * v[measure] for v in self._own if (v["policy"], v["rate"]) == (name, rate)]

    def ahead(self, name: str, others: Sequence[str], measure: str) -> Estimate:
        """Points by which it is ahead of the best of the others, at the rate where that is least."""

        def at(rate: float) -> Estimate:
            best = max(others, key=lambda other: sum(self.points(other, rate, measure)))
            mine, theirs = self.points(name, rate, measure), self.points(best, rate, measure)
            return over_seeds([a - b for a, b in zip(mine, theirs, strict=True)])

        return min(map(at, self.rates), key=lambda estimate: estimate.value)


def found(values: Sequence[Any], small: bool) -> Found:
    one, fleet = _Runs(values, 1), _Runs(values, REPLICAS)
    others = [name for name in one.names if name in REPLICA and name != OURS]
    elsewhere = [name for name in fleet.names if name != OUR_FLEET]
    estimates = {f"replica-{measure}": one.ahead(OURS, others, measure) for measure in MEASURES}
    estimates |= {f"fleet-{measure}": fleet.ahead(OUR_FLEET, elsewhere, measure) for measure in MEASURES}
    estimates["affinity"] = fleet.ahead(WITH, [WITHOUT], "sessions")
    estimates["late"] = Estimate.exact(sum(v["late"] for v in values))
    settings = {
        "scenario": SCENARIO, "rates": RATES, "fleet": FLEET, "fleet_rate": FLEET_RATE, "noise": NOISE,
        "turns": (TURNS, FLEET_TURNS),
        "machine": hardware().describe(),
    }  # fmt: skip
    return Found(estimates, list(values), SEEDS[:1] if small else SEEDS, "deadline", settings)


def tables(data: Sequence[Any]) -> str:
    """Sessions and turns attained, in percent."""
    rows = [("system", "replicas", "turns/s a replica", "sessions", "turns")]
    for replicas in (1, REPLICAS):
        runs = _Runs(data, replicas)
        for rate in runs.rates:
            for name in runs.names:
                shares = [over_seeds(runs.points(name, rate, measure)) for measure in MEASURES]
                shown = [f"{share.value:.1f} {share.interval('{:.1f}'.format)}" for share in shares]
                rows.append((name, str(replicas), f"{rate:g}", *shown))
    return markdown(rows)
