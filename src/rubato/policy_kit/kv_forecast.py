"""Forecasts the KV of a replica as its residents grow, before one more is placed there.

Each resident grows by a token a step and leaves at its predicted end (PolyServe, §4.5). `PeakKV` is made for one
question, `KVForecast` kept from step to step: in steps counted from the replica's first, a resident that had `length`
tokens at step s has length + (T - s) at any step T before its end, so that its share of the sum changes with T alone.
The sums are kept for stretches of `STRETCH_STEPS` steps, each at its last step: placing or leaving is one addition over
them, the largest sum to come one maximum."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

STRETCH_STEPS = 16  # steps of a stretch; a resident counts for up to so many tokens too many
MAX_PEAK_ENDS = 4  # ends that are looked at, of `PeakKV`
MAX_STRETCHES = 512  # kept at a time; what ends later counts as ending in the last
NOT_HERE = (None, -1)  # of a request that is no resident


class KVForecast:
    """Forecasts the tokens in KV, by step, of the residents of one replica. Steps never go back."""

    def __init__(self) -> None:
        self._first = 0  # the step at which the first stretch begins
        # steps from there to each stretch's end
        self._after = STRETCH_STEPS * np.arange(1, MAX_STRETCHES + 1, dtype=np.int64)
        self._sums = np.zeros(MAX_STRETCHES, dtype=np.int64)
        self._used = 0  # stretches that have a resident
        self._of: dict[str, tuple[int, int]] = {}  # resident -> (length less the step it had it at, end)
        self._ends: list[tuple[int, str]] = []  # by end, some of them gone already
        self.changes = 0  # counted, so that what was worked out from it can be kept

    def __len__(self) -> int:
        return len(self._of)

    def add(self, id: str, length: int, remaining: float, step: int) -> None:
        """Adds a resident with `length` tokens at `step` and `remaining` to come, or updates it."""
        base, end = length - step, step + max(1, round(remaining))
        base_before, end_before = self._of.get(id, NOT_HERE)
        begin = self._stretches_until(end_before)
        if base != base_before or end < end_before:  # else it decodes as forecast, and goes on for longer
            self.drop(id)
            begin = 0
        self._count(base, begin, self._stretches_until(end), 1)
        self._of[id] = base, end
        heappush(self._ends, (end, id))

    def drop(self, id: str) -> None:
        """Removes a resident, if it is here."""
        found = self._of.pop(id, None)
        if found is None:
            return
        self._count(found[0], 0, self._stretches_until(found[1]), -1)
        if not self._of:
            self._used = 0
            self._ends.clear()

    def now(self, step: int) -> int:
        """Returns the tokens at `step`."""
        at = self._at(step)
        return int(self._sums[at]) if at < self._used else 0

    def peak(self, step: int) -> int:
        """Returns the most tokens at any time from `step` on."""
        at = self._at(step)
        return int(self._sums[at : self._used].max()) if at < self._used else 0

    def peak_with(self, length: int, remaining: float, step: int) -> int:
        """Returns the most tokens at any time from `step` on with one resident more, of `length` tokens and `remaining`
        to come."""
        at = self._at(step)
        base, end = length - step, step + max(1, round(remaining))
        until = max(at + 1, self._stretches_until(end))
        beside = int((self._sums[at:until] + self._after[at:until]).max()) + base + self._first
        later = int(self._sums[until : self._used].max()) if until < self._used else 0
        return max(beside, later)

    def overdue(self, step: int) -> list[str]:
        """Takes and returns residents that outlived their predicted end.

        They are in no sum any more, so add them again with a new prediction.
        """
        late: list[str] = []
        while self._ends and self._ends[0][0] <= step:
            end, id = heappop(self._ends)
            if self._of.get(id, NOT_HERE)[1] == end:
                late.append(id)
        return late

    def _at(self, step: int) -> int:
        """Returns the stretch of `step`, and drops past stretches now and then."""
        at = (step - self._first) // STRETCH_STEPS
        if at >= MAX_STRETCHES // 2:
            self._begin_at(step)
            at = 0
        return at

    def _begin_at(self, step: int) -> None:
        """Counts stretches from this step on; ends beyond the last stretch may now be in other stretches."""
        self._first = step
        self._sums[:] = 0
        self._used = 0
        for base, end in self._of.values():
            self._count(base, 0, self._stretches_until(end), 1)

    def _stretches_until(self, end: int) -> int:
        """Returns the number of stretches up to an end; 0: it was before the first."""
        return max(0, min((end - self._first) // STRETCH_STEPS + 1, MAX_STRETCHES))

    def _count(self, base: int, begin: int, until: int, times: int) -> None:
        """Adds a resident to the sums of stretches from `begin` until before `until`; with `times` -1 it removes it."""
        self.changes += 1
        if begin < until:
            self._sums[begin:until] += times * (base + self._first + self._after[begin:until])
            self._used = max(self._used, until)


class PeakKV:
    """Computes the largest KV, in blocks, that residents will hold together if each gets a token in every step.

    That is just before one of them ends. It is less than the sum of their final sizes, since they end at different
    times.

    Args:
        final: blocks that each resident holds at its end.
        left: tokens to come of each resident.
        block: tokens of a block.
    """

    def __init__(self, final: Sequence[int], left: Sequence[float], block: int) -> None:
        self._final, self._tokens_left = np.array(final, dtype=np.float64), np.array(left, dtype=np.float64)
        self._block = block

    def peak_with(self, final: Sequence[int] = (), left: Sequence[float] = ()) -> int:
        """Returns the peak with more residents, in whole blocks, at the `MAX_PEAK_ENDS` ends with the most tokens."""
        final_, left_ = np.append(self._final, final), np.append(self._tokens_left, left)
        last = np.argsort(-left_)  # the last to end first
        final_, left_ = final_[last], left_[last]
        # Blocks, not rounded, when each ends: of itself and all that end later, each less what it has yet to get.
        blocks = (final_ - left_ / self._block).cumsum() + left_ / self._block * np.arange(1, len(last) + 1)
        ends = np.argsort(-blocks)[:MAX_PEAK_ENDS]
        to_come = np.floor((left_ - left_[ends, None]).clip(0.0) / self._block)
        there = np.arange(len(last)) <= ends[:, None]  # those before have ended
        return int(((final_ - to_come) * there).sum(axis=1).max(initial=0.0))
