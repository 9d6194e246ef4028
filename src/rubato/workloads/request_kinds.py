"""Kinds of requests: prompt, lengths and SLO; and mixes of kinds that change during a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rubato.core.request import SLO
from rubato.workloads.lengths import Lengths, mean, of
from rubato.workloads.root import root
from rubato.workloads.workload import NO_SLO

Range = Lengths | tuple[int, int]  # a pair: uniform from the least to the most tokens


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A stage after the first: another prefill (the result of a tool; none: a decode that goes on), and another decode.

    Args:
        ttft_slowdown, ends: as in `Kind`.
        pause: seconds that a tool takes before the stage.
    """

    output: Range
    prompt: Range = (0, 0)
    slo: SLO = NO_SLO
    ttft_slowdown: float | None = None
    ends: str = "eos"
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request in a mix. Of its stages the first runs `rounds` times (0: not at all), with `pause` seconds of
    a tool between two rounds; then come those of `then`.

    Args:
        prompt, output: lengths in tokens.
        app: what the request is for, and which texts are made (`prompts.TEXTS`; any other app: chat's).
        share: weight in the mix; shares need not add up to 1.
        ttft_slowdown: TTFT is so many times the zero-load prefill time of that prompt, instead of `slo.ttft`.
        ttfts: TTFT is one of these, in seconds, drawn evenly; an idle replica must be able to meet it.
        acceptance: least and most probability that a drafted token is accepted, one number for each request.
    """

    app: str
    slo: SLO
    prompt: Range
    output: Range
    tier: str = ""  # "" = the app's name
    share: float = 1.0
    tenant: str = "default"
    ttft_slowdown: float | None = None
    ttfts: tuple[float, ...] = ()
    ends: str = "eos"
    pause: float = 0.0
    rounds: Lengths | None = None
    then: tuple[FollowUp, ...] = ()
    acceptance: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            tokens = getattr(self, name)
            if isinstance(tokens, tuple) and not 1 <= tokens[0] <= tokens[1]:
                raise ValueError(f"kind {self.app!r}: {name} is {tokens} tokens: give 1 <= least <= most")
        if not 0.0 < self.share < math.inf:
            raise ValueError(f"kind {self.app!r}: share is {self.share}: give a positive weight")
        if self.ttfts and (self.staged or self.ttft_slowdown):
            raise ValueError(f"kind {self.app!r}: ttfts go with neither stages nor ttft_slowdown")
        if self.acceptance and not 0.0 <= self.acceptance[0] <= self.acceptance[1] <= 1.0:
            raise ValueError(f"kind {self.app!r}: acceptance is {self.acceptance}: give 0 <= least <= most <= 1")
        if not self.tier:
            object.__setattr__(self, "tier", self.app)

    @property
    def stages(self) -> tuple[Kind | FollowUp, ...]:
        """The first, however often it runs, and those after it."""
        return (self, *self.then)

    @property
    def staged(self) -> bool:
        return bool(self.then) or self.rounds is not None

    def scaled(self, factor: float) -> Kind:
        """The same kind with prompts `factor` times as long, in every stage."""

        def longer(tokens: Range) -> Lengths:
            return of(tokens).scaled(factor)

        then = tuple(dataclasses.replace(stage, prompt=longer(stage.prompt)) for stage in self.then)
        return dataclasses.replace(self, prompt=longer(self.prompt), then=then)


@dataclass(frozen=True, slots=True)
class MixChange:
    """Another mix from the first request that is at least the `request`th (from 0) and arrives `at` or later (s)."""

    kinds: tuple[Kind, ...]
    request: int = 0
    at: float = 0.0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("a workload needs at least one kind of request")


def chat(slo: SLO, **changes: Any) -> Kind:
    """Short prompts, answers read as they come."""
    return dataclasses.replace(Kind("chat", slo, prompt=(30, 200), output=(40, 120)), **changes)


def code(slo: SLO, **changes: Any) -> Kind:
    """A file to complete in an editor."""
    return dataclasses.replace(Kind("code", slo, prompt=(100, 400), output=(40, 120)), **changes)


def summary(slo: SLO, **changes: Any) -> Kind:
    """Long prompts, short answers, no hurry."""
    return dataclasses.replace(Kind("summary", slo, prompt=(400, 900), output=(30, 80)), **changes)


USUAL_SLOS = {"chat": SLO(2.0, 0.15), "code": SLO(3.0, 0.2), "summary": SLO(6.0, 0.3)}  # without better knowledge


def usual_kinds(slos: Mapping[str, SLO]) -> tuple[Kind, ...]:
    """Chat, code and summaries, 4 : 3 : 3, under these SLOs."""
    return chat(slos["chat"], share=0.4), code(slos["code"], share=0.3), summary(slos["summary"], share=0.3)


def within(kind: Kind, most: int) -> Kind:
    """The kind whose mean output is still this one's when outputs are cut to let prompt + output fit in `most` tokens.

    Lengths are drawn independently, so a cut takes from the outputs of long prompts (of SLOs-Serve's summaries 18 %
    of the mean at 2048); all outputs are made longer by the factor that brings it back. Raises ValueError where no
    factor up to 100 does.
    """
    share = (np.arange(1000) + 0.5) / 1000
    room = np.maximum(1, most - of(kind.prompt).at(share))[:, None]
    mean_output = mean(of(kind.output))

    def off(factor: float) -> float:
        return float(np.minimum(of(kind.output).scaled(factor).at(share), room).mean()) - mean_output

    if off(1.0) > -0.001 * mean_output:
        return kind
    if off(100.0) < 0.0:
        raise ValueError(
            f"kind {kind.app!r}: prompts leave no room in {most} tokens for {mean_output:.0f} of output on average"
        )
    return dataclasses.replace(kind, output=of(kind.output).scaled(root(off, 1.0, 100.0, within=1e-3)))


def tiers_of(kinds: Sequence[Kind]) -> dict[str, SLO]:
    """Each tier's SLO. Raises ValueError without kinds, or when two of them disagree about a tier."""
    if not kinds:
        raise ValueError("a workload needs at least one kind of request")
    tiers: dict[str, SLO] = {}
    for kind in kinds:
        if tiers.setdefault(kind.tier, kind.slo) != kind.slo:
            raise ValueError(f"two kinds share the tier {kind.tier!r} but not its SLO: {tiers[kind.tier]}, {kind.slo}")
    return tiers
