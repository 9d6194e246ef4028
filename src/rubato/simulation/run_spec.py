"""Describes a simulated run: replicas' hardware, the policy with its settings, what schedulers are told.

Everything here pickles, so that a run can happen in another process.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import Autoscaler, LatencyModel, LengthPredictor
from rubato.core.length_prediction import PREDICTORS, ConditionalMean, Oracle, RunningMean
from rubato.core.plan import Limits, Sample
from rubato.core.replica_options import ReplicaOptions
from rubato.engines.simulated import FREE_LINK, Drafter, KVLink
from rubato.engines.simulated.step_noise import Noise
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import profiles
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.with_drafter import WithDrafter
from rubato.policies import default_lengths
from rubato.policy_kit.fair_share import FairShare
from rubato.workloads import Workload

Truth = Mapping[str, Sequence[int]]  # request id -> output tokens of each stage
Lengths = Callable[[Truth], LengthPredictor | None]


def oracle_lengths(truth: Truth) -> LengthPredictor:
    """Makes a predictor that returns true output lengths, as SLOs-Serve gives every system (its §6)."""
    return Oracle({id: sum(outputs) for id, outputs in truth.items()})


def running_mean(truth: Truth) -> LengthPredictor:
    """Makes a predictor that returns the mean of finished requests of the same app."""
    return RunningMean()


def conditional_mean(truth: Truth) -> LengthPredictor:
    """Makes a predictor that returns the mean of those that were longer than a request is already (PolyServe)."""
    return ConditionalMean()


@dataclass(frozen=True)
class Hardware:
    """One replica.

    Args:
        name: for tables.
        model: its true step times.
        limits: of a batch, and KV blocks.
        gpus: how many it takes.
    """

    name: str
    model: LatencyModel
    limits: Limits
    gpus: int = 1

    def prefill(self, tokens: int) -> float:
        """Returns the TTFT in seconds of a prompt of `tokens` tokens on an idle replica."""
        return prefill_time(self.model, tokens, 0, self.limits.max_num_batched_tokens)

    def describe(self) -> dict[str, Any]:
        """Describes it for a result file; of the model a digest, so that a file of jobs is not resumed with other step
        times.
        """
        return {"name": self.name, "gpus": self.gpus, "limits": asdict(self.limits), "model": digest_of(self.model)}


def digest_of(model: LatencyModel | None) -> str:
    """Returns a text that differs for models that differ."""
    return hashlib.blake2b(pickle.dumps(model), digest_size=8).hexdigest()


def packaged_hardware(name: str, kv_tokens: int | None = None, host_scale: float = 1.0, **limits: int) -> Hardware:
    """Returns a packaged hardware profile.

    Args:
        name: of the profile.
        kv_tokens: KV memory in tokens, in place of the profile's.
        host_scale: what a step takes outside the device is so many times as long.
        limits: max_num_seqs, max_num_batched_tokens, max_model_len where they should differ.

    Raises:
        ValueError: the profile is unknown, or has no KV capacity and `kv_tokens` does not say it.
    """
    profile = profiles.load(name, kv_tokens=kv_tokens, host_scale=host_scale)
    what = name if host_scale == 1.0 else f"{name}, host × {host_scale:g}"
    return Hardware(what, profile.model(), profile.limits(**limits), profile.gpus)


@dataclass(frozen=True)
class Fixed(ModelWrapper):
    """A latency model that neither learns nor forgets."""

    def fit(self, samples: Sequence[Sample]) -> None:
        raise ValueError("this latency model is fixed for a simulation: fit it before")

    def update(self, sample: Sample) -> None:
        pass

    def idle(self, seconds: float) -> None:
        pass


@dataclass(frozen=True)
class RunSpec:
    """All of a simulated run but its requests and its seed.

    Args:
        hardware: of each replica.
        choice: of the policy.
        replicas: their number.
        slo_rule: judges requests.
        noise: of step times (`engines.simulated.step_noise`).
        lengths: makes what predicts output lengths, given the true ones; None: the policy's own predictor, if it names
            one (`policies.default_lengths`).
        learns: schedulers update their step times from the steps, as they do live. Off by default: step times are exact
            already, and steps are simulated one by one where models learn.
        link: what moving KV to a replica costs.
        drafter: schedulers know its step times; None: the engines do not speculate.
        stated_max_tokens: what each request of a workload asks for at least. With 0 it asks for its true output, which
            then bounds what is predicted of it.
        believed: the step times that schedulers begin with; None: the hardware's.
        prefix_cache: as `ReplicaOptions`.
        max_in_flight: as `ClusterOptions`.
        fair: makes the tenants' shares.
        autoscaler: makes what adds and drains replicas; None: no scaling.
        start_seconds: until an added replica serves.
    """

    hardware: Hardware
    choice: PolicyChoice
    replicas: int = 1
    slo_rule: str = "deadline"
    noise: Noise = 0.0
    lengths: Lengths | None = None
    learns: bool = False
    link: KVLink = FREE_LINK
    drafter: Drafter | None = None
    stated_max_tokens: int = 0
    believed: LatencyModel | None = None
    prefix_cache: bool = False
    max_in_flight: int | None = None
    fair: Callable[[], FairShare | None] | None = None
    autoscaler: Callable[[], Autoscaler | None] | None = None
    start_seconds: float = 0.0

    def cluster_options(self, truth: Truth, causes: bool = True) -> ClusterOptions:
        """Makes the options of one run: predictors, shares and autoscalers learn, so that each run has its own."""
        return ClusterOptions(
            self.choice,
            ReplicaOptions(self.predictor(truth), self.slo_rule, self.prefix_cache, causes),
            self.max_in_flight,
            self.fair() if self.fair else None,
            self.autoscaler() if self.autoscaler else None,
        )

    def predictor(self, truth: Truth) -> LengthPredictor | None:
        """Makes the predictor of output lengths for one run; None where schedulers know nothing of them."""
        if self.lengths is not None:
            return self.lengths(truth)
        name = default_lengths(self.choice.policy, self.choice.router)
        return None if name is None else PREDICTORS[name]()

    def scheduler_models(self) -> Iterator[LatencyModel]:
        """Yields the latency model of one replica's scheduler after the other: copies if they learn, else the same for
        all.
        """
        model = self.hardware.model if self.believed is None else self.believed
        if self.drafter is not None and self.drafter.latency is not None:
            model = WithDrafter(model, self.drafter.latency)
        return map(copy.deepcopy, repeat(model)) if self.learns else repeat(Fixed(model))

    def for_load(self, workload: Workload) -> RunSpec:
        """Returns this run with the acceptance that the workload's requests have of their own."""
        own = workload.acceptances()
        if self.drafter is None or not own:
            return self
        return replace(self, drafter=replace(self.drafter, acceptance=replace(self.drafter.acceptance, requests=own)))

    def describe(self) -> dict[str, Any]:
        """Describes the run for the head of a result file."""
        return {
            "hardware": self.hardware.describe(),
            "policy": self.choice.label,
            "replicas": self.replicas,
            "slo_rule": self.slo_rule,
            "noise": self.noise,
            "lengths": "default" if self.lengths is None else _name(self.lengths),
            "learns": self.learns,
            **({} if self.link == FREE_LINK else {"link": asdict(self.link)}),
            **({} if self.drafter is None else {"drafter": _described(self.drafter)}),
            **({"stated_max_tokens": self.stated_max_tokens} if self.stated_max_tokens else {}),
        }


def _described(drafter: Drafter) -> dict[str, Any]:
    return {"acceptance": asdict(drafter.acceptance), "model": digest_of(drafter.latency)}


def _name(function: Lengths) -> str:
    return repr(function.args) if isinstance(function, partial) else getattr(function, "__name__", repr(function))
