"""AdaServe's simulated runs, for the figures `adaserve-*`: models, drafters, systems, judges, how baselines are tuned.

Streams are synthetic (`scenarios`), or a recorded one whose times are stretched to the rate. Every request has a TTFT
of 2 s beside its TPOT, since policies that look at TTFTs (`edf`, ours) else hold prompts back for minutes; steps are
off by 5 %, lengths are learnt. One run is judged three ways: mean TPOT and TTFT of 2 s, the same with 5 s, and mean
TPOT alone, which is the paper's judge. The last is won by queueing prompts: a small token budget keeps few decodes,
whose TPOTs then hold. Giving a class of requests up, or single requests for minutes, wins any of them: the least tier
and the 99th percentile of TTFTs stand beside.

Baselines are tuned on the requests of seed 0, over all rates together, for each judge: token budgets of all that have
one, lengths of chains. On the seeds that count, what was best there runs, of the paper's baselines and of all, and by
the first judge chains of 2, of 4 and `smart_spec` in any case; that of them which attains most there, in the mean over
these seeds, is the best baseline, which flatters it. KV never binds here: 60 requests of 1,000 tokens are 13 % of the
Llama profile's, 19 % of the Qwen profile's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._guest import beside
from experiments._host import AS_STATED, at_host
from rubato.core.events import Event, Tokens
from rubato.core.plan import Sample, Shape
from rubato.engines.simulated import Drafter, drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.model_base import ModelBase
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware, running_mean
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios, traces

# Acceptance of a drafted token: assumed, the same for every token; as sure of some tokens and unsure of others as real
# draft models; and what the suffix drafter shows live on 60 held-out prompts, of which a verified chain of 4 had 0.90
# (code), 0.38 (chat) and 1.00 (summary) right, a tree of depth 4 and width 3 1.01, 0.43 and 1.16: alphas give the
# chains, certainty the trees (nearly all that it is wrong about, it has no second guess for).
# Unequal: the certainty with which the target's token is among the drafter's k likeliest as often as in `TOP_K`, from
# the mean over its five data sets. Draft models know how sure they are: of EAGLE-2's tokens of a confidence below 0.05
# some 4 % are accepted, of those above 0.95 98 % (Li et al. 2024, arXiv 2406.16858, section 3.2, text to Fig. 6), so
# what the simulated drafter says is what happens.
ACCEPTANCE: Mapping[str, Mapping[str, Any]] = {
    "0.7": {"alpha": 0.7},
    "unequal": {"alpha": 0.7, "certainty": 0.84},
    "suffix": {"apps": {"code": 0.488, "chat": 0.277, "summary": 0.519}, "certainty": 0.13},
}
# How often LLaMA-7B's greedy token is among the 1 to 5 likeliest of LLaMA-68M: SpecInfer (Miao et al. 2024, arXiv
# 2305.09781v4), Table 1, greedy decoding, read from its text.
TOP_K: Mapping[str, Sequence[float]] = {
    "Alpaca": (0.68, 0.77, 0.81, 0.84, 0.85),
    "CP": (0.69, 0.79, 0.83, 0.86, 0.87),
    "WebQA": (0.62, 0.72, 0.77, 0.80, 0.82),
    "CIP": (0.70, 0.81, 0.85, 0.88, 0.89),
    "PIQA": (0.63, 0.75, 0.79, 0.83, 0.85),
}
ALPHA, REAL, SUFFIX = "0.7", "unequal", "suffix"
TTFT, NOISE, MOST_TOKENS = 2.0, 0.05, 2048  # seconds; spread of step times; `max_tokens` of a request
JUDGES: Mapping[str, float] = {"2 s": 2.0, "5 s": 5.0, "TPOT": float("inf")}  # most seconds of TTFT, with the mean TPOT
JUDGE = "2 s"
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Model:
    """unloaded: seconds per token. artifact: the authors' bounds of depth and width; ours: the same with depths from 1,
    for B and depth by the latency model. b1: the artifact's."""

    scenario: str
    drafter: str
    unloaded: float
    artifact: str
    b1: int
    ours: str


MODELS = {
    "llama": Model(
        "adaserve-llama70b", "llama-3.2-1b-a100", scenarios.MODELS["llama70b"][1], "min_depth=4,prefill_chunk=1024",
        512, "",
    ),
    "qwen": Model(
        "adaserve-qwen32b", "qwen2.5-0.5b-a100", scenarios.MODELS["qwen32b"][1],
        "draft_tokens=80,min_depth=3,max_depth=5,prefill_chunk=1024", 256, "draft_tokens=80,max_depth=5",
    ),
}  # fmt: skip

OURS, NO_NEEDS, KNEE = "adaserve", "adaserve, needs 0", "adaserve, the paper's"
NEEDLESS = "experiments._needless_adaserve"
BUDGETS = (256, 512, 1024, 2048)
PAPER = ("vllm", "sarathi", "chains of 4", "chains of 6", "chains of 8")  # of which the paper takes the best
V0_CHAINS = "experiments._v0_chains:n="
V0 = tuple(f"{V0_CHAINS}{n}" for n in (4, 6, 8))  # the paper's chains literally, not tuned
TUNED = (*PAPER, "chains of 2", "smart_spec", "priority", "edf")


def choice(model: str, system: str, host: str = AS_STATED) -> str:
    """The policy that a system of ours is, with its settings; another's name is its policy."""
    of = MODELS[model]
    name = {NO_NEEDS: NEEDLESS, KNEE: OURS}.get(system, system)
    if system == KNEE:
        knee = 1 + hardware(model, host).model.knee(Shape().plus(1, 512))
        return f"{name}:verify_tokens={knee},{of.artifact}"
    return f"{name}:{of.ours}" if of.ours and name in (OURS, NEEDLESS) else name


@lru_cache
def hardware(model: str, host: str = AS_STATED) -> Hardware:
    return packaged_hardware(at_host(scenarios.get(MODELS[model].scenario).profile, host))


@dataclass(frozen=True)
class Lookup(ModelBase):
    """What the suffix drafter takes, measured (docs/server.md): 0.04 ms for a chain of 8 tokens, 0.2 ms for a tree of
    depth 8 and width 3, one sequence after the other. A step is a layer of each; the first runs no prompt."""

    def step_time(self, shape: Shape) -> float:
        return 1e-9 + 1e-5 * min(shape.tokens, 3 * shape.seqs) - 5e-6 * min(shape.seqs, shape.tokens)

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return most if self.step_time(base.plus(most, cached)) <= seconds else 0

    def fit(self, samples: Sequence[Sample]) -> None:
        raise ValueError("the suffix drafter's time is what was measured")

    def update(self, sample: Sample) -> None:
        pass


def drafting(model: str, acceptance: str, seed: int) -> Drafter:
    """The model's drafter, or, with its acceptance, the suffix drafter."""
    if acceptance == SUFFIX:
        return replace(drafter(None, **ACCEPTANCE[acceptance], seed=seed), latency=Lookup())
    return drafter(MODELS[model].drafter, **ACCEPTANCE[acceptance], seed=seed)


def with_ttft(load: Workload) -> Workload:
    return load.with_slos({tier: replace(slo, ttft=TTFT) for tier, slo in load.tiers.items()})


@lru_cache(maxsize=8)
def offered(model: str, rate: float, seconds: float, seed: int, trace: str | None = None) -> Workload:
    """The scenario for so many seconds, or the whole of a recorded stream, at `rate` requests/s."""
    if trace is None:
        return with_ttft(scenarios.make(MODELS[model].scenario, rate, duration=seconds, seed=seed))
    stream = traces.read(trace)
    called = {"coding": "code", "summarization": "summary"}
    ours = tuple(replace(offer, tier=called.get(offer.tier, offer.tier)) for offer in stream.offers)
    stream = replace(stream, offers=ours)
    return with_ttft(
        traces.make("adaserve", stream, rate=rate, unloaded=MODELS[model].unloaded, seed=seed, texts=False)
    )


@dataclass(frozen=True)
class Served:
    """A run. ttft, tpot: of each request, in order of arrival, seconds, inf of one that was not completed; output:
    tokens of each. accepted: drafted tokens that were right, per request and verification; None without drafts."""

    load: Workload
    ttft: np.ndarray[Any, Any]
    tpot: np.ndarray[Any, Any]
    output: np.ndarray[Any, Any]
    accepted: float | None

    def met(self, judge: str) -> np.ndarray[Any, Any]:
        """Of each request whether it is in its SLO."""
        most = np.array([self.load.tiers[a.tier].tpot for a in self.load.arrivals])
        met: np.ndarray[Any, Any] = (self.tpot <= most) & (self.ttft <= JUDGES[judge]) & np.isfinite(self.ttft)
        return met

    def summary(self) -> dict[str, Any]:
        """Shares and goodput (output tokens of attained requests per second in which requests are offered) by judge."""
        tiers, met = np.array([a.tier for a in self.load.arrivals]), {judge: self.met(judge) for judge in JUDGES}
        return {
            "share": {judge: float(np.mean(own)) for judge, own in met.items()},
            "goodput": {judge: float(self.output[own].sum()) / self.load.duration for judge, own in met.items()},
            "by_tier": {tier: float(np.mean(met[JUDGE][tiers == tier])) for tier in sorted(set(tiers.tolist()))},
            "ttft_p99": float(np.quantile(self.ttft, 0.99)), "accepted": self.accepted,
        }  # fmt: skip


def served(
    model: str, policy: str, load: Workload, acceptance: str, seed: int, listen: Callable[[Event], None] | None = None,
    host: str = AS_STATED,
) -> Served:  # fmt: skip
    spec = RunSpec(
        hardware(model, host), PolicyChoice.parse(policy), slo_rule="mean", noise=NOISE, lengths=running_mean,
        drafter=drafting(model, acceptance, seed), stated_max_tokens=MOST_TOKENS,
    )  # fmt: skip
    right: list[int] = []

    def hear(event: Event) -> None:
        if isinstance(event, Tokens) and event.tried:
            right.append(event.tokens - 1)
        if listen is not None:
            listen(event)

    records = simulate(load, spec, seed, times=False, causes=False, listen=hear).records
    done = [r.outcome == "completed" for r in records]
    ttft = [
        r.verdict.ttft if ok and r.verdict.ttft is not None else np.inf for ok, r in zip(done, records, strict=True)
    ]
    tpot = [r.verdict.tpot or 0.0 if ok else np.inf for ok, r in zip(done, records, strict=True)]
    output = np.array([r.output for r in records], dtype=float)
    return Served(load, np.array(ttft), np.array(tpot), output, float(np.mean(right)) if right else None)


# --------------------------------------------------------------------------- tuned on seed 0, judged on others


Run = Callable[[str], Mapping[str, Any]]  # policy -> `Served.summary` of it
ALWAYS = ("chains of 2", "chains of 4", "smart_spec", "edf")


def tuned(runs: Sequence[Run], budgets: Sequence[int] = BUDGETS, families: Sequence[str] = TUNED) -> dict[str, Any]:
    """Of each family of baselines, by judge, the settings with which it attains most in the mean over `runs`. `tried`:
    all shares. Of equals the largest budget, which starts prompts soonest. Chains of 6 and 8 run with the budgets that
    are best for chains of 4."""
    tried: dict[str, dict[str, float]] = {}

    def best(policies: Sequence[str]) -> dict[str, str]:
        for policy in policies:
            each = [run(policy)["share"] for run in runs]
            tried[policy] = {judge: float(np.mean([share[judge] for share in each])) for judge in JUDGES}
        return {judge: max(reversed(policies), key=lambda policy: tried[policy][judge]) for judge in JUDGES}

    found: dict[str, dict[str, str]] = {}
    for name in families:
        chain = int(name.rpartition(" ")[2]) if name.startswith("chains") else 0
        own = sorted({int(p.rpartition("=")[2]) for p in found["chains of 4"].values()}) if chain > 4 else budgets
        policy = f"vllm_spec:n={chain},budget=" if chain else f"{name}:budget="
        found[name] = best([name] if name in ("sarathi", "edf") else [f"{policy}{budget}" for budget in own])
    return {"families": found, "tried": tried}


def winners(tuning: Mapping[str, Any], judges: Sequence[str] = tuple(JUDGES)) -> dict[str, str]:
    """What runs on the seeds that count: policy -> its family. For each judge what attains most on seed 0, of the
    paper's baselines and of all, and `ALWAYS`."""
    families, tried = tuning["families"], tuning["tried"]
    found = {families[name][JUDGE]: name for name in ALWAYS}
    for judge in judges:
        for systems in (PAPER, TUNED):
            names = [name for name in systems if name in families]
            name = max(names, key=lambda name: float(tried[families[name][judge]][judge]))
            found[families[name][judge]] = name
    return found


def cell(
    runs: Callable[[int], Run], tuning: Mapping[str, Any], systems: Sequence[str], policy: str | None,
    seeds: Sequence[int], judges: Sequence[str] = tuple(JUDGES),
) -> dict[str, Any]:  # fmt: skip
    """On each of `seeds`: ours (`systems`), the `winners` for these judges, a guest. runs: seed -> how a policy runs on
    its requests."""
    baselines = winners(tuning, judges)
    names = beside((*systems, *baselines), policy)
    each = [{"seed": seed, "systems": {name: dict(runs(seed)(name)) for name in names}} for seed in seeds]
    return {**tuning, "baselines": baselines, "runs": each}


def best_baseline(of: Mapping[str, Any], which: str, judge: str = JUDGE) -> str:
    """That of those which ran here that attains most in the mean over seeds. which: of the "paper"'s baselines, of
    "all", or of "v0": vLLM V0's chains."""
    names: list[str] = [name for name, family in of["baselines"].items() if which == "all" or family in PAPER]
    names = list(V0) if which == "v0" else names
    return max(names, key=lambda name: mean_of(of, name, "share", judge))


def best_share(
    of: Mapping[str, Any], run: Mapping[str, Any], which: str, judge: str = JUDGE, key: str = "share"
) -> float:
    """What the best baseline makes of this seed's requests."""
    return float(run["systems"][best_baseline(of, which, judge)][key][judge])


def ahead(of: Mapping[str, Any], which: str = "all", ours: str = OURS, judge: str = JUDGE) -> Estimate:
    """Points by which ours attains more than the best baseline, over seeds."""
    return over_seeds(
        [100 * (run["systems"][ours]["share"][judge] - best_share(of, run, which, judge)) for run in of["runs"]]
    )


# --------------------------------------------------------------------------- ratios


def fewer(ours: float, best: float, requests: int) -> float:
    """How many times as many requests the best baseline misses as we; misses are at least one request."""
    return max(1.0 - best, 1.0 / requests) / max(1.0 - ours, 1.0 / requests)


def violations(of: Mapping[str, Any], which: str, ours: str = OURS, judge: str = JUDGE) -> list[float]:
    """`fewer`, logarithm, by seed."""
    return [
        float(np.log(fewer(run["systems"][ours]["share"][judge], best_share(of, run, which, judge), of["requests"])))
        for run in of["runs"]
    ]


def more(of: Mapping[str, Any], which: str, ours: str = OURS, judge: str = JUDGE, key: str = "goodput") -> list[float]:
    """Logarithm of ours over the best baseline's, by seed; of goodput or share."""
    least = 1.0 if key == "goodput" else 1.0 / of["requests"]
    return [
        float(np.log(max(least, run["systems"][ours][key][judge]) / max(least, best_share(of, run, which, judge, key))))
        for run in of["runs"]
    ]


def up_to(logs: Sequence[Sequence[float]]) -> Estimate:
    """The largest ratio of several points, on average over seeds (geometric), and its interval over seeds."""
    return over_seeds(max(logs, key=lambda own: float(np.mean(own)))).exp()


# --------------------------------------------------------------------------- a sweep at one rate


@dataclass(frozen=True)
class Sweep:
    """Figures 10 and 11: at 4.0 requests/s, by something else of the requests, `x`; unequal acceptance."""

    x: str
    says: str
    at: Sequence[float]
    work: Any  # (model, at, seconds, seeds, trace, policy) -> what `measured` gives
    small: Sequence[float]
    seconds: float = 30.0
    seeds: Sequence[int] = SEEDS

    def jobs(self, small: bool, trace: str | None = None, policy: str | None = None) -> list[Job]:
        if small:
            return [Job("llama", self.work, ("llama", self.small, 2.0, self.seeds[:1], trace, policy))]
        return [Job(model, self.work, (model, self.at, self.seconds, self.seeds, trace, policy)) for model in MODELS]

    def measured(
        self, model: str, at: Sequence[float], load: Callable[[float, int], Workload], seeds: Sequence[int],
        policy: str | None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """load: x, seed -> the requests."""

        def runs(x: float, seed: int) -> Run:
            return lambda name: served(model, choice(model, name), load(x, seed), REAL, seed).summary()

        tuning, judges = tuned([runs(x, 0) for x in at], BUDGETS[::2]), (JUDGE, "TPOT")
        return [
            {
                "model": model, self.x: x, "requests": len(load(x, seeds[0]).arrivals),
                **cell(partial(runs, x), tuning, (OURS, KNEE, *V0), policy, seeds, judges),
            }
            for x in at
        ]  # fmt: skip

    def found(self, jobs: Sequence[Any], settings: Mapping[str, Any]) -> Found:
        values, estimates = [cell for cells in jobs for cell in cells], {}
        for model in MODELS:
            own = [v for v in values if v["model"] == model] or values  # a small run has one model
            for name, which in (("", "paper"), ("-v0", "v0")):
                estimates[f"{model}-violations{name}"] = up_to([violations(v, which) for v in own])
                estimates[f"{model}-goodput{name}"] = up_to([more(v, which) for v in own])
        estimates["below"] = below(values)
        seeds = [run["seed"] for run in values[0]["runs"]]
        return Found(estimates, values, seeds, "mean", {"ttft": TTFT, "acceptance": REAL, **settings})

    def tables(self, values: Sequence[Any]) -> str:
        return "\n\n".join(
            table([v for v in values if v["model"] == model], self.x, f"{model}, {self.says}")
            for model in dict.fromkeys(v["model"] for v in values)
        )

    def draw(self, values: Sequence[Any], axes: Any) -> None:
        curves([v for v in values if v["model"] == values[0]["model"]], self.x, self.says, axes)


def below(values: Sequence[Any]) -> Estimate:
    """In how many cells ours is below the best tuned baseline, with all of the interval over seeds."""
    return Estimate.exact(float(sum(ahead(v).high < 0.0 for v in values)))


# --------------------------------------------------------------------------- for readers


def shown(of: Mapping[str, Any]) -> list[str]:
    """Ours and a guest, and what they are compared with."""
    return list(of["runs"][0]["systems"])


def mean_of(of: Mapping[str, Any], system: str, key: str, judge: str = "") -> float:
    """The mean over seeds of one number of a system."""
    own = [run["systems"][system][key] for run in of["runs"]]
    return float(np.mean([number[judge] if judge else number for number in own]))


def table(values: Sequence[Any], x: str, says: str) -> str:
    """Each system by `x`: shares in SLO by each judge, the least tier's by the first, the 99th percentile of TTFTs."""
    rows = [[says, "system", "points ahead of it", *JUDGES, "least tier", "TTFT P99, s", "accepted"]]
    for v in values:
        for name in shown(v):
            runs = [run["systems"] for run in v["runs"]]
            points = over_seeds([100 * (run[OURS]["share"][JUDGE] - run[name]["share"][JUDGE]) for run in runs])
            least = float(np.mean([min(run[name]["by_tier"].values()) for run in runs]))
            right = [run[name]["accepted"] for run in runs if run[name]["accepted"] is not None]
            said = "" if name == OURS else f"{points.value:+.1f} [{points.low:+.1f}, {points.high:+.1f}]"
            rows.append([
                f"{v[x]:g}", name.replace(V0_CHAINS, "chains by vLLM V0's rules, "), said,
                *(f"{mean_of(v, name, 'share', judge):.3f}" for judge in JUDGES),
                f"{least:.2f}", f"{mean_of(v, name, 'ttft_p99'):.1f}", f"{np.mean(right):.2f}" if right else "",
            ])  # fmt: skip
    return markdown(rows)


def curves(values: Sequence[Any], x: str, says: str, axes: Any) -> None:
    """Attainment by `x`, the mean of the seeds."""
    at = [v[x] for v in values]
    for name in (OURS, KNEE):
        axes.plot(at, [mean_of(v, name, "share", JUDGE) for v in values], "o-", label=name)
    for which, said in (("paper", "the best of the paper's baselines"), ("all", "the best tuned baseline")):
        best = [float(np.mean([best_share(v, run, which) for run in v["runs"]])) for v in values]
        axes.plot(at, best, "x--", label=said)
    name_axes(axes, says, "in SLO, TTFT of 2 s among them")
