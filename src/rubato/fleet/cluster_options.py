"""Options of a cluster: the policy, its router, and the options of all replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from rubato.core.interfaces import Autoscaler, Router, Scheduler
from rubato.core.replica_options import DEFAULT_OPTIONS, ReplicaOptions
from rubato.policies import load, router_for
from rubato.policy_kit.fair_share import FairShare


@dataclass(frozen=True)
class PolicyChoice:
    """A policy and a router with their settings, as one writes them: `sarathi:budget=256@random:seed=3`. router:
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
        """Parses without a check that the policy exists. Raises ValueError for text that is no policy."""
        own, _, other = text.partition("@")
        return cls(*_parsed(own), *_parsed(other or router))

    def checked(self) -> PolicyChoice:
        """Itself. Raises as `build`."""
        self.build()
        return self

    def build(self) -> tuple[Scheduler, Router]:
        """A scheduler and the router. Raises ValueError (PolicyError) for what is not there."""
        scheduler = load(self.policy, self.settings)
        return scheduler, router_for(self.policy, self.router, self.router_settings, self.settings)


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


@dataclass(frozen=True)
class ClusterOptions:
    """max_in_flight: requests beyond it are refused as saturated (None: no bound). fair: the tenants' shares, None for
    first come, first served. autoscaler: what adds and drains hosts."""

    choice: PolicyChoice
    replica: ReplicaOptions = DEFAULT_OPTIONS
    max_in_flight: int | None = None
    fair: FairShare | None = None
    autoscaler: Autoscaler | None = None
