"""SA's priority mapping by exhaustive search (§4.3), the yardstick of its annealing."""

from __future__ import annotations

import numpy as np

from rubato.policy_kit.annealing import Floats, Ints, Predicted, Solution
from rubato.policy_kit.compiled import compiled

EXHAUSTIBLE = 10  # jobs at most: 102 million orders and splits


@compiled()
def _searched(seconds: Floats, slack: Floats, waited: float, best: Ints) -> tuple[int, float, int]:
    """Every way of sending the jobs in batches, each a set of bits, one batch deeper at a time. Leaves the best one's
    batches in `best`."""
    n, most = seconds.shape
    left, batch = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    met, total, wait = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1), np.zeros(n + 1)
    left[0], batch[0], total[0] = (1 << n) - 1, 1 << n, waited
    best_met, best_total, evaluations, depth = -1, 1.0, 0, 0
    while depth >= 0:
        batch[depth] = (batch[depth] - 1) & left[depth] if batch[depth] <= left[depth] else left[depth]
        chosen = batch[depth]
        if chosen == 0:
            depth -= 1
            continue
        size = 0
        for j in range(n):
            size += (chosen >> j) & 1
        if size > most:
            continue
        here_met, here_total, longest = met[depth], total[depth], 0.0
        for j in range(n):
            if (chosen >> j) & 1:
                here_met += wait[depth] <= slack[j, size - 1]
                here_total += wait[depth] + seconds[j, size - 1]
                longest = max(longest, seconds[j, size - 1])
        depth += 1
        left[depth], met[depth], total[depth] = left[depth - 1] & ~chosen, here_met, here_total
        wait[depth] = wait[depth - 1] + longest
        batch[depth] = 1 << n
        if left[depth] == 0:
            evaluations += 1
            g, best_g = here_met / here_total, best_met / best_total
            if g > best_g or (g == best_g and here_total < best_total):
                best_met, best_total = here_met, here_total
                best[:] = 0
                best[:depth] = batch[:depth]
            depth -= 1
    return best_met, best_total, evaluations


def exhaustive(jobs: Predicted) -> Solution:
    """The best of all orders and splits; of those that differ only within batches, which are worth the same, one is
    evaluated. Raises ValueError for more than `EXHAUSTIBLE` jobs."""
    n = len(jobs.seconds)
    if n > EXHAUSTIBLE:
        raise ValueError(f"{n} jobs: an exhaustive search takes {EXHAUSTIBLE} at most, use `anneal`")
    best = np.zeros(n, dtype=np.int64)
    met, total, evaluations = _searched(jobs.seconds, jobs.slack, jobs.waited, best)
    batches = tuple(tuple(j for j in range(n) if bits >> j & 1) for bits in best.tolist() if bits)
    return Solution(batches, met, total, evaluations)
