"""SA: an order and batch sizes for the requests that wait, found by simulated annealing, in front of any engine.

For bursts in front of a server whose own order stays and which takes few requests at once, output lengths known.
docs/policies/sa.md has the rest.

As in the paper (§3, §4): requests wait in a pool; each is assigned to the replica with the most memory left, by turns;
for each replica an order of its requests and the sizes of the batches in which they are sent are sought that maximise
G = requests in SLO / sum of their end-to-end latencies, as a latency model and predicted output lengths give them; the
batches are sent one after the other, or the next request whenever a place is free. The engine behind is vLLM's
(`policies.vllm`) and knows nothing of it.
`order` is the same search for anyone's server (docs/policies/sa.md).

Ours, where the paper is silent: how a difference of G is scaled before it is compared with the temperature
(`policy_kit.annealing`), how the last batch is split, and that time already waited counts. Ours, too: lengths are class
means unless a draw is asked for (`lengths: gaussian`), and requests are sent one by one unless batches are
(`dispatch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral
from typing import ClassVar

import numpy as np

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed
from rubato.core.interfaces import MIN_WAKE_S, Dispatch, LatencyModel, SeqView, View
from rubato.core.request import SLO
from rubato.latency.whole_request import decode_seconds, prefill_seconds
from rubato.policies.vllm import Scheduler as Scheduler
from rubato.policy_kit.annealing import Annealing, Floats, Predicted, Solution, anneal, compile_search
from rubato.policy_kit.batch_builder import remaining_output

SOURCE = "SLO-Aware Scheduling for Large Language Model Inferences, §3 and §4"

BATCH_GAP_S = 1e-4  # seconds between the batches (§5.1)
KV_USE_SHARE = 0.9  # μ of equation 20: the share of KV memory that tokens fill (§5.1)
DISPATCHES = ("place", "interval", "batch_end")
# A prediction stands while the length and the step times behind it move by less: G is the same (§5.3).
PREDICTION_TOLERANCE = 0.025
PROBE_TOKENS = 1024  # tokens whose prefill and decode step tell how fast a latency model believes its engine to be


@dataclass(frozen=True, slots=True)
class MappedRequest:
    """A request to be ordered. prompt, output: tokens, the second as predicted. waited: seconds since it arrived."""

    id: str
    prompt: int
    output: int
    slo: SLO
    waited: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.prompt, Integral) and isinstance(self.output, Integral)
        if not whole or self.prompt < 1 or self.output < 1 or not 0.0 <= self.waited < inf:
            said = f"request {self.id!r}: prompt {self.prompt}, output {self.output}, waited {self.waited} s"
            raise ValueError(f"{said}: give 1 token or more of each, whole numbers, and a finite time of 0 or more")


def order(
    requests: Sequence[MappedRequest], model: LatencyModel, max_batch: int, *, seed: int = 0
) -> list[list[MappedRequest]]:
    """Orders requests in batches of at most `max_batch`, to be sent one after the other.

    Args:
        requests: the waiting requests, with unique ids
        model: predicts a step's time from its shape; `latency.bilinear.Model()` is the paper's
        max_batch: requests of a batch, 1 or more
        seed: of the search

    Returns:
        the batches

    Raises:
        ValueError: `max_batch` is no whole number of 1 or more, or two requests have one id
    """
    if not isinstance(max_batch, Integral) or max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}: give a whole number, 1 or more")
    if len({request.id for request in requests}) < len(requests):
        raise ValueError("two requests have the same id: ids must be unique")
    if not requests:
        return []
    found = anneal(Predictions().of(requests, model, max_batch), Annealing(), np.random.default_rng(seed))
    return [[requests[i] for i in batch] for batch in found.batches]


# --------------------------------------------------------------------------- what a solution is worth


@dataclass(slots=True)
class _RequestPrediction:
    """The prediction of a request that has just arrived, by batch size from 1 on."""

    request: MappedRequest
    seconds: Floats
    slack: Floats

    def stands(self, request: MappedRequest) -> bool:
        own = self.request
        same = own.prompt == request.prompt and own.slo == request.slo
        return same and abs(request.output - own.output) <= PREDICTION_TOLERANCE * own.output


@dataclass
class Predictions:
    """Predictions of the requests that wait for one replica, kept by id and batch size from one mapping to the next:
    each is a few calls of the latency model, for as many batch sizes as there are, and few change."""

    _rows_by_id: dict[str, _RequestPrediction] = field(default_factory=dict)
    _probed: float = 0.0  # seconds of `PROBE_TOKENS` when they were made

    def of(self, requests: Sequence[MappedRequest], model: LatencyModel, max_batch: int) -> Predicted:
        """Predicts these requests, and forgets all others."""
        sizes = min(max_batch, max(1, len(requests)))
        probed = prefill_seconds(model, 1, PROBE_TOKENS) + decode_seconds(model, 1, PROBE_TOKENS, 1)
        if abs(probed - self._probed) > PREDICTION_TOLERANCE * self._probed:
            self._rows_by_id, self._probed = {}, probed
        rows = [self._row(request, model, sizes) for request in requests]
        self._rows_by_id = {request.id: row for request, row in zip(requests, rows, strict=True)}
        seconds, slack = np.empty((2, len(requests), sizes))
        for j, (request, row) in enumerate(zip(requests, rows, strict=True)):
            seconds[j] = row.seconds[:sizes]
            slack[j] = row.slack[:sizes] - request.waited
        return Predicted(seconds, slack, sum(request.waited for request in requests))

    def _row(self, request: MappedRequest, model: LatencyModel, sizes: int) -> _RequestPrediction:
        row = self._rows_by_id.get(request.id)
        if row is None or not row.stands(request):
            row = _RequestPrediction(request, np.empty(0), np.empty(0))
        known = len(row.seconds)
        if known < sizes:
            own, new = row.request, np.empty((2, sizes - known))
            for b in range(known + 1, sizes + 1):
                prefill = prefill_seconds(model, b, own.prompt)
                decode = decode_seconds(model, b, own.prompt, own.output)
                new[:, b - known - 1] = prefill + decode, _slack(own.slo, prefill, decode, own.output)
            row.seconds, row.slack = np.concatenate([row.seconds, new[0]]), np.concatenate([row.slack, new[1]])
        return row


def _slack(slo: SLO, prefill: float, decode: float, output: int) -> float:
    """Returns the seconds until it must be executed; -inf if a batch of that size cannot meet its TPOT."""
    if slo.tpot is not None and decode / output > slo.tpot:
        return -inf
    by_ttft = inf if slo.ttft is None else slo.ttft - prefill
    by_e2e = inf if slo.e2e is None else slo.e2e - prefill - decode
    return min(by_ttft, by_e2e)


# --------------------------------------------------------------------------- as a policy (Algorithm 2)


@dataclass
class Router:
    """Sends waiting requests in the order and batches that annealing finds.

    Args:
        max_batch ([0, inf)): the largest batch; 0: as many sequences as hold KV at once, or as a batch takes
        dispatch (place, interval, batch_end): the next request when a place is free, in an order found anew; batches
            0.1 ms apart (§5.1); each batch when all before it has ended (§4.4)
        temperature ([20, inf)): at which the annealing begins; it ends below 20
        iterations ([1, inf)): orders tried at each temperature
    """

    needs: ClassVar[frozenset[str]] = frozenset({"step_times"})
    wants: ClassVar[frozenset[str]] = frozenset({"step"})  # so that requests of one instant are mapped together
    default_lengths: ClassVar[str] = "running_mean"
    max_batch: int = 0
    dispatch: str = "place"
    temperature: float = 500.0
    iterations: int = 100
    _annealing: Annealing = field(init=False)
    _rng: np.random.Generator = field(init=False)
    _memory: dict[str, float] = field(default_factory=dict, init=False)  # replica -> tokens that still fit
    _batches: dict[str, list[list[str]]] = field(default_factory=dict, init=False)  # replica -> what is to be sent
    _sent: dict[str, str] = field(default_factory=dict, init=False)  # request -> the replica that serves it
    _next_at: dict[str, float] = field(default_factory=dict, init=False)  # replica -> when a batch may be sent again
    _predictions: dict[str, Predictions] = field(default_factory=dict, init=False)  # replica -> of what waits for it

    def __post_init__(self) -> None:
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch is {self.dispatch!r}: give {' or '.join(map(repr, DISPATCHES))}")
        if self.max_batch < 0:
            raise ValueError(f"max_batch is {self.max_batch}: give the engine's, or 0 for as many as hold KV at once")
        self._annealing = Annealing(self.temperature, iterations=self.iterations)
        self._rng = np.random.default_rng(0)
        compile_search()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff | Lost):
                self._sent.pop(event.id, None)
            elif isinstance(event, Placed) and event.id in self._sent:  # with its group, or where its prefix is cached
                self._sent[event.id] = event.replica

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        waiting = {seq.id: seq for seq in held}
        views = {view.id: view for view in fleet}
        queued = self._forget_gone(waiting, views)
        for id in self._assigned([seq for seq in held if seq.id not in queued], fleet):
            if self.dispatch != "place":
                self._map(waiting, views[id], now)
        place = {id: view.id for view in fleet for id in self._due(waiting, view, now)}
        self._sent.update(place)
        times = (at for id, at in self._next_at.items() if at > now + MIN_WAKE_S and self._batches.get(id))
        return Dispatch(place, wake_at=min(times, default=None))

    def _forget_gone(self, waiting: Mapping[str, SeqView], views: Mapping[str, View]) -> set[str]:
        """Drop cancelled requests and lost replicas. Returns the ids assigned to one of the others."""
        self._batches = {
            replica: [
                left for batch in self._batches.get(replica, []) if (left := [id for id in batch if id in waiting])
            ]
            for replica in views
        }
        self._predictions = {replica: self._predictions.get(replica, Predictions()) for replica in views}
        return {id for batches in self._batches.values() for batch in batches for id in batch}

    def _assigned(self, new: Sequence[SeqView], fleet: Sequence[View]) -> list[str]:
        """Each to the replica with the most memory left; when that has none for it, a new round begins (equation 20).
        Returns the replicas that have new ones, in the fleet's order: each search draws from one stream."""
        full = {view.id: KV_USE_SHARE * view.kv_total * view.limits.block_size for view in fleet}
        left = {id: self._memory.get(id, tokens) for id, tokens in full.items()}
        changed = set()
        for seq in new:
            need = seq.length + remaining_output(seq)
            most = max(left, key=left.__getitem__)
            if left[most] < need:
                left = dict(full)
                most = max(left, key=left.__getitem__)
            left[most] -= need
            self._batches[most].append([seq.id])
            changed.add(most)
        self._memory = left
        return [view.id for view in fleet if view.id in changed]

    def _map(self, waiting: Mapping[str, SeqView], view: View, now: float) -> None:
        """The priority mapper (§4.3), for the requests of one replica that have not been sent."""
        asked = [_mapped_request(waiting[id], now) for batch in self._batches[view.id] for id in batch]
        predicted = self._predictions[view.id].of(asked, view.latency, self._largest(view))
        self._batches[view.id] = [[asked[i].id for i in batch] for batch in self.solved(predicted).batches]

    def _largest(self, view: View) -> int:
        limits = view.limits
        return self.max_batch or min(limits.max_num_seqs, limits.max_running or limits.max_num_seqs)

    def solved(self, predicted: Predicted) -> Solution:
        """By annealing; a router that searches otherwise overrides this."""
        return anneal(predicted, self._annealing, self._rng)

    def _due(self, waiting: Mapping[str, SeqView], view: View, now: float) -> list[str]:
        """What is to be sent to a replica now, if anything."""
        batches, there = self._batches[view.id], sum(replica == view.id for replica in self._sent.values())
        if not batches:
            return []
        if self.dispatch == "place":
            free = self._largest(view) - there
            if free <= 0:
                return []
            self._map(waiting, view, now)  # not before: an order that nothing can be sent by would be made anew
            ordered = [id for batch in self._batches[view.id] for id in batch]
            self._batches[view.id] = [ordered[free:]] if ordered[free:] else []
            return ordered[:free]
        if (self.dispatch == "batch_end" and there) or now + MIN_WAKE_S < self._next_at.get(view.id, 0.0):
            return []
        self._next_at[view.id] = now + BATCH_GAP_S
        return batches.pop(0)


def _mapped_request(seq: SeqView, now: float) -> MappedRequest:
    """A request as it waits; a resumed one's prompt is all its tokens so far."""
    slo, waited = seq.slo, max(0.0, now - seq.stage_start)
    return MappedRequest(seq.id, max(1, seq.length), max(1, round(remaining_output(seq))), slo, waited)
