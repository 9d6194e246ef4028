"""Forecasts KV when output lengths are unknown: each resident counts by the probability that it is still running.

The chance comes from how long finished requests were, over what was first predicted for them. With exact predictions
that ratio is always 1 and the forecast is the peak of the residents' sum; with a mean it is the expected sum.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import View

FORECAST_POINTS = 24  # steps from now at which KV is forecast; 48 give the same decisions
MIN_FINISHED_REQUESTS = 8  # before their ratios count; until then predictions are taken as exact
MAX_OUTPUT_RATIO = 10.0  # above it the prediction knew nothing of the class, and the ratio is ignored
TAIL_DECAY = 5.0  # beyond the longest known ratio the probability falls by a factor of e for each fifth more
MAX_CLASSES, ALL_CLASSES = 256, ""  # classes that are remembered, the latest; and the name of all together
LAST_BLOCK_EMPTY_SHARE = 0.55  # of a resident's last block that is empty, on average, and some for rounding

Array = NDArray[np.float64]


class OutputRatios:
    """Keeps the ratios of output tokens to the first prediction, of recently finished requests by class."""

    def __init__(self, last: int = 256) -> None:
        self._last = last
        self._classes: OrderedDict[str, tuple[deque[float], list[float]]] = OrderedDict()  # by time, ascending

    def add(self, kind: str, ratio: float) -> None:
        """Adds the ratio of a finished request of class `kind`."""
        if ratio > MAX_OUTPUT_RATIO:
            return
        for name in (kind, ALL_CLASSES):
            by_time, ascending = self._classes.setdefault(name, (deque(maxlen=self._last), []))
            if len(by_time) == self._last:
                ascending.remove(by_time[0])
            by_time.append(ratio)
            insort(ascending, ratio)
            self._classes.move_to_end(name)
        if len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)

    def ratios_of(self, kind: str) -> Sequence[float]:
        """Returns the ratios of a class, ascending.

        While the class has too few, those of all classes; (1.0,) while all together have too few.
        """
        for name in (kind, ALL_CLASSES):
            _, ascending = self._classes.get(name, ((), ()))
            if len(ascending) >= MIN_FINISHED_REQUESTS:
                return ascending
        return (1.0,)


class Resident(NamedTuple):
    """A request that holds KV, or may.

    Args:
        kind: its class.
        output: tokens out, in all stages.
        expected: output tokens in all, as first predicted.
        most: output tokens in all that it may ask for.
        length: tokens in KV when it ends, less those of its output that are still to come.
    """

    kind: str
    output: int
    expected: float
    most: int
    length: int


class KVSurvival:
    """Forecasts the KV blocks that residents are expected to hold, at `FORECAST_POINTS` steps from now on.

    All that may be counted are passed at once; `add` counts some of them. Every resident counts in every step: those
    that sit out only hold theirs for longer.

    Args:
        view: of the replica.
        ratios: of finished requests.
        residents: all that may be counted.
    """

    def __init__(self, view: View, ratios: OutputRatios, residents: Sequence[Resident]) -> None:
        self._free = view.kv_total - sum([s.blocks for s in view.moving])
        self._sum: Array = np.zeros(FORECAST_POINTS)
        output, expected, most, length = np.array([r[1:] for r in residents], dtype=np.float64).T
        expected = np.maximum(expected, 1.0)
        rows: dict[str, list[int]] = {}
        for i, resident in enumerate(residents):
            rows.setdefault(resident.kind, []).append(i)
        longest = np.empty(len(residents))
        curves: dict[str, SurvivalCurve] = {}
        for kind, own in rows.items():
            curve = curves[kind] = SurvivalCurve(
                ratios.ratios_of(kind), (output[own] / expected[own])[output[own] > 0.0]
            )
            longest[own] = np.minimum(expected[own] * curve.longest, most[own]) - output[own]
        ahead = np.linspace(0.0, max(1.0, float(longest.max())), FORECAST_POINTS)
        self._blocks: Array = (length[:, None] + ahead) / view.limits.block_size + LAST_BLOCK_EMPTY_SHARE
        for kind, own in rows.items():
            out, all_ = output[own][:, None], expected[own][:, None]
            stays = curves[kind].at((out + ahead) / all_) / curves[kind].at(out / all_)
            stays[ahead > (most[own] - output[own])[:, None]] = 0.0  # a prediction may have been far too short
            self._blocks[own] *= stays

    def costs(self) -> Sequence[float]:
        """Returns the KV × time of each resident, up to a common factor."""
        costs: list[float] = self._blocks.sum(axis=1).tolist()
        return costs

    def fits(self, i: int, share: float = 1.0) -> bool:
        """Returns whether resident `i` beside those counted stays within this share of memory at all times."""
        return bool((self._sum + self._blocks[i]).max() <= share * self._free)

    def add(self, which: slice) -> None:
        """Counts these residents."""
        self._sum = self._sum + self._blocks[which].sum(axis=0)


class SurvivalCurve:
    """Estimates the share of requests whose output is at least so many times what was predicted (Kaplan and Meier
    1958).

    Args:
        ended: that ratio of requests that finished, ascending.
        so_far: that ratio of those that run: while a server fills, what has finished is short, and these say so.
    """

    def __init__(self, ended: Sequence[float], so_far: Array) -> None:
        self._ended = np.array(ended)
        self.longest = float(self._ended[-1])
        longer = len(self._ended) - np.arange(len(self._ended))
        longer += len(so_far) - np.searchsorted(np.sort(so_far), self._ended, side="left")
        self._after = np.concatenate(([1.0], np.cumprod(1.0 - 1.0 / (longer + 0.5))))

    def at(self, ratio: Array) -> Array:
        """Returns the survival at these ratios; never 0, falling fast beyond the longest known ratio."""
        share = self._after[np.searchsorted(self._ended, ratio - 1e-9, side="left")]
        beyond: Array = share * np.exp(-TAIL_DECAY * np.maximum(0.0, ratio - self.longest))
        return np.maximum(beyond, 1e-12)
