"""AdaServe's simulated runs, for the figures `adaserve-*`: models, drafters, systems, and what comes out of a run.

Streams are synthetic (`scenarios`), or a recorded one whose times are stretched to the rate. Judged by the mean TPOT.
KV never binds here: 60 requests of 1,000 tokens are 13 % of the Llama profile's, 19 % of the Qwen profile's, so that
`reserve_kv` changes nothing. `edf` and `slos_serve` are left out: with drafts their plans take 1.2 and 0.8 times the
time simulated. As these requests have no TTFT both hold back those they cannot serve at once, for minutes (half of
30 s of requests waited 85 s under `slos_serve`), which this judge does not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside
from rubato.core.events import Event, Finished, Tokens
from rubato.core.plan import Shape
from rubato.engines.simulated import Drafter, drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.policies import load as load_policy
from rubato.policies import optional
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware, running_mean
from rubato.simulation.simulate import gc_paused, simulate, simulate_events
from rubato.workloads import Workload, scenarios, traces

# acceptance of a drafted token: assumed, and what the suffix drafter shows live on 60 held-out prompts, of which a
# verified chain of 4 had 0.90 (code), 0.38 (chat) and 1.00 (summary) right, a tree of depth 4 and width 3 1.01, 0.43
# and 1.16: alphas give the chains, certainty the trees (nearly all that it is wrong about, it has no second guess for)
ACCEPTANCE: Mapping[str, Mapping[str, Any]] = {
    "0.7": {"alpha": 0.7},
    "0.6": {"alpha": 0.6},
    "0.8": {"alpha": 0.8},
    "suffix": {"apps": {"code": 0.488, "chat": 0.277, "summary": 0.519}, "certainty": 0.13},
}
ALPHA = "0.7"


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
        "adaserve-llama70b", "llama-3.2-1b-a100", scenarios.MODELS["llama70b"][1], "min_depth=4", 512,
        "adaserve",
    ),
    "qwen": Model(
        "adaserve-qwen32b", "qwen2.5-0.5b-a100", scenarios.MODELS["qwen32b"][1],
        "draft_tokens=80,min_depth=3,max_depth=5", 256, "adaserve:draft_tokens=80,max_depth=5",
    ),
}  # fmt: skip

OURS, KNEE, ARTIFACT, SMART = "adaserve", "adaserve, B at the knee", "adaserve, artifact's B1", "smart_spec"
PAPER = ("vllm", "sarathi", "vllm_spec(4)", "vllm_spec(6)", "vllm_spec(8)")  # of which the paper takes the best
TUNED = (*PAPER, "vllm_spec(2)")
FEW = (OURS, KNEE, "vllm", "sarathi", "vllm_spec(2)", "vllm_spec(4)", SMART)
ALL = (OURS, KNEE, ARTIFACT, *TUNED, SMART)


def choice(model: str, system: str) -> str:
    """The policy that a system is, with its settings."""
    of = MODELS[model]
    if system in (KNEE, ARTIFACT):
        budget = of.b1 if system == ARTIFACT else 1 + hardware(model).model.knee(Shape().plus(1, 512))
        return f"adaserve:verify_tokens={budget},{of.artifact}"
    if system.startswith("vllm_spec("):
        return f"vllm_spec:n={system[-2]}"
    return of.ours if system == OURS else system


@lru_cache
def hardware(model: str) -> Hardware:
    return packaged_hardware(scenarios.get(MODELS[model].scenario).profile)


def drafting(model: str, acceptance: str, seed: int) -> Drafter:
    return drafter(MODELS[model].drafter, **ACCEPTANCE[acceptance], seed=seed)


@lru_cache(maxsize=4)
def offered(model: str, rate: float, seconds: float, seed: int, trace: str | None = None) -> Workload:
    """The scenario for so many seconds, or the whole of a recorded stream, at `rate` requests/s."""
    if trace is None:
        return scenarios.make(MODELS[model].scenario, rate, duration=seconds, seed=seed)
    stream = traces.read(trace)
    called = {"coding": "code", "summarization": "summary"}
    ours = tuple(replace(offer, tier=called.get(offer.tier, offer.tier)) for offer in stream.offers)
    stream = replace(stream, offers=ours)
    return traces.make("adaserve", stream, rate=rate, unloaded=MODELS[model].unloaded, seed=seed, texts=False)


@dataclass(frozen=True)
class Served:
    """A run. met: by request, in order of arrival. output: tokens of each. accepted: drafted tokens that were right,
    per request and verification; None without drafts. events: all of them, none without drafts."""

    load: Workload
    met: Sequence[bool]
    output: Sequence[int]
    accepted: float | None
    events: Sequence[Event]

    @property
    def share(self) -> float:
        return float(np.mean(self.met))

    @property
    def goodput(self) -> float:
        """Output tokens of attained requests, per second in which requests are offered."""
        return sum(tokens for tokens, met in zip(self.output, self.met, strict=True) if met) / self.load.duration

    def summary(self) -> dict[str, Any]:
        tiers = [a.tier for a in self.load.arrivals]
        by = {t: float(np.mean([m for m, own in zip(self.met, tiers, strict=True) if own == t])) for t in set(tiers)}
        return {"share": self.share, "goodput": self.goodput, "accepted": self.accepted, "by_tier": by}


def served(model: str, policy: str, load: Workload, acceptance: str, seed: int) -> Served:
    chosen, drafter = PolicyChoice.parse(policy), drafting(model, acceptance, seed)
    spec = RunSpec(hardware(model), chosen, slo_rule="mean", lengths=running_mean, drafter=drafter)
    scheduler = load_policy(chosen.policy, chosen.settings)
    if "draft" not in scheduler.needs | optional(scheduler):
        records = simulate(load, spec, seed, times=False, causes=False).records
        return Served(load, [r.verdict.met for r in records], [r.output for r in records], None, ())
    with gc_paused():
        events = simulate_events(list(load.requests()), load.truth(), spec, seed)
    ends = {event.id: event for event in events if isinstance(event, Finished)}
    right = [event.tokens - 1 for event in events if isinstance(event, Tokens) and event.tried]
    return Served(
        load, [ends[a.id].verdict.met for a in load.arrivals], [ends[a.id].output for a in load.arrivals],
        float(np.mean(right)) if right else None, events,
    )  # fmt: skip


def compared(model: str, systems: Sequence[str], load: Workload, acceptance: str, seed: int) -> dict[str, Any]:
    """What each system makes of the same requests."""
    return {name: served(model, choice(model, name), load, acceptance, seed).summary() for name in systems}


# --------------------------------------------------------------------------- ratios


def fewer(ours: float, best: float, requests: int) -> float:
    """How many times as many requests the best baseline misses as we; misses are at least one request."""
    return max(1.0 - best, 1.0 / requests) / max(1.0 - ours, 1.0 / requests)


def best_of(run: Mapping[str, Any], systems: Sequence[str], key: str = "share") -> float:
    return max(float(run[name][key]) for name in systems if name in run)


def up_to(values: Sequence[Any], x: str, ratio: Any) -> Estimate:
    """The largest ratio over the values of `x`, on average over seeds (geometric), and its interval over seeds."""
    logs = {at: [float(np.log(ratio(v))) for v in values if v[x] == at] for at in dict.fromkeys(v[x] for v in values)}
    return over_seeds(max(logs.values(), key=lambda own: float(np.mean(own)))).exp()


# --------------------------------------------------------------------------- a sweep at one rate


@dataclass(frozen=True)
class Sweep:
    """Figures 10 and 11: at 4.0 requests/s, by something else of the requests, `x`."""

    x: str
    says: str
    at: Sequence[float]
    work: Any  # (model, x, seconds, seed, trace, policy) -> what `measured` gives
    small: Sequence[float]
    seconds: float = 90.0
    seeds: Sequence[int] = (1, 2, 3)

    def jobs(self, small: bool, trace: str | None = None, policy: str | None = None) -> list[Job]:
        beside(FEW, policy)
        models, at, seeds, seconds = tuple(MODELS), self.at, self.seeds, self.seconds
        if small:
            models, at, seeds, seconds = models[:1], self.small, seeds[:1], 3.0
        return [
            Job(f"{model} {self.x}={x} seed={seed}", self.work, (model, x, seconds, seed, trace, policy))
            for model in models
            for x in at
            for seed in seeds
        ]

    def measured(self, model: str, x: float, load: Workload, seed: int, policy: str | None) -> dict[str, Any]:
        requests = len(load.arrivals)
        return {
            "model": model, self.x: x, "seed": seed, "requests": requests, "seconds": load.duration,
            "systems": compared(model, beside(FEW, policy), load, ALPHA, seed),
        }  # fmt: skip

    def found(self, values: Sequence[Any], settings: Mapping[str, Any]) -> Found:
        estimates = {}
        for model in MODELS:
            own = [v for v in values if v["model"] == model] or values  # a small run has one model
            for name, systems in (("", PAPER), ("-tuned", TUNED)):
                estimates[f"{model}-violations{name}"] = up_to(own, self.x, lambda v, s=systems: _fewer(v, s))
                estimates[f"{model}-goodput{name}"] = up_to(own, self.x, lambda v, s=systems: _more(v, s))
            estimates[f"{model}-knee"] = up_to(own, self.x, lambda v: _fewer(v, TUNED, KNEE))
        return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", dict(settings))

    def tables(self, values: Sequence[Any]) -> str:
        return "\n\n".join(
            table([v for v in values if v["model"] == model], self.x, f"{model}, {self.says}")
            for model in dict.fromkeys(v["model"] for v in values)
        )

    def draw(self, values: Sequence[Any], axes: Any) -> None:
        curves([v for v in values if v["model"] == values[0]["model"]], self.x, self.says, axes)


def _fewer(value: Any, systems: Sequence[str], ours: str = OURS) -> float:
    run = value["systems"]
    return fewer(run[ours]["share"], best_of(run, systems), value["requests"])


def _more(value: Any, systems: Sequence[str]) -> float:
    run = value["systems"]
    return max(1.0, float(run[OURS]["goodput"])) / max(1.0, best_of(run, systems, "goodput"))


# --------------------------------------------------------------------------- for readers


def mean_of(values: Sequence[Any], x: str, at: Any, system: str, key: str) -> float | None:
    """The mean over seeds of one number of a system; None where nothing was drafted."""
    own = [v["systems"][system][key] for v in values if v[x] == at and system in v["systems"]]
    known = [number for number in own if number is not None]
    return float(np.mean(known)) if known else None


def table(values: Sequence[Any], x: str, says: str, keys: Sequence[str] = ("share", "goodput")) -> str:
    """Attainment and goodput (output tokens/s of attained requests) of each system by `x`, means of the seeds."""
    at = list(dict.fromkeys(v[x] for v in values))
    words = {"share": ("attained", "{:.3f}"), "goodput": ("goodput", "{:.0f}"), "accepted": ("accepted", "{:.2f}")}
    rows = [[says, *(f"{place:g}, {words[key][0]}" for key in keys for place in at)]]
    for system in dict.fromkeys(name for v in values for name in v["systems"]):
        numbers = [(key, mean_of(values, x, place, system, key)) for key in keys for place in at]
        rows.append([system, *("" if n is None else words[key][1].format(n) for key, n in numbers)])
    return markdown(rows)


def curves(values: Sequence[Any], x: str, says: str, axes: Any) -> None:
    """Attainment of each system by `x`, the mean of the seeds."""
    at = list(dict.fromkeys(v[x] for v in values))
    for system in values[0]["systems"]:
        axes.plot(at, [mean_of(values, x, place, system, "share") for place in at], "o-", label=system)
    axes.set_xlabel(says)
    axes.set_ylabel("attained")
    axes.legend(fontsize=7)
