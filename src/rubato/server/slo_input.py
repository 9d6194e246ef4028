"""Which SLO a request carries: headers, then body, then service tier, then the server's default.

The order holds per dimension (TTFT, TPOT, e2e): a header that states a TPOT leaves the tier's TTFT standing. A named
tier replaces the default tier as a whole, so `flex` is best effort whatever the default promises.

With `slo.stages` each stage but the last says `until`, the literal that ends it. A TTFT stated for the whole request is
the first stage's; a TPOT is every stage's that states none of its own, unless it comes from a header, which wins; an
e2e bounds all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rubato.server.errors import ApiError
from rubato.server.schemas import SLOBody, StageBody
from rubato.types import SLO, OnDecline, Stage

# The dimension -> headers that state it in milliseconds, the first of which wins.
HEADERS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tpot": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
    "e2e": ("x-slo-e2e-ms",),
}
NOTHING = SLO()
BEST_EFFORT = "flex"  # OpenAI's name of the tier that promises nothing


@dataclass(frozen=True, slots=True)
class Tier:
    """A named promise of the operator's."""

    name: str
    slo: SLO = NOTHING
    on_decline: OnDecline = "best_effort"


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
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        raise ApiError(400, f"service_tier: unknown tier {name!r}; {hint}", param="service_tier", code="invalid_value")


def from_headers(headers: Mapping[str, str]) -> dict[str, float]:
    """Dimension -> seconds, of those that headers state. Raises ApiError 400 naming a header that is no number."""
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
        seconds = float(text) / 1e3
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ApiError(
            400,
            f"{name}: {text[:40]!r} is not a positive, finite number of milliseconds.",
            param=name,
            code="invalid_value",
        )
    return seconds


def stages(prompt: tuple[int, ...], headers: Mapping[str, str], body: SLOBody | None, tier: Tier) -> tuple[Stage, ...]:
    """The stages of a request with this prompt. Raises ApiError 400 for a contract that contradicts itself."""
    header = from_headers(headers)
    body = body or SLOBody()
    parts = body.stages or [StageBody()]
    _check_ends(parts)
    ttft = _first(header.get("ttft"), _from_ms(parts[0].ttft_ms), _from_ms(body.ttft_ms), tier.slo.ttft)
    e2e = _first(header.get("e2e"), _from_ms(body.e2e_ms), tier.slo.e2e)
    resolved = []
    for index, part in enumerate(parts):
        tpot = _first(header.get("tpot"), _from_ms(part.tpot_ms), _from_ms(body.tpot_ms), tier.slo.tpot)
        slo = SLO(ttft if index == 0 else _from_ms(part.ttft_ms), tpot, e2e)
        ids = prompt if index == 0 else ()
        resolved.append(Stage(len(ids), slo, part.until or "eos", ids))
    return tuple(resolved)


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
