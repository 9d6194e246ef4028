"""Which TPOTs a replica is for, where replicas are divided by TPOT, and how much is gained by it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf, log
from typing import NamedTuple

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.step_table import StepTable

TIGHTEST = 1 / 32  # the part of the requests that a TPOT must have to count as the tightest
ALIKE = 1.25  # TPOTs up to so many times each other are one


class Recent(NamedTuple):
    """A request of late: its TPOT, inf without one, and the seconds that a replica works for it."""

    tpot: float
    work: float


def work(seq: SeqView, steps: StepTable) -> float:
    """Seconds of a replica that its prompt takes alone, and its tokens as parts of full steps."""
    each = (steps.decodes(64, 64 * seq.length) - steps.decodes(1, 1)) / 64
    return steps.alone(seq.pending) + remaining_output(seq) * max(0.0, each)


def prompts_gain(tpots: Sequence[float], fleet: Sequence[View]) -> float:
    """How many times as much of a replica's time prompts get where each replica has one of these TPOTs, and steps as
    long, as where all have steps of the tightest: a step costs a part that no token in it can share."""
    least = min([view.latency.step_time(Shape(1, 1, 1)) for view in fleet])
    left = sorted([1.0 - least / tpot for tpot in tpots if tpot > least])
    return sum(left) / len(left) / left[int(len(left) * TIGHTEST)] if left else 1.0


def divided(recent: Sequence[Recent], step: float, replicas: int) -> list[float]:
    """The TPOTs that so many replicas are for, ascending, such that the one with most to do has least; neighbours share
    replicas of the tightest of them. Of the time there a step of `step` seconds, the shortest, is lost in each TPOT.
    All inf where no request tells."""
    kinds: dict[int, list[Recent]] = {}
    for one in recent:
        if one.tpot > step:
            kinds.setdefault(floor(log(min(one.tpot, 1e6), ALIKE)), []).append(one)
    found = [kinds[kind] for kind in sorted(kinds)] or [[Recent(inf, 1.0)]]
    tpots, works = [min(found)[0] for found in found], [sum(one.work for one in own) for own in found]

    def within(seconds: float) -> list[float]:
        """As few replicas as can be, none with more to do."""
        best: list[list[float]] = [[] for _ in range(len(tpots) + 1)]  # for those of this TPOT and looser ones
        for first, tpot in reversed(list(enumerate(tpots))):
            total, choices = 0.0, []
            for last in range(first, len(tpots)):
                total += works[last] / (1.0 - step / tpot)
                choices.append([tpot] * ceil(total / seconds) + best[last + 1])
            best[first] = min(choices, key=len)
        return best[0]

    low, high = 0.0, 1.001 * sum(works) / (1.0 - step / tpots[0])  # at which one does all: more than rounding is off
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(within(middle)) <= replicas else (middle, high)
    return [tpots[0]] * (replicas - len(within(high))) + within(high)
