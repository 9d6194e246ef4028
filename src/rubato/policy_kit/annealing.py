"""Searches orders and batch sizes of waiting requests by simulated annealing, as SA (Algorithm 1), for its router."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import exp, inf, log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rubato.policy_kit.compiled import compiled, warn_if_plain

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the latency model says of requests (equations 14 to 19), in seconds.

    Args:
        seconds: seconds[j, b-1] is the execution time of request j in a batch of b.
        slack: slack[j, b-1] is how long it may wait for the batches before its own and still be in SLO.
        waited: what all together have waited so far.
    """

    seconds: Floats
    slack: Floats
    waited: float


@dataclass(frozen=True, slots=True)
class Annealing:
    """How long the search is and what it accepts (§5.1's values).

    A solution that is worse by D is accepted with probability exp(-D / temperature), D = 1000 × the loss of G, as a
    share of the best G seen: at 500 a loss of 35 % is accepted half the time, at 20 one of 5 % in 8 of 100. Where no
    solution seen has a request in SLO, D is 1000 × the relative rise of the sum of latencies.
    """

    temperature: float = 500.0
    threshold: float = 20.0
    iterations: int = 100  # a level of temperature
    decay: float = 0.95

    def __post_init__(self) -> None:
        is_finite = 0.0 < self.threshold <= self.temperature < inf
        if not (is_finite and 0.0 < self.decay < 1.0 and self.iterations >= 1):
            values = f"temperature {self.temperature}, threshold {self.threshold}, decay {self.decay}"
            raise ValueError(
                f"{values}, iterations {self.iterations}: give finite numbers above 0, a temperature no "
                "lower than the threshold, a decay below 1, 1 iteration"
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a search.

    Args:
        batches: indices of requests, in the order in which they are sent.
        met: requests predicted to be in SLO.
        latency: the sum of all end-to-end latencies, in seconds.
        evaluations: solutions whose G was computed.
        levels: a row for each temperature of the search: the temperature, and how many solutions no better than the
            current one were tried there, and accepted.
    """

    batches: tuple[tuple[int, ...], ...]
    met: int
    latency: float
    evaluations: int
    levels: Floats = field(default_factory=lambda: np.empty((0, 3)))

    @property
    def g(self) -> float:
        """Returns the requests in SLO per second of latency (equation 2)."""
        return self.met / self.latency


@compiled()
def evaluate(order: Ints, sizes: Ints, seconds: Floats, slack: Floats, waited: float) -> tuple[int, float]:
    """Returns the requests in SLO and the sum of latencies, when each batch waits for the longest of each before it
    (equation 11).

    One loop: two, one in the other, take three times as long.

    Args:
        order: indices of requests.
        sizes: of the batches, with zeros behind them.
        seconds: as in `Predicted`.
        slack: as in `Predicted`.
        waited: as in `Predicted`.
    """
    wait, total, met, k, longest = 0.0, waited, 0, 0, 0.0
    jobs_left, column = sizes[0], sizes[0] - 1  # of the batch
    for job in order:
        took = seconds[job, column]
        met += wait <= slack[job, column]
        total += wait + took
        longest = max(took, longest)
        jobs_left -= 1
        if jobs_left == 0:
            wait += longest
            longest = 0.0
            k += 1
            if k < len(sizes):
                jobs_left, column = sizes[k], sizes[k] - 1
    return met, total


@compiled()
def move(order: Ints, sizes: Ints, most: int, rng: np.random.Generator) -> None:
    """Changes a solution in one of the paper's three ways: a request goes into the batch before its own, or into the
    one after it (the last batch's into a new one), where there is room; or two of different batches change places.

    What is drawn and cannot be done is drawn again.
    """
    n = len(order)
    while True:
        kind, i = int(3 * rng.random()), int(n * rng.random())  # 0: to the batch before, 1: to the one after, 2: change
        k, begin = 0, 0  # the batch of request i
        while begin + sizes[k] <= i:
            begin += sizes[k]
            k += 1
        end = begin + sizes[k] - 1
        job = order[i]
        if kind == 2:
            j = int(n * rng.random())
            if begin <= j <= end:
                continue
            order[i], order[j] = order[j], job
            return
        if kind == 0:
            if k == 0 or sizes[k - 1] == most:
                continue
            for p in range(i, begin, -1):
                order[p] = order[p - 1]
            order[begin] = job
            sizes[k - 1] += 1
        else:
            last = k + 1 == n or sizes[k + 1] == 0
            if (last and sizes[k] == 1) or (not last and sizes[k + 1] == most):
                continue
            for p in range(i, end):
                order[p] = order[p + 1]
            order[end] = job
            sizes[k + 1] += 1
        sizes[k] -= 1
        if sizes[k] == 0:
            sizes[k:-1] = sizes[k + 1 :].copy()
            sizes[-1] = 0
        return


@compiled()
def is_accepted(
    now_g: float, now_total: float, g: float, total: float, best_g: float, level: Floats, random: float
) -> bool:
    """Returns whether the search accepts a solution that is no better. `level` holds the temperature and the solutions
    tried and accepted; `random`, in [0, 1), decides."""
    difference = (now_g - g) / best_g if best_g > 0.0 else (total - now_total) / total
    take = random < exp(1000.0 * difference / level[0])
    level[1] += 1
    level[2] += take
    return take


@compiled()
def anneal_batches(
    order: Ints, sizes: Ints, met: int, total: float, seconds: Floats, slack: Floats, waited: float,
    iterations: int, rng: np.random.Generator, levels: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Searches from a solution with `met` requests in SLO and the sum of latencies `total`.

    Leaves the best in `order` and `sizes`, and returns its two numbers. `levels` has a row for each temperature
    (`Solution.levels`).
    """
    best_order, best_sizes, best_met, best_total = order.copy(), sizes.copy(), met, total
    tried_order, tried_sizes = order.copy(), sizes.copy()
    g = best_g = met / total
    for level in levels:
        for _ in range(iterations):
            tried_order[:], tried_sizes[:] = order, sizes
            move(tried_order, tried_sizes, seconds.shape[1], rng)
            now_met, now_total = evaluate(tried_order, tried_sizes, seconds, slack, waited)
            now_g = now_met / now_total
            is_better = now_g > g or (now_g == g and now_total < total)
            if is_better or is_accepted(now_g, now_total, g, total, best_g, level, rng.random()):
                order[:], sizes[:] = tried_order, tried_sizes
                met, total, g = now_met, now_total, now_g
                if g > best_g or (g == best_g and total < best_total):
                    best_order[:], best_sizes[:] = order, sizes
                    best_met, best_total, best_g = met, total, g
    order[:], sizes[:] = best_order, best_sizes
    return best_met, best_total


@compiled()
def anneal_one_by_one(
    order: Ints, met: int, total: float, seconds: Floats, slack: Floats,
    iterations: int, rng: np.random.Generator, levels: Floats,
) -> None:  # fmt: skip
    """Searches as `anneal_batches`, for batches of 1, in a third of its time; leaves the best in `order`.

    Of the three moves only the exchange can be done, which leaves those before the two and behind them as they are.
    """
    n = len(order)
    took, may_wait, wait = seconds[order, 0], slack[order, 0], np.zeros(n)
    for p in range(n - 1):
        wait[p + 1] = wait[p] + took[p]
    best, best_total = order.copy(), total
    g = best_g = met / total
    for level in levels:
        for _ in range(iterations):
            i, j = int(n * rng.random()), int((n - 1) * rng.random())
            i, j = min(i, j), max(i, j + (j >= i))
            later = took[j] - took[i]  # by how much those between them begin later
            now_met = met - (wait[i] <= may_wait[i]) - (wait[j] <= may_wait[j])
            now_met += (wait[i] <= may_wait[j]) + (wait[j] + later <= may_wait[i])
            for p in range(i + 1, j):
                now_met += (wait[p] + later <= may_wait[p]) - (wait[p] <= may_wait[p])
            now_total = total + later * (j - i)
            now_g = now_met / now_total
            is_better = now_g > g or (now_g == g and now_total < total)
            if is_better or is_accepted(now_g, now_total, g, total, best_g, level, rng.random()):
                for each in (took, may_wait):
                    each[i], each[j] = each[j], each[i]
                order[i], order[j] = order[j], order[i]
                for p in range(i, j):
                    wait[p + 1] = wait[p] + took[p]
                met, total, g = now_met, now_total, now_g
                if g > best_g or (g == best_g and total < best_total):
                    best[:] = order
                    best_total, best_g = total, g
    order[:] = best


def anneal(predicted: Predicted, how: Annealing, rng: np.random.Generator) -> Solution:
    """Returns the best solution that the search has seen.

    It begins with the better of order of arrival and order of execution time, both in full batches. Where the second
    meets every SLO Algorithm 1 ends there; that is the best only in batches of 1, so with larger ones the search goes
    on.
    """
    seconds, slack, waited = predicted.seconds, predicted.slack, predicted.waited
    n, most = seconds.shape
    sizes = np.zeros(n, dtype=np.int64)
    full = -(-n // most)
    sizes[:full] = most
    sizes[full - 1] = n - (full - 1) * most
    arrival = np.arange(n, dtype=np.int64)
    shortest = np.argsort(seconds[:, most - 1], kind="stable").astype(np.int64)
    met, total = evaluate(shortest, sizes, seconds, slack, waited)
    own_met, own_total = evaluate(arrival, sizes, seconds, slack, waited)
    if n == 1 or (most == 1 and met == n):
        return Solution(_batches(shortest, sizes), met, total, 2)
    begin = shortest
    if own_met / own_total > met / total:
        begin, met, total = arrival, own_met, own_total
    levels = _levels(how).copy()
    if most == 1:
        anneal_one_by_one(begin, met, total, seconds, slack, how.iterations, rng, levels)
        met, total = evaluate(begin, sizes, seconds, slack, waited)
    else:
        met, total = anneal_batches(begin, sizes, met, total, seconds, slack, waited, how.iterations, rng, levels)
    return Solution(_batches(begin, sizes), met, total, how.iterations * len(levels) + 2, levels)


@lru_cache
def _levels(how: Annealing) -> Floats:
    """Returns a row for each temperature, (temperature, 0, 0)."""
    most = int(max(0.0, log(how.threshold / how.temperature) / log(how.decay))) + 2
    temperatures = np.cumprod([how.temperature, *[how.decay] * most])
    return np.outer(temperatures[temperatures >= how.threshold], [1.0, 0.0, 0.0])


@lru_cache(1)
def compile_search() -> None:
    """Compiles the search, once on a new machine, or loads it: seconds that no request is to wait for."""
    warn_if_plain("sa", "up to a second for each search")
    for most in (1, 2):
        predicted = Predicted(np.ones((2, most)), np.zeros((2, most)), 0.0)
        anneal(predicted, Annealing(iterations=1), np.random.default_rng(0))


def _batches(order: Ints, sizes: Ints) -> tuple[tuple[int, ...], ...]:
    """Splits an order of requests into batches of these sizes."""
    jobs = iter(order.tolist())
    return tuple(tuple(islice(jobs, size)) for size in sizes.tolist() if size)
