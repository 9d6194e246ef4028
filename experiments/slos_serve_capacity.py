"""Capacity on SLOs-Serve's six scenarios: the largest rate per GPU at which 90, and 98, % attain (Fig. 9).

Every system serves the same requests, seed by seed, on the profile of the scenario's model, and knows output lengths,
for memory. Settings are tuned for each scenario, judge and target on a seed that is not measured; prefill-first and
Sarathi are measured in one published setting too. `edf` is ours, so among no baselines, and compared with `slos_serve`
by itself. Two judges: the deadline rule, and the paper's, TTFT and the TPOT of
every ten tokens. A rate is searched as `rubato capacity` does. DistServe's rates are per replica of its fleets, and its
KV moves at no cost. With drafts: OPT-125M beside OPT-13B; the paper does not print its acceptance (ours: 0.7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside, drafts, held
from rubato.engines import simulated
from rubato.engines.simulated import Drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import BenchResult, rejudged
from rubato.planning import capacity
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.planning.sweep import markdown
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios

SOURCE = "SLOs-Serve, Fig. 1, Fig. 9 and §6.1"
SECONDS = 15000.0

JUDGES = ("deadline", "windowed")  # ours, and the paper's
TARGETS = (0.9, 0.98)
ASKED = tuple((judge_, target) for judge_ in JUDGES for target in TARGETS)
# where a search begins, requests/s of a replica
STARTS = {"chatbot": 3.0, "coder": 0.9, "summarizer": 2.0, "mixed": 2.6, "toolllm": 0.2, "reasoning": 0.8}
# requests of a run: a burst of code is 130 on average; a reasoning request lives for two minutes, 200 fill the memory
COUNTS = {"chatbot": 200, "coder": 400, "summarizer": 200, "mixed": 200, "toolllm": 400, "reasoning": 400}
LONGEST = "reasoning"
OURS = "slos_serve"
OURS_DRAFTING = "slos_serve+drafts"
EDF = "edf"
DRAFTING = "vllm_spec"
WHOLE = ("true", "false")
ALPHA = 0.7  # how often a drafted token is right (ours)


@dataclass(frozen=True)
class System:
    """settings: what it is tuned over, each on so many replicas; few: where a run takes minutes. drafts: its engine has
    a drafter."""

    settings: tuple[tuple[str, int], ...]
    scenarios: tuple[str, ...] = tuple(STARTS)
    few: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    drafts: bool = False


def drafter() -> Drafter:
    """What drafts beside OPT."""
    return simulated.drafter("opt-125m-a100-40g", alpha=ALPHA)


def _alone(*settings: str) -> tuple[tuple[str, int], ...]:
    return tuple((setting, 1) for setting in settings)


LONG = "max_ttft_share=1,safety_margin=0"
OPT = ("chatbot", "coder", "summarizer", "mixed")
SYSTEMS = {
    OURS: System(
        _alone(
            OURS,
            *(
                f"{OURS}:max_batch_seconds={longest}{even}"
                for longest in (0.1, 0.018)
                for even in ("", ",steady_tokens=true")
            ),
        ),
        few={"reasoning": _alone(*(f"{OURS}:max_batch_seconds={longest}" for longest in (0.018, 0.02)), OURS)},
    ),
    EDF: System(  # step times are known exactly here: no safety; longer steps; a smaller cushion
        _alone(
            EDF, *(f"{EDF}:{own}" for own in ("safety_margin=0", "max_ttft_share=1", LONG, f"{LONG},decode_lead=1"))
        ),
        tuple(scenario for scenario in STARTS if scenario != LONGEST),  # too many wait there for its plans to be quick
    ),
    "prefill_first": System(_alone(*(f"prefill_first:reserve_kv={w}" for w in WHOLE))),
    "vllm": System(_alone(*(f"vllm:budget={b},reserve_kv={w}" for b in (512, 2048, 8192) for w in WHOLE))),
    "sarathi": System(_alone(*(f"sarathi:budget={b},reserve_kv={w}" for b in (0, 256, 512, 1024) for w in WHOLE))),
    "prefill_first, published": System(_alone("prefill_first:reserve_kv=false")),
    "sarathi, published": System(
        _alone("sarathi:budget=0,reserve_kv=false")
    ),  # the largest that keeps the tightest TPOT
    "distserve": System(
        tuple(
            (f"distserve@distserve:prefill={p},decode={d},reserve_kv=true", p + d) for p, d in ((1, 1), (2, 1), (1, 2))
        ),
        OPT,  # a tool's return is a new prefill of everything there: three quarters miss their TTFT at any rate
    ),
    DRAFTING: System(_alone(*(f"vllm_spec:n={n},reserve_kv=true" for n in (2, 4, 6))), OPT, drafts=True),
    OURS_DRAFTING: System(  # not drafting is a setting of its own, as it is among the baselines that it is held against
        _alone(
            OURS,
            f"{OURS}:max_batch_seconds=0.1",
            *(
                f"{OURS}:{more}steady_tokens=true"
                for more in ("", "max_batch_seconds=0.1,", "max_draft=0,max_batch_seconds=0.1,")
            ),
        ),
        OPT,
        drafts=True,
    ),
}


@dataclass(frozen=True)
class Scale:
    """count: requests of a run (0: as `COUNTS`). tolerance: of capacities, measured or tuned for. shorter: outputs are
    cut to this part. tuned: settings tried of a system, at most. limits: of the engine, where not the profile's. host:
    how many times as long a step takes outside the device."""

    seeds: tuple[int, ...] = (1, 2, 3)
    count: int = 0
    tolerance: float = 0.06
    tuned: int = 99
    shorter: int = 1
    limits: tuple[tuple[str, int], ...] = ()
    host: float = 1.0


FULL = Scale()
SMALL = Scale((1,), 8, 0.9, 1, 16, (("max_num_seqs", 2), ("max_num_batched_tokens", 2048)))
TUNING = 0  # the seed
CONTEXT = {"toolllm": 8192}  # tokens; one request in twenty is longer than the model's 4,096, all rounds together


def of_name(system: str) -> System:
    """A system of the table, or a policy of one's own, with the drafter's scenarios if it cannot do without one."""
    if system in SYSTEMS:
        return SYSTEMS[system]
    return System(_alone(system), OPT, drafts=True) if drafts(system) else System(_alone(system))


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    scale = SMALL if small else FULL
    systems = {name: of_name(name) for name in beside(tuple(SYSTEMS), policy)}
    each = [
        (scenario, name)
        for scenario in sorted(STARTS, key=lambda scenario: scenario != LONGEST)  # it takes as long as all others
        for name, system in systems.items()
        if scenario in system.scenarios
    ]
    return [Job(f"{scenario} {name}", measured, (scenario, name, scale)) for scenario, name in each]


def measured(
    scenario: str, system: str, scale: Scale, asked: Sequence[tuple[str, float]] = ASKED
) -> list[dict[str, Any]]:
    """One system's capacities (requests/s a replica), seed by seed, each with the setting that was best for it, and how
    long (seconds) arrivals and requests (p99 of e2e) lasted at the first. asked: judge and target."""
    drafting = of_name(system).drafts
    tuning: dict[tuple[str, int], RateTrials] = {}
    best = {of: tuned(scenario, system, *of, scale, tuning) for of in asked}
    values = []
    for seed in scale.seeds:
        tries = {
            setting: RateTrials(scenario, setting, seed, scale, drafting) for setting in dict.fromkeys(best.values())
        }
        found: dict[str, Any] = {judge_: {"setting": {}, "capacity": {}} for judge_, _ in asked}
        for (judge_, target), setting in best.items():
            found[judge_]["setting"][str(target)] = setting[0]
            search = partial(tries[setting].capacity, judge_, target, scale.tolerance)
            found[judge_]["capacity"][str(target)] = search() if system in SYSTEMS else held(search)
        judge_, target = asked[0]
        seconds, p99 = tries[best[asked[0]]].lasted(found[judge_]["capacity"][str(target)])
        values.append({
            "scenario": scenario, "system": system, "seed": seed, "found": found,
            "tried": {setting: sorted(own.known.items()) for (setting, _), own in tries.items()},
            "seconds": seconds, "e2e_p99": p99,
            "unfinished": sum(own.unfinished for own in tries.values()),
            "differ": sum(own.differ for own in tries.values()),
        })  # fmt: skip
    return values


def tuned(
    scenario: str, system: str, judge_: str, target: float, scale: Scale, known: dict[tuple[str, int], RateTrials]
) -> tuple[str, int]:
    """The setting, and on how many replicas, with the largest rate a replica: each is tried at what the best before it
    does not hold, and only if it attains the target there its own capacity is searched. Of settings that hold as much,
    to the tolerance, the first. known: what has been tried, and will be."""
    able = of_name(system).few.get(scenario, of_name(system).settings)[: scale.tuned]
    best, beyond = able[0], 0.0
    for setting in able if len(able) > 1 else ():
        if setting not in known:
            known[setting] = RateTrials(scenario, setting, TUNING, scale, of_name(system).drafts)
        tries = known[setting]
        if beyond and tries.attained(beyond)[judge_] < target:
            continue
        try:
            held = tries.capacity(judge_, target, scale.tolerance)
        except ValueError:  # so many attain at no rate
            continue
        if held > beyond:
            best, beyond = setting, held * (1.0 + scale.tolerance) ** 0.5
    return best


class RateTrials:
    """Runs of one setting under one seed: the same requests at one rate after another."""

    def __init__(self, scenario: str, setting: tuple[str, int], seed: int, scale: Scale, drafting: bool) -> None:
        choice, self._replicas = setting
        machine = hardware(scenario, scale)
        self._load = load(scenario, seed, scale)
        self._seed = seed
        self._start = STARTS[scenario]
        engines = drafter() if drafting else None
        self._setting = RunSpec(
            machine, PolicyChoice.parse(choice), self._replicas, lengths=oracle_lengths, drafter=engines
        )
        self.known: dict[float, dict[str, float]] = {}  # requests/s a replica -> attained, by judge
        self._lasted: dict[float, tuple[float, float]] = {}
        self.unfinished = 0  # requests that had not all their tokens in the end
        self.differ = 0  # verdicts that are not what the simulator's own judge said

    def capacity(self, judge_: str, target: float, tolerance: float) -> float:
        return capacity.crossing(lambda rate: self.attained(rate)[judge_], target, self._start, tolerance)

    def lasted(self, rate: float) -> tuple[float, float]:
        """Seconds of arrivals, and the p99 of e2e, of the run whose rate was nearest."""
        return self._lasted[min(self._lasted, key=lambda tried: abs(tried - rate))]

    def attained(self, rate: float) -> Mapping[str, float]:
        if rate not in self.known:
            load = self._load.rescaled(rate * self._replicas)
            run = simulate(load, self._setting, self._seed, causes=False)
            met = {judge_: verdicts(run, judge_) for judge_ in JUDGES}
            self.known[rate] = {judge_: sum(own) / len(own) for judge_, own in met.items()}
            self._lasted[rate] = run.workload.duration, capacity.e2e_p99(run)
            self.unfinished += sum(r.outcome != "completed" or r.output != r.asked for r in run.records)
            self.differ += sum(a != r.verdict.met for a, r in zip(met[run.slo_rule], run.records, strict=True))
        return self.known[rate]


def verdicts(run: BenchResult, slo_rule: str) -> list[bool]:
    """Whether each request of a run is attained by this rule."""
    return [r.verdict.met for r in rejudged(run, slo_rule).records]


@cache
def hardware(scenario: str, scale: Scale) -> Hardware:
    limits = dict(scale.limits)
    if scenario in CONTEXT:
        limits["max_model_len"] = CONTEXT[scenario]
    return packaged_hardware(scenarios.get(f"slos-serve-{scenario}").profile, host_scale=scale.host, **limits)


def load(scenario: str, seed: int, scale: Scale) -> Workload:
    made = ScenarioSource(
        f"slos-serve-{scenario}", hardware(scenario, scale), count=scale.count or COUNTS[scenario]
    ).make(seed)
    if scale.shorter == 1:
        return made
    return with_outputs(made, lambda output: max(2, output // scale.shorter))


def with_outputs(load: Workload, change: Callable[[int], int]) -> Workload:
    """The same requests with other output tokens of each stage."""
    arrivals = []
    for a in load.arrivals:
        parts = tuple(replace(part, output=change(part.output)) for part in a.parts)
        arrivals.append(replace(a, parts=parts, output_tokens=sum(map(change, a.outputs))))
    return replace(load, arrivals=tuple(arrivals))


# --------------------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Rates:
    """Capacities of all systems: requests/s a replica, by seed."""

    values: Sequence[Mapping[str, Any]]

    def of(self, scenario: str, system: str, judge_: str, target: float) -> list[float]:
        """By seed; none where the system was not run."""
        return [
            v["found"][judge_]["capacity"][str(target)]
            for v in self.values
            if (v["scenario"], v["system"]) == (scenario, system)
        ]

    def best(self, scenario: str, systems: Sequence[str], judge_: str, target: float) -> str:
        """The system with the largest capacity, mean over seeds."""
        means = {s: float(np.mean(own)) for s in systems if (own := self.of(scenario, s, judge_, target))}
        return max(means, key=lambda s: means[s])

    def logs(self, scenario: str, system: str, judge_: str, target: float, ours: str = OURS) -> list[float]:
        """Logarithms of ours over a system's, paired by seed."""
        pair = (self.of(scenario, s, judge_, target) for s in (ours, system))
        return [float(np.log(a / b)) for a, b in zip(*pair, strict=True)]

    def ratio(self, scenario: str, systems: Sequence[str], judge_: str, target: float, ours: str = OURS) -> Estimate:
        """Ours over the best of some systems."""
        best = self.best(scenario, systems, judge_, target)
        return over_seeds(self.logs(scenario, best, judge_, target, ours)).exp()

    def mean_ratio(
        self, systems: Sequence[str], judge_: str, target: float, drafting: bool = True,
        among: Sequence[str] = tuple(STARTS),
    ) -> Estimate:  # fmt: skip
        """The geometric mean of that over the scenarios in which they were run. drafting: ours drafts where it does in
        the paper."""
        able = [s for s in among if any(self.of(s, system, judge_, target) for system in systems)]
        best = {s: self.best(s, systems, judge_, target) for s in able}
        ours = {s: _as_published(s) if drafting else OURS for s in able}
        each = [self.logs(s, best[s], judge_, target, ours[s]) for s in able]
        return over_seeds([float(np.mean(seed)) for seed in zip(*each, strict=True)]).exp()


def _as_published(scenario: str) -> str:
    """Ours as in the paper's Fig. 9: it drafts where the model has a drafter."""
    return OURS_DRAFTING if scenario in OPT else OURS


PLAIN = ("prefill_first", "vllm", "sarathi", "distserve")  # baselines that do not draft
PRINTED = tuple(scenario for scenario in STARTS if scenario != "mixed")  # whose gains §6.1 gives in numbers
PUBLISHED = ("prefill_first, published", "sarathi, published")  # as the paper has them: one setting, no memory kept


def _name(scenario: str, target: float, judge_: str, what: str = "") -> str:
    """Of a claim."""
    return f"{scenario}-{100 * target:g}{what}{'' if judge_ == 'deadline' else '-windowed'}"


def found(values: Sequence[Any], small: bool) -> Found:
    values = [value for own in values for value in own]
    rates = Rates(values)
    estimates = {
        _name(scenario, target, judge_): rates.ratio(scenario, PLAIN, judge_, target)
        for judge_ in JUDGES
        for target in TARGETS
        for scenario in STARTS
    }
    estimates |= {
        _name(scenario, target, judge_, "-drafts"): rates.ratio(
            scenario, (*PLAIN, DRAFTING), judge_, target, OURS_DRAFTING
        )
        for judge_ in JUDGES
        for target in TARGETS
        for scenario in OPT
    }
    estimates |= {
        _name(scenario, target, judge_, "-edf"): rates.ratio(scenario, (EDF,), judge_, target)
        for judge_ in JUDGES
        for target in TARGETS
        for scenario in SYSTEMS[EDF].scenarios
    }
    estimates |= {
        _name("mean", target, judge_, "-edf"): rates.mean_ratio((EDF,), judge_, target, drafting=False)
        for judge_ in JUDGES
        for target in TARGETS
    }
    two = ("prefill_first", "sarathi")
    paper = {s: rates.ratio(s, two, "windowed", 0.9, _as_published(s)) for s in PRINTED}
    estimates |= {f"{scenario}-paper": ratio for scenario, ratio in paper.items()}
    estimates["mean-paper-five"] = rates.mean_ratio(two, "windowed", 0.9, among=PRINTED)
    estimates["mean-paper-best"] = rates.mean_ratio(two, "windowed", 0.9)
    estimates["mean-paper-best-undrafted"] = rates.mean_ratio(two, "windowed", 0.9, drafting=False)
    estimates["mean-paper-published"] = rates.mean_ratio(PUBLISHED, "windowed", 0.9)
    for system in (*two, "distserve"):
        name = system.replace("_", "-")
        estimates[f"mean-paper-{name}"] = rates.mean_ratio((system,), "windowed", 0.9)
        ratio = rates.ratio("chatbot", (system,), "windowed", 0.98, _as_published("chatbot"))
        estimates[f"chatbot-98-paper-{name}"] = ratio
    estimates["unfinished"] = Estimate.exact(sum(v["unfinished"] for v in values))
    estimates["verdicts-differ"] = Estimate.exact(sum(v["differ"] for v in values))
    scale = SMALL if small else FULL
    machines = {scenario: hardware(scenario, scale).describe() for scenario in STARTS}
    settings = {
        "counts": COUNTS, "tolerance": scale.tolerance, "lengths": "oracle",
        "systems": {name: [s for s, _ in system.settings] for name, system in SYSTEMS.items()}, "machines": machines,
    }  # fmt: skip
    return Found(estimates, list(values), scale.seeds, " and ".join(JUDGES), settings)


NOTE = """\
The best tuned baseline is of `prefill_first`, `vllm`, `sarathi` and `distserve`. Our own `edf` is none: claims with
`-edf` hold `slos_serve` against it, tuned like the others. It is not run on Reasoning, where hundreds wait and its
plans take too long: in one run at 0.9 requests/s it attained 32 %, `slos_serve` 91 %.

The paper's 2.2 × over the better of vLLM (prefill-first) and Sarathi (§1) cannot be reconciled with its own §6.1: a
gain over the better of two is at most the gain over either, and §6.1 gives 1.76 × over vLLM. The five scenarios whose
gains §6.1 prints come to about 1.75 ×; `mean-paper-five` has ours."""


def tables(data: Sequence[Any]) -> str:
    """Capacities in requests/s a GPU, mean over seeds."""
    parts = [NOTE]
    guests = [name for name in dict.fromkeys(v["system"] for v in data) if name not in SYSTEMS]
    kinds = (((OURS, EDF, *PLAIN, *guests), "without speculation"), ((OURS_DRAFTING, DRAFTING), "with speculation"))
    for judge_ in JUDGES:
        for systems, what in kinds:
            rows = [["scenario", *(f"`{s}` {100 * t:g} %" for s in systems for t in TARGETS)]]
            for scenario in STARTS:
                own = [_cell(data, scenario, system, judge_, target) for system in systems for target in TARGETS]
                if any(own):
                    rows.append([scenario, *own])
            parts.append(f"Requests/s a GPU, {judge_} rule, {what}:\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def _cell(data: Sequence[Any], scenario: str, system: str, judge_: str, target: float) -> str:
    rates = Rates(data).of(scenario, system, judge_, target)
    return f"{np.mean(rates) / hardware(scenario, FULL).gpus:.3g}" if rates else ""


def draw(data: Sequence[Any], axes: Any) -> None:
    """Each scenario's capacities at 90 % by the deadline rule, as shares of the largest."""
    systems = (OURS, EDF, *PLAIN)
    for i, system in enumerate(systems):
        for j, scenario in enumerate(STARTS):
            own = Rates(data).of(scenario, system, "deadline", 0.9)
            most = max(float(np.mean(Rates(data).of(scenario, s, "deadline", 0.9) or [0.0])) for s in systems)
            height = float(np.mean(own)) / most if own else 0.0
            axes.bar(j + 0.14 * (i - 2.5), height, 0.13, color=f"C{i}", label="" if j else system)
    axes.set_xticks(range(len(STARTS)), list(STARTS))
    axes.set_ylabel("capacity at 90 %, of the largest")
    axes.legend(frameon=False)
