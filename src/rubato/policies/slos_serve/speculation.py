"""PB*, speculative (SLOs-Serve, Appendix D): how many tokens to verify for a decode of each tier.

A tier's length is the tokens verified in one entry: the pending one and the drafted. With acceptance a, sl of them give
Acc(sl) = (1 - a^sl) / (1 - a) tokens on average (a = 1: sl), so a batch may last TPOT · Acc(sl) without its decodes
falling behind. Longer batches hold more tokens a second; more verified tokens leave fewer of them for prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

LONGEST = 10  # tokens verified in one entry (the paper: lengths are below ten)
CLOSE = 1e-9  # relative: TPOTs times expected tokens that are equal but for rounding


@dataclass(frozen=True, slots=True)
class Tier:
    """`count` requests that decode at `tpot` seconds a token; acceptance: probability that a drafted token is right."""

    tpot: float
    count: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """verified: tokens an entry, by tier (1: plain decoding). seconds: of a batch. prefill: tokens of it that are left
    for prefill, per second in `throughput`."""

    verified: tuple[int, ...]
    seconds: float
    prefill: int

    @property
    def throughput(self) -> float:
        return self.prefill / self.seconds


def expected(acceptance: float, length: int) -> float:
    """Acc(sl): tokens that verifying so many gives on average."""
    if acceptance >= 1.0:
        return float(length)
    return float((1.0 - acceptance**length) / (1.0 - acceptance))


def keeping_up(tpot: float, acceptance: float, seconds: float, longest: int = LONGEST) -> int:
    """The smallest length with which a decode keeps up with batches of so many seconds; `longest` where none does."""
    enough = seconds * (1.0 - CLOSE) / tpot
    return next((n for n in range(1, longest) if expected(acceptance, n) >= enough), longest)


def best_lengths(
    tiers: Sequence[Tier], time2bs: Callable[[float, int], int], longest: int = LONGEST, most: float = inf
) -> Lengths | None:
    """The lengths with the largest prefill throughput; of equal ones those that verify least. None: decodes alone do
    not fit.

    time2bs: tokens of a batch that takes so many seconds, so many draft steps included. most: seconds of a batch. For
    each tier as the one that bounds the batch, at each length, the others take the smallest length that keeps up.
    Raises ValueError without tiers, or with one that is empty or whose acceptance is no probability.
    """
    if not tiers:
        raise ValueError("no tier decodes: a batch is as large as the engine takes, and nothing is to be verified")
    for tier in tiers:
        if tier.count < 1 or not 0.0 <= tier.acceptance <= 1.0 or not tier.tpot > 0.0:
            raise ValueError(f"{tier}: give at least 1 request, an acceptance in [0, 1] and a TPOT above 0")
    best: Lengths | None = None
    for bound in tiers:
        for length in range(1, longest + 1):
            lasts = bound.tpot * expected(bound.acceptance, length)
            found = _at(min(lasts, most), tiers, time2bs, longest)
            if found is not None and (best is None or _rank(found, tiers) > _rank(best, tiers)):
                best = found
    return best


def _at(seconds: float, tiers: Sequence[Tier], time2bs: Callable[[float, int], int], longest: int) -> Lengths | None:
    """The smallest lengths whose decodes keep up with batches of so many seconds."""
    verified = [keeping_up(tier.tpot, tier.acceptance, seconds, longest) for tier in tiers]
    if any(_lasts(tier, n) < seconds * (1.0 - CLOSE) for tier, n in zip(tiers, verified, strict=True)):
        return None
    cost = sum(tier.count * n for tier, n in zip(tiers, verified, strict=True))
    left = time2bs(seconds, max(verified) - 1) - cost
    return Lengths(tuple(verified), seconds, left) if left >= 0 else None


def _lasts(tier: Tier, length: int) -> float:
    return tier.tpot * expected(tier.acceptance, length)


def _rank(lengths: Lengths, tiers: Sequence[Tier]) -> tuple[float, int]:
    return lengths.throughput, -sum(t.count * n for t, n in zip(tiers, lengths.verified, strict=True))
