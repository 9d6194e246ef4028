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
    """Names a policy and a router with their settings, written as `sarathi:budget=256@random:seed=3`.

    Args:
        router: "auto": the policy's own, or `least_loaded`.
    """

    policy: str
    settings: Mapping[str, object] = field(default_factory=dict)
    router: str = "auto"
    router_settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        own = _text_of(self.policy, self.settings)
        router = _text_of(self.router, self.router_settings)
        return own if router == "auto" else f"{own}@{router}"

    @classmethod
    def parse(cls, text: str, router: str = "auto") -> PolicyChoice:
        """Parses a choice. Raises ValueError (PolicyError) for an unknown policy, router or setting."""
        return cls.read(text, router).checked()

    @classmethod
    def read(cls, text: str, router: str = "auto") -> PolicyChoice:
        """Parses a choice without a check that the policy exists. Raises ValueError for text of another form."""
        own, _, other = text.partition("@")
        return cls(*_parse(own), *_parse(other or router))

    def checked(self) -> PolicyChoice:
        """Returns itself. Raises as `build`."""
        self.build()
        return self

    def build(self) -> tuple[Scheduler, Router]:
        """Makes a scheduler and the router. Raises ValueError (PolicyError) for an unknown policy, router or
        setting."""
        scheduler = load(self.policy, self.settings)
        return scheduler, router_for(self.policy, self.router, self.router_settings, self.settings)


def _text_of(name: str, settings: Mapping[str, object]) -> str:
    return name + "".join(f"{',' if i else ':'}{key}={value}" for i, (key, value) in enumerate(settings.items()))


def _parse(text: str) -> tuple[str, dict[str, object]]:
    name, _, rest = text.partition(":")
    settings: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"policy {text!r}: write its settings as {name}:SETTING=VALUE,SETTING=VALUE")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"policy {text!r}: {value!r} is no value for {key}: give a number or a word") from error
    return name, settings


@dataclass(frozen=True)
class ClusterOptions:
    """Holds the options of a cluster.

    Args:
        max_in_flight: requests beyond it are refused as saturated; None: no bound.
        fair: the tenants' shares; None: first come, first served.
        autoscaler: adds and drains hosts.
    """

    choice: PolicyChoice
    replica: ReplicaOptions = DEFAULT_OPTIONS
    max_in_flight: int | None = None
    fair: FairShare | None = None
    autoscaler: Autoscaler | None = None
