"""Attainment lost where step times, lengths or the mix of SLOs are not as policies were told.

And what host and prefix cache change. SLOs-Serve's Mixed on three replicas. Each policy is offered the rate at which 90
% attain for it (all tiers together, nothing disturbed, on a seed that is not measured), and again with one thing
changed: what is lost is that policy's own attainment, in points, seed by seed. What changes the work itself (the host's
time of today's vLLM, prompts that are in the prefix cache) is shown by the rate that attains 90 %, over the policy's
own without it, and over `edf`'s.

Nothing disturbed: output lengths are learnt while running, step times are off by 5 % at random, and policies believe
the profile for ever (`learns` off), so that a wrong model stays wrong. TTFTs are three times that of an idle replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from experiments import Found
from experiments._host import AS_STATED, TODAY, at_host
from experiments._rate_search import RateSearch, geometric, shares_of
from experiments._rubato_runs import CONTEXT, NOISE, USUALLY
from rubato.core.interfaces import LengthPredictor
from rubato.core.request import Request
from rubato.engines.simulated import Drafter
from rubato.engines.simulated.acceptance import Acceptance
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.fleet_size_model import Faster
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.simulation.run_spec import Hardware, RunSpec, Truth, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload, scenarios
from rubato.workloads.workload import HASH_BLOCK_TOKENS

SOURCE = "ours"
SECONDS = 1100.0

SCENARIO, REPLICAS = "slos-serve-mixed", 3
START = 12.0  # requests/s of the fleet
MEASURE = "90 % of all"
DRAFTED = "adaserve"
SYSTEMS: Mapping[str, str] = {
    "rubato": "rubato",
    "slos_serve": "slos_serve",
    "adaserve": "adaserve",
    "polyserve": "polyserve@polyserve:mode=co",
    "ascendra": "ascendra:batch_size=256,hp_tokens=4096@ascendra:groups=2L1H",
    "sa": "sa",
    "scorpio": "scorpio",
    "qoserve": "qoserve",
    "edf": "edf:max_ttft_share=1,safety_margin=0",
    "sarathi": "sarathi",
    "vllm": "vllm",
}
PAPERS = ("slos_serve", "adaserve", "polyserve", "ascendra", "sa")
ERRORS = (-25, -10, 10, 25)  # percent by which step times are believed wrong
LENGTHS = (-50, 50)
HITS = (50, 95)  # percent of the prompts that are in the prefix cache; none are where nothing is changed
TEMPLATES = 8  # prompts that those begin like
TODAYS = "today's host"


# --------------------------------------------------------------------------- what is changed


class Biased:
    """A predictor that says so many times what another says."""

    def __init__(self, predictor: LengthPredictor, factor: float) -> None:
        self._predictor, self._factor = predictor, factor

    def remaining(self, request: Request, output: int) -> float | None:
        said = self._predictor.remaining(request, output)
        return None if said is None else max(1.0, said * self._factor)

    def learn(self, request: Request, output: int) -> None:
        self._predictor.learn(request, output)


def biased(truth: Truth, factor: float) -> LengthPredictor:
    return Biased(conditional_mean(truth), factor)


def turned(load: Workload) -> Workload:
    """The same requests; in the second half of them the tiers have each other's SLOs."""
    names = list(load.tiers)
    other = dict(zip(names, [load.tiers[name] for name in (*names[1:], names[0])], strict=True))
    half = len(load.arrivals) // 2
    late = tuple(replace(a, slo=replace(other[a.tier], ttft=load.slo(a).ttft)) for a in load.arrivals[half:])
    return replace(load, arrivals=load.arrivals[:half] + late)


def shifted(load: Workload) -> Workload:
    """The first half of the requests without those of the tightest tier, the second half with all of them, at the same
    rate throughout."""
    tight = min(load.tiers, key=lambda name: load.tiers[name].tpot or np.inf)
    others = [a for a in load.arrivals if a.tier != tight]
    tights = [a for a in load.arrivals if a.tier == tight]
    half = len(load.arrivals) // 2
    order = [*others[:half], *tights, *others[half:]]
    late = np.random.default_rng(load.seed).permutation(len(order) - half) + half
    order = [*order[:half], *(order[i] for i in late)]
    arrivals = [replace(a, at=own.at, id=own.id) for a, own in zip(order, load.arrivals, strict=True)]
    return replace(load, arrivals=tuple(arrivals))


def cached(load: Workload, percent: int) -> Workload:
    """The same requests with prompts of which so many percent begin like one of a few, as long as they are; the others
    have nothing in common."""
    rng = np.random.default_rng(load.seed)

    def own(number: int, a: Arrival) -> Arrival:
        blocks = -(-a.prompt_tokens // HASH_BLOCK_TOKENS)
        shared = rng.random() < percent / 100.0
        first = int(rng.integers(TEMPLATES)) if shared else TEMPLATES + number
        return replace(a, blocks=tuple(1 + first * 1000 + i for i in range(blocks)))

    return replace(load, arrivals=tuple(own(number, a) for number, a in enumerate(load.arrivals)))


@dataclass(frozen=True)
class Scale:
    """How large a run is: requests, seeds, and how finely rates are searched (`RateSearch`; steps until a bracket)."""

    count: int
    seeds: tuple[int, ...]
    grid: float
    bracket: float
    coarse: int


FULL = Scale(200, (1, 2, 3), 1.08, 0.09, 2)
SMALL = Scale(40, (1,), 2.0, 1.0, 1)
TUNING = 0  # the seed that rates are found on


@dataclass(frozen=True)
class Condition:
    """What is changed: of the requests, of what policies believe of step times (a factor) and of lengths."""

    load: Callable[[Workload], Workload] | None = None
    believed: float = 1.0
    lengths: float = 1.0
    prefix_cache: bool = False
    host: str = AS_STATED


PLAIN = Condition()
DISTURBED: Mapping[str, Condition] = {
    **{f"steps believed {100 + e} % as long": Condition(believed=1.0 + e / 100.0) for e in ERRORS},
    **{f"lengths predicted {100 + e} % as long": Condition(lengths=1.0 + e / 100.0) for e in LENGTHS},
    "tiers change places at half-time": Condition(turned),
    "the tightest tier comes at half-time": Condition(shifted),
}
CHANGED: Mapping[str, Condition] = {
    TODAYS: Condition(host=TODAY),
    **{f"{h} % of prompts cached": Condition(partial(cached, percent=h), prefix_cache=True) for h in HITS},
}


# --------------------------------------------------------------------------- what is run


class Tried(RateSearch):
    """Runs under one condition and one seed."""

    def __init__(self, condition: Condition, seed: int, scale: Scale) -> None:
        super().__init__(scale.grid, scale.bracket)
        self.condition, self.seed, self.coarse = condition, seed, scale.coarse
        self.machine = hardware(condition.host)
        load = ScenarioSource(SCENARIO, hardware(), count=scale.count).make(seed)  # the TTFTs asked for stay
        self._load = condition.load(load) if condition.load else load

    def run(self, choice: str, rate: float) -> dict[str, float]:
        own = self.condition
        spec = RunSpec(
            self.machine, PolicyChoice.parse(choice), REPLICAS, lengths=partial(biased, factor=own.lengths),
            noise=NOISE, believed=Faster(self.machine.model, 1.0 / own.believed), stated_max_tokens=USUALLY,
            prefix_cache=own.prefix_cache,
            drafter=Drafter(Acceptance(alpha=0.7)) if choice.startswith(DRAFTED) else None,
        )  # fmt: skip
        return shares_of(simulate(self._load.rescaled(rate), spec, self.seed, causes=False, times=False).records)

    def held(self, system: str, start: float) -> float:
        """Requests/s at which 90 % attain; 0: none."""
        return self.best([SYSTEMS[system]], start, MEASURE, self.coarse)[0]


@cache
def hardware(host: str = AS_STATED) -> Hardware:
    """host: whose host term (`_host`)."""
    profile = scenarios.get(SCENARIO).profile
    return packaged_hardware(at_host(profile, host), max_model_len=CONTEXT)


def jobs(small: bool) -> list[Job]:
    """The rate that each holds; `then` changes something."""
    systems = ("rubato", "edf", "sa") if small else tuple(SYSTEMS)
    return [Job(f"{system} holds", holds, (system, SMALL if small else FULL)) for system in systems]


def holds(system: str, scale: Scale) -> dict[str, Any]:
    return {"system": system, "rate": Tried(PLAIN, TUNING, scale).held(system, START)}


def then(values: Sequence[Any], small: bool) -> list[Job]:
    scale = SMALL if small else FULL
    each = [(v["system"], v["rate"], scale, seed) for v in values for seed in scale.seeds]
    names, conditions = ([*every][-1 if small else 0 :] for every in (DISTURBED, CHANGED))
    made = [Job(f"{one[0]} disturbed seed={one[-1]}", disturbed, (*one, names)) for one in each]
    return made + [
        Job(f"{one[0]}, {condition}, seed={one[-1]}", changed, (*one, condition))
        for one in each for condition in ("", *conditions)
    ]  # fmt: skip


def disturbed(system: str, rate: float, scale: Scale, seed: int, names: Sequence[str]) -> dict[str, Any]:
    """Attained at the system's own rate (shares of all, and of the worst tier) as it is and with one thing changed."""
    conditions = {"": PLAIN, **{name: DISTURBED[name] for name in names}}
    runs = {name: Tried(own, seed, scale).run(SYSTEMS[system], rate) for name, own in conditions.items()}
    return {
        "system": system, "seed": seed, "rate": rate,
        "attained": {name: {"all": own["all"], "worst": own["worst"]} for name, own in runs.items()},
    }  # fmt: skip


def changed(system: str, rate: float, scale: Scale, seed: int, condition: str) -> dict[str, Any]:
    """The rate that attains under a condition ("": none)."""
    held = Tried(CHANGED.get(condition, PLAIN), seed, scale).held(system, rate or START)
    return {"system": system, "seed": seed, "condition": condition, "holds": held}


# --------------------------------------------------------------------------- what was found


class Results:
    """What a system loses under each condition, and what it holds."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.runs = [v for v in values if "attained" in v]
        self.rates = [v for v in values if "holds" in v]
        self.systems = list(dict.fromkeys(v["system"] for v in self.runs))
        self.disturbances = [name for name in self.runs[0]["attained"] if name]
        self.conditions = [c for c in dict.fromkeys(v["condition"] for v in self.rates) if c]

    def lost(self, system: str, condition: str, of: str = "all") -> Estimate:
        """Points of attainment, by seed."""
        own = [v["attained"] for v in self.runs if v["system"] == system]
        return over_seeds([100.0 * (by[""][of] - by[condition][of]) for by in own])

    def worst(self, system: str) -> tuple[str, Estimate]:
        """The condition under which it loses most, in the mean over seeds, and how much."""
        each = {condition: self.lost(system, condition) for condition in self.disturbances}
        return max(each.items(), key=lambda item: item[1].value)

    def held(self, system: str, condition: str) -> list[float]:
        """Requests/s of the fleet by seed."""
        return [max(v["holds"], 1e-3) for v in self.rates if (v["system"], v["condition"]) == (system, condition)]

    def ratio(self, system: str, condition: str, beside: str, reference: str) -> Estimate:
        """What it holds under a condition over what another holds under one."""
        pairs = zip(self.held(system, condition), self.held(beside, reference), strict=True)
        return geometric([a / b for a, b in pairs])


def found(values: Sequence[Any], small: bool) -> Found:
    results = Results(values)
    papers = [system for system in results.systems if system in PAPERS]
    worst = {system: results.worst(system)[1] for system in results.systems}
    estimates = {f"worst-{system}": worst[system] for system in ("rubato", "edf")}
    estimates["worst-papers"] = max((worst[system] for system in papers), key=lambda lost: lost.value)
    warm, today = results.conditions[-1], TODAYS if TODAYS in results.conditions else ""
    for name, condition in (("", ""), ("-today", today), ("-cached", warm)):
        over = {system: results.ratio(system, condition, "edf", condition) for system in results.systems}
        estimates[f"rubato-edf{name}"] = over["rubato"]
        estimates[f"papers-edf{name}"] = max((over[system] for system in papers), key=lambda ratio: ratio.value)
    settings = {
        "systems": dict(SYSTEMS), "count": FULL.count, "replicas": REPLICAS, "noise": NOISE,
        "lengths": "conditional_mean",
        "machines": {host or "scenario's": hardware(host).describe() for host in (AS_STATED, TODAY)},
    }  # fmt: skip
    return Found(estimates, list(values), SMALL.seeds if small else FULL.seeds, "deadline", settings)


def tables(data: Sequence[Any]) -> str:
    """Losses first: by system, what each disturbance takes of its attainment; then what it holds of `edf`'s."""
    results = Results(data)
    order = sorted(results.systems, key=lambda system: -results.worst(system)[1].value)
    rows = [["changed", *(f"`{system}`" for system in order)]]
    by_loss = sorted(results.disturbances, key=lambda c: -max(results.lost(system, c).value for system in order))
    for condition in by_loss:
        rows.append([condition, *(_lost(results, system, condition) for system in order)])
    parts = [
        "Points of attainment lost at the rate that the system holds undisturbed, of all requests and, after the "
        f"slash, of the worst tier (negative: gained):\n\n{markdown(rows)}"
    ]
    rows = [["system", "holds, requests/s of the fleet", "over `edf`'s"]]
    rows[0] += [f"{condition}: of its own, over `edf`'s" for condition in results.conditions]
    for system in sorted(order, key=lambda system: results.ratio(system, "", "edf", "").value):
        cells = [
            system,
            f"{float(np.mean(results.held(system, ''))):.3g}",
            results.ratio(system, "", "edf", "").shown(),
        ]
        for condition in results.conditions:
            own, beside = (results.ratio(system, condition, *other) for other in ((system, ""), ("edf", condition)))
            cells.append(f"{own.value:.2f}, {beside.shown()}")
        rows.append([f"`{cells[0]}`", *cells[1:]])
    parts.append(f"Rates that attain 90 % of all:\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def _lost(results: Results, system: str, condition: str) -> str:
    own, worst = results.lost(system, condition), results.lost(system, condition, "worst")
    return f"{own.shown('.1f')} / {worst.value:.1f}"
