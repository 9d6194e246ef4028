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
    """A request to be ordered.

    Args:
        id: of the request
        prompt: tokens
        output: tokens, as predicted
        slo: its SLO
        waited: seconds since it arrived
    """

    id: str
    prompt: int
    output: int
    slo: SLO
    waited: float = 0.0

    def __post_init__(self) -> None:
        is_whole = isinstance(self.prompt, Integral) and isinstance(self.output, Integral)
        if not is_whole or self.prompt < 1 or self.output < 1 or not 0.0 <= self.waited < inf:
            values = f"request {self.id!r}: prompt {self.prompt}, output {self.output}, waited {self.waited} s"
            raise ValueError(f"{values}: give 1 token or more of each, whole numbers, and a finite time of 0 or more")


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
    solution = anneal(Predictions().predict(requests, model, max_batch), Annealing(), np.random.default_rng(seed))
    return [[requests[i] for i in batch] for batch in solution.batches]


# --------------------------------------------------------------------------- what a solution is worth


@dataclass(slots=True)
class _RequestPrediction:
    """The prediction of a request as if it had just arrived, by batch size from 1 on: the seconds that it takes, and
    until when it has to be executed (`_slack`)."""

    request: MappedRequest
    seconds: Floats
    slack: Floats

    def holds_for(self, request: MappedRequest) -> bool:
        """Returns whether the prediction still stands for the request as it is now."""
        own = self.request
        is_same = own.prompt == request.prompt and own.slo == request.slo
        return is_same and abs(request.output - own.output) <= PREDICTION_TOLERANCE * own.output


@dataclass
class Predictions:
    """The predictions of the requests that wait for one replica, kept from one mapping to the next: each takes a few
    calls of the latency model for every batch size, and few change."""

    _rows_by_id: dict[str, _RequestPrediction] = field(default_factory=dict)
    _probe_seconds: float = 0.0  # of `PROBE_TOKENS`, when they were made

    def predict(self, requests: Sequence[MappedRequest], model: LatencyModel, max_batch: int) -> Predicted:
        """Predicts these requests, and forgets all others."""
        sizes = min(max_batch, max(1, len(requests)))
        probe_seconds = prefill_seconds(model, 1, PROBE_TOKENS) + decode_seconds(model, 1, PROBE_TOKENS, 1)
        if abs(probe_seconds - self._probe_seconds) > PREDICTION_TOLERANCE * self._probe_seconds:
            self._rows_by_id, self._probe_seconds = {}, probe_seconds
        rows = [self._row(request, model, sizes) for request in requests]
        self._rows_by_id = {request.id: row for request, row in zip(requests, rows, strict=True)}
        seconds, slack = np.empty((2, len(requests), sizes))
        for j, (request, row) in enumerate(zip(requests, rows, strict=True)):
            seconds[j] = row.seconds[:sizes]
            slack[j] = row.slack[:sizes] - request.waited
        return Predicted(seconds, slack, sum(request.waited for request in requests))

    def _row(self, request: MappedRequest, model: LatencyModel, sizes: int) -> _RequestPrediction:
        row = self._rows_by_id.get(request.id)
        if row is None or not row.holds_for(request):
            row = _RequestPrediction(request, np.empty(0), np.empty(0))
        predicted_sizes = len(row.seconds)
        if predicted_sizes < sizes:
            own, new = row.request, np.empty((2, sizes - predicted_sizes))
            for b in range(predicted_sizes + 1, sizes + 1):
                prefill = prefill_seconds(model, b, own.prompt)
                decode = decode_seconds(model, b, own.prompt, own.output)
                new[:, b - predicted_sizes - 1] = prefill + decode, _slack(own.slo, prefill, decode, own.output)
            row.seconds, row.slack = np.concatenate([row.seconds, new[0]]), np.concatenate([row.slack, new[1]])
        return row


def _slack(slo: SLO, prefill: float, decode: float, output: int) -> float:
    """Returns the seconds, from its arrival, within which a request must be executed; -inf if its TPOT cannot be met.

    Args:
        slo: of the request
        prefill: seconds of its prompt in the batch
        decode: seconds of its output in the batch
        output: tokens
    """
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
    _replica_of_sent: dict[str, str] = field(default_factory=dict, init=False)  # request -> the replica that serves it
    _next_at: dict[str, float] = field(default_factory=dict, init=False)  # replica -> when a batch may be sent again
    _predictions: dict[str, Predictions] = field(default_factory=dict, init=False)  # by replica

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
                self._replica_of_sent.pop(event.id, None)
            elif (
                isinstance(event, Placed) and event.id in self._replica_of_sent
            ):  # with its group, or where its prefix is cached
                self._replica_of_sent[event.id] = event.replica

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        waiting = {seq.id: seq for seq in held}
        views = {view.id: view for view in fleet}
        queued = self._forget_gone(waiting, views)
        for id in self._assign_new([seq for seq in held if seq.id not in queued], fleet):
            if self.dispatch != "place":
                self._map(waiting, views[id], now)
        place = {id: view.id for view in fleet for id in self._take_next(waiting, view, now)}
        self._replica_of_sent.update(place)
        times = (at for id, at in self._next_at.items() if at > now + MIN_WAKE_S and self._batches.get(id))
        return Dispatch(place, wake_at=min(times, default=None))

    def _forget_gone(self, waiting: Mapping[str, SeqView], views: Mapping[str, View]) -> set[str]:
        """Drops cancelled requests and lost replicas; returns the ids that are assigned to the other replicas."""
        old, self._batches = self._batches, {}
        for replica in views:
            batches = ([id for id in batch if id in waiting] for batch in old.get(replica, []))
            self._batches[replica] = [batch for batch in batches if batch]
        self._predictions = {replica: self._predictions.get(replica, Predictions()) for replica in views}
        return {id for batches in self._batches.values() for batch in batches for id in batch}

    def _assign_new(self, new: Sequence[SeqView], fleet: Sequence[View]) -> list[str]:
        """Assigns each new request to the replica with the most memory left; if that is too little, a new round begins,
        in which all memory is free (equation 20).

        Returns:
            the ids of the replicas that got some, in the fleet's order: all searches draw from one stream
        """
        full = {view.id: KV_USE_SHARE * view.kv_total * view.limits.block_size for view in fleet}
        memory = {id: self._memory.get(id, tokens) for id, tokens in full.items()}
        changed = set()
        for seq in new:
            need = seq.length + remaining_output(seq)
            emptiest = max(memory, key=memory.__getitem__)
            if memory[emptiest] < need:
                memory = dict(full)
                emptiest = max(memory, key=memory.__getitem__)
            memory[emptiest] -= need
            self._batches[emptiest].append([seq.id])
            changed.add(emptiest)
        self._memory = memory
        return [view.id for view in fleet if view.id in changed]

    def _map(self, waiting: Mapping[str, SeqView], view: View, now: float) -> None:
        """Orders the requests of one replica that have not been sent in batches (the priority mapper, §4.3)."""
        requests = [_mapped_request(waiting[id], now) for batch in self._batches[view.id] for id in batch]
        predicted = self._predictions[view.id].predict(requests, view.latency, self._max_batch_size(view))
        self._batches[view.id] = [[requests[i].id for i in batch] for batch in self.solve(predicted).batches]

    def _max_batch_size(self, view: View) -> int:
        limits = view.limits
        return self.max_batch or min(limits.max_num_seqs, limits.max_running or limits.max_num_seqs)

    def solve(self, predicted: Predicted) -> Solution:
        """Finds an order and batches by annealing; a router that searches otherwise overrides this."""
        return anneal(predicted, self._annealing, self._rng)

    def _take_next(self, waiting: Mapping[str, SeqView], view: View, now: float) -> list[str]:
        """Takes from the replica's batches the ids of the requests to send now, and returns them."""
        batches, running = self._batches[view.id], sum(replica == view.id for replica in self._replica_of_sent.values())
        if not batches:
            return []
        if self.dispatch == "place":
            free = self._max_batch_size(view) - running
            if free <= 0:
                return []
            self._map(waiting, view, now)  # only now: an order of which nothing can be sent would be made anew
            ordered = [id for batch in self._batches[view.id] for id in batch]
            self._batches[view.id] = [ordered[free:]] if ordered[free:] else []
            return ordered[:free]
        if (self.dispatch == "batch_end" and running) or now + MIN_WAKE_S < self._next_at.get(view.id, 0.0):
            return []
        self._next_at[view.id] = now + BATCH_GAP_S
        return batches.pop(0)


def _mapped_request(seq: SeqView, now: float) -> MappedRequest:
    """Returns a request as it waits; a resumed one's prompt is all its tokens so far."""
    slo, waited = seq.slo, max(0.0, now - seq.stage_start)
    return MappedRequest(seq.id, max(1, seq.length), max(1, round(remaining_output(seq))), slo, waited)
