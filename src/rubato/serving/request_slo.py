"""The SLO of a request: headers, then body, then service tier, then the server's default.

The order holds per dimension (TTFT, TPOT, e2e): a header that states a TPOT leaves the tier's TTFT standing. A named
tier replaces the default tier as a whole, so `flex` is best effort whatever the default promises.

With `slo.stages` each stage but the last says `until`, the literal that ends it. A TTFT stated for the whole request is
the first stage's; a TPOT is every stage's that states none of its own, unless it comes from a header, which wins; an
e2e bounds all stages.

What a client states is a wish: with tenants, a tier that its tenant may not use is replaced by one that it may, and a
time tighter than any of those tiers promises is loosened to the tightest that they do (`Bounds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf

from rubato.core.request import LEAST_MS, MOST_MS, SLO, OnDecline, Stage
from rubato.serving.errors import ApiError
from rubato.serving.schemas import LONGEST_NAME, SLOBody, StageBody

# The dimension -> headers that state it in milliseconds, the first of which wins.
HEADERS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tpot": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
    "e2e": ("x-slo-e2e-ms",),
}
NOTHING = SLO()
BEST_EFFORT = "flex"  # OpenAI's name of the tier without an SLO


@dataclass(frozen=True, slots=True)
class Bounds:
    """The tightest that may be promised, in seconds: 0 = anything, inf = nothing at all in this dimension."""

    ttft: float = 0.0
    tpot: float = 0.0
    e2e: float = 0.0

    def clamp(self, slo: SLO) -> SLO:
        return SLO(_clamp(slo.ttft, self.ttft), _clamp(slo.tpot, self.tpot), _clamp(slo.e2e, self.e2e))


def _clamp(seconds: float | None, least: float) -> float | None:
    return None if seconds is None or least == inf else max(seconds, least)


@dataclass(frozen=True, slots=True)
class Tier:
    """A named SLO of the operator's. bounds: of what a request in this tier may state besides."""

    name: str
    slo: SLO = NOTHING
    on_decline: OnDecline = "best_effort"
    bounds: Bounds = Bounds()


class Tiers:
    """The tiers a request may name. OpenAI's own names are always known: `auto` (and none) is the default tier,
    `default` and `priority` too unless configured, `flex` is best effort unless configured."""

    def __init__(self, configured: Sequence[Tier] = (), default: str = "default") -> None:
        self._named = {tier.name: tier for tier in configured}
        self._named.setdefault(BEST_EFFORT, Tier(BEST_EFFORT))
        if default == "default":
            self._named.setdefault("default", Tier("default"))
        if default not in self._named:
            raise ValueError(f"default_tier {default!r} is not among the tiers: {', '.join(sorted(self._named))}")
        self.default = self._named[default]

    def allowed(self, names: Sequence[str] | None) -> TenantTiers:
        """For a tenant that may use the tiers of these names, None = all. Raises ValueError for an unknown one."""
        if names is None:
            return TenantTiers(self, list(self._named.values()), listed=False)
        for name in names:
            if name not in self._named:
                raise ValueError(f"{name!r} is not among the tiers: {', '.join(sorted(self._named))}")
        return TenantTiers(self, [self._named[name] for name in names], listed=True)

    def resolve(self, name: str | None) -> Tier:
        """The tier of this `service_tier`. Raises ApiError 400 for an unknown one."""
        if name is None:
            return self.default
        tier = self._named.get(name)
        if tier is not None:
            return tier
        if name in ("auto", "default", "priority"):
            return self.default
        known = sorted({*self._named, "auto", "default", "priority"})
        near = get_close_matches(name[:LONGEST_NAME], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        message = f"service_tier: unknown tier {name[:LONGEST_NAME]!r}; {hint}"
        raise ApiError(400, message, param="service_tier", code="invalid_value")


class TenantTiers:
    """The tiers of one tenant. A tier beyond them becomes the tenant's own default: the server's where it may use that,
    else the first of its list. Best effort is open to every tenant.

    A stated time is bounded, dimension by dimension, by the tightest that its tiers promise. Where none promises
    anything, a tenant with a list of its own gets nothing promised; one without may state what it likes.
    """

    def __init__(self, tiers: Tiers, allowed: Sequence[Tier], *, listed: bool) -> None:
        self._tiers = tiers
        self._names = {tier.name for tier in allowed}
        self._default = tiers.default if tiers.default.name in self._names else allowed[0]
        free = inf if listed else 0.0

        def least(dimension: str) -> float:
            promised = [getattr(tier.slo, dimension) for tier in allowed]
            return min((seconds for seconds in promised if seconds is not None), default=free)

        self.bounds = Bounds(least("ttft"), least("tpot"), least("e2e"))

    def resolve(self, name: str | None) -> Tier:
        """The tier that a request for this `service_tier` gets. Raises ApiError 400 for an unknown one."""
        asked = self._tiers.resolve(name)
        usable = asked.name in self._names or (asked.name == BEST_EFFORT and asked.slo.best_effort)
        return replace(asked if usable else self._default, bounds=self.bounds)


def from_headers(headers: Mapping[str, str]) -> dict[str, float]:
    """Dimension -> seconds, of those that headers state. Raises ApiError 400 naming a header that is no such number."""
    stated: dict[str, float] = {}
    for dimension, names in HEADERS.items():
        for name in names:
            if (text := headers.get(name)) is None:
                continue
            seconds = _seconds(name, text)
            stated.setdefault(dimension, seconds)
    return stated


def _seconds(name: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not LEAST_MS <= milliseconds <= MOST_MS:
        raise ApiError(
            400,
            f"{name}: {text[:40]!r} is no number of milliseconds from {LEAST_MS:g} to {MOST_MS:g}.",
            param=name,
            code="invalid_value",
        )
    return milliseconds / 1e3


def stages(prompt: tuple[int, ...], headers: Mapping[str, str], body: SLOBody | None, tier: Tier) -> tuple[Stage, ...]:
    """The stages of a request with this prompt. Raises ApiError 400 for a contract that contradicts itself."""
    parts = _parts(body)
    _check_ends(parts)
    resolved = []
    for index, (part, slo) in enumerate(zip(parts, _stated(headers, body, tier), strict=True)):
        ids = prompt if index == 0 else ()
        resolved.append(Stage(len(ids), tier.bounds.clamp(slo), part.until or "eos", ids))
    return tuple(resolved)


def clamped(headers: Mapping[str, str], body: SLOBody | None, tier: Tier) -> list[str]:
    """The dimensions in which less was promised than stated, in some stage."""
    if tier.bounds == Bounds():
        return []
    stated = _stated(headers, body, tier)
    pairs = [(slo, tier.bounds.clamp(slo)) for slo in stated]
    return [name for name in HEADERS if any(getattr(asked, name) != getattr(got, name) for asked, got in pairs)]


def _parts(body: SLOBody | None) -> list[StageBody]:
    return (body and body.stages) or [StageBody()]


def _stated(headers: Mapping[str, str], body: SLOBody | None, tier: Tier) -> list[SLO]:
    """The SLO of each stage as stated, before any bound."""
    header = from_headers(headers)
    body = body or SLOBody()
    parts = _parts(body)
    ttft = _first(header.get("ttft"), _from_ms(parts[0].ttft_ms), _from_ms(body.ttft_ms), tier.slo.ttft)
    e2e = _first(header.get("e2e"), _from_ms(body.e2e_ms), tier.slo.e2e)
    slos = []
    for index, part in enumerate(parts):
        tpot = _first(header.get("tpot"), _from_ms(part.tpot_ms), _from_ms(body.tpot_ms), tier.slo.tpot)
        slos.append(SLO(ttft if index == 0 else _from_ms(part.ttft_ms), tpot, e2e))
    return slos


def _check_ends(parts: Sequence[StageBody]) -> None:
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        where = f"slo.stages[{index}].until"
        if last and part.until is not None:
            raise ApiError(400, f"{where}: the last stage ends with the answer; leave it out.", param=where)
        if not last and part.until in (None, "eos"):
            raise ApiError(400, f'{where}: say what ends this stage, such as "</think>".', param=where)


def _from_ms(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
