"""Computes the time that decodes leave for prompts, from predicted step times and their measured errors."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.draft_value import drafting, with_nodes

# Steps over which measured errors fade, and requests over which losses fade: with 256 a corrected model is doubted for
# too long. Pauses are rare: the lateness of steps fades over the square of it.
MEMORY_STEPS = 64
MAX_STEP_ERROR = 1.0  # relative, of one step: a pause of the machine does not predict the next step
SLACK_SHARE = 0.1  # share of the time left free by decodes in the shortest steps, and used to gain or regain a lead
# Largest lead of a decode, in tokens, and largest pause, in steps: no lead outlasts a longer one.
MAX_LEAD_STEPS = 8.0
MIN_LEAD_STEPS = 2.0  # average steps, once a step has been late: with 0 the demo breaks 2 % more SLOs
DRAFT_MARGIN_STEPS = 12  # steps in a row without an accepted draft that a lead covers: with 4 more SLOs break
STEP_LENGTHS = (1.25, 1.75, 2.5, 3.5, 5.0)  # step lengths to try, in steps of all decodes
MAX_DEADLINE_POINTS = 24  # deadlines at which the need of decodes is computed; interpolated between them

Array = NDArray[np.float64]


class Task(NamedTuple):
    """A request whose next token can still be in time. It sorts by deadline.

    Args:
        due: time of the next token, in seconds
        arrival: of the request, in seconds
        id: of the request
        tpot: seconds between later tokens
        pending: tokens to compute
        cached: tokens in KV
        seq: the request
    """

    due: float
    arrival: float
    id: str
    tpot: float
    pending: int
    cached: int
    seq: SeqView


class DecodeEntry(NamedTuple):
    """The average entry of a decode in a step.

    Args:
        draft: (depth, width) of the tree drafted at its end; None: plain decoding
        nodes: verified nodes of the last tree
        tokens: output tokens
        seconds: predicted for a step of all decodes
    """

    draft: tuple[int, int] | None = None
    nodes: float = 0.0
    tokens: float = 1.0
    seconds: float = 0.0

    def shape(self, seqs: int, kv: int) -> Shape:
        """Returns the shape of a step of `seqs` decodes with `kv` tokens of KV together, next tokens included."""
        if self.draft is None:
            return Shape(seqs, seqs, kv)
        return with_nodes(drafting(self.draft, seqs), seqs, kv - seqs, round(self.nodes * seqs))

    def unlucky(self, tpot: float) -> float:
        """Returns the seconds by which a decode falls behind while no draft is accepted."""
        return DRAFT_MARGIN_STEPS * max(0.0, self.seconds - tpot)


PLAIN_DECODE = DecodeEntry()


class StepErrors:
    """Measures the errors of predicted step times, from one plan to the next while requests run."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._square = 0.0
        self._last_plan = (0.0, 0.0)  # when the last plan was made, and the seconds predicted for it
        self._behind = self._worst = 0.0  # seconds by which steps are behind their plan: now, and at worst of late
        self.usual = 0.0  # seconds of a step, as it was planned, on average of late

    def record_plan(self, now: float, seconds: float) -> None:
        """Records the predicted seconds of the step that begins; 0 if none does."""
        self._last_plan = now, seconds

    def learn(self, view: View) -> None:
        """Learns from the step that ended when the next plan is made."""
        at, seconds = self._last_plan
        if seconds and view.running and view.now > at:
            error = min((view.now - at) / seconds - 1.0, MAX_STEP_ERROR)
            self._mean += (error - self._mean) / MEMORY_STEPS
            self._square += ((error - self._mean) ** 2 - self._square) / MEMORY_STEPS
            planned_seconds = seconds * self.slower
            late = min(view.now - at - planned_seconds, MAX_LEAD_STEPS * planned_seconds)
            self._behind = max(0.0, self._behind + late - SLACK_SHARE * planned_seconds)
            self._worst = max(self._worst * (1.0 - 1.0 / MEMORY_STEPS**2), self._behind)
            self.usual += (planned_seconds - self.usual) / MEMORY_STEPS if self.usual else planned_seconds

    @property
    def lead(self) -> float:
        """Returns the seconds that decodes should be ahead of their deadlines: how late steps were lately if a tenth of
        the time is left to catch up (Lindley's recursion), at least two steps; 0 while predictions are exact, as in a
        simulation without noise."""
        return max(self._worst, MIN_LEAD_STEPS * self.usual) if self._worst else 0.0

    @property
    def slower(self) -> float:
        """Returns the average ratio of measured to predicted step time, at least 1."""
        return 1.0 + max(0.0, self._mean)

    def spread(self, model_spread: float) -> float:
        """Returns the relative standard deviation of step times, at least the latency model's own `model_spread`."""
        return max(sqrt(self._square), model_spread)


class DecodeSteps:
    """Step times with the given decodes.

    Args:
        decodes: sorted by deadline
        doubt: relative error that one step may have
        reserve: seconds kept before a deadline
        slower: `StepErrors.slower`
        entry: the average entry of a decode
    """

    def __init__(
        self,
        view: View,
        decodes: Sequence[Task],
        doubt: float,
        reserve: float,
        slower: float,
        entry: DecodeEntry = PLAIN_DECODE,
    ) -> None:
        self.entry = entry
        self.now, self.decodes, self.doubt, self.reserve, self.slower = view.now, decodes, doubt, reserve, slower
        self._step_time = view.latency.step_time
        self.kv = list(accumulate([job.cached + 1 for job in decodes], initial=0))
        self._due = np.array([job.due for job in decodes])
        count = len(decodes)
        self.base = slower * self._step_time(Shape.decodes(1, 1))
        self.full = self.seconds(count)  # of all decodes
        self.unit = max(self.full, 2.0 * self.base)
        self.each = max(0.0, self.full - self.base) / count if count else 0.0  # seconds of one decode more

    def shortest(self) -> float:
        """Returns the seconds of the shortest step that keeps all decodes on pace with a tenth of the time to spare, at
        most a step of all decodes. Shorter steps would save the decode that is due first and lose all others, since
        each step has the fixed cost `base`."""
        falls_due = self.each * sum([1.0 / job.tpot for job in self.decodes])
        return min(self.full, self.base / max(1e-9, 1.0 - SLACK_SHARE - falls_due))

    def max_step_until(self, seconds: float) -> float:
        """Returns the longest predicted step that is sure to end within `seconds`."""
        return (seconds - self.reserve) / (1.0 + self.doubt)

    def seconds(self, count: int) -> float:
        """Returns the seconds of a step with the first `count` decodes."""
        return self.slower * self._step_time(self.entry.shape(count, self.kv[count])) if count else 0.0

    def seconds_without_drafts(self, count: int) -> float:
        """Returns the seconds of a step with the first `count` decodes and no drafts."""
        return self.slower * self._step_time(Shape(count, count, self.kv[count])) if count else 0.0

    def seconds_with(self, count: int, job: Task) -> float:
        """Returns the seconds of a step with the first `count` decodes and a whole prompt."""
        shape = self.entry.shape(count, self.kv[count]) if count else Shape()
        return self.slower * self._step_time(shape.plus(job.pending, job.cached))

    def seconds_more(self, job: Task) -> float:
        """Returns the seconds that a prompt adds to a step with all decodes."""
        return self.seconds_with(len(self.decodes), job) - (self.full or self.base)

    def most_within(self, count: int, bound: float) -> int:
        """Returns how many of the first `count` decodes end within `bound` seconds without drafts, at least 1."""
        return max(1, bisect_right(range(count + 1), bound, key=self.seconds_without_drafts) - 1)

    def due_by(self, time: float) -> int:
        """Returns how many decodes are due before `time`."""
        return int(np.searchsorted(self._due, time))

    def first_due(self) -> float:
        return self.decodes[0].due if self.decodes else inf

    def entries_owed(self, span: Array) -> tuple[Array, Array]:
        """Returns, for ascending spans from now in seconds, the entries that the neediest decode needs within each, and
        those that all decodes need together."""
        if not self.decodes:
            return np.zeros(len(span)), np.zeros(len(span))
        first = self._due - self.now
        brings = self.entry.tokens
        tpot = brings * np.array([min(job.tpot, 1e6) for job in self.decodes])
        left = np.array([remaining_output(job.seq) for job in self.decodes]) / brings
        at = span if len(span) <= MAX_DEADLINE_POINTS else np.linspace(span[0], span[-1], MAX_DEADLINE_POINTS)
        each = np.clip(np.floor((at[:, None] - first) / tpot) + 1.0, 0.0, left)
        most, all_ = each.max(axis=1), each.sum(axis=1)
        if at is span:
            return most, all_
        return np.interp(span, at, most), np.interp(span, at, all_)


def find_omitted(seconds: Sequence[float], weights: Sequence[float], room: Array) -> set[int]:
    """Returns the indices of tasks to omit so that all others are in time (Moore 1968, in Hodgson's form): whenever a
    task would be late, the heaviest so far is omitted.

    Args:
        seconds: of each task, by deadline
        weights: of each task
        room: seconds available up to each deadline
    """
    if (np.cumsum(seconds) <= room).all():
        return set()
    omitted: set[int] = set()
    heap: list[tuple[float, int]] = []
    total = 0.0
    for i, limit in enumerate(room.tolist()):
        heapq.heappush(heap, (-weights[i], i))
        total += seconds[i]
        while heap and total > limit:
            _, heaviest = heapq.heappop(heap)
            omitted.add(heaviest)
            total -= seconds[heaviest]
    return omitted
