"""The linear programme of a bound, solved by HiGHS (SciPy): rows are added until none is exceeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rubato.core.extras import extra
from rubato.planning.bound.minorant import Array
from rubato.planning.bound.rows import Row, Windows, period_rows
from rubato.planning.bound.work import Ints, RequestWork

Alike = Literal["anybody", "deciles", "lottery"]
ALIKE: tuple[Alike, ...] = get_args(Alike)
ROUNDS = 60
SETTLED = 2e-4  # in three rounds: what more rows could lower the share by is left
EQUAL = 1e-9  # relative: costs that differ by less are one
SLACK = 0.5  # rows with more of their seconds left over are put aside


@dataclass(frozen=True)
class Share:
    """The largest share of requests that can be attained.

    Args:
        share: of the requests; where a target was given and is out of reach, some value below the target.
        binds: the part that each kind of row has in keeping the share down (dual values), in all 1; empty where all
            attain.
        steps: of the seconds that are short, the part that steps take as such, spread as far as limits permit.
    """

    share: float
    requests: Array
    binds: Mapping[str, float]
    steps: float


def largest_share(work: RequestWork, replicas: int, alike: Alike, target: float | None = None) -> Share:
    """Rows are added until none is exceeded, the share has settled, or it is below `target`."""
    programme = _Programme(work, alike)
    rows = list(period_rows(work, replicas))
    windows = Windows(work, replicas)
    solution = programme.solved(rows)
    history = [solution.share]
    for _ in range(ROUNDS):
        if target is not None and solution.share < target:
            break
        more = windows.find_exceeded(solution.requests)
        if not more:
            break
        near = [row for row in rows if row.kind == "period" or row.excess(solution.requests) > -SLACK * row.seconds]
        rows = [*near, *more]
        solution = programme.solved(rows)
        history.append(solution.share)
        if len(history) > 3 and history[-4] - history[-1] < SETTLED:
            break
    return solution


def grouped(cost: Array, alike: Alike) -> list[Ints]:
    """Indices of the requests of each group. Those of equal cost are in one: in which of two they were would be said by
    nothing but their place in the workload."""
    order = np.argsort(cost, kind="stable")
    if alike != "deciles":
        return list(np.array_split(order, 1 if alike == "anybody" else len(cost)))
    ends = np.cumsum([len(part) for part in np.array_split(order, min(10, len(cost)))])
    ascending = cost[order]
    ends = np.searchsorted(ascending, ascending[ends - 1] * (1.0 + EQUAL), side="right")
    return [part for part in np.split(order, ends) if len(part)]


class _Programme:
    """max φ, x in [0, possible], mean of x over each group >= φ, and rows."""

    def __init__(self, work: RequestWork, alike: Alike) -> None:
        with extra("bound", "a bound"):
            from scipy import sparse
            from scipy.optimize import linprog
        self._solve, self._sparse = linprog, sparse
        n = work.requests
        groups = grouped(work.cost, alike)
        of_group = sparse.csr_array(
            (
                np.concatenate([np.full(len(g), -1.0 / len(g)) for g in groups]),
                (np.repeat(np.arange(len(groups)), [len(g) for g in groups]), np.concatenate(groups)),
            ),
            shape=(len(groups), n),
        )
        self._groups = sparse.hstack([of_group, np.ones((len(groups), 1))], format="csr")  # φ - mean <= 0
        self._bounds = np.column_stack([np.zeros(n + 1), np.append(work.possible.astype(float), 1.0)])
        self._objective = np.append(np.zeros(n), -1.0)

    def solved(self, rows: Sequence[Row]) -> Share:
        parts, right = [self._groups], [np.zeros(self._groups.shape[0])]
        if rows:
            of_rows = np.array([(row.own + row.fixed) / row.seconds for row in rows])
            parts.append(self._sparse.csr_array(np.column_stack([of_rows, np.zeros(len(rows))])))
            right.append(np.ones(len(rows)))
        solution = self._solve(
            self._objective, A_ub=self._sparse.vstack(parts, format="csr"), b_ub=np.concatenate(right),
            bounds=self._bounds, method="highs",
        )  # fmt: skip
        if solution.status != 0:
            raise RuntimeError(f"the linear programme of a bound was not solved: {solution.message}")
        share = np.clip(solution.x[:-1], 0.0, 1.0)
        prices = -solution.ineqlin.marginals[self._groups.shape[0] :]
        binds: dict[str, float] = {}
        steps = seconds = 0.0
        for row, price in zip(rows, prices.tolist(), strict=True):
            if price > 1e-9:
                binds[row.kind] = binds.get(row.kind, 0.0) + price
                steps += price * float(row.fixed @ share) / row.seconds
                seconds += price * float((row.own + row.fixed) @ share) / row.seconds
        whole = sum(binds.values())
        return Share(
            min(1.0, -float(solution.fun)), share, {kind: own / whole for kind, own in binds.items()},
            steps / seconds if seconds else 0.0,
        )  # fmt: skip
