"""Specification of a simulated run: a replica's hardware, the policy with its settings, and the source of requests.

Everything here pickles, so that a run can happen in another process. Only this module loads packaged profiles and
scenarios.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from rubato.core.events import Event
from rubato.core.interfaces import LatencyModel, LengthPredictor
from rubato.core.length_prediction import ConditionalMean, Oracle, RunningMean, seeded_gaussian
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.simulated import FREE, Drafter, Link
from rubato.latency import profiles
from rubato.measure.records import Run
from rubato.policies import load, router_for
from rubato.policy_kit.batch_builder import prefill_time
from rubato.simulation.simulate import SimulationSetup, simulate_fast, simulated_run
from rubato.workloads import Workload, read, scenarios, traces
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from rubato.workloads.resample import Stretch, bootstrapped, busiest, inside, multiplied, window

Lengths = Callable[[Mapping[str, int]], LengthPredictor | None]  # request id -> output tokens, the truth


def unknown_lengths(truth: Mapping[str, int]) -> None:
    """No predictor: schedulers know nothing of output lengths. The default."""


def oracle_lengths(truth: Mapping[str, int]) -> LengthPredictor:
    """A predictor that returns true output lengths, as SLOs-Serve gives every system (its §6)."""
    return Oracle(truth)


def running_mean(truth: Mapping[str, int]) -> LengthPredictor:
    """The mean of finished requests of the same app."""
    return RunningMean()


def conditional_mean(truth: Mapping[str, int]) -> LengthPredictor:
    """The mean of those that were longer than a request is already (PolyServe)."""
    return ConditionalMean()


def gaussian(truth: Mapping[str, int]) -> LengthPredictor:
    """A draw for each request, always the same one for its id (SA)."""
    return seeded_gaussian()


# --------------------------------------------------------------------------- hardware


@dataclass(frozen=True)
class Hardware:
    """One replica: its step-time model, its limits (batch, KV blocks), and its number of GPUs."""

    name: str
    model: LatencyModel
    limits: Limits
    gpus: int = 1

    def fresh(self) -> LatencyModel:
        """A copy of the step-time model, for a scheduler that updates it online."""
        return copy.deepcopy(self.model)

    def prefill(self, tokens: int) -> float:
        """TTFT in seconds of a prompt on an idle replica."""
        return prefill_time(self.model, tokens, 0, self.limits.max_num_batched_tokens)

    def describe(self) -> dict[str, Any]:
        """model: a digest, so that a file of jobs is not resumed with other step times."""
        return {"name": self.name, "gpus": self.gpus, "limits": asdict(self.limits), "model": digest_of(self.model)}


def digest_of(model: LatencyModel | None) -> str:
    return hashlib.blake2b(pickle.dumps(model), digest_size=8).hexdigest()


def packaged_hardware(name: str, kv_tokens: int | None = None, host_scale: float = 1.0, **limits: int) -> Hardware:
    """A packaged hardware profile; limits: max_num_seqs, max_num_batched_tokens, max_model_len where they
    should differ. host_scale: what a step takes outside the device is so many times as long.

    Raises ValueError for an unknown profile, or one without KV capacity when `kv_tokens` does not say it.
    """
    profile = profiles.load(name, kv_tokens=kv_tokens, host_scale=host_scale)
    what = name if host_scale == 1.0 else f"{name}, host × {host_scale:g}"
    return Hardware(what, profile.model(), profile.limits(**limits), profile.gpus)


# --------------------------------------------------------------------------- policies


@dataclass(frozen=True)
class PolicyChoice:
    """A policy and a router with their settings, as one writes them: `co_chunk:budget=256@random:seed=3`. router:
    "auto" is the policy's own, or `least_loaded`."""

    policy: str
    settings: Mapping[str, object] = field(default_factory=dict)
    router: str = "auto"
    router_settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        own = _words(self.policy, self.settings)
        router = _words(self.router, self.router_settings)
        return own if router == "auto" else f"{own}@{router}"

    @classmethod
    def parse(cls, text: str, router: str = "auto") -> PolicyChoice:
        """Raises ValueError (PolicyError) for a policy, router or setting that is not there."""
        return cls.read(text, router).checked()

    @classmethod
    def read(cls, text: str, router: str = "auto") -> PolicyChoice:
        """Without looking whether it is there. Raises ValueError for what is not written as a policy is."""
        own, _, other = text.partition("@")
        return cls(*_parsed(own), *_parsed(other or router))

    def checked(self) -> PolicyChoice:
        """Itself. Raises ValueError (PolicyError) for a policy, router or setting that is not there."""
        load(self.policy, self.settings)
        router_for(self.policy, self.router, self.router_settings, self.settings)
        return self


def _words(name: str, settings: Mapping[str, object]) -> str:
    return name + "".join(f"{',' if i else ':'}{key}={value}" for i, (key, value) in enumerate(settings.items()))


def _parsed(text: str) -> tuple[str, dict[str, object]]:
    name, _, rest = text.partition(":")
    settings: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, found, value = part.partition("=")
        if not found:
            raise ValueError(f"policy {text!r}: write its settings as {name}:SETTING=VALUE,SETTING=VALUE")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"policy {text!r}: {value!r} is no value for {key}: give a number or a word") from error
    return name, settings


# --------------------------------------------------------------------------- all of a simulation but its requests

PROBE = Request("probe", (Stage(1, SLO()),), 0.0, sampling=Sampling(max_tokens=1))


@dataclass(frozen=True)
class RunSpec:
    """All of a simulated run but its requests. learns: schedulers update their latency models online, as they do live.
    Off by default: step times are exact already, and steps are simulated one by one where models learn. link,
    drafter, stated_max_tokens: as in `SimulationSetup`."""

    hardware: Hardware
    choice: PolicyChoice
    replicas: int = 1
    slo_rule: str = "deadline"
    noise: float = 0.0
    lengths: Lengths = unknown_lengths
    learns: bool = False
    link: Link = FREE
    drafter: Drafter | None = None
    stated_max_tokens: int = 0

    def run(
        self, load: Workload, seed: int = 0, *, times: bool = True, causes: bool = True,
        listen: Callable[[Event], None] | None = None,
    ) -> Run:  # fmt: skip
        """Simulate the workload. seed: of the noise in step times; times, causes, listen: as in `simulated_run`."""
        setup = self.setup({a.id: a.output_tokens for a in load.arrivals}, seed)
        return simulated_run(load, setup, self.choice.label, times=times, causes=causes, listen=listen)

    def check(self) -> None:
        """Serve one request of one token. Raises ValueError or RuntimeError, saying why, for a policy that is not
        there, or cannot serve on these replicas: too few of them, a need that they do not meet, a router that does not
        go with it."""
        simulate_fast([PROBE], {PROBE.id: (1,)}, self.setup({PROBE.id: 1}), times=False)

    def setup(self, truth: Mapping[str, int], seed: int = 0) -> SimulationSetup:
        """truth: request id -> output tokens."""
        return SimulationSetup(
            latency=self.hardware.fresh if self.learns else lambda: self.hardware.model,
            limits=self.hardware.limits,
            policy=self.choice.policy,
            settings=self.choice.settings,
            router=self.choice.router,
            router_settings=self.choice.router_settings,
            replicas=self.replicas,
            noise=self.noise,
            seed=seed,
            lengths=self.lengths(truth),
            slo_rule=self.slo_rule,
            learns=self.learns,
            link=self.link,
            drafter=self.drafter,
            stated_max_tokens=self.stated_max_tokens,
        )

    def with_replicas(self, replicas: int) -> RunSpec:
        return replace(self, replicas=replicas)

    def describe(self) -> dict[str, Any]:
        """For the head of a result file."""
        return {
            "hardware": self.hardware.describe(),
            "policy": self.choice.label,
            "replicas": self.replicas,
            "slo_rule": self.slo_rule,
            "noise": self.noise,
            "lengths": _name(self.lengths),
            "learns": self.learns,
            **({} if self.link == FREE else {"link": asdict(self.link)}),
            **({} if self.drafter is None else {"drafter": _described(self.drafter)}),
            **({"stated_max_tokens": self.stated_max_tokens} if self.stated_max_tokens else {}),
        }


def able(settings: Sequence[RunSpec]) -> tuple[tuple[RunSpec, ...], dict[str, str]]:
    """Those whose policy can run, and of the others, by label, why not. Raises ValueError with all reasons when none
    can."""
    reasons: dict[str, str] = {}
    for setting in settings:
        try:
            setting.check()
        except (ValueError, RuntimeError) as error:
            reasons[setting.choice.label] = str(error)
    if len(reasons) == len(settings):
        raise ValueError("no policy can run: " + "; ".join(f"{label}: {why}" for label, why in reasons.items()))
    return tuple(one for one in settings if one.choice.label not in reasons), reasons


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """A note on each policy that cannot run (`able`)."""
    return [f"{label} is left out, as it cannot run: {why}" for label, why in reasons.items()]


def _described(drafter: Drafter) -> dict[str, Any]:
    return {"acceptance": asdict(drafter.acceptance), "model": digest_of(drafter.latency)}


def _name(function: Lengths) -> str:
    return repr(function.args) if isinstance(function, partial) else getattr(function, "__name__", repr(function))


# --------------------------------------------------------------------------- where requests come from


def _digest(path: str) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


class RequestSource(Protocol):
    """Makes a workload for each seed: the same traffic drawn anew. Rates are set by `Workload.rescaled`."""

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        """The whole workload, or the requests that arrive in a stretch, times from its beginning."""
        ...

    def busiest(self, seed: int, seconds: float) -> Stretch:
        """The stretch of this many seconds with the most tokens, prompt and output."""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ScenarioSource:
    """A packaged scenario at a rate (requests/s), for `count` requests or `duration` seconds."""

    name: str
    hardware: Hardware
    rate: float = 1.0
    count: int | None = None
    duration: float | None = None

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = scenarios.make(
            self.name, self.rate, count=self.count, duration=self.duration, seed=seed, prefill=self.hardware.prefill
        )
        return window(made, stretch)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return busiest(self.make(seed), seconds)

    def describe(self) -> dict[str, Any]:
        return {"scenario": self.name, "rate": self.rate, "count": self.count, "duration": self.duration}


@dataclass(frozen=True)
class MixSource:
    """Poisson arrivals of a mix of kinds."""

    kinds: tuple[Kind, ...]
    rate: float = 1.0
    count: int | None = None
    duration: float | None = None

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        return window(_mixed(self, seed), stretch)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return busiest(self.make(seed), seconds)

    def describe(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=8)
def _mixed(mix: MixSource, seed: int) -> Workload:
    return make("mix", mix.kinds, mix.rate, duration=mix.duration, count=mix.count, seed=seed, texts=False)


@dataclass(frozen=True)
class FileSource:
    """A workload file. drawn: seeds above 0 bootstrap blocks of 60 s of it; else the times are the file's."""

    path: str
    drawn: bool = True

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = _filed(self.path)
        return window(bootstrapped(made, seed) if self.drawn and seed else made, stretch)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return busiest(self.make(seed), seconds)

    def describe(self) -> dict[str, Any]:
        return {"path": Path(self.path).name, "content": _digest(self.path), "drawn": self.drawn}


@lru_cache(maxsize=8)
def _filed(path: str) -> Workload:
    return read(path)


@dataclass(frozen=True)
class TraceSource:
    """A recorded trace, `factor` times as much of it. A request's tier is the trace's, or drawn by the kinds' shares.

    drawn: as of a file. A stretch is cut out before it is multiplied; it begins with a minute, whose copies stay in it.
    """

    path: str
    kinds: tuple[Kind, ...]
    factor: float = 1.0
    seconds: float | None = None
    count: int | None = None
    drawn: bool = True

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        return _traced(self, seed, stretch)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return busiest(_traced(replace(self, factor=1.0, drawn=False), 0, None), seconds)

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"path": Path(self.path).name, "content": _digest(self.path)}


@lru_cache(maxsize=8)
def _traced(trace: TraceSource, seed: int, stretch: Stretch | None) -> Workload:
    whole = _read(trace.path, trace.seconds, trace.count)
    offers: Sequence[traces.TraceRequest] = whole.offers
    if stretch is not None:
        start, end = stretch
        last = max(offer.at for offer in offers)
        offers = [replace(offer, at=offer.at - start) for offer in offers if inside(offer.at, stretch, last)]
    name = Path(trace.path).name.partition(".")[0]
    length = None if stretch is None else stretch[1] - stretch[0]
    more = replace(whole, offers=tuple(multiplied(offers, trace.factor, seed, end=length)))
    made = traces.make(name, more, trace.kinds, seed=seed, texts=False)
    if stretch is not None:
        made = replace(made, rate=len(made.arrivals) / (end - start), duration=end - start)
    return bootstrapped(made, seed) if trace.drawn and seed else made


@lru_cache(maxsize=2)
def _read(path: str, seconds: float | None, count: int | None) -> traces.Trace:
    return traces.read(path, seconds=seconds, count=count)
