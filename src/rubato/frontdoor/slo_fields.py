"""Determines the SLO of a request from headers, then body, then service tier, then the server's default.

The order holds per dimension (TTFT, TPOT, e2e): a header with a TPOT keeps the tier's TTFT. A named tier replaces the
default tier as a whole, so `flex` is best effort whatever the default is. Only a tier can set `max_pause`, which holds
together with any TPOT.

With `slo.stages` each stage but the last has `until`, the text that ends it. A TTFT of the whole request is the first
stage's. A TPOT of the whole request is that of every stage without its own; one from a header is that of all stages. An
e2e bounds all stages.

The server may grant less than the client states: with tenants, a tier that the tenant may not use is replaced by one
that it may, and a time is loosened to the tightest of the tenant's tiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from math import inf
from typing import cast, get_args

from rubato.core.did_you_mean import nearest
from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS, SLO, OnDecline, Stage
from rubato.frontdoor.errors import ApiError, invalid
from rubato.frontdoor.slo_body import MAX_NAME_CHARACTERS, SLOBody, StageBody

# Dimension -> headers with its milliseconds; the first one wins.
SLO_HEADERS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tpot": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
    "e2e": ("x-slo-e2e-ms",),
}
ON_DECLINE_HEADER = "x-slo-on-decline"
KNOWN_HEADERS = (*(name for names in SLO_HEADERS.values() for name in names), ON_DECLINE_HEADER)
LOOKS_LIKE_SLO = re.compile("(x[-_])?(llm[-_]d[-_])?slo([-_]|$)")
MAX_CHECKED_NAMES = 64  # fields of a body that are checked for misspelt names
NO_SLO = SLO()
BEST_EFFORT_TIER = "flex"  # OpenAI's name of the tier without an SLO
STANDARD_TIERS = ("auto", "default", "priority", "scale", "standard_only")  # the last is Anthropic's


@dataclass(frozen=True, slots=True)
class Tier:
    """Names an SLO of the operator's."""

    name: str
    slo: SLO = NO_SLO
    on_decline: OnDecline = "best_effort"


class Tiers:
    """Knows the tiers that a request may name. OpenAI's and Anthropic's names are always known: `auto`, and those of
    STANDARD_TIERS unless configured, are the default tier; `flex` is best effort unless configured."""

    def __init__(self, configured: Sequence[Tier] = (), default: str = "default") -> None:
        self._by_name = {tier.name: tier for tier in configured}
        self._by_name.setdefault(BEST_EFFORT_TIER, Tier(BEST_EFFORT_TIER))
        if default == "default":
            self._by_name.setdefault("default", Tier("default"))
        if default not in self._by_name:
            raise ValueError(f"default_tier {default!r} is not among the tiers: {', '.join(sorted(self._by_name))}")
        self.default = self._by_name[default]
        self._usable = self._by_name
        self._min_seconds = dict.fromkeys(SLO_HEADERS, 0.0)  # the tightest allowed: 0 = any time, inf = no SLO

    @property
    def usable(self) -> Sequence[Tier]:
        """Returns the tiers that a request may have by naming them."""
        best_effort = self._by_name[BEST_EFFORT_TIER]
        tiers = {**self._usable, **({BEST_EFFORT_TIER: best_effort} if best_effort.slo.best_effort else {})}
        return list(tiers.values())

    def restrict_to(self, names: Sequence[str] | None) -> Tiers:
        """Returns the tiers for a tenant that may use these names; None = all. Raises ValueError for an unknown name.

        Any other tier becomes the tenant's default: the server's if allowed, else the first of its list. Best effort is
        open to every tenant. A stated time is bounded in each dimension by the tightest of its tiers. Where no tier
        bounds a dimension, a tenant with a list gets no SLO in it; one without may state any time.
        """
        for name in names or ():
            if name not in self._by_name:
                raise ValueError(f"{name!r} is not among the tiers: {', '.join(sorted(self._by_name))}")
        free = 0.0 if names is None else inf
        bounded = copy(self)
        bounded._usable = {name: self._by_name[name] for name in (self._by_name if names is None else names)}

        def min_seconds(dimension: str) -> float:
            promised = [tier.slo.bounds for tier in bounded._usable.values()]
            return min((times[dimension] for times in promised if dimension in times), default=free)

        bounded._min_seconds = {dimension: min_seconds(dimension) for dimension in SLO_HEADERS}
        return bounded

    def resolve(self, name: str | None) -> Tier:
        """Returns the tier that a request for this `service_tier` gets. Raises ApiError 400 for an unknown one."""
        tier = self.tier_of(name)
        if tier.name in self._usable or (tier.name == BEST_EFFORT_TIER and tier.slo.best_effort):
            return tier
        return self._usable.get(self.default.name) or next(iter(self._usable.values()))

    def tier_of(self, name: str | None) -> Tier:
        """Returns the tier of this `service_tier`, allowed or not. Raises ApiError 400 for an unknown one."""
        if name is None:
            return self.default
        tier = self._by_name.get(name)
        if tier is not None:
            return tier
        if name in STANDARD_TIERS:
            return self.default
        known = sorted({*self._by_name, *STANDARD_TIERS})
        near = get_close_matches(name[:MAX_NAME_CHARACTERS], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        raise invalid("service_tier", f"unknown tier {name[:MAX_NAME_CHARACTERS]!r}; {hint}")

    def loosen(self, slo: SLO) -> SLO:
        """Returns the SLO that may be granted; a `max_pause`, which only tiers have, always is."""
        min_seconds = {"max_pause": 0.0, **self._min_seconds}
        stated = slo.bounds.items()
        return SLO(**{name: max(time, min_seconds[name]) for name, time in stated if min_seconds[name] < inf})


@dataclass(frozen=True, slots=True)
class GrantedSLO:
    """Describes the SLO granted to one API request; `clamped` names the tier and dimensions looser than stated."""

    tier: str
    on_decline: OnDecline
    clamped: tuple[str, ...]
    _stages: tuple[Stage, ...]  # without a prompt

    def stages(self, prompt: tuple[int, ...]) -> tuple[Stage, ...]:
        """Returns the stages of a request with this prompt."""
        return (replace(self._stages[0], prompt=len(prompt), token_ids=prompt), *self._stages[1:])

    @property
    def slo(self) -> SLO:
        """Returns the SLO of the first stage, the only one of most requests."""
        return self._stages[0].slo

    def stages_of_length(self, prompt: int) -> tuple[Stage, ...]:
        """Returns the stages of a request whose prompt has this many tokens; their ids are unknown."""
        return (replace(self._stages[0], prompt=prompt), *self._stages[1:])


def grant(tiers: Tiers, headers: Mapping[str, str], service_tier: str | None, body: SLOBody | None) -> GrantedSLO:
    """Grants the SLO of an API request.

    Args:
        tiers: of the request's tenant.
        headers: by lower-case name.
        service_tier: of the body.
        body: its `slo`.

    Raises:
        ApiError: 400 for an unknown tier, a header that is no time, and stages that contradict each other.
    """
    tier = tiers.resolve(service_tier)
    body = body or SLOBody()
    parts = body.stages or [StageBody()]
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        where = f"slo.stages[{index}].until"
        if last and part.until is not None:
            raise ApiError(400, f"{where}: the last stage ends with the answer; leave it out.", param=where)
        if not last and part.until in (None, "eos"):
            raise ApiError(400, f'{where}: say what ends this stage, such as "</think>".', param=where)
    header = from_headers(headers)
    on_decline = headers.get(ON_DECLINE_HEADER) or body.on_decline or tier.on_decline
    if on_decline not in get_args(OnDecline):
        raise invalid(ON_DECLINE_HEADER, f"{on_decline[:MAX_NAME_CHARACTERS]!r} is neither best_effort nor refuse.")
    stated_slos = [_first_stated(header, part.slo, body.slo, tier.slo) for part in parts]
    for at, part in enumerate(parts[1:], 1):  # a TTFT of the whole request is the first stage's
        stated_slos[at] = replace(stated_slos[at], ttft=part.slo.ttft)
    granted_slos = [tiers.loosen(slo) for slo in stated_slos]
    clamped = [
        name
        for name in SLO_HEADERS
        if [getattr(slo, name) for slo in stated_slos] != [getattr(slo, name) for slo in granted_slos]
    ]
    if service_tier not in (None, "auto") and tiers.tier_of(service_tier).name != tier.name:
        clamped.insert(0, "service_tier")
    stages = tuple(Stage(0, slo, part.until or "eos") for part, slo in zip(parts, granted_slos, strict=True))
    return GrantedSLO(tier.name, cast(OnDecline, on_decline), tuple(clamped), stages)


def _first_stated(*slos: SLO) -> SLO:
    """Returns the SLO with, in each dimension, the first stated value."""
    return SLO(**{name: seconds for slo in reversed(slos) for name, seconds in slo.bounds.items()})


def from_headers(headers: Mapping[str, str]) -> SLO:
    """Returns the SLO stated in headers. Raises ApiError 400 for no number of milliseconds and misspelt headers."""
    for name in headers:
        if name not in KNOWN_HEADERS and LOOKS_LIKE_SLO.match(name):
            shown = name[:MAX_NAME_CHARACTERS]
            raise invalid(shown, f"unknown header{nearest(shown, KNOWN_HEADERS)}")
    times: dict[str, float] = {}
    for dimension, names in SLO_HEADERS.items():
        for name in names:
            if (text := headers.get(name)) is not None:
                times.setdefault(dimension, _seconds(name, text))
    return SLO(**times)


def _seconds(name: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not MIN_SLO_MS <= milliseconds <= MAX_SLO_MS:
        raise invalid(name, f"{text[:40]!r} is no number of milliseconds from {MIN_SLO_MS:g} to {MAX_SLO_MS:g}.")
    return milliseconds / 1e3


def to_headers(granted: GrantedSLO) -> list[tuple[str, str]]:
    """Returns the headers that state a granted SLO; a `max_pause` has none."""
    promised = granted.slo.bounds
    headers = [(names[0], f"{promised[name] * 1e3:g}") for name, names in SLO_HEADERS.items() if name in promised]
    return headers if granted.on_decline == "best_effort" else [*headers, (ON_DECLINE_HEADER, granted.on_decline)]


def check_names(names: Iterable[str], ours: Sequence[str]) -> None:
    """Raises ApiError 400 for a field of a body that is a misspelt SLO field."""
    for name in islice(names, MAX_CHECKED_NAMES):
        if name in ours or len(name) >= MAX_NAME_CHARACTERS:
            continue
        if near := _closest(name.lower(), tuple(ours)):
            message = f"{name}: unknown parameter; did you mean {near[0]}?"
            raise ApiError(400, message, param=name, code="unknown_parameter")


@lru_cache(1024)
def _closest(name: str, ours: tuple[str, ...]) -> list[str]:
    """Returns close matches, cached since most bodies have the same few names."""
    return get_close_matches(name, ours, 1, 0.8)


def unknown_name(where: str, name: str, known: Sequence[str]) -> ApiError:
    """Returns the error of a name that is not known there."""
    return invalid(where[:MAX_NAME_CHARACTERS], f"unknown key{nearest(name[:MAX_NAME_CHARACTERS], known)}")
