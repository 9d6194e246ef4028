"""Divides replicas by TPOT, and estimates the gain."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf, log
from typing import NamedTuple

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.step_table import StepTable

MIN_TIGHTEST_SHARE = 1 / 32  # share of the requests below which a TPOT does not count as the tightest
SAME_TPOT_RATIO = 1.25  # TPOTs within this ratio of each other count as one


class Recent(NamedTuple):
    """A recent request: its TPOT (inf without one) and the replica seconds that it takes."""

    tpot: float
    work: float


def work(seq: SeqView, steps: StepTable) -> float:
    """Returns the replica seconds of a request: its prompt alone, and its output tokens as shares of full steps."""
    each = (steps.decodes(64, 64 * seq.length) - steps.decodes(1, 1)) / 64
    return steps.isolated_seconds(seq.pending) + remaining_output(seq) * max(0.0, each)


def gain_of_prompts(tpots: Sequence[float], fleet: Sequence[View]) -> float:
    """Returns how many times as much time prompts get if each replica serves one TPOT with steps of that length,
    compared with steps of the tightest TPOT everywhere. Each step has a fixed cost, so longer steps leave more time for
    prompts."""
    fixed = min([view.latency.step_time(Shape.decodes(1, 1)) for view in fleet])
    shares = sorted([1.0 - fixed / tpot for tpot in tpots if tpot > fixed])  # of the time, without the fixed costs
    return sum(shares) / len(shares) / shares[int(len(shares) * MIN_TIGHTEST_SHARE)] if shares else 1.0


def divide_by_tpot(recent: Sequence[Recent], step: float, replicas: int) -> list[float]:
    """Assigns a TPOT to each replica so that the busiest one has as little work as possible.

    Neighbouring TPOTs share replicas of the tighter one. Each step loses its fixed cost.

    Args:
        recent: requests to divide by
        step: seconds of the shortest step
        replicas: number of replicas

    Returns:
        TPOTs, ascending, one a replica; all inf without requests
    """
    kinds: dict[int, list[Recent]] = {}
    for one in recent:
        if one.tpot > step:
            kinds.setdefault(floor(log(min(one.tpot, 1e6), SAME_TPOT_RATIO)), []).append(one)
    groups = [kinds[kind] for kind in sorted(kinds)] or [[Recent(inf, 1.0)]]
    tpots, works = [min(group)[0] for group in groups], [sum(one.work for one in group) for group in groups]

    def within(seconds: float) -> list[float]:
        """Returns the fewest replicas' TPOTs such that none has more work than `seconds`."""
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
