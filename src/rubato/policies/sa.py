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
(`Annealing`), how the last batch is split, and that time already waited counts. Ours, too: lengths are class means
unless a draw is asked for (`lengths: gaussian`), and requests are sent one by one unless batches are (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import exp, inf, log
from numbers import Integral
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed
from rubato.core.interfaces import MIN_WAKE_S, Dispatch, LatencyModel, SeqView, View
from rubato.core.request import SLO
from rubato.latency.whole_request import decode_seconds, prefill_seconds
from rubato.policies.vllm import Scheduler as Scheduler
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.compiled import compiled, warn_if_plain

SOURCE = "SLO-Aware Scheduling for Large Language Model Inferences, §3 and §4"

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

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


@dataclass(frozen=True, slots=True)
class Annealing:
    """How long the search is and what it accepts (§5.1's values).

    A solution that is worse by D is accepted with probability exp(-D / temperature), D = 1000 × the loss of G, as a
    share of the best G seen: at 500 a loss of 35 % is accepted half the time, at 20 one of 5 % in 8 of 100. Where no
    solution seen has a request in SLO, D is 1000 × the relative rise of the sum of latencies.
    """

    temperature: float = 500.0
    threshold: float = 20.0
    iterations: int = 100  # a level of temperature
    decay: float = 0.95

    def __post_init__(self) -> None:
        finite = 0.0 < self.threshold <= self.temperature < inf
        if not (finite and 0.0 < self.decay < 1.0 and self.iterations >= 1):
            said = f"temperature {self.temperature}, threshold {self.threshold}, decay {self.decay}"
            raise ValueError(
                f"{said}, iterations {self.iterations}: give finite numbers above 0, a temperature no "
                "lower than the threshold, a decay below 1, 1 iteration"
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """batches: indices of requests, in the order in which they are sent. met: requests predicted to be in SLO. latency:
    the sum of all end-to-end latencies, seconds. evaluations: solutions whose G was computed. levels: a row for each
    temperature of the search, with how many solutions worse than the one at hand were tried there, and accepted."""

    batches: tuple[tuple[int, ...], ...]
    met: int
    latency: float
    evaluations: int
    levels: Floats = field(default_factory=lambda: np.empty((0, 3)))

    @property
    def g(self) -> float:
        """Requests in SLO per second of latency (equation 2)."""
        return self.met / self.latency


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
    found = anneal(Predicted.of(requests, model, max_batch), Annealing(), np.random.default_rng(seed))
    return [[requests[i] for i in batch] for batch in found.batches]


# --------------------------------------------------------------------------- what a solution is worth


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the latency model says of requests (equations 14 to 19). seconds[j, b-1]: execution time of request j in a
    batch of b. slack[j, b-1]: how long it may wait for the batches before its own and still be in SLO. waited: seconds
    that all together have waited so far."""

    seconds: Floats
    slack: Floats
    waited: float

    @classmethod
    def of(cls, requests: Sequence[MappedRequest], model: LatencyModel, max_batch: int) -> Predicted:
        return Predictions().of(requests, model, max_batch)


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


@compiled()
def evaluated(order: Ints, sizes: Ints, seconds: Floats, slack: Floats, waited: float) -> tuple[int, float]:
    """Requests in SLO and the sum of latencies, when each batch waits for the longest of each before it (equation 11).
    sizes: of the batches, with zeros behind them. One loop: two, one in the other, take three times as long."""
    wait, total, met, k, longest = 0.0, waited, 0, 0, 0.0
    left, column = sizes[0], sizes[0] - 1
    for job in order:
        took = seconds[job, column]
        met += wait <= slack[job, column]
        total += wait + took
        longest = max(took, longest)
        left -= 1
        if left == 0:
            wait += longest
            longest = 0.0
            k += 1
            if k < len(sizes):
                left, column = sizes[k], sizes[k] - 1
    return met, total


# --------------------------------------------------------------------------- simulated annealing (Algorithm 1)


@compiled()
def move(order: Ints, sizes: Ints, most: int, rng: np.random.Generator) -> None:
    """Change a solution in one of the paper's three ways: a request goes into the batch before its own, or into the one
    after it (the last batch's into a new one), where there is room; or two of different batches change places.
    What is drawn and cannot be done is drawn again."""
    n = len(order)
    while True:
        kind, i = int(3 * rng.random()), int(n * rng.random())
        k, begin = 0, 0
        while begin + sizes[k] <= i:
            begin += sizes[k]
            k += 1
        end = begin + sizes[k] - 1
        job = order[i]
        if kind == 2:
            j = int(n * rng.random())
            if begin <= j <= end:
                continue
            order[i], order[j] = order[j], job
            return
        if kind == 0:
            if k == 0 or sizes[k - 1] == most:
                continue
            for p in range(i, begin, -1):
                order[p] = order[p - 1]
            order[begin] = job
            sizes[k - 1] += 1
        else:
            last = k + 1 == n or sizes[k + 1] == 0
            if (last and sizes[k] == 1) or (not last and sizes[k + 1] == most):
                continue
            for p in range(i, end):
                order[p] = order[p + 1]
            order[end] = job
            sizes[k + 1] += 1
        sizes[k] -= 1
        if sizes[k] == 0:
            sizes[k:-1] = sizes[k + 1 :].copy()
            sizes[-1] = 0
        return


@compiled()
def is_accepted(
    now_g: float, now_total: float, g: float, total: float, best_g: float, level: Floats, random: float
) -> bool:
    """Returns whether the search accepts a solution that is no better. `level` holds the temperature and the solutions
    tried and accepted; `random`, in [0, 1), decides."""
    difference = (now_g - g) / best_g if best_g > 0.0 else (total - now_total) / total
    take = random < exp(1000.0 * difference / level[0])
    level[1] += 1
    level[2] += take
    return take


@compiled()
def annealed(
    order: Ints, sizes: Ints, met: int, total: float, seconds: Floats, slack: Floats, waited: float,
    iterations: int, rng: np.random.Generator, levels: Floats,
) -> tuple[int, float]:  # fmt: skip
    """From a solution with `met` requests in SLO and this sum of latencies; leaves the best in `order` and `sizes`, and
    returns its two numbers. levels: a row for each temperature, as `is_accepted` has it."""
    best_order, best_sizes, best_met, best_total = order.copy(), sizes.copy(), met, total
    tried_order, tried_sizes = order.copy(), sizes.copy()
    g = best_g = met / total
    for level in levels:
        for _ in range(iterations):
            tried_order[:], tried_sizes[:] = order, sizes
            move(tried_order, tried_sizes, seconds.shape[1], rng)
            now_met, now_total = evaluated(tried_order, tried_sizes, seconds, slack, waited)
            now_g = now_met / now_total
            better = now_g > g or (now_g == g and now_total < total)
            if better or is_accepted(now_g, now_total, g, total, best_g, level, rng.random()):
                order[:], sizes[:] = tried_order, tried_sizes
                met, total, g = now_met, now_total, now_g
                if g > best_g or (g == best_g and total < best_total):
                    best_order[:], best_sizes[:] = order, sizes
                    best_met, best_total, best_g = met, total, g
    order[:], sizes[:] = best_order, best_sizes
    return best_met, best_total


@compiled()
def annealed_one_by_one(
    order: Ints, met: int, total: float, seconds: Floats, slack: Floats,
    iterations: int, rng: np.random.Generator, levels: Floats,
) -> None:  # fmt: skip
    """`annealed` for batches of 1, a third of its time: of the three moves only the exchange can be done, which leaves
    those before the two and behind them as they are. Leaves the best in `order`."""
    n = len(order)
    took, may_wait, wait = seconds[order, 0], slack[order, 0], np.zeros(n)
    for p in range(n - 1):
        wait[p + 1] = wait[p] + took[p]
    best, best_total = order.copy(), total
    g = best_g = met / total
    for level in levels:
        for _ in range(iterations):
            i, j = int(n * rng.random()), int((n - 1) * rng.random())
            i, j = min(i, j), max(i, j + (j >= i))
            later = took[j] - took[i]  # by how much those between them begin later
            now_met = met - (wait[i] <= may_wait[i]) - (wait[j] <= may_wait[j])
            now_met += (wait[i] <= may_wait[j]) + (wait[j] + later <= may_wait[i])
            for p in range(i + 1, j):
                now_met += (wait[p] + later <= may_wait[p]) - (wait[p] <= may_wait[p])
            now_total = total + later * (j - i)
            now_g = now_met / now_total
            better = now_g > g or (now_g == g and now_total < total)
            if better or is_accepted(now_g, now_total, g, total, best_g, level, rng.random()):
                for each in (took, may_wait):
                    each[i], each[j] = each[j], each[i]
                order[i], order[j] = order[j], order[i]
                for p in range(i, j):
                    wait[p + 1] = wait[p] + took[p]
                met, total, g = now_met, now_total, now_g
                if g > best_g or (g == best_g and total < best_total):
                    best[:] = order
                    best_total, best_g = total, g
    order[:] = best


def anneal(predicted: Predicted, how: Annealing, rng: np.random.Generator) -> Solution:
    """The best solution that the search has seen. It begins with the better of order of arrival and order of execution
    time, both in full batches. Where the second meets every SLO Algorithm 1 ends there; that is the best only in
    batches of 1, so with larger ones the search goes on."""
    seconds, slack, waited = predicted.seconds, predicted.slack, predicted.waited
    n, most = seconds.shape
    sizes = np.zeros(n, dtype=np.int64)
    full = -(-n // most)
    sizes[:full] = most
    sizes[full - 1] = n - (full - 1) * most
    arrival = np.arange(n, dtype=np.int64)
    shortest = np.argsort(seconds[:, most - 1], kind="stable").astype(np.int64)
    met, total = evaluated(shortest, sizes, seconds, slack, waited)
    own_met, own_total = evaluated(arrival, sizes, seconds, slack, waited)
    if n == 1 or (most == 1 and met == n):
        return Solution(_batches(shortest, sizes), met, total, 2)
    begin = shortest
    if own_met / own_total > met / total:
        begin, met, total = arrival, own_met, own_total
    levels = _levels(how).copy()
    if most == 1:
        annealed_one_by_one(begin, met, total, seconds, slack, how.iterations, rng, levels)
        met, total = evaluated(begin, sizes, seconds, slack, waited)
    else:
        met, total = annealed(begin, sizes, met, total, seconds, slack, waited, how.iterations, rng, levels)
    return Solution(_batches(begin, sizes), met, total, how.iterations * len(levels) + 2, levels)


@lru_cache
def _levels(how: Annealing) -> Floats:
    most = int(max(0.0, log(how.threshold / how.temperature) / log(how.decay))) + 2
    temperatures = np.cumprod([how.temperature, *[how.decay] * most])
    return np.outer(temperatures[temperatures >= how.threshold], [1.0, 0.0, 0.0])


@lru_cache(1)
def compile_search() -> None:
    """Compile the search, once on a new machine, or load it: seconds that no request is to wait for."""
    warn_if_plain("sa", "up to a second for each search")
    for most in (1, 2):
        predicted = Predicted(np.ones((2, most)), np.zeros((2, most)), 0.0)
        anneal(predicted, Annealing(iterations=1), np.random.default_rng(0))


def _batches(order: Ints, sizes: Ints) -> tuple[tuple[int, ...], ...]:
    jobs = iter(order.tolist())
    return tuple(tuple(islice(jobs, size)) for size in sizes.tolist() if size)


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
    slo, waited = seq.request.stages[seq.stage].slo, max(0.0, now - seq.stage_start)
    return MappedRequest(seq.id, max(1, seq.length), max(1, round(remaining_output(seq))), slo, waited)
