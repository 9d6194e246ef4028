"""Rows of `planning.bound`'s linear programme: what the requests that are attained take, and the time there is for it.

Each row is a sum over requests, at most the seconds that the replicas have between two moments, or in a period. There
are too many to list, so those that shares found so far exceed most are looked for (`find_exceeded`); a row that is
not found only loosens the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log2
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.planning.bound.minorant import Array
from rubato.planning.bound.work import Ints, RequestWork, sums

Kind = Literal["period", "window", "sequence"]
STARTS, CHAIN_STARTS = 600, 100  # moments at which windows begin, at most
WORKED = 2**22  # and so few that starts times pieces are no more
BLOCK = 2**20  # numbers worked on at once
EXCESS, RELATIVE = 1e-4, 1e-6  # seconds, and part of all, by which a row must be exceeded to be added
ROUND, ALIKE = 100, 2  # rows added at a time; of these with about the same window
MIN_WINDOW_S = 0.05  # seconds: shorter windows count as so long, where rows are put in order


@dataclass(frozen=True)
class Row:
    """One constraint of the programme: Σ (own + fixed)[request]·share <= seconds.

    Args:
        own: seconds of the entries of the pieces in the window, by request.
        fixed: seconds that steps take beside their entries, by request.
        kind: over a period; over a window, fixed costs spread by a limit; or counted by a sequence of pieces, one after
            the other.
        begin, end: of the window, in seconds.
    """

    kind: Kind
    own: Array
    fixed: Array
    seconds: float
    begin: float = 0.0
    end: float = inf

    def excess(self, share: Array) -> float:
        """Seconds beyond what there is."""
        return float((self.own + self.fixed) @ share) - self.seconds


class _Violation(NamedTuple):
    relative: float  # excess over the window
    kind: Kind
    charge: int
    begin: float
    end: float
    column: int  # of the start among those of sequences


def period_rows(work: RequestWork, replicas: int) -> Iterator[Row]:
    """All that is attained in a period takes no longer than it. None where requests come once."""
    if work.period < inf:
        for own, spread in zip(work.own, work.spread, strict=True):
            yield Row("period", work.by_request(own), work.by_request(spread), replicas * work.period)


class Windows:
    """Rows of windows. On one replica also by sequences of pieces; with several those bind nothing."""

    def __init__(self, work: RequestWork, replicas: int) -> None:
        self.work, self.replicas = work, replicas
        self._order = np.argsort(work.due, kind="stable")
        self._release, self._due = work.release[self._order], work.due[self._order]
        self._request = work.request[self._order]
        most = max(1, min(STARTS, WORKED // len(work.release)))
        self._starts = _some(np.unique(work.release[: work.once]), most, work.arrivals)
        self._sequences = Sequences(work, _some(np.unique(work.arrivals), CHAIN_STARTS)) if replicas == 1 else None

    def find_exceeded(self, share: Array, most: int = ROUND) -> list[Row]:
        """Returns the rows that shares exceed most, relative to their windows, at most `ALIKE` of about the same window
        (which begins within 0.3 of its width and is within a factor of √2 as wide).

        Args:
            share: of each request.
            most: rows to return at most.
        """
        if self._sequences is not None:
            self._sequences.choose(share)
        violations = sorted((f for k in range(len(self.work.charges)) for f in self._of(k, share)), reverse=True)
        rows: list[Row] = []
        near: dict[tuple[object, ...], int] = {}
        for one in violations:
            width = one.end - one.begin
            alike = (one.kind, one.charge, round(one.begin / max(0.3 * width, 1e-3)), round(2 * log2(width)))
            if near.get(alike, 0) >= ALIKE:
                continue
            near[alike] = near.get(alike, 0) + 1
            rows.append(self.row(one))
            if len(rows) == most:
                break
        return rows

    def row(self, violation: _Violation) -> Row:
        work, k = self.work, violation.charge
        inside = (work.release >= violation.begin) & (work.due <= violation.end)
        request = work.request[inside]
        own, fixed = (sums(request, part[k][inside], work.requests) for part in (work.own, work.spread))
        if violation.kind == "sequence" and self._sequences is not None:
            line = work.charges[k].minorant
            fixed = self._sequences.steps(violation.column, violation.end, line.fixed, line.decode_fixed)
        return Row(
            violation.kind,
            own,
            fixed,
            self.replicas * (violation.end - violation.begin),
            violation.begin,
            violation.end,
        )

    def fullest(self, share: Array) -> float:
        """The part of its seconds that is taken in the window where that is largest: up to 1 for what a run attains."""
        if self._sequences is not None:
            self._sequences.choose(share)
        largest = 0.0
        for k in range(len(self.work.charges)):
            for _, begin, used, _ in self._windows(k, share):
                width = self.replicas * (self._due - begin)
                part = np.divide(used, width, out=np.zeros_like(used), where=width > 0.0)
                largest = max(largest, float(part.max()))
        return largest

    def _of(self, k: int, share: Array) -> Iterator[_Violation]:
        """The window that is exceeded most, for each start."""
        for kind, begin, used, first in self._windows(k, share):
            excess = used - (1.0 + RELATIVE) * self.replicas * (self._due - begin)
            excess[self._due <= begin] = -inf
            best = np.argmax(excess, axis=1)
            for i in np.nonzero(excess[np.arange(len(begin)), best] > EXCESS)[0]:
                start, end = float(begin[i, 0]), float(self._due[best[i]])
                relative = float(excess[i, best[i]]) / max(end - start, MIN_WINDOW_S)
                yield _Violation(relative, kind, k, start, end, first + int(i))

    def _windows(self, k: int, share: Array) -> Iterator[tuple[Kind, Array, Array, int]]:
        """Kind, [start][0], seconds [start][piece] of what lies between a start and the piece's due time, and the index
        of the first start: some starts at a time."""
        work, at = self.work, max(1, BLOCK // len(self._due))
        weight = share[self._request]
        own, spread = work.own[k][self._order] * weight, work.spread[k][self._order] * weight
        for first in range(0, len(self._starts), at):
            begin = self._starts[first : first + at, None]
            yield "window", begin, np.cumsum(np.where(self._release >= begin, own + spread, 0.0), axis=1), first
        if self._sequences is None or work.charges[k].by != "memory":
            return
        line, starts = work.charges[k].minorant, self._sequences.starts
        steps = self._sequences.seconds(self._due, line.fixed, line.decode_fixed).T
        for first in range(0, len(starts), at):
            begin = starts[first : first + at, None]
            used = np.cumsum(np.where(self._release >= begin, own, 0.0), axis=1)
            yield "sequence", begin, used + steps[first : first + at], first


class Sequences:
    """Pieces one after the other: of two whose windows do not overlap, and of one request's tokens, each needs steps of
    its own. So steps between two moments are at least the tokens of any such sequence in between, each weighed by its
    request's share. The heaviest is found by weighted interval scheduling, for all starts at once."""

    def __init__(self, work: RequestWork, starts: Array) -> None:
        self.starts = starts
        self._requests = work.requests
        begin, end, request, tokens, prompt = _runs(work)
        order = np.argsort(end, kind="stable")
        self._begin, self._end = begin[order], end[order]
        self._request, self._tokens, self._prompt = request[order], tokens[order], prompt[order]
        self._before = np.searchsorted(self._end, self._begin, side="right")  # pieces that end by its begin
        self._chosen = np.zeros((len(begin) + 1, len(starts)), dtype=bool)
        self._steps = np.zeros((len(begin) + 1, len(starts)))  # [pieces that end first][start]
        self._prompts = np.zeros((len(begin) + 1, len(starts)))

    def choose(self, share: Array) -> None:
        """The heaviest sequences under these shares."""
        value, prompt = share[self._request] * self._tokens, share[self._request] * self._prompt
        allowed = self._begin[:, None] >= self.starts
        steps, prompts, chosen = self._steps, self._prompts, self._chosen
        for k, before in enumerate(self._before.tolist()):
            longer = steps[before] + value[k]
            take = allowed[k] & (longer > steps[k])
            chosen[k + 1] = take
            steps[k + 1] = np.where(take, longer, steps[k])
            prompts[k + 1] = np.where(take, prompts[before] + prompt[k], prompts[k])

    def seconds(self, ends: Array, fixed: float, decode_fixed: float) -> Array:
        """[end][start]: fixed costs of the steps of the sequence chosen. A step that brings a first token need not
        decode."""
        count = np.searchsorted(self._end, ends, side="right")
        seconds: Array = (fixed + decode_fixed) * self._steps[count] - decode_fixed * self._prompts[count]
        return seconds

    def steps(self, column: int, end: float, fixed: float, decode_fixed: float) -> Array:
        """[request] the same, of its pieces in the sequence that was chosen from a start to `end`."""
        seconds = np.zeros(self._requests)
        k, later = int(np.searchsorted(self._end, end, side="right")), inf
        while k > 0:
            if not self._chosen[k, column]:
                k -= 1
                continue
            k -= 1
            if self._end[k] > later or self._begin[k] < self.starts[column]:
                raise RuntimeError(f"sequence of pieces: one ends at {self._end[k]}, after the next begins at {later}")
            seconds[self._request[k]] += (fixed + decode_fixed) * self._tokens[k] - decode_fixed * self._prompt[k]
            k, later = int(self._before[k]), self._begin[k]
        return seconds


def _runs(work: RequestWork) -> tuple[Array, Array, Ints, Ints, NDArray[np.bool_]]:
    """Returns all prefixes and suffixes of each request's pieces, as columns: begin and end (seconds), request, tokens,
    and whether the prompt is among them."""
    first = np.nonzero(work.prompt)[0]
    last = np.append(first[1:], len(work.prompt)) - 1
    begins, ends = [], []  # of each run, as indices of pieces
    for lo, hi in zip(first.tolist(), last.tolist(), strict=True):
        begins += [lo] * (hi - lo + 1) + list(range(lo + 1, hi + 1))
        ends += [*range(lo, hi + 1), *[hi] * (hi - lo)]
    u, v = np.array(begins), np.array(ends)
    before = np.concatenate([[0], np.cumsum(work.tokens)])
    return work.release[u], work.due[v], work.request[u], before[v + 1] - before[u], work.prompt[u]


def _some(moments: Array, most: int, always: Array | None = None) -> Array:
    """At most so many of them, evenly, and those that are always there (of these, too, at most so many)."""
    own = [part[:: max(1, -(-len(part) // most))] for part in (moments, always) if part is not None]
    return np.unique(np.concatenate(own))
