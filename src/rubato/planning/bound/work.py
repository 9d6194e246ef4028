"""The work of a workload as pieces: when each may begin and must have ended, and what it takes at least.

A request is served in pieces: its prompt, and up to `PIECES` runs of output tokens. A piece's steps begin after its
release and end by the deadline of its last token, if the request is attained. What it takes is a sum over the entries
that a step has for it (`minorant.py`), and a part of what every step takes whatever is in it: a step holds the KV of
all its entries, at most `kv_blocks`, and has at most `max_num_seqs` of them, so an entry can be charged its blocks, or
itself, over that many. This is the most that fixed costs can be spread.

An output token is an entry that decodes, or the end of a recomputation of all tokens before it (after preemption, or
after a move without KV); charged is the cheaper of both. KV blocks are not shared between requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.core.slo import TOLERANCE_S
from rubato.planning.bound.minorant import Array, Minorant, minorants
from rubato.planning.feasibility import fitting
from rubato.simulation.run_spec import Hardware
from rubato.workloads import OfferedStage, Workload

PIECES = 10  # of the outputs of a request; more are tighter
NEAR_LARGEST, MAX_CHARGES = 0.8, 6  # charges whose mean is this near to the largest are in use, at most so many
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Charge:
    """How a piece is charged: by which line, and by which limit the fixed cost of steps is spread."""

    minorant: Minorant
    by: str  # "memory" or "sequences"


@dataclass(frozen=True)
class RequestWork:
    """The pieces of work of all requests, by index: when a piece is released and due (seconds), its request, the tokens
    that come out, whether it is a prompt. Pieces of two periods are there; a request's index is the same in both.

    Args:
        own: seconds of a piece's entries, by charge and piece.
        spread: a piece's part of the fixed costs of steps, by charge and piece.
        possible: whether a request could be attained by itself, by request.
        period: seconds after which the requests come again, without end, or inf: they come once.
    """

    release: Array
    due: Array
    request: Ints
    tokens: Ints
    prompt: NDArray[np.bool_]
    own: Array
    spread: Array
    charges: tuple[Charge, ...]
    possible: NDArray[np.bool_]
    arrivals: Array
    period: float = inf

    @property
    def requests(self) -> int:
        return len(self.arrivals)

    @cached_property
    def once(self) -> int:
        """Pieces of one period: the first so many."""
        return len(self.release) // (1 if self.period == inf else 2)

    def by_request(self, piece_seconds: Array) -> Array:
        """[request] sums over pieces of one period."""
        return sums(self.request[: self.once], piece_seconds[: self.once], self.requests)

    @cached_property
    def cost(self) -> Array:
        """[request] seconds of a replica that it takes at least, by the charge that is largest for it."""
        each = [self.by_request(own + spread) for own, spread in zip(self.own, self.spread, strict=True)]
        largest: Array = np.max(each, axis=0)
        return largest


def sums(request: Ints, seconds: Array, requests: int) -> Array:
    """[request] of pieces' seconds."""
    sums: Array = np.bincount(request, seconds, requests).astype(np.float64)
    return sums


def work_of(load: Workload, machine: Hardware, *, endless: bool) -> RequestWork:
    """All pieces of a workload, times as they are in it. Raises ValueError for requests that are not covered."""
    if load.paced_by_ends:
        raise ValueError(
            f"workload {load.name!r} has requests whose times follow from how others end: a bound is of given times"
        )
    offered = [_covered(load.parts(a), a.id) for a in load.arrivals]
    at = np.array([a.at for a in load.arrivals])
    if not offered:
        raise ValueError("the workload is empty: give requests")
    if endless and (len(at) < 2 or at[-1] <= at[0]):
        raise ValueError(
            "requests that come at one instant do not make a stream to repeat: bound them as they come once"
        )
    period = float((at[-1] - at[0]) * len(at) / (len(at) - 1)) if endless else inf
    charged = _Charged(machine.limits, _minorants(machine, offered), max(s.prompt + s.output for s in offered))
    rows = [charged.pieces(i, float(at[i]), stage) for i, stage in enumerate(offered)]
    release, due, request, tokens, prompt = (np.concatenate([row[k] for row in rows]) for k in range(5))
    own, spread = (np.concatenate([row[k] for row in rows], axis=1) for k in (5, 6))
    largest = _largest(own + spread)
    fits = fitting(machine)
    possible = np.array([s.prompt + s.output <= fits and charged.in_time(s) for s in offered])
    own, spread = own[largest], spread[largest]
    if endless:
        release, due = np.concatenate([release, release + period]), np.concatenate([due, due + period])
        request, tokens, prompt = (np.tile(part, 2) for part in (request, tokens, prompt))
        own, spread = np.tile(own, (1, 2)), np.tile(spread, (1, 2))
    charges = tuple(charged.charges[k] for k in largest)
    return RequestWork(release, due, request, tokens, prompt, own, spread, charges, possible, at, period)


def _covered(stages: Sequence[OfferedStage], name: str) -> OfferedStage:
    if len(stages) > 1:
        raise ValueError(f"request {name!r} has several stages: a bound is worked out for requests of one prompt")
    (stage,) = stages
    if not stage.prompt:
        raise ValueError(f"request {name!r} has no prompt: a bound is worked out for requests of one prompt")
    if _due(stage.slo, stage.output)[-1] == inf:
        raise ValueError(
            f"request {name!r} has no deadline for its last token: give each request ttft and tpot, or e2e"
        )
    return stage


def _due(slo: SLO, output: int) -> Array:
    """Of each output token, seconds after arrival, by the deadline rule; inf where there is none, or it is not fixed
    beforehand (a TPOT without a TTFT)."""
    first = inf if slo.ttft is None else slo.ttft
    later = (0.0 if slo.tpot is None else slo.tpot) * np.arange(output)
    if slo.tpot is None:
        later[1:] = inf
    due: Array = np.minimum(first + later, inf if slo.e2e is None else slo.e2e)
    return due


def _minorants(machine: Hardware, offered: Sequence[OfferedStage]) -> list[Minorant]:
    """Close where batches are as full of these requests' decodes as limits allow."""
    limits = machine.limits
    decodes = np.array([s.output - 1 for s in offered], dtype=float)
    read = np.array([s.prompt + s.output / 2 for s in offered])
    kv = float(np.average(read, weights=decodes if decodes.any() else None))
    seqs = max(1.0, min(limits.max_num_seqs, limits.kv_blocks * limits.block_size / kv))
    return minorants(machine.model, limits, seqs, seqs * kv)


def _largest(seconds: Array) -> Ints:
    """Indices of the charges that matter: to leave others out only loosens a bound."""
    mean = seconds.mean(axis=1)
    best = np.argsort(-mean)[:MAX_CHARGES]
    largest: Ints = best[mean[best] >= NEAR_LARGEST * mean[best[0]]]
    return largest


class _Charged:
    """Pieces of single requests. Sums over a run of output tokens are differences of two running sums over KV."""

    def __init__(self, limits: Limits, lines: Sequence[Minorant], longest: int) -> None:
        self.charges = tuple(Charge(line, by) for line in lines for by in ("memory", "sequences"))
        kv = np.arange(1.0, longest + 1.0)
        each = {
            "memory": -(-kv // limits.block_size) / limits.kv_blocks,
            "sequences": np.full(longest, 1 / limits.max_num_seqs),
        }
        self._parts = [each[c.by] for c in self.charges]  # [charge][KV - 1] of a step, that an entry is charged
        self._running = [_running(part) for part in self._parts]
        prefill = {line: line.prefill_seconds(longest) for line in lines}
        decode = {
            line: _running(np.minimum(line.decode_seconds(kv), prefill[line] - line.decode_fixed)) for line in lines
        }
        self._prefill = [prefill[c.minorant] for c in self.charges]
        self._decode = [decode[c.minorant] for c in self.charges]
        self._first = np.max([line.fixed + prefill[line] for line in lines], axis=0)  # [prompt - 1] seconds to token 0
        self._step = max(line.fixed + line.token + line.seq for line in lines)

    def in_time(self, stage: OfferedStage) -> bool:
        """Whether an idle replica could keep each deadline, if its steps took no longer than is known here."""
        earliest = self._first[stage.prompt - 1] + self._step * np.arange(stage.output)
        return bool(np.all(earliest <= _due(stage.slo, stage.output) + TOLERANCE_S))

    def pieces(self, request: int, at: float, stage: OfferedStage) -> tuple[Array, ...]:
        """release, due, request, tokens, prompt; own and spread [charge][piece]. A step on token i (from 1; 0 is what
        the prompt brings) begins after token i - 1 and reads prompt + i tokens of KV."""
        p, o = stage.prompt, stage.output
        cut = np.unique(np.linspace(1, o, min(PIECES, o - 1) + 1).astype(int)) if o > 1 else np.array([1])
        begin, end = cut[:-1], cut[1:]  # tokens begin to end - 1
        due = _due(stage.slo, o)
        release = np.concatenate([[at], at + self._first[p - 1] + (begin - 1) * self._step])
        own, spread = [], []
        for charge, prefill, decode, part, running in zip(
            self.charges, self._prefill, self._decode, self._parts, self._running, strict=True
        ):
            line = charge.minorant
            own.append(np.concatenate([[prefill[p - 1]], decode[p + end - 1] - decode[p + begin - 1]]))
            later = (line.fixed + line.decode_fixed) * (running[p + end - 1] - running[p + begin - 1])
            spread.append(np.concatenate([[line.fixed * part[p - 1]], later]))
        pieces = len(release)
        return (
            release, at + due[np.concatenate([[0], end - 1])], np.full(pieces, request),
            np.concatenate([[1], end - begin]), np.arange(pieces) == 0, np.array(own), np.array(spread),
        )  # fmt: skip


def _running(values: Array) -> Array:
    """[n] sum of the first n."""
    return np.concatenate([[0.0], np.cumsum(values)])
