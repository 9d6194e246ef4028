"""What a scheduler may know of output lengths: nothing, a mean, a quantile, a draw, or an oracle blurred by noise.

All are `interfaces.LengthPredictor`: `remaining` is asked of a request with so many output tokens, in all stages, and
says how many more are expected, at least 1, or None before anything is known; `learn` is told of each that completed.
Those that learn take `classes`, too: a class of requests, their app (their tier, where they name none) -> the
distribution of its output lengths that a user states (SA, §4.2), {mean, std} or a range [least, most], in tokens. It
stands in the place of what finished requests of that class say.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import ceil, isfinite, sqrt
from statistics import NormalDist
from types import MappingProxyType
from typing import Protocol

import numpy as np

from rubato.core.interfaces import LengthPredictor
from rubato.core.request import Request

LAST = 1024  # finished requests of a class that are remembered
CLASSES = 256  # classes that are: tiers may be any text of a client's
STANDARD = NormalDist()
QUANTILE = 0.95  # of `Quantile`, that of JITServe's forests
FAR = 8.0  # deviations beyond which there is no one
NONE: Mapping[str, object] = MappingProxyType({})
FORMS = "{mean: TOKENS, std: TOKENS}, or a range [LEAST, MOST]"


class Stated(Protocol):
    """A distribution of output lengths, in tokens, that a user states."""

    @property
    def mean(self) -> float: ...

    def mean_beyond(self, output: int) -> float | None:
        """Of those longer than `output`; None when there is none."""
        ...

    def at(self, share: float) -> float:
        """The length that this share (0 to 1) is below."""
        ...

    def share_below(self, length: float) -> float:
        """The share (0 to 1) that is shorter."""
        ...


@dataclass(frozen=True)
class StatedNormal:
    mean: float
    std: float

    def mean_beyond(self, output: int) -> float | None:
        beyond = (output - self.mean) / self.std if self.std else 0.0
        if not self.std or beyond > FAR:
            return self.mean if self.mean > output else None
        return self.mean + self.std * STANDARD.pdf(beyond) / STANDARD.cdf(-beyond)

    def at(self, share: float) -> float:
        return self.mean + self.std * STANDARD.inv_cdf(share)

    def share_below(self, length: float) -> float:
        return STANDARD.cdf((length - self.mean) / self.std) if self.std else float(length > self.mean)


@dataclass(frozen=True)
class StatedRange:
    least: float
    most: float

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2.0

    def mean_beyond(self, output: int) -> float | None:
        return None if output >= self.most else (max(float(output), self.least) + self.most) / 2.0

    def at(self, share: float) -> float:
        return self.least + share * (self.most - self.least)

    def share_below(self, length: float) -> float:
        if length <= self.least:
            return 0.0
        return 1.0 if length >= self.most else (length - self.least) / (self.most - self.least)


def stated(classes: Mapping[str, object]) -> dict[str, Stated]:
    """Class -> distribution, from what a configuration says. Raises ValueError, naming the class, for anything that is
    neither {mean, std} nor [least, most]."""
    if not isinstance(classes, Mapping):
        raise ValueError(f"classes is {classes!r:.80}: give a class's name -> {FORMS}")
    return {name: _stated(name, given) for name, given in classes.items()}


def _stated(name: object, given: object) -> Stated:
    if not isinstance(name, str):
        raise ValueError(f"classes: {name!r} is no name: give the app of requests, or their tier, as text")
    wrong = f"classes.{name} is {given!r:.80}"
    if isinstance(given, Mapping) and set(given) == {"mean", "std"}:
        mean, std = given["mean"], given["std"]
        if not (_is_number(mean) and _is_number(std) and mean >= 1.0 and std >= 0.0):
            raise ValueError(f"{wrong}: give a mean of 1 token or more and a std of 0 or more")
        return StatedNormal(float(mean), float(std))
    if isinstance(given, list | tuple) and len(given) == 2:
        least, most = given
        if not (_is_number(least) and _is_number(most) and 1.0 <= least <= most):
            raise ValueError(f"{wrong}: give a range of tokens as [least, most], 1 or more, ascending")
        return StatedRange(float(least), float(most))
    raise ValueError(f"{wrong}: give {FORMS}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def class_of(request: Request) -> str:
    """By which requests' output lengths are told apart: their app, or their tier where they name none."""
    return request.app or request.tier


def checked_least(least: int) -> int:
    """Raises ValueError unless it is 1 or more."""
    if type(least) is not int or least < 1:
        raise ValueError(f"least is {least!r}: give a whole number of finished requests, 1 or more")
    return least


class RunningMean:
    """The mean output length of finished requests of the same class, a request's app, or its tier where it names none
    (of all classes until `least` of its own have finished).

    least: requests of a class that must have finished before its own lengths count. classes: lengths that are known, by
    class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NONE) -> None:
        self._least = checked_least(least)
        self._stated = stated(classes)
        self._sums: OrderedDict[str, tuple[int, int]] = OrderedDict()  # the class that finished longest ago first

    def remaining(self, request: Request, output: int) -> float | None:
        if (own := self._stated.get(class_of(request))) is not None:
            return max(1.0, min(own.mean, request.sampling.max_tokens) - output)
        count, total = self._sums.get(class_of(request), (0, 0))
        if count < self._least:
            count = sum(c for c, _ in self._sums.values())
            total = sum(t for _, t in self._sums.values())
        if count == 0:
            return None
        expected = min(total / count, request.sampling.max_tokens)
        return max(1.0, expected - output)

    def learn(self, request: Request, output: int) -> None:
        name = class_of(request)
        count, total = self._sums.get(name, (0, 0))
        self._sums[name] = (count + 1, total + output)
        self._sums.move_to_end(name)
        if len(self._sums) > CLASSES:
            self._sums.popitem(last=False)


class _Lengths:
    """The output lengths of the last `LAST` finished requests of one class."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = self._squares = 0
        self._tails: list[int] = []  # sums of `_sorted` from each place to its end; empty = to be made anew

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, output: int) -> None:
        if len(self._arrived) == LAST:
            oldest = self._arrived.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._arrived.append(output)
        insort(self._sorted, output)
        self._sum += output
        self._squares += output * output
        self._tails = []

    def mean_beyond(self, output: int) -> float | None:
        """Of those longer than `output`; None when there is none."""
        at = bisect_right(self._sorted, output)
        if at == len(self._sorted):
            return None
        if not self._tails:
            self._tails = list(accumulate(reversed(self._sorted)))[::-1]
        return self._tails[at] / (len(self._sorted) - at)

    def quantile_beyond(self, output: int, share: float) -> int | None:
        """The length that this share of those longer than `output` is at or below; None when there is none."""
        at = bisect_right(self._sorted, output)
        longer = len(self._sorted) - at
        return self._sorted[at + ceil(share * longer) - 1] if longer else None

    def normal(self) -> tuple[float, float]:
        """Mean and standard deviation of all of them (one at least)."""
        count = len(self._sorted)
        return self._sum / count, sqrt(self._squares * count - self._sum**2) / count  # integers: nothing cancels


class _Seen:
    """Lengths of finished requests by class, a request's app, or its tier where it names none; of a class with fewer
    than `least`, those of all. Raises ValueError for a `least` below 1."""

    def __init__(self, least: int) -> None:
        self._least = checked_least(least)
        self._classes: OrderedDict[str, _Lengths] = OrderedDict()  # whose last request finished longest ago first
        self.all = _Lengths()

    def add(self, request: Request, output: int) -> None:
        name = class_of(request)
        lengths = self._classes.setdefault(name, _Lengths())
        self._classes.move_to_end(name)
        if len(self._classes) > CLASSES:
            self._classes.popitem(last=False)
        lengths.add(output)
        self.all.add(output)

    def like(self, request: Request) -> _Lengths:
        own = self._classes.get(class_of(request))
        return self.all if own is None or len(own) < self._least else own


class ConditionalMean:
    """E[length | length > output so far] over finished requests of the same class (`_Seen`), for PolyServe, whose
    admission counts on residents that are past the mean, too. Where none of its class was longer, over all; where
    none at all was, one token is left.

    least: requests of a class that must have finished before its own lengths count. classes: lengths that are known, by
    class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NONE) -> None:
        self._seen = _Seen(least)
        self._stated = stated(classes)

    def remaining(self, request: Request, output: int) -> float | None:
        if (own := self._stated.get(class_of(request))) is not None:
            return max(1.0, min(own.mean_beyond(output) or 0.0, request.sampling.max_tokens) - output)
        if not len(self._seen.all):
            return None
        expected = self._seen.like(request).mean_beyond(output) or self._seen.all.mean_beyond(output) or 0.0
        return max(1.0, min(expected, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._seen.add(request, output)


class Quantile:
    """The length that 95 % of the finished requests of the same class (`_Seen`) that were longer than the output so far
    were at or below, for JITServe: a bound, and a closer one as output comes out. Where none of its class was longer,
    over all; where none at all was, one token is left.

    least: requests of a class that must have finished before its own lengths count. classes: lengths that are known, by
    class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NONE) -> None:
        self._seen = _Seen(least)
        self._stated = stated(classes)

    def remaining(self, request: Request, output: int) -> float | None:
        bound: float | None
        if (own := self._stated.get(class_of(request))) is not None:
            share = QUANTILE + (1.0 - QUANTILE) * own.share_below(output)
            bound = own.at(share) if share < 1.0 else None
        elif not len(self._seen.all):
            return None
        else:
            bound = self._seen.like(request).quantile_beyond(output, QUANTILE)
            bound = bound or self._seen.all.quantile_beyond(output, QUANTILE)
        return max(1.0, min(bound or 0.0, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._seen.add(request, output)


class Gaussian:
    """A draw from the normal distribution with the mean and variance of finished requests of the same class (`_Seen`),
    as SA predicts (§3), or from what is stated of the class, a range, too: one for each request, between 1 and its
    max_tokens.

    rng: draws, once, the key that all draws follow from. A request's draw follows from the key and its id, so that
    neither the order nor the number of calls matters, and nothing is kept of a request that never ends; it moves with
    the fit.
    """

    def __init__(self, rng: np.random.Generator, least: int = 5, classes: Mapping[str, object] = NONE) -> None:
        self._seen = _Seen(least)
        self._stated = stated(classes)
        self._key = rng.bytes(16)

    def remaining(self, request: Request, output: int) -> float | None:
        of = self._stated.get(class_of(request))
        if of is None:
            lengths = self._seen.like(request)
            if not len(lengths):
                return None
            of = StatedNormal(*lengths.normal())
        name = request.id.encode("utf-8", "surrogatepass")
        bits = int.from_bytes(blake2b(name, digest_size=8, key=self._key).digest()) >> 12  # as many as a float holds
        drawn = of.at((bits + 0.5) / 2.0**52)
        return max(1.0, min(drawn, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._seen.add(request, output)


def seeded_gaussian(least: int = 5, seed: int = 0, classes: Mapping[str, object] = NONE) -> Gaussian:
    """A `Gaussian`, for configurations.

    seed: of the draws. least: requests of a class that must have finished before its own lengths count. classes:
    lengths that are known, by class: {mean, std} or [least, most], in tokens. Raises ValueError for a bad seed.
    """
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed is {seed!r}: give a whole number, 0 or more")
    return Gaussian(np.random.default_rng(seed), least, classes)


PREDICTORS: Mapping[str, Callable[..., LengthPredictor]] = {
    "running_mean": RunningMean,
    "conditional_mean": ConditionalMean,
    "quantile": Quantile,
    "gaussian": seeded_gaussian,
}  # by the names that configurations give them; they learn, and know no truth
DEFAULT_LENGTHS = "running_mean"  # of servers where an e2e may be stated; simulations keep none


class Oracle:
    """The true length times a factor uniform in [1 - noise, 1 + noise], drawn once per request from its own stream.

    truth: request id -> output tokens. Raises KeyError for a request it does not hold, ValueError for a bad noise.
    """

    def __init__(self, truth: Mapping[str, int], noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise < 1.0:
            raise ValueError(f"oracle noise is {noise}: give a fraction in [0, 1)")
        self._truth = truth
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._drawn: dict[str, float] = {}

    def remaining(self, request: Request, output: int) -> float | None:
        if request.id not in self._drawn:
            factor = 1.0 + self._noise * float(self._rng.uniform(-1.0, 1.0)) if self._noise else 1.0
            self._drawn[request.id] = max(1.0, self._truth[request.id] * factor)
        return max(1.0, self._drawn[request.id] - output)

    def learn(self, request: Request, output: int) -> None:
        self._drawn.pop(request.id, None)
