"""Schedules prefills as jobs of one machine: which can have their first token in time, and whether their decodes fit
together."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.refusals import known_output, refusable, why_infeasible

PROBE_TOKENS = 256  # marginal prefill time is measured on these
REINSTATE_MARGIN = 1.2  # a job that was set aside comes back only if this many times its tokens fit

# Due, arrival, place among all that are here, tokens pending, sequence; sorts by deadline. A plain tuple: a NamedTuple
# makes a plan up to a quarter longer where thousands wait.
PrefillJob = tuple[float, float, int, int, SeqView]
due_of: Callable[[PrefillJob], float] = itemgetter(0)
arrival_of: Callable[[PrefillJob], float] = itemgetter(1)
index_of: Callable[[PrefillJob], int] = itemgetter(2)
pending_of: Callable[[PrefillJob], int] = itemgetter(3)
seq_of: Callable[[PrefillJob], SeqView] = itemgetter(4)


class PrefillRate:
    """Predicts the speed of prefill beside decodes: full while they have time to spare, then the part of each TPOT that
    is left after a token of each decode.

    Args:
        view: of the replica.
        decodes: the batch of decodes.
        spare: seconds until the first decode is due.
        tpot: the tightest of the decodes, in seconds.
        safety: factor on step times.
    """

    def __init__(self, view: View, decodes: Shape, spare: float, tpot: float, safety: float) -> None:
        latency = view.latency
        alone = latency.step_time(decodes) * safety if decodes.seqs else 0.0
        self._first = latency.step_time(decodes.plus(1, 0)) * safety
        self._token = (latency.step_time(decodes.plus(PROBE_TOKENS, 0)) * safety - self._first) / (PROBE_TOKENS - 1)
        self._sprint = max(0.0, spare - self._first)
        self._share = max(0.02, 1.0 - alone / tpot) if tpot < inf else 1.0

    def seconds_at_full_speed(self, tokens: int) -> float:
        """Returns the least seconds for `tokens`, as if nothing were decoded meanwhile."""
        return self._first + tokens * self._token

    def seconds(self, tokens: int) -> float:
        """Returns the seconds until `tokens` tokens of prefill are done."""
        work = tokens * self._token
        late = max(0.0, work - self._sprint)
        return self._first + work - late + late / self._share

    def seconds_each(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns `seconds` of each element."""
        work = tokens * self._token
        late = np.maximum(0.0, work - self._sprint)
        each: NDArray[np.float64] = self._first + work - late + late / self._share
        return each

    def tokens_each(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the tokens done in each of `seconds`: the inverse of `seconds_each`, up to rounding."""
        left = seconds - self._first
        sprint = min(self._sprint, 1e12)
        work: NDArray[np.float64] = np.minimum(left, sprint) + np.maximum(left - sprint, 0.0) * self._share
        return work / max(self._token, 1e-12)


def feasible(view: View, jobs: Sequence[PrefillJob], rate: PrefillRate) -> Sequence[PrefillJob]:
    """Returns the jobs without those that prefer a refusal and could not keep their TPOT, or their e2e as far as their
    length is known, even alone."""
    to_refuse = [job for job in jobs if job[4].request.on_decline == "refuse" and refusable(job[4])]
    if not to_refuse:
        return jobs
    longest: dict[float, int] = {}  # by TPOT: a step of the longest takes longest, and mostly says enough of all
    for job in to_refuse:
        tpot, length = tpot_of(seq_of(job)), seq_of(job).length
        longest[tpot] = max(longest.get(tpot, 0), length)
    steps = {tpot: view.latency.step_time(Shape.decodes(1, length)) for tpot, length in longest.items()}
    slow = set()
    for _, arrival, place, pending, seq in to_refuse:
        tpot, e2e = tpot_of(seq), seq.slo.e2e
        predicted = None if e2e is None else known_output(seq)
        step = steps[tpot]
        if step > tpot or predicted is not None:
            step = view.latency.step_time(Shape.decodes(1, seq.length))
        late = step > tpot and why_infeasible(seq, view) is not None
        if e2e is not None and predicted is not None:
            end = view.now + rate.seconds_at_full_speed(pending) + (predicted - 1.0) * step
            late = late or end > arrival + seq.tool_seconds + e2e
        if late:
            slow.add(place)
    return [job for job in jobs if index_of(job) not in slow] if slow else jobs


def schedulable(
    jobs: Sequence[PrefillJob], rate: PrefillRate, now: float, reserve: float, protected: Container[str]
) -> list[PrefillJob]:
    """Returns the jobs that can have their first token in time (Moore 1968; with a heap, in Hodgson's form).

    It goes through the jobs by deadline, less `reserve` seconds; whenever one is late, it sets aside the longest so
    far, the first of equally long ones, that is not of a protected tier. A protected one may count on decodes that end
    meanwhile, and no other starts at its expense; unless it would be late even alone.
    """
    ends = np.cumsum(np.array([*map(pending_of, jobs)], dtype=np.float64))
    late = now + rate.seconds_each(ends) > np.array([*map(due_of, jobs)]) - reserve
    if not late.any():
        return list(jobs)

    def may_be_omitted(job: PrefillJob) -> bool:
        is_protected = bool(protected) and seq_of(job).request.tier in protected
        return not (is_protected and now + rate.seconds_at_full_speed(pending_of(job)) <= due_of(job))

    first = int(late.argmax())  # up to here all are in time
    longest = [(-pending_of(job), i) for i, job in enumerate(jobs[:first]) if may_be_omitted(job)]
    heapify(longest)
    omitted: set[int] = set()
    tokens, seconds = int(ends[first]) - pending_of(jobs[first]), rate.seconds
    for i, job in enumerate(jobs[first:], first):
        due, pending = due_of(job), pending_of(job)
        tokens += pending
        if may_be_omitted(job):
            heappush(longest, (-pending, i))
        while longest and now + seconds(tokens) > due - reserve:
            less, one = heappop(longest)
            tokens += less
            omitted.add(one)
    return [job for i, job in enumerate(jobs) if i not in omitted]


def insertable_jobs(
    on_time: Sequence[PrefillJob], others: Sequence[PrefillJob], rate: PrefillRate, now: float, reserve: float
) -> list[PrefillJob]:
    """Returns the jobs of `others`, cheapest first, that fit by a margin together with all jobs that are on time.

    Jobs run by deadline. A job of p tokens fits where no later job has fewer than p tokens to spare; this is estimated
    in tokens and then decided in seconds."""
    able = [job for job in others if rate.seconds(int(pending_of(job) * REINSTATE_MARGIN)) <= due_of(job) - now]
    if not able:
        return []
    line = sorted([*on_time, *able])
    places = set(map(index_of, on_time))
    is_in_line = np.array([index_of(job) in places for job in line])
    tokens_done = np.cumsum(np.where(is_in_line, np.array([*map(pending_of, line)], dtype=np.float64), 0.0))
    ends = np.array([*map(due_of, line)]) - reserve
    within = rate.tokens_each(ends - now)
    back: list[PrefillJob] = []

    def room() -> NDArray[np.float64]:
        """Returns the tokens that the job at each place, and all later ones, can spare."""
        spare = np.where(is_in_line, within - tokens_done, inf)
        return np.minimum.accumulate(spare[::-1])[::-1]

    if np.any(is_in_line & (now + rate.seconds_each(tokens_done) > ends)):
        return []
    order = sorted(range(len(line)), key=lambda i: (pending_of(line[i]), index_of(line[i])))
    todo = np.array([i for i in order if index_of(line[i]) not in places])
    tokens = np.array([pending_of(line[i]) for i in todo], dtype=np.float64)
    spare = room()
    fit = (tokens <= spare[todo] + 1.0) & (tokens_done[todo] + tokens <= within[todo] + 1.0)
    for i, need in zip(todo[fit].tolist(), tokens[fit].tolist(), strict=True):
        if need > spare[i] + 1.0 or tokens_done[i] + need > within[i] + 1.0:
            continue
        later, is_counted = tokens_done[i:] + need, is_in_line[i:].copy()
        is_counted[0] = True
        if not np.any(is_counted & (now + rate.seconds_each(later) > ends[i:])):
            back.append(line[i])
            tokens_done[i:], is_in_line[i] = later, True
            spare = room()
    return back


class DecodeCapacity:
    """Checks whether one more request can decode with those that hold KV, within the tightest TPOT. The first always
    can.
    """

    def __init__(self, view: View, seqs: Sequence[SeqView], safety: float, share: float) -> None:
        self._latency, self._safety, self._share = view.latency, safety, share
        self._count = len(seqs)
        self._length = sum([s.length for s in seqs])
        self._tpot = min(map(tpot_of, seqs), default=inf)
        self._refused = (inf, -inf)  # length and TPOT: one as long, with as tight a TPOT, is too much

    def can_add(self, seq: SeqView) -> bool:
        """Returns whether a request can decode with those here."""
        tpot, length = min(self._tpot, tpot_of(seq)), seq.length
        if not self._count:
            return True
        if length >= self._refused[0] and tpot <= self._refused[1]:
            return False
        shape = Shape.decodes(self._count + 1, self._length + length)
        if self._latency.step_time(shape) * self._safety <= self._share * tpot:
            return True
        self._refused = (length, tpot)
        return False

    def add(self, seq: SeqView) -> None:
        """Counts a request among those that decode."""
        self._count += 1
        self._length += seq.length
        self._tpot = min(self._tpot, tpot_of(seq))


def tpot_of(seq: SeqView) -> float:
    """Returns the TPOT of a sequence's stage in seconds, inf without one."""
    tpot = seq.slo.tpot
    return inf if tpot is None else tpot
