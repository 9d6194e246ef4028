"""What a scheduler may know of output lengths: nothing, a mean, a distribution, or an oracle blurred by stated noise.

All are `interfaces.LengthPredictor`: `remaining` is asked of a request with so many output tokens, in all stages, and
says how many more are expected, at least 1, or None before anything is known; `learn` is told of each that completed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from math import sqrt
from statistics import NormalDist

import numpy as np

from rubato.core.interfaces import LengthPredictor
from rubato.core.request import Request

LAST = 1024  # finished requests of a class that are remembered
CLASSES = 256  # classes that are: tiers may be any text of a client's
STANDARD = NormalDist()


@dataclass
class RunningMean:
    """The mean output length of finished requests of the same app (all apps until `least` of its own have finished)."""

    least: int = 5
    _sums: dict[str, tuple[int, int]] = field(default_factory=dict)

    def remaining(self, request: Request, output: int) -> float | None:
        count, total = self._sums.get(request.app, (0, 0))
        if count < self.least:
            count = sum(c for c, _ in self._sums.values())
            total = sum(t for _, t in self._sums.values())
        if count == 0:
            return None
        expected = min(total / count, request.sampling.max_tokens)
        return max(1.0, expected - output)

    def learn(self, request: Request, output: int) -> None:
        count, total = self._sums.get(request.app, (0, 0))
        self._sums[request.app] = (count + 1, total + output)


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

    def normal(self) -> tuple[float, float]:
        """Mean and standard deviation of all of them (one at least)."""
        count = len(self._sorted)
        return self._sum / count, sqrt(self._squares * count - self._sum**2) / count  # integers: nothing cancels


class _Seen:
    """Lengths of finished requests by class, a request's app, or its tier where it names none; of a class with fewer
    than `least`, those of all. Raises ValueError for a `least` below 1."""

    def __init__(self, least: int) -> None:
        if type(least) is not int or least < 1:
            raise ValueError(f"least is {least!r}: give a whole number of finished requests, 1 or more")
        self._least = least
        self._classes: OrderedDict[str, _Lengths] = OrderedDict()  # whose last request finished longest ago first
        self.all = _Lengths()

    def add(self, request: Request, output: int) -> None:
        name = request.app or request.tier
        lengths = self._classes.setdefault(name, _Lengths())
        self._classes.move_to_end(name)
        if len(self._classes) > CLASSES:
            self._classes.popitem(last=False)
        lengths.add(output)
        self.all.add(output)

    def like(self, request: Request) -> _Lengths:
        own = self._classes.get(request.app or request.tier)
        return self.all if own is None or len(own) < self._least else own


class ConditionalMean:
    """E[length | length > output so far] over finished requests of the same class (`_Seen`), for PolyServe, whose
    admission counts on residents that are past the mean, too. Where none of its class was longer, over all; where
    none at all was, one token is left."""

    def __init__(self, least: int = 5) -> None:
        self._seen = _Seen(least)

    def remaining(self, request: Request, output: int) -> float | None:
        if not len(self._seen.all):
            return None
        expected = self._seen.like(request).mean_beyond(output) or self._seen.all.mean_beyond(output) or 0.0
        return max(1.0, min(expected, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._seen.add(request, output)


class Gaussian:
    """A draw from the normal distribution with the mean and variance of finished requests of the same class (`_Seen`),
    as SA predicts (§3): one for each request, between 1 and its max_tokens.

    rng: draws, once, the key that all draws follow from. A request's draw follows from the key and its id, so that
    neither the order nor the number of calls matters, and nothing is kept of a request that never ends; it moves with
    the fit.
    """

    def __init__(self, rng: np.random.Generator, least: int = 5) -> None:
        self._seen = _Seen(least)
        self._key = rng.bytes(16)

    def remaining(self, request: Request, output: int) -> float | None:
        lengths = self._seen.like(request)
        if not len(lengths):
            return None
        mean, deviation = lengths.normal()
        name = request.id.encode("utf-8", "surrogatepass")
        bits = int.from_bytes(blake2b(name, digest_size=8, key=self._key).digest()) >> 12  # as many as a float holds
        drawn = mean + deviation * STANDARD.inv_cdf((bits + 0.5) / 2.0**52)
        return max(1.0, min(drawn, request.sampling.max_tokens) - output)

    def learn(self, request: Request, output: int) -> None:
        self._seen.add(request, output)


def seeded_gaussian(least: int = 5, seed: int = 0) -> Gaussian:
    """For configurations."""
    return Gaussian(np.random.default_rng(seed), least)


PREDICTORS: Mapping[str, Callable[..., LengthPredictor]] = {
    "running_mean": RunningMean,
    "conditional_mean": ConditionalMean,
    "gaussian": seeded_gaussian,
}  # by the names that configurations give them; they learn, and know no truth


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
