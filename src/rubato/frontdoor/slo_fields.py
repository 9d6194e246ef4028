"""The SLO of a request: headers, then body, then service tier, then the server's default.

The order holds per dimension (TTFT, TPOT, e2e): a header that states a TPOT leaves the tier's TTFT standing. A named
tier replaces the default tier as a whole, so `flex` is best effort whatever the default promises. A `max_pause` is a
tier's alone, and holds beside whichever TPOT counts.

With `slo.stages` each stage but the last says `until`, the literal that ends it. A TTFT stated for the whole request is
the first stage's; a TPOT is every stage's that states none of its own, unless it comes from a header, which wins; an
e2e bounds all stages.

What a client states is a wish: with tenants, a tier that its tenant may not use is replaced by one that it may, and a
time tighter than any of those tiers promises is loosened to the tightest that they do.
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

# The dimension -> headers that state it in milliseconds, the first of which wins.
HEADERS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tpot": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
    "e2e": ("x-slo-e2e-ms",),
}
ON_DECLINE = "x-slo-on-decline"
KNOWN_HEADERS = (*(name for names in HEADERS.values() for name in names), ON_DECLINE)
LIKE_OURS = re.compile("(x[-_])?(llm[-_]d[-_])?slo([-_]|$)")
MAX_NAMES = 64  # of a body, that are looked through for one of ours misspelt
NOTHING = SLO()
BEST_EFFORT = "flex"  # OpenAI's name of the tier without an SLO
STANDARD = ("auto", "default", "priority", "scale", "standard_only")  # the last is Anthropic's


@dataclass(frozen=True, slots=True)
class Tier:
    """A named SLO of the operator's."""

    name: str
    slo: SLO = NOTHING
    on_decline: OnDecline = "best_effort"


class Tiers:
    """The tiers a request may name. OpenAI's and Anthropic's own names are always known: `auto` (and none) is the
    default tier, those of STANDARD too unless configured, `flex` is best effort unless configured."""

    def __init__(self, configured: Sequence[Tier] = (), default: str = "default") -> None:
        self._named = {tier.name: tier for tier in configured}
        self._named.setdefault(BEST_EFFORT, Tier(BEST_EFFORT))
        if default == "default":
            self._named.setdefault("default", Tier("default"))
        if default not in self._named:
            raise ValueError(f"default_tier {default!r} is not among the tiers: {', '.join(sorted(self._named))}")
        self.default = self._named[default]
        self._usable = self._named
        self._least = dict.fromkeys(HEADERS, 0.0)  # seconds that may be stated: 0 = anything, inf = nothing at all

    @property
    def usable(self) -> Sequence[Tier]:
        """Those that a request gets when it names them."""
        best_effort = self._named[BEST_EFFORT]
        tiers = {**self._usable, **({BEST_EFFORT: best_effort} if best_effort.slo.best_effort else {})}
        return list(tiers.values())

    def allowed(self, names: Sequence[str] | None) -> Tiers:
        """For a tenant that may use the tiers of these names, None = all. Raises ValueError for an unknown one.

        A tier beyond them becomes the tenant's own default: the server's where it may use that, else the first of its
        list. Best effort is open to every tenant. A stated time is bounded, dimension by dimension, by the tightest
        that its tiers promise. Where none promises anything, a tenant with a list of its own gets nothing promised; one
        without may state what it likes.
        """
        for name in names or ():
            if name not in self._named:
                raise ValueError(f"{name!r} is not among the tiers: {', '.join(sorted(self._named))}")
        free = 0.0 if names is None else inf
        bounded = copy(self)
        bounded._usable = {name: self._named[name] for name in (self._named if names is None else names)}

        def least(dimension: str) -> float:
            promised = [tier.slo.promised for tier in bounded._usable.values()]
            return min((times[dimension] for times in promised if dimension in times), default=free)

        bounded._least = {dimension: least(dimension) for dimension in HEADERS}
        return bounded

    def resolve(self, name: str | None) -> Tier:
        """The tier that a request for this `service_tier` gets. Raises ApiError 400 for an unknown one."""
        asked = self.named(name)
        if asked.name in self._usable or (asked.name == BEST_EFFORT and asked.slo.best_effort):
            return asked
        return self._usable.get(self.default.name) or next(iter(self._usable.values()))

    def named(self, name: str | None) -> Tier:
        """The tier of this `service_tier`, usable or not. Raises ApiError 400 for an unknown one."""
        if name is None:
            return self.default
        tier = self._named.get(name)
        if tier is not None:
            return tier
        if name in STANDARD:
            return self.default
        known = sorted({*self._named, *STANDARD})
        near = get_close_matches(name[:MAX_NAME_CHARACTERS], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        raise invalid("service_tier", f"unknown tier {name[:MAX_NAME_CHARACTERS]!r}; {hint}")

    def loosened(self, slo: SLO) -> SLO:
        """What of it may be promised; a tier's `max_pause`, which no client states, is."""
        least = {"max_pause": 0.0, **self._least}
        return SLO(**{name: max(stated, least[name]) for name, stated in slo.promised.items() if least[name] < inf})


@dataclass(frozen=True, slots=True)
class GrantedSLO:
    """What is promised to one API request. clamped: where that is less than what it states ("service_tier", or a
    dimension in some stage)."""

    tier: str
    on_decline: OnDecline
    clamped: tuple[str, ...]
    _stages: tuple[Stage, ...]  # without a prompt

    def stages(self, prompt: tuple[int, ...]) -> tuple[Stage, ...]:
        """The stages of a request with this prompt."""
        return (replace(self._stages[0], prompt=len(prompt), token_ids=prompt), *self._stages[1:])

    @property
    def slo(self) -> SLO:
        """Of the first stage, which most requests alone have."""
        return self._stages[0].slo

    def stages_of_length(self, prompt: int) -> tuple[Stage, ...]:
        """The stages of a request whose prompt has so many tokens, which are not known."""
        return (replace(self._stages[0], prompt=prompt), *self._stages[1:])


def grant(tiers: Tiers, headers: Mapping[str, str], service_tier: str | None, body: SLOBody | None) -> GrantedSLO:
    """tiers: those of the request's tenant. Raises ApiError 400 for an unknown tier, for a header that is no time, and
    for stages that contradict each other."""
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
    on_decline = headers.get(ON_DECLINE) or body.on_decline or tier.on_decline
    if on_decline not in get_args(OnDecline):
        raise invalid(ON_DECLINE, f"{on_decline[:MAX_NAME_CHARACTERS]!r} is neither best_effort nor refuse.")
    stated = [_first(header, part.slo, body.slo, tier.slo) for part in parts]
    for at, part in enumerate(parts[1:], 1):  # a TTFT that is stated for the whole request is the first stage's
        stated[at] = replace(stated[at], ttft=part.slo.ttft)
    granted = [tiers.loosened(slo) for slo in stated]
    clamped = [
        name for name in HEADERS if [getattr(slo, name) for slo in stated] != [getattr(slo, name) for slo in granted]
    ]
    if service_tier not in (None, "auto") and tiers.named(service_tier).name != tier.name:
        clamped.insert(0, "service_tier")
    stages = tuple(Stage(0, slo, part.until or "eos") for part, slo in zip(parts, granted, strict=True))
    return GrantedSLO(tier.name, cast(OnDecline, on_decline), tuple(clamped), stages)


def _first(*slos: SLO) -> SLO:
    """In each dimension, the value of the first of them that states one."""
    return SLO(**{name: seconds for slo in reversed(slos) for name, seconds in slo.promised.items()})


def from_headers(headers: Mapping[str, str]) -> SLO:
    """What headers state. Raises ApiError 400 naming one that is no number of milliseconds, or looks like an SLO and is
    none."""
    for name in headers:
        if name not in KNOWN_HEADERS and LIKE_OURS.match(name):
            shown = name[:MAX_NAME_CHARACTERS]
            raise invalid(shown, f"unknown header{nearest(shown, KNOWN_HEADERS)}")
    stated: dict[str, float] = {}
    for dimension, names in HEADERS.items():
        for name in names:
            if (text := headers.get(name)) is not None:
                stated.setdefault(dimension, _seconds(name, text))
    return SLO(**stated)


def _seconds(name: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not MIN_SLO_MS <= milliseconds <= MAX_SLO_MS:
        raise invalid(name, f"{text[:40]!r} is no number of milliseconds from {MIN_SLO_MS:g} to {MAX_SLO_MS:g}.")
    return milliseconds / 1e3


def to_headers(granted: GrantedSLO) -> list[tuple[str, str]]:
    """What is granted as the headers that state it; a `max_pause` has none."""
    promised = granted.slo.promised
    stated = [(names[0], f"{promised[name] * 1e3:g}") for name, names in HEADERS.items() if name in promised]
    return stated if granted.on_decline == "best_effort" else [*stated, (ON_DECLINE, granted.on_decline)]


def check_names(names: Iterable[str], ours: Sequence[str]) -> None:
    """Raises ApiError 400 for a body's field that looks like one of ours and is none."""
    for name in islice(names, MAX_NAMES):
        if name in ours or len(name) >= MAX_NAME_CHARACTERS:
            continue
        if near := _closest(name.lower(), tuple(ours)):
            message = f"{name}: unknown parameter; did you mean {near[0]}?"
            raise ApiError(400, message, param=name, code="unknown_parameter")


@lru_cache(1024)
def _closest(name: str, ours: tuple[str, ...]) -> list[str]:
    """Most bodies have the same few names."""
    return get_close_matches(name, ours, 1, 0.8)


def unknown_name(where: str, name: str, known: Sequence[str]) -> ApiError:
    """The error of a name that is not known there."""
    return invalid(where[:MAX_NAME_CHARACTERS], f"unknown key{nearest(name[:MAX_NAME_CHARACTERS], known)}")
