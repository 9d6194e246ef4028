"""When the next token of each running sequence is due, as columns: worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.replica.sequence import Seq, StepEnds


class DueTimes:
    """Rows in order of start. Token `output + moves * tick` of a row's stage is next, due at first + tpot times that,
    never after `end`, and within `pause` of the token before it: that of the last step where it moves and steps have
    ended since `tick`, else the one that came out at `last`."""

    def __init__(self) -> None:
        self._seqs: list[Seq] = []
        self._columns: NDArray[np.float64] = np.zeros((8, 64))

    def add(self, seq: Seq) -> None:
        """It has started."""
        if len(self._seqs) == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._seqs.append(seq)
        self._write(len(self._seqs) - 1, seq)

    def drop(self, seq: Seq) -> None:
        """It runs no longer."""
        i, n = self._seqs.index(seq), len(self._seqs)
        del self._seqs[i]
        self._columns[:, i : n - 1] = self._columns[:, i + 1 : n]

    def renew(self, seq: Seq) -> None:
        """It has begun or ceased to decode, has had a first token or several at once, or is in another stage."""
        self._write(self._seqs.index(seq), seq)

    def at(self, steps: StepEnds) -> NDArray[np.float64]:
        """`SeqView.due` of each, when these steps are done."""
        output, moves, first, tpot, end, pause, last, since = self._columns[:, : len(self._seqs)]
        due: NDArray[np.float64] = moves * steps.tick
        due += output
        due *= tpot
        due += first
        np.minimum(due, end, out=due)
        if pause.min(initial=inf) < inf:
            moved = (moves > 0.0) & (since < steps.tick)
            np.minimum(due, np.where(moved, steps.last if steps.kept else inf, last) + pause, out=due)
        return due

    def first_decode(self, steps: StepEnds, now: float, ended: Sequence[Seq]) -> float:
        """The earliest from `now` on of those that decode and are not among `ended`, when these steps are done; inf for
        none."""
        due = self.at(steps)
        due[(self._columns[1, : len(due)] == 0.0) | (due < now)] = inf
        for seq in ended:
            if seq.decoding:
                due[self._seqs.index(seq)] = inf
        return float(due.min(initial=inf))

    def _write(self, i: int, seq: Seq) -> None:
        due = seq.deadlines
        first, tpot = due.first, due.tpot
        if tpot == inf:  # nothing is promised after the first token
            first, tpot = (inf if seq.output else first), 0.0
        last, since = seq.last_token_at, seq.steps.tick
        self._columns[:, i] = seq._output, seq.decoding, first, tpot, due.end, due.max_pause, last, since
