"""Predicts output lengths: not at all, by a mean, a quantile, a draw, or an oracle with noise.

All are `interfaces.LengthPredictor`: `remaining` returns how many more output tokens to expect of a request, at least
1, or None while unknown; `output` counts those of all stages so far. `learn` is called with each completed request.

Predictors that learn also take `classes`, which maps a class of requests (`class_of`) to the distribution of its output
lengths (SA, §4.2): {mean, std} or a range [least, most], in tokens. It replaces what finished requests of that class
teach.
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
from rubato.core.registry import Registry
from rubato.core.request import Request

MAX_LENGTHS = 1024  # of finished requests that are remembered for each class
MAX_CLASSES = 256  # that are remembered: clients may name any number of tiers
STANDARD_NORMAL = NormalDist()
BOUND_QUANTILE = 0.95  # of `Quantile`, as JITServe's forests
MAX_DEVIATIONS = 8.0  # of a normal distribution, beyond which its tail counts as empty
NO_CLASSES: Mapping[str, object] = MappingProxyType({})
CLASS_FORMS = "{mean: TOKENS, std: TOKENS}, or a range [LEAST, MOST]"


class LengthDistribution(Protocol):
    """A distribution of output lengths, in tokens, from a user's configuration."""

    @property
    def mean(self) -> float: ...

    def mean_beyond(self, output: int) -> float | None:
        """Returns the mean of lengths above `output`; None when there are none."""
        ...

    def at(self, share: float) -> float:
        """Returns the length that this share (0 to 1) of outputs is below."""
        ...

    def share_below(self, length: float) -> float:
        """Returns the share (0 to 1) of outputs below this length."""
        ...


@dataclass(frozen=True)
class NormalLengths:
    mean: float
    std: float

    def mean_beyond(self, output: int) -> float | None:
        beyond = (output - self.mean) / self.std if self.std else 0.0
        if not self.std or beyond > MAX_DEVIATIONS:
            return self.mean if self.mean > output else None
        return self.mean + self.std * STANDARD_NORMAL.pdf(beyond) / STANDARD_NORMAL.cdf(-beyond)

    def at(self, share: float) -> float:
        return self.mean + self.std * STANDARD_NORMAL.inv_cdf(share)

    def share_below(self, length: float) -> float:
        return STANDARD_NORMAL.cdf((length - self.mean) / self.std) if self.std else float(length > self.mean)


@dataclass(frozen=True)
class LengthRange:
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


def parse_classes(classes: Mapping[str, object]) -> dict[str, LengthDistribution]:
    """Parses the setting `classes` into class -> distribution.

    Raises:
        ValueError: for anything but {mean, std} or [least, most]; it names the class.
    """
    if not isinstance(classes, Mapping):
        raise ValueError(f"classes is {classes!r:.80}: give a class's name -> {CLASS_FORMS}")
    return {name: _parse_class(name, value) for name, value in classes.items()}


def _parse_class(name: object, value: object) -> LengthDistribution:
    if not isinstance(name, str):
        raise ValueError(f"classes: {name!r} is no name: give the app of requests, or their tier, as text")
    wrong = f"classes.{name} is {value!r:.80}"
    if isinstance(value, Mapping) and set(value) == {"mean", "std"}:
        mean, std = value["mean"], value["std"]
        if not (_is_number(mean) and _is_number(std) and mean >= 1.0 and std >= 0.0):
            raise ValueError(f"{wrong}: give a mean of 1 token or more and a std of 0 or more")
        return NormalLengths(float(mean), float(std))
    if isinstance(value, list | tuple) and len(value) == 2:
        least, most = value
        if not (_is_number(least) and _is_number(most) and 1.0 <= least <= most):
            raise ValueError(f"{wrong}: give a range of tokens as [least, most], 1 or more, ascending")
        return LengthRange(float(least), float(most))
    raise ValueError(f"{wrong}: give {CLASS_FORMS}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def class_of(request: Request) -> str:
    """Returns the class of a request's output lengths: its app, or its tier where it names none."""
    return request.app or request.tier


def check_least(least: int) -> int:
    """Returns the setting `least`. Raises ValueError unless it is 1 or more."""
    if type(least) is not int or least < 1:
        raise ValueError(f"least is {least!r}: give a whole number of finished requests, 1 or more")
    return least


class RunningMean:
    """Predicts the mean output length of finished requests of the same class (`class_of`); of all classes until `least`
    of its own have finished.

    Args:
        least: requests of a class that must have finished before its own lengths count.
        classes: lengths that are known, by class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NO_CLASSES) -> None:
        self._least = check_least(least)
        self._configured = parse_classes(classes)
        self._sums: OrderedDict[str, tuple[int, int]] = OrderedDict()  # the class that finished longest ago first

    def remaining(self, request: Request, output: int) -> float | None:
        if (own := self._configured.get(class_of(request))) is not None:
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
        if len(self._sums) > MAX_CLASSES:
            self._sums.popitem(last=False)


class _Lengths:
    """The output lengths of the last `MAX_LENGTHS` finished requests of one class."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = self._squares = 0
        self._tails: list[int] = []  # sums of `_sorted` from each index to its end; empty = outdated

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, output: int) -> None:
        if len(self._arrived) == MAX_LENGTHS:
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
        """Returns the mean of lengths above `output`; None when there are none."""
        at = bisect_right(self._sorted, output)
        if at == len(self._sorted):
            return None
        if not self._tails:
            self._tails = list(accumulate(reversed(self._sorted)))[::-1]
        return self._tails[at] / (len(self._sorted) - at)

    def quantile_beyond(self, output: int, share: float) -> int | None:
        """Returns the length that this share of lengths above `output` does not exceed; None when there are none."""
        at = bisect_right(self._sorted, output)
        longer = len(self._sorted) - at
        return self._sorted[at + ceil(share * longer) - 1] if longer else None

    def normal(self) -> tuple[float, float]:
        """Returns mean and standard deviation of all lengths (at least one)."""
        count = len(self._sorted)
        return self._sum / count, sqrt(self._squares * count - self._sum**2) / count  # integers: nothing cancels


class _ObservedLengths:
    """Output lengths of finished requests by class (`class_of`); a class with fewer than `least` uses those of all.

    Raises:
        ValueError: `least` is below 1.
    """

    def __init__(self, least: int) -> None:
        self._least = check_least(least)
        self._classes: OrderedDict[str, _Lengths] = OrderedDict()  # whose last request finished longest ago first
        self.all = _Lengths()

    def add(self, request: Request, output: int) -> None:
        name = class_of(request)
        lengths = self._classes.setdefault(name, _Lengths())
        self._classes.move_to_end(name)
        if len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)
        lengths.add(output)
        self.all.add(output)

    def lengths_for(self, request: Request) -> _Lengths:
        """Returns the lengths to predict this request by."""
        own = self._classes.get(class_of(request))
        return self.all if own is None or len(own) < self._least else own


class ConditionalMean:
    """Predicts the mean length of finished requests of the same class (`_ObservedLengths`) that were longer than the
    output so far.

    If no request of the class was longer, all classes count; if none was longer at all, it predicts 1 token. For
    PolyServe, whose admission also counts on residents past the mean.

    Args:
        least: requests of a class that must have finished before its own lengths count.
        classes: lengths that are known, by class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NO_CLASSES) -> None:
        self._observed = _ObservedLengths(least)
        self._configured = parse_classes(classes)

    def remaining(self, request: Request, output: int) -> float | None:
        if (own := self._configured.get(class_of(request))) is not None:
            return max(1.0, min(own.mean_beyond(output) or 0.0, request.sampling.max_tokens) - output)
        if not len(self._observed.all):
            return None
        expected = (
            self._observed.lengths_for(request).mean_beyond(output) or self._observed.all.mean_beyond(output) or 0.0
        )
        return max(1.0, min(expected, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._observed.add(request, output)


class Quantile:
    """Predicts the 95 % quantile of the lengths above the output so far, over finished requests of the same class
    (`_ObservedLengths`).

    If no request of the class was longer, all classes count; if none was longer at all, it predicts 1 token. For
    JITServe: an upper bound that tightens as output comes out.

    Args:
        least: requests of a class that must have finished before its own lengths count.
        classes: lengths that are known, by class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, least: int = 5, classes: Mapping[str, object] = NO_CLASSES) -> None:
        self._observed = _ObservedLengths(least)
        self._configured = parse_classes(classes)

    def remaining(self, request: Request, output: int) -> float | None:
        bound: float | None
        if (own := self._configured.get(class_of(request))) is not None:
            share = BOUND_QUANTILE + (1.0 - BOUND_QUANTILE) * own.share_below(output)
            bound = own.at(share) if share < 1.0 else None
        elif not len(self._observed.all):
            return None
        else:
            bound = self._observed.lengths_for(request).quantile_beyond(output, BOUND_QUANTILE)
            bound = bound or self._observed.all.quantile_beyond(output, BOUND_QUANTILE)
        return max(1.0, min(bound or 0.0, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._observed.add(request, output)


class Gaussian:
    """Draws a length for each request from a normal distribution, as SA predicts (§3), between 1 and its max_tokens.

    Its mean and variance are those of finished requests of the same class (`_ObservedLengths`); a class's configured
    distribution replaces it. A request's draw depends on the key of all draws and its id only, so that neither the
    order nor the number of calls matters and no state of a request is kept; it follows the fit as that changes.

    Args:
        rng: makes the key of all draws, once.
        least: requests of a class that must have finished before its own lengths count.
        classes: lengths that are known, by class: {mean, std} or [least, most], in tokens.
    """

    def __init__(self, rng: np.random.Generator, least: int = 5, classes: Mapping[str, object] = NO_CLASSES) -> None:
        self._observed = _ObservedLengths(least)
        self._configured = parse_classes(classes)
        self._key = rng.bytes(16)

    def remaining(self, request: Request, output: int) -> float | None:
        distribution: LengthDistribution | None = self._configured.get(class_of(request))
        if distribution is None:
            lengths = self._observed.lengths_for(request)
            if not len(lengths):
                return None
            distribution = NormalLengths(*lengths.normal())
        name = request.id.encode("utf-8", "surrogatepass")
        bits = int.from_bytes(blake2b(name, digest_size=8, key=self._key).digest()) >> 12  # 52, a float's precision
        length = distribution.at((bits + 0.5) / 2.0**52)
        return max(1.0, min(length, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._observed.add(request, output)


def seeded_gaussian(least: int = 5, seed: int = 0, classes: Mapping[str, object] = NO_CLASSES) -> Gaussian:
    """Makes a `Gaussian`, for configurations.

    Args:
        seed: of the draws.
        least: requests of a class that must have finished before its own lengths count.
        classes: lengths that are known, by class: {mean, std} or [least, most], in tokens.

    Raises:
        ValueError: for a bad seed.
    """
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed is {seed!r}: give a whole number, 0 or more")
    return Gaussian(np.random.default_rng(seed), least, classes)


PREDICTORS: Mapping[str, Callable[..., LengthPredictor]] = {
    "running_mean": RunningMean,
    "conditional_mean": ConditionalMean,
    "quantile": Quantile,
    "gaussian": seeded_gaussian,
}  # by their names in configurations; they learn, and do not know the truth
DEFAULT_LENGTHS = "running_mean"  # on servers that accept an e2e; simulations have none


class Oracle:
    """Predicts the true length times a factor uniform in [1 - noise, 1 + noise], drawn once per request from its own
    stream.

    Args:
        truth: request id -> output tokens.
        noise: largest relative error, in [0, 1).
        seed: of the draws.

    Raises:
        KeyError: for a request that is not in `truth`.
        ValueError: for a bad noise.
    """

    def __init__(self, truth: Mapping[str, int], noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise < 1.0:
            raise ValueError(f"oracle noise is {noise}: give a fraction in [0, 1)")
        self._truth = truth
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._true_lengths: dict[str, float] = {}

    def remaining(self, request: Request, output: int) -> float | None:
        if request.id not in self._true_lengths:
            factor = 1.0 + self._noise * float(self._rng.uniform(-1.0, 1.0)) if self._noise else 1.0
            self._true_lengths[request.id] = max(1.0, self._truth[request.id] * factor)
        return max(1.0, self._true_lengths[request.id] - output)

    def learn(self, request: Request, output: int) -> None:
        self._true_lengths.pop(request.id, None)


LENGTHS = Registry("length predictor", "Lengths", {"oracle": Oracle, **PREDICTORS}, ("remaining", "learn"))
