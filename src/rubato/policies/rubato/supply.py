"""The time that decodes leave to prompts, as far as steps are predicted and as far as predictions have been right."""

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

# Steps over which measured errors fade, and requests over which losses do: with 256 a model that has been corrected is
# doubted for too long. Pauses are rare: how far steps were behind fades over MEMORY times as many.
MEMORY = 64
WORST = 1.0  # the largest error of one step that is counted: a pause of the machine says nothing of the next step
SLACK = 0.1  # of the time, that decodes leave where steps are shortest, and with which they get ahead, or catch up
# Tokens that a decode is ahead at most, and steps that a pause counts as: no lead outlasts longer ones.
MOST_AHEAD_STEPS = 8.0
LEAST_LEAD_STEPS = 2.0  # usual ones, once a step has been late: with none the demo breaks 2 % more promises
UNLUCKY = 12  # steps without luck in a row that decodes with drafts are ahead for: with 4 more promises break
LADDER = (1.25, 1.75, 2.5, 3.5, 5.0)  # lengths of a step that are tried, in steps of all decodes
POINTS = 24  # deadlines at which what decodes are owed is worked out; between them it is interpolated

Array = NDArray[np.float64]


class Job(NamedTuple):
    """A request whose next token can still be in time: when it is due, the seconds between tokens after it, tokens
    pending and in KV. Sorts by deadline."""

    due: float
    arrival: float
    id: str
    tpot: float
    pending: int
    cached: int
    seq: SeqView


class Entry(NamedTuple):
    """What a decode has in a step. draft: (depth, width) of the tree that is drafted at its end, None: plain decoding.
    nodes: of the last one, verified; tokens: out; both on average. seconds: predicted of a step of all."""

    draft: tuple[int, int] | None = None
    nodes: float = 0.0
    tokens: float = 1.0
    seconds: float = 0.0

    def shape(self, seqs: int, kv: int) -> Shape:
        """A step of so many, which have so much KV together, their next token counted."""
        if self.draft is None:
            return Shape(seqs, seqs, kv)
        return with_nodes(drafting(self.draft, seqs), seqs, kv - seqs, round(self.nodes * seqs))

    def unlucky(self, tpot: float) -> float:
        """Seconds by which a decode falls behind in steps without luck, which bring a single token each."""
        return UNLUCKY * max(0.0, self.seconds - tpot)


PLAIN = Entry()


class StepErrors:
    """How far steps were off what was predicted for them, as seen from one plan to the next while something runs."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._square = 0.0
        self._asked = (0.0, 0.0)  # when the last plan was made, and the seconds predicted for it
        self._behind = self._worst = 0.0  # seconds by which steps are behind their plan: now, and at worst of late
        self.usual = 0.0  # seconds of a step, as it was planned, on average of late

    def planned(self, now: float, seconds: float) -> None:
        """A step begins; 0 seconds: none does."""
        self._asked = now, seconds

    def learn(self, view: View) -> None:
        """The next plan is asked for."""
        at, seconds = self._asked
        if seconds and view.running and view.now > at:
            error = min((view.now - at) / seconds - 1.0, WORST)
            self._mean += (error - self._mean) / MEMORY
            self._square += ((error - self._mean) ** 2 - self._square) / MEMORY
            planned = seconds * self.slower
            late = min(view.now - at - planned, MOST_AHEAD_STEPS * planned)
            self._behind = max(0.0, self._behind + late - SLACK * planned)
            self._worst = max(self._worst * (1.0 - 1.0 / MEMORY**2), self._behind)
            self.usual += (planned - self.usual) / MEMORY if self.usual else planned

    @property
    def lead(self) -> float:
        """Seconds that decodes should be ahead of their deadlines: as far as steps have been behind their plan of late,
        were a tenth of the time left to catch up (a queue of lateness: Lindley's recursion), and two steps at least. 0
        while steps take what is predicted, as in a simulation without noise."""
        return max(self._worst, LEAST_LEAD_STEPS * self.usual) if self._worst else 0.0

    @property
    def slower(self) -> float:
        """What steps take over what is predicted, on average; 1 if they take less."""
        return 1.0 + max(0.0, self._mean)

    def spread(self, told: float) -> float:
        """Their standard deviation, relative; `told`, what the latency model says of itself, if that is more."""
        return max(sqrt(self._square), told)


class DecodeSteps:
    """Seconds of steps with these decodes, which come by deadline. doubt: relative, what one step may take beyond what
    is predicted; reserve: seconds kept before a deadline; slower: of `StepErrors`."""

    def __init__(
        self, view: View, decodes: Sequence[Job], doubt: float, reserve: float, slower: float, entry: Entry = PLAIN
    ) -> None:
        self.entry = entry
        self.now, self.decodes, self.doubt, self.reserve, self.slower = view.now, decodes, doubt, reserve, slower
        self._step_time = view.latency.step_time
        self._kv = list(accumulate([job.cached + 1 for job in decodes], initial=0))
        self._due = np.array([job.due for job in decodes])
        count = len(decodes)
        self.base = slower * self._step_time(Shape(1, 1, 1))
        self.full = self.seconds(count)  # of all decodes
        self.unit = max(self.full, 2.0 * self.base)
        self.each = max(0.0, self.full - self.base) / count if count else 0.0  # seconds of one decode more

    def shortest(self) -> float:
        """Seconds of the shortest steps that still bring a token of each decode as often as one falls due, if a tenth
        of the time is left for what else may be; of a step of all decodes if that is less. Shorter ones save the decode
        that is due first, and then lose all the others: each step costs `base` however few are in it."""
        falls_due = self.each * sum([1.0 / job.tpot for job in self.decodes])
        return min(self.full, self.base / max(1e-9, 1.0 - SLACK - falls_due))

    def within(self, seconds: float) -> float:
        """The longest step, as predicted, that surely ends by then."""
        return (seconds - self.reserve) / (1.0 + self.doubt)

    def seconds(self, count: int) -> float:
        """Of a step with the first so many decodes."""
        return self.slower * self._step_time(self.entry.shape(count, self._kv[count])) if count else 0.0

    def least(self, count: int) -> float:
        """Of the same without drafts."""
        return self.slower * self._step_time(Shape(count, count, self._kv[count])) if count else 0.0

    def seconds_with(self, count: int, job: Job) -> float:
        """Of these and all of a prompt."""
        shape = self.entry.shape(count, self._kv[count]) if count else Shape()
        return self.slower * self._step_time(shape.plus(job.pending, job.cached))

    def seconds_more(self, job: Job) -> float:
        """What a prompt adds to a step with all decodes."""
        return self.seconds_with(len(self.decodes), job) - (self.full or self.base)

    def most_within(self, count: int, bound: float) -> int:
        """How many of the first so many decodes end within the bound, without drafts; 1 at least."""
        return max(1, bisect_right(range(count + 1), bound, key=self.least) - 1)

    def due_by(self, time: float) -> int:
        """How many decodes are due before then."""
        return int(np.searchsorted(self._due, time))

    def first_due(self) -> float:
        return self.decodes[0].due if self.decodes else inf

    def owed(self, span: Array) -> tuple[Array, Array]:
        """Within each of these spans from now, ascending: entries of the decode that needs most, and of all."""
        if not self.decodes:
            return np.zeros(len(span)), np.zeros(len(span))
        first = self._due - self.now
        brings = self.entry.tokens
        tpot = brings * np.array([min(job.tpot, 1e6) for job in self.decodes])
        left = np.array([remaining_output(job.seq) for job in self.decodes]) / brings
        at = span if len(span) <= POINTS else np.linspace(span[0], span[-1], POINTS)
        each = np.clip(np.floor((at[:, None] - first) / tpot) + 1.0, 0.0, left)
        most, all_ = each.max(axis=1), each.sum(axis=1)
        if at is span:
            return most, all_
        return np.interp(span, at, most), np.interp(span, at, all_)


def left_out(seconds: Sequence[float], weights: Sequence[float], room: Array) -> set[int]:
    """Indices of jobs, given by deadline, that are set aside so that all others are in time; `room`: seconds up to each
    deadline. Whenever one would be late, the heaviest so far goes (Moore 1968, in Hodgson's form)."""
    if (np.cumsum(seconds) <= room).all():
        return set()
    gone: set[int] = set()
    heap: list[tuple[float, int]] = []
    total = 0.0
    for i, limit in enumerate(room.tolist()):
        heapq.heappush(heap, (-weights[i], i))
        total += seconds[i]
        while heap and total > limit:
            _, heaviest = heapq.heappop(heap)
            gone.add(heaviest)
            total -= seconds[heaviest]
    return gone
