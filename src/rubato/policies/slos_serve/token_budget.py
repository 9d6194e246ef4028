"""PB*, autoregressive (SLOs-Serve, Algorithm 2): what a grid of batches brings by each deadline, after every decode.

Batches lie end to end, each as long as the tightest TPOT among those that decode by then. One counts for the first
deadline at or after its end, so a deadline d is met by the first `index(d)` batches and what remains of the time goes
on into the next interval. A request demands its pending tokens by its next due token (one token of a decode: there is
no difference), then one a TPOT.

Served earliest deadline first, one token a batch for each decode and prefill in any chunks, all are in time if and only
if for each k what is due within k batches is no more than these k hold. Only if is plain. The other way: take the first
k that fails and the last batch b < k not full of tokens due by k. All prefill due by k was done with it, and each
decode that still owed a token due by k got one in it; so fewer decodes than a batch holds are left, each has a place in
all of b+1..k, and no more tokens due in there than that, since two of its tokens are never due by the same batch. It
holds again on the grid that starts when the first batch has ended, early or not: no deadline loses a batch by that. The
bound is kept by `dynamic_program.demand_line` with decodes as straight lines, never below their stairs, so that counts
suffice to add them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from rubato.policies.slos_serve import dynamic_program
from rubato.policies.slos_serve.dynamic_program import Floats


class Demand(NamedTuple):
    """What one request demands: `tokens` by `due` (seconds from where the grid begins), from then on an entry of
    `verified` every `tpot` seconds (inf: none), and `memory` KV blocks. value: of attaining it. accepts: probability
    that a token drafted for it is right. left: tokens of output to come. Tokens count as a decode's, drafted or not: a
    prefill's last counts as one, the others as what they cost compared to it (`demand.prefill_token_weight`)."""

    id: str
    due: float
    tokens: float
    tpot: float
    memory: int = 0
    value: float = 1.0
    accepts: float = 0.0
    verified: int = 1
    left: float = 0.0


class Phase(NamedTuple):
    """So many `batches` (inf: for ever) of at most `seconds` and `tokens`."""

    batches: float
    seconds: float
    tokens: float


class Grid:
    """Batches laid end to end: phases, each of shorter batches than the one before, the last without end. Before the
    longest there may be one short batch, for a prompt that is due at its end (`grid_building.short`). rows: the
    phases."""

    __slots__ = ("phases", "rows")

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self.rows = np.array(self.phases, dtype=np.float64)

    @classmethod
    def of(cls, rows: Floats) -> Grid:
        return cls([Phase(*row) for row in rows.tolist()])

    @property
    def leads(self) -> bool:
        """Whether the first batch is such a short one."""
        return len(self.phases) > 1 and self.phases[0].seconds < self.phases[1].seconds

    @property
    def second(self) -> Phase:
        """What the batch after the first is like."""
        return self.phases[0 if self.phases[0].batches > 1 else 1]

    def step(self) -> Grid:
        """What remains after the first batch."""
        first, *rest = self.phases
        if first.batches == inf:
            return self
        return Grid([first._replace(batches=first.batches - 1), *rest] if first.batches > 1 else rest)


COLUMNS = itemgetter(*map(Demand._fields.index, ("due", "tokens", "tpot", "verified", "memory", "value")))


def rows(demands: Sequence[Demand], in_order_given: bool = False) -> Floats:
    """What those with a deadline demand, (due, tokens, tpot, verified, memory, value), in order of deadline if not as
    given: made once, used for many grids."""
    each = [row for row in map(COLUMNS, demands) if row[0] < inf]
    if not in_order_given:
        each.sort()
    flat = np.fromiter(chain.from_iterable(each), np.float64, 6 * len(each))  # `array` of rows takes twice as long
    return flat.reshape(len(each), 6)


def room(grid: Grid, demands: Sequence[Demand]) -> Floats:
    """Tokens that these, served anyway, leave of a grid for others, by each batch by which something of theirs is due;
    negative: they do not fit. Jobs due at 0 are late already: they are due with the first batch."""
    return dynamic_program.demand_line(grid.rows, rows(demands))[3]
