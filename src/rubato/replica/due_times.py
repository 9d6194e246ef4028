"""Keeps when the next token of each running sequence is due, as columns, computed for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.replica.sequence import Seq, StepEnds


class DueTimes:
    """Due times of running sequences, in order of start.

    The next token of a sequence is number n = `output` + `moves` · steps. It is due at `first` + `tpot` · n, never
    after `end`, and within `pause` of the token before it. That one came with the last step if the sequence decodes
    (`moves` is 1, else 0) and a step has ended since `since`, else at `last`.
    """

    def __init__(self) -> None:
        self._seqs: list[Seq] = []
        self._columns: NDArray[np.float64] = np.zeros((8, 64))
        self._has_pauses = False  # some sequence had a `pause` so far

    def add(self, seq: Seq) -> None:
        """Adds a sequence that started."""
        if len(self._seqs) == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._seqs.append(seq)
        self._write(len(self._seqs) - 1, seq)

    def drop(self, seq: Seq) -> None:
        """Removes a sequence that no longer runs."""
        i, n = self._seqs.index(seq), len(self._seqs)
        del self._seqs[i]
        self._columns[:, i : n - 1] = self._columns[:, i + 1 : n]

    def renew(self, seq: Seq) -> None:
        """Updates a sequence that began or ceased to decode, got its first token or several at once, or is in another
        stage."""
        self._write(self._seqs.index(seq), seq)

    def at(self, steps: StepEnds) -> NDArray[np.float64]:
        """Returns `SeqView.due` of each sequence, after these steps."""
        output, moves, first, tpot, end, pause, last, since = self._columns[:, : len(self._seqs)]
        due: NDArray[np.float64] = moves * steps.tick
        due += output
        due *= tpot
        due += first
        np.minimum(due, end, out=due)
        if self._has_pauses:
            moved = (moves > 0.0) & (since < steps.tick)
            np.minimum(due, np.where(moved, steps.last if steps.count else inf, last) + pause, out=due)
        return due

    def first_decode(self, steps: StepEnds, now: float, ended: Sequence[Seq]) -> float:
        """Returns the earliest due time from `now` on among decodes that are not `ended`; inf for none."""
        due = self.at(steps)
        for seq in ended:
            if seq.decoding:
                due[self._seqs.index(seq)] = inf
        counts = (self._columns[1, : len(due)] > 0.0) & (due >= now)
        return float(np.minimum.reduce(due, initial=inf, where=counts))

    def _write(self, i: int, seq: Seq) -> None:
        """Fills the columns of the i-th sequence."""
        due = seq.deadlines
        first, tpot = due.first, due.tpot
        if tpot == inf:  # no SLO after the first token
            first, tpot = (inf if seq.output else first), 0.0
        last, since = seq.last_token_at, seq.steps.tick
        self._has_pauses |= due.max_pause < inf
        self._columns[:, i] = seq._output, seq.decoding, first, tpot, due.end, due.max_pause, last, since
