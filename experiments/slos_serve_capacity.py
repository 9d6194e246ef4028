"""Capacity on SLOs-Serve's six scenarios: the largest rate per GPU at which 90 % attain (Fig. 9).

Models, GPUs and replicas are the paper's: OPT-7B on four replicas (and on one), OPT-13B on two GPUs, OPT-30B on four,
ToolLLM and Reasoning on one. Every system serves the same requests, seed by seed, and knows output lengths. Settings,
and routers where there are several replicas, are tuned on a seed that is not measured. `edf` is ours and among no
baselines. Judges: the paper's (TTFT, and the TPOT of every ten tokens) and the deadline rule. DistServe's rates are per
replica of its fleets, and its KV moves at no cost. With drafts: OPT-125M; its acceptance is ours (0.7).

Beside Sarathi tuned stands the paper's own, with one budget for a model: what a step of the tightest decode SLO of all
scenarios holds (§6). Beside Reasoning stands a row whose zero-load TTFT, of which its SLO is three times, holds the
server's part, too, as one that is measured does.

Arrivals are stand-ins with the statistics of Azure's. `--trace` with Azure's two files adds rows with the trace's own,
stretched to the rate; no claim reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import Found
from experiments import _slos_serve_runs as runs
from experiments._axes import bars
from experiments._guest import beside, drafts
from experiments._rate_search import geometric
from experiments._slos_serve_runs import FULL, OURS, PAPERS, SMALL_SEARCH, CapacitySearch, Scale, hardware
from rubato.core.plan import Shape
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.capacity import MIN_RUN_IN_E2ES
from rubato.planning.jobs import Job

SOURCE = "SLOs-Serve, Fig. 1, Fig. 9 and §6.1"
SECONDS = 10100.0

STRICT = "windowed 98 %"
TUNING = 0  # the seed
STAND_IN, AZURE = "stand-in", "azure"


@dataclass(frozen=True)
class Case:
    """count: requests of a run: arrivals last 5 times as long as a request takes (p99). tuning: of the tuning's,
    where fewer will do. server: share of a zero-load TTFT that is the server's."""

    scenario: str
    count: int
    profile: str = ""  # the scenario's
    replicas: int = 1
    targets: tuple[str, ...] = (PAPERS, OURS)
    tuning: int = 0
    server: float = 0.0


OPT_7B, OPT_30B = "opt-6.7b-a100-40g@vllm-2024", "opt-30b-4xa100-40g@vllm-2024"
LONGEST, SERVED = "reasoning", "reasoning-served"
API_SERVER = 0.33  # of a request's time, Llama-3-8B on an H100 (vLLM's report on 0.6.0, September 2024)
CASES = {
    LONGEST: Case("reasoning", 1600, tuning=400),  # first: it takes as long as several others
    SERVED: Case("reasoning", 800, tuning=400, targets=(PAPERS,), server=API_SERVER),
    "chatbot-7b-x4": Case("chatbot", 2400, OPT_7B, 4),
    "summarizer-7b-x4": Case("summarizer", 2400, OPT_7B, 4),
    "coder-7b-x4": Case("coder", 2400, OPT_7B, 4),
    "chatbot-13b": Case("chatbot", 700, targets=(PAPERS, OURS, STRICT)),
    "coder-13b": Case("coder", 1000),
    "summarizer-13b": Case("summarizer", 800),
    "mixed-13b": Case("mixed", 1200),
    "toolllm": Case("toolllm", 800),
    "chatbot-30b": Case("chatbot", 700, OPT_30B),
    "coder-30b": Case("coder", 1000, OPT_30B),
    "summarizer-30b": Case("summarizer", 800, OPT_30B),
    "chatbot-7b": Case("chatbot", 700, OPT_7B),
    "coder-7b": Case("coder", 1000, OPT_7B),
}
ONE = ("chatbot-13b", "coder-13b", "summarizer-13b", "mixed-13b", "toolllm", LONGEST)  # each scenario on one replica
MODELS = {  # as in the paper's figure: OPT-7B on four replicas, the others on one
    **{name: (f"{name}-7b-x4", f"{name}-13b", f"{name}-30b") for name in ("chatbot", "coder", "summarizer")},
    "mixed": ("mixed-13b",), "toolllm": ("toolllm",), LONGEST: (LONGEST,),
}  # fmt: skip
PRINTED = ("chatbot", "coder", "summarizer", "toolllm", LONGEST)  # whose gains §6.1 gives in numbers
SEVERAL_PROMPTS = ("toolllm",)  # each decided anew
UNDRAFTED = ("toolllm", LONGEST)  # whose models have no drafter
REPLAYED = (  # with the trace's arrivals too
    "chatbot-13b", "coder-13b", "summarizer-13b", "toolllm", "coder-7b-x4",
)  # fmt: skip

PLAIN, DRAFTING, EDF, VLLM_SPEC = "slos_serve", "slos_serve+drafts", "edf", "vllm_spec"
PREFILL_FIRST, SARATHI, STATIC = "prefill_first", "sarathi", "sarathi, static"
PAPERS_TWO = (PREFILL_FIRST, SARATHI)  # the paper's vLLM of 2024, and Sarathi
LITERAL = (PREFILL_FIRST, STATIC)
TIGHTEST = 0.05  # seconds: the tightest TPOT of all scenarios
DECODES = 30  # beside a static budget's prompts: OPT-7B's is 501 then, the paper's 512 (Fig. 10a)
BASELINES = (*PAPERS_TWO, "distserve")
WHOLE = ("true", "false")
ROUTERS = ("least_loaded", "round_robin")


@dataclass(frozen=True)
class System:
    """settings: what it is tuned over, on several replicas under each of `routers` too (none: it has its own). cases:
    in which it runs. drafts: its engine has a drafter."""

    settings: tuple[str, ...]
    cases: tuple[str, ...]
    routers: tuple[str, ...] = ()
    drafts: bool = False

    def able(self, case: str) -> tuple[str, ...]:
        settings = tuple(setting.format(static=static_budget(case)) for setting in self.settings)
        if CASES[case].replicas == 1 or not self.routers:
            return settings
        return tuple(f"{setting}@{router}" for router in self.routers for setting in settings)


def static_budget(case: str) -> int:
    """Tokens of a step as long as the tightest decode SLO of all scenarios, with so many decodes of ChatBot."""
    machine = hardware(CASES[case].scenario, FULL, CASES[case].profile)
    chat = runs.load("chatbot", TUNING, FULL).arrivals
    kv = int(np.mean([a.prompt_tokens + a.output_tokens / 2 for a in chat])) * DECODES
    most = machine.limits.max_num_batched_tokens
    return DECODES + machine.model.largest_chunk(TIGHTEST, Shape(DECODES, DECODES, kv), 0, most)


ALL = tuple(CASES)
OF_OPT = tuple(case for case in CASES if case not in (*UNDRAFTED, SERVED))
FOUR_UNDRAFTED = ("chatbot-7b-x4", "coder-7b-x4")
FOUR = (*FOUR_UNDRAFTED, "summarizer-7b-x4")
OPT_ONE = tuple(case for case in ONE if case not in UNDRAFTED)
SYSTEMS = {
    PLAIN: System(
        (*(f"{PLAIN}:max_batch_seconds={longest}" for longest in (0.02, 0.1)), PLAIN), (*ONE, SERVED, *FOUR_UNDRAFTED)
    ),
    DRAFTING: System((PLAIN, f"{PLAIN}:max_batch_seconds=0.1"), OF_OPT, drafts=True),
    EDF: System(  # step times are known exactly here: no safety; longer steps; a smaller cushion
        (EDF, f"{EDF}:max_ttft_share=1,safety_margin=0", f"{EDF}:max_ttft_share=1,safety_margin=0,decode_lead=1"),
        tuple(
            case for case in (*ONE, *FOUR_UNDRAFTED) if case != LONGEST
        ),  # where hundreds wait, its plans take too long
        ROUTERS,
    ),
    PREFILL_FIRST: System(tuple(f"prefill_first:reserve_kv={w}" for w in WHOLE), ALL, ROUTERS),
    SARATHI: System(tuple(f"sarathi:budget={b},reserve_kv={w}" for b in (0, 256, 512) for w in WHOLE), ALL, ROUTERS),
    STATIC: System(("sarathi:budget={static},reserve_kv=true",), ALL, ("least_loaded",)),
    "distserve": System(
        tuple(f"distserve@distserve:prefill={p},decode={d},reserve_kv=true" for p, d in ((1, 1), (2, 1), (1, 2))),
        # a tool's return is a new prefill of everything there: three quarters miss their TTFT at any rate; a replica of
        # OPT-30B takes all GPUs of the paper's machine
        (*OPT_ONE, *FOUR),
    ),
    VLLM_SPEC: System(tuple(f"vllm_spec:n={n},reserve_kv=true" for n in (2, 4)), OPT_ONE, drafts=True),
}


def of_name(system: str) -> System:
    """A system of the table, or a policy of one's own in that one setting, on one replica of each model."""
    if system in SYSTEMS:
        return SYSTEMS[system]
    drafting = drafts(system)
    return System((system,), OPT_ONE if drafting else ONE, drafts=drafting)


# --------------------------------------------------------------------------- what is run


def jobs(small: bool, policy: str | None = None, trace: str | None = None) -> list[Job]:
    """Tuning; `then` measures."""
    if trace is not None:
        runs.trace_files(trace)  # raises for what is none
    scale = SMALL_SEARCH if small else FULL
    return [
        Job(f"{case} {system} tuned", tuned, (case, system, scale))
        for case in CASES for system in beside(tuple(SYSTEMS), policy) if case in of_name(system).cases
    ]  # fmt: skip


def then(values: Sequence[Any], small: bool, policy: str | None = None, trace: str | None = None) -> list[Job]:
    """A search for each seed, from what the tuning found."""
    scale = SMALL_SEARCH if small else FULL
    files = {} if trace is None else runs.trace_files(trace)
    made = [
        Job(f"{v['case']} {v['system']} seed={seed}", measured, (v["case"], v["system"], v["tuned"], seed, scale, ""))
        for v in values
        for seed in scale.seeds
    ]
    for v in values:
        file = files.get(runs.PATTERNS[CASES[v["case"]].scenario])
        if file is not None and v["case"] in REPLAYED and v["system"] != VLLM_SPEC:
            made += [
                Job(f"{v['case']} {v['system']} {AZURE} seed={seed}", measured,
                    (v["case"], v["system"], v["tuned"], seed, scale, str(file)))
                for seed in scale.seeds
            ]  # fmt: skip
    return made


def search_of(case: str, system: str, seed: int, scale: Scale, trace: str = "") -> tuple[CapacitySearch, float]:
    """Runs of a case under one seed, and a rate to begin with. trace: a file whose arrivals are offered."""
    own = CASES[case]
    machine = hardware(own.scenario, scale, own.profile)
    count = own.tuning if seed == TUNING and own.tuning else own.count
    arrivals = runs.replayed(trace, seed) if trace else runs.stand_in(own.scenario)
    made = runs.load(own.scenario, seed, scale, own.profile, count, arrivals, own.server)
    search = CapacitySearch(made, machine, seed, own.replicas, of_name(system).drafts)
    return search, runs.fluid_rate(made, machine)


def tuned(case: str, system: str, scale: Scale, targets: Sequence[str] = ()) -> dict[str, Any]:
    """For each target, by default the case's, the setting that holds most, and what it holds (requests/s a replica; 0:
    none held any)."""
    search, start = search_of(case, system, TUNING, scale)
    settings = of_name(system).able(case)[: 1 if scale.count else None]
    found: dict[str, tuple[str, float]] = {}
    for target in targets or CASES[case].targets:
        found[target] = search.tuned(settings, target, start)
    return {"case": case, "system": system, "tuned": found, "runs": len(search.known)}


def measured(
    case: str, system: str, found: Mapping[str, tuple[str, float]], seed: int, scale: Scale, trace: str
) -> dict[str, Any]:
    """One system's capacities under one seed (requests/s a replica; 0: it holds none), and how long arrivals and
    requests (p99 of e2e) lasted at the first, in seconds. found: as `tuned` returns it."""
    search, start = search_of(case, system, seed, scale, trace)
    rates: dict[str, float] = {}
    for target, (setting, rate) in found.items():
        near = rate > 0.0 and not scale.count  # else the tuning says little
        rates[target] = search.capacity(setting, target, rate or start, runs.NEAR if near else runs.FAR)
    first = next(iter(found))
    seconds, p99 = search.lasted(found[first][0], rates[first])
    return {
        "case": case, "system": system, "seed": seed, "arrivals": AZURE if trace else STAND_IN, "rates": rates,
        "settings": {target: own for target, (own, _) in found.items()}, "tried": search.shares_tried(),
        "seconds": seconds, "e2e_p99": p99, "unfinished": search.unfinished, "differ": search.differ,
        "begun": search.begun,
    }  # fmt: skip


# --------------------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Rates:
    """Capacities (requests/s a replica) of all systems under the stand-in's arrivals, or the trace's, by seed."""

    values: Sequence[Mapping[str, Any]]
    arrivals: str = STAND_IN

    def of(self, case: str, system: str, target: str) -> list[float]:
        """By seed; none where the system was not run."""
        return [
            max(v["rates"][target], LEAST)
            for v in self.values
            if (v["case"], v["system"], v["arrivals"]) == (case, system, self.arrivals) and target in v["rates"]
        ]

    def best(self, case: str, systems: Sequence[str], target: str) -> str:
        """The system with the largest capacity, mean over seeds."""
        means = {s: float(np.mean(own)) for s in systems if (own := self.of(case, s, target))}
        return max(means, key=lambda s: means[s])

    def logs(self, case: str, systems: Sequence[str], target: str, ours: str = "") -> list[float]:
        """Logarithms of ours over the best of some systems, paired by seed. ours: the system that it is, else as in the
        paper's figure, where it drafts if the model has a drafter."""
        best = self.best(case, systems, target)
        pair = (self.of(case, s, target) for s in (ours or published(case), best))
        return [float(np.log(a / b)) for a, b in zip(*pair, strict=True)]

    def ratio(self, cases: Sequence[str], systems: Sequence[str], target: str = PAPERS, ours: str = "") -> Estimate:
        """The geometric mean over cases."""
        return self.mean_ratio([cases], systems, target, ours)

    def mean_ratio(
        self, groups: Sequence[Sequence[str]], systems: Sequence[str], target: str = PAPERS, ours: str = ""
    ) -> Estimate:
        """The geometric mean over groups of cases, each of which counts as one; cases in which none of the systems ran
        are left out."""
        seeds = []
        for cases in groups:
            able = [case for case in cases if any(self.of(case, s, target) for s in systems)]
            if able:
                seeds.append(np.mean([self.logs(case, systems, target, ours) for case in able], axis=0))
        return over_seeds([float(x) for x in np.mean(seeds, axis=0)]).exp()


LEAST = 1e-3  # requests/s that count where none was held


def published(case: str) -> str:
    """Ours as in the paper's Fig. 9."""
    return DRAFTING if case in OF_OPT else PLAIN


def found(values: Sequence[Any], small: bool) -> Found:
    tuning, values = [v for v in values if "tuned" in v], [v for v in values if "rates" in v]
    rates = Rates(values)
    two = PAPERS_TWO
    printed = [MODELS[name] for name in PRINTED]
    one = [(case,) for case in ONE if case != "mixed-13b"]
    estimates = {name: rates.ratio(MODELS[name], two) for name in ("chatbot", "summarizer", "toolllm", LONGEST)}
    estimates["coder"] = max((rates.ratio([case], two) for case in MODELS["coder"]), key=lambda own: own.value)
    estimates["five"] = rates.mean_ratio(printed, two)
    estimates["six"] = rates.mean_ratio(list(MODELS.values()), two)
    for system in BASELINES:
        name = system.replace("_", "-")
        estimates[f"six-{name}"] = rates.mean_ratio(list(MODELS.values()), (system,))
        estimates[f"chatbot-98-{name}"] = rates.ratio(["chatbot-13b"], (system,), STRICT)
    estimates["five-literal"] = rates.mean_ratio(printed, LITERAL)
    estimates["six-literal"] = rates.mean_ratio(list(MODELS.values()), LITERAL)
    estimates["six-sarathi-static"] = rates.mean_ratio(list(MODELS.values()), (STATIC,))
    estimates["chatbot-98-sarathi-static"] = rates.ratio(["chatbot-13b"], (STATIC,), STRICT)
    estimates[SERVED] = rates.ratio([SERVED], two)
    estimates[f"{SERVED}-literal"] = rates.ratio([SERVED], LITERAL)
    estimates["five-one-replica"] = rates.mean_ratio(one, two)
    estimates["five-one-replica-deadline"] = rates.mean_ratio(one, two, OURS)
    estimates["five-undrafted"] = rates.mean_ratio(one, two, ours=PLAIN)
    estimates["five-all-baselines"] = rates.mean_ratio(one, (*BASELINES, VLLM_SPEC))
    estimates |= {case: rates.ratio([case], two) for case in OF_OPT}
    for name in ("chatbot", "coder"):
        four, single = (rates.logs(f"{name}-7b{replicas}", two, PAPERS) for replicas in ("-x4", ""))
        estimates[f"{name}-routing"] = over_seeds([a - b for a, b in zip(four, single, strict=True)]).exp()
    able = [case for case in ONE if case in SYSTEMS[EDF].cases]
    for judge, target in zip(("", "-deadline"), (PAPERS, OURS), strict=True):
        estimates |= {f"{case}-edf{judge}": rates.ratio([case], (EDF,), target, PLAIN) for case in able}
        estimates[f"mean-edf{judge}"] = rates.ratio(able, (EDF,), target, PLAIN)
    estimates["four-replicas-edf"] = rates.ratio(FOUR_UNDRAFTED, (EDF,), PAPERS, PLAIN)
    baseline = rates.of(LONGEST, rates.best(LONGEST, two, PAPERS), PAPERS)
    estimates["reasoning-bound"] = geometric([most_by_decodes() / rate for rate in baseline])
    for judge in runs.JUDGES:
        begun = [v["begun"][judge] for v in values if v["case"] not in SEVERAL_PROMPTS]
        made, broken = (sum(own) for own in zip(*begun, strict=True))
        estimates[f"begun-broken-{judge}"] = Estimate.exact(broken / made)
    estimates["short-runs"] = Estimate.exact(sum(v["seconds"] < MIN_RUN_IN_E2ES * v["e2e_p99"] for v in values))
    estimates["unfinished"] = Estimate.exact(sum(v["unfinished"] for v in values))
    estimates["verdicts-differ"] = Estimate.exact(sum(v["differ"] for v in values))
    scale = SMALL_SEARCH if small else FULL
    settings = {
        "lengths": "oracle", "systems": {name: list(system.settings) for name, system in SYSTEMS.items()},
        "static budgets": {case: static_budget(case) for case in CASES},
        "machines": {c: hardware(own.scenario, scale, own.profile).describe() for c, own in CASES.items()},
        "counts": {case: scale.count or own.count for case, own in CASES.items()},
        "replicas": {case: own.replicas for case, own in CASES.items()},
        "tuned": {f"{v['case']} {v['system']}": v["tuned"] for v in tuning},
    }  # fmt: skip
    return Found(estimates, values, scale.seeds, " and ".join(runs.JUDGES), settings)


def most_by_decodes() -> float:
    """Requests/s of Reasoning of which any scheduler can keep 90 %: prompts cost nothing, and one request in ten is not
    served at all."""
    made = runs.load(LONGEST, TUNING, FULL)
    output = float(np.mean([a.output_tokens for a in made.arrivals]))
    return runs.decode_rate(made, hardware(LONGEST, FULL)) / output / 0.9


NOTE = """\
Rates are requests/s a GPU, means over seeds. Baselines are the paper's: `prefill_first` is vLLM of 2024. Our own `edf`
is none of them and stands by itself; it does not run on Reasoning, where hundreds wait and its plans take too long.
The gain is over the better of `prefill_first` and `sarathi`, both tuned; over the literal: of `prefill_first` and
`sarathi, static`, the paper's Sarathi with one budget for a model.

The paper's 2.2 × over the better of vLLM and Sarathi (§1) cannot be reconciled with its own §6.1: a gain over the
better of two is at most the gain over either, and §6.1 gives 1.76 × over vLLM. The five scenarios whose gains §6.1
prints come to about 1.75 ×; `five` has ours."""
HEADS = {PAPERS: "The paper's judge, 90 %", OURS: "Deadline rule, 90 %", STRICT: "The paper's judge, 98 %"}


def tables(data: Sequence[Any]) -> str:
    """Ours over the better of the paper's two, and every system's requests/s a GPU."""
    parts = [NOTE]
    guests = [name for name in dict.fromkeys(v["system"] for v in data) if name not in SYSTEMS]
    systems = (*SYSTEMS, *guests)
    for arrivals in dict.fromkeys(v["arrivals"] for v in data):
        rates = Rates(data, arrivals)
        for target, head in HEADS.items():
            rows = [["case", "arrivals", "gain", "over the literal", *(f"`{system}`" for system in systems)]]
            for case in CASES:
                cells = [_cell(rates, case, system, target) for system in systems]
                if any(cells) and rates.of(case, published(case), target):
                    gain = rates.ratio([case], PAPERS_TWO, target)
                    literal = rates.ratio([case], LITERAL, target)
                    rows.append([case, arrivals, gain.shown(), literal.shown(), *cells])
            if len(rows) > 1:
                parts.append(f"{head}, {arrivals} arrivals:\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def _cell(rates: Rates, case: str, system: str, target: str) -> str:
    own = rates.of(case, system, target)
    return f"{np.mean(own) / hardware(CASES[case].scenario, FULL, CASES[case].profile).gpus:.3g}" if own else ""


def draw(data: Sequence[Any], axes: Any) -> None:
    """Each case's capacities by the paper's judge, as shares of the largest."""
    rates = Rates(data)
    systems = [name for name in SYSTEMS if name != VLLM_SPEC]
    means = np.array([[np.mean(rates.of(case, s, PAPERS) or [0.0]) for case in CASES] for s in systems])
    heights = dict(zip(systems, (means / np.maximum(means.max(axis=0), 1e-9)).tolist(), strict=True))
    bars(axes, list(CASES), heights, "capacity at 90 %, of the largest")
