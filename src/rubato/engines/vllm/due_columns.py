"""When the next token of each running request is due, computed for all at once while the same requests run."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.engines.vllm.sequence import VllmSeq


class DueColumns:
    """Computes `VllmSeq.due` of running requests, in their order. The deadlines of each are kept as columns, until one
    changes (`Seq.deadlines`: a TPOT without a TTFT counts from the first token)."""

    def __init__(self, seqs: Sequence[VllmSeq]) -> None:
        self._seqs = seqs
        self._deadlines: list[object] = []
        self._columns: NDArray[np.float64] = np.empty((4, 0))
        self._paused: list[int] = []  # places of those with a longest pause, which counts from the last token
        self._dues: NDArray[np.float64] | None = None  # of this view

    def begin_view(self) -> None:
        """Forgets the due times of the last view."""
        self._dues = None

    def compute(self) -> NDArray[np.float64]:
        """Returns the due times, once for each view."""
        if self._dues is not None:
            return self._dues
        seqs = self._seqs
        # A sequence whose deadlines are to be computed again has None there.
        if not self._deadlines or [seq._deadlines for seq in seqs] != self._deadlines:
            deadlines = [seq.deadlines for seq in seqs]
            # A token after the first is due at `then` + number · `tpot`: without a TPOT, never.
            rows = [
                (d.first, inf, 0.0, d.end) if d.tpot == inf else (d.first, d.first, d.tpot, d.end) for d in deadlines
            ]
            self._columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
            self._deadlines = [*deadlines]
            self._paused = [i for i, d in enumerate(deadlines) if d.max_pause < inf]
        first, then, tpot, end = self._columns
        # The number of the next token; 0: the first.
        number = np.array([seq._output + seq.expected_tokens for seq in seqs], dtype=np.float64)
        dues: NDArray[np.float64] = np.minimum(np.where(number > 0.0, then + number * tpot, first), end)
        for i in self._paused:
            dues[i] = seqs[i].due
        self._dues = dues
        return dues

    def first_unmissed(self) -> float:
        """Returns the earliest of those of requests that have missed nothing yet: the others' tokens are late for
        nothing more."""
        missed = np.array([seq._missed for seq in self._seqs], dtype=bool)
        return float(self.compute()[~missed].min(initial=inf))
