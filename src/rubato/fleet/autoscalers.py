"""Autoscalers: PolyServe's, by its pool of replicas without a tier, and one for any policy, by predicted attainment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite

from rubato.core.events import Event, Finished, Joined, Offered
from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import Scaling, SeqView, View
from rubato.core.plan import Shape
from rubato.core.registry import Registry
from rubato.core.request import Request
from rubato.fleet.scaling import is_idle

CHECK_S = 1.0  # interval of the checks of predicted attainment
MAX_UTILIZATION = 0.8  # of the time, places and KV of the replicas that stay when one leaves
MIN_MISSES = 2  # in a tier: one miss alone adds no replica


@dataclass
class ReplicaBounds:
    """Limits the number of replicas that serve or start.

    Args:
        min (1 or more): replicas, at least; after a loss others are added at once
        max (1 or more): replicas, at most
    """

    min: int = 1
    max: int = 8

    def __post_init__(self) -> None:
        for name, n in (("min", self.min), ("max", self.max)):
            if type(n) is not int or n < 1:
                raise ValueError(f"{name} is {n!r}: give a whole number of replicas, 1 or more")
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, above max, {self.max}")

    def _bounded_add(self, count: int, replica_count: int) -> int:
        """Returns how many of `count` replicas the bounds allow to add, if `replica_count` serve or start."""
        return max(self.min - replica_count, min(count, self.max - replica_count), 0)


def check_seconds(**settings: float) -> None:
    """Checks settings.

    Raises:
        ValueError: one is no number of seconds.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} is {value!r}: give a number of seconds, 0 or more")


def is_in_pool(view: View) -> bool:
    """Returns whether the replica serves no tier and so is in PolyServe's best-effort pool (§4.3). An empty replica is:
    it has just joined, or its tier gives it back when the router is asked again."""
    return is_idle(view) or (not view.role.tier and view.role.phase == "both" and view.role.kind in ("", "best_effort"))


@dataclass
class PoolAutoscaler(ReplicaBounds):
    """Keeps replicas in PolyServe's pool of machines (§4.3, §5.4), which the paper takes as unlimited. A tier takes a
    replica from the pool at once.

    A replica is added when for `add_seconds` the pool, with replicas that start, has had fewer than `spare` replicas,
    or is empty while requests are unplaced. A replica that has been idle for `drain_seconds` leaves while more than
    `spare` are idle.

    Args:
        spare (0 or more): replicas that the pool keeps; 0: a replica is added only for unplaced requests
        add_seconds (0 or more): for which the pool is short before a replica is added
        drain_seconds (0 or more): for which a replica is idle before it leaves
    """

    spare: int = 1
    add_seconds: float = 1.0
    drain_seconds: float = 30.0
    _short_since: float | None = field(init=False, repr=False, default=None)
    _idle_since: dict[str, float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.spare) is not int or self.spare < 0:
            raise ValueError(f"spare is {self.spare!r}: give a whole number of replicas, 0 or more")
        check_seconds(add_seconds=self.add_seconds, drain_seconds=self.drain_seconds)

    def observe(self, events: Sequence[Event]) -> None:
        """Ignores events: the views are enough."""

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        pool = [view for view in fleet if is_in_pool(view)]
        short = max(self.spare, 1 if unplaced else 0) - len(pool) - starting
        replica_count = len(fleet) + starting
        wake: list[float] = []
        add = self._bounded_add(0, replica_count)
        if short <= 0 or replica_count >= self.max:
            self._short_since = None
        else:
            since = self._short_since = now if self._short_since is None else self._short_since
            if now >= since + self.add_seconds:
                add = self._bounded_add(short, replica_count)
                self._short_since = None
            else:
                wake.append(since + self.add_seconds)
        return Scaling(add, self._idle_to_drain(pool, replica_count + add, now, wake), min(wake, default=None))

    def _idle_to_drain(self, pool: Sequence[View], replica_count: int, now: float, wake: list[float]) -> list[str]:
        """Returns replicas that were idle for long enough, the last of the pool first, since PolyServe takes its first.
        Adds to `wake` when others will be."""
        unused = [view.id for view in pool if is_idle(view)]
        self._idle_since = {id: self._idle_since.get(id, now) for id in unused}
        surplus = max(0, min(len(unused) - self.spare, replica_count - self.min))
        drain: list[str] = []
        for id in reversed(unused):
            if surplus == len(drain):
                break
            if now >= (at := self._idle_since[id] + self.drain_seconds):
                drain.append(id)
            else:
                wake.append(at)
        return drain


@dataclass(slots=True)
class _Tier:
    """Counts a tier's requests, and of these the requests that missed their SLO or are predicted to."""

    all: int = 0
    missed: int = 0

    def add(self, missed: bool) -> None:
        self.all += 1
        self.missed += missed


@dataclass
class AttainmentAutoscaler(ReplicaBounds):
    """Scales a fleet of any policy by predicted attainment. Replicas are added while a tier has fewer than `target` of
    its requests in SLO, by fact or prediction; one is added while the fleet is too small for the offered load; one is
    drained when for `hold_seconds` the others were enough.

    A tier's share counts requests that ended in the last `window_seconds`, and the present ones. A present request is
    predicted to miss if it is late or demoted, or if the prompts due before it leave no time for its own. Requests
    that came before the last replica joined do not count, nor does best effort.

    Replicas are enough if each one spends at most `MAX_UTILIZATION` of its time on prefill, at the tokens/s offered in
    the window, and on the present decodes, at the tightest TPOT offered; the same for its places and KV.

    Args:
        target ((0, 1]): share of each tier's requests to attain
        window_seconds (0 or more): over which attainment and load are measured
        hold_seconds (0 or more): for which fewer replicas were enough before one is drained
    """

    target: float = 0.95
    window_seconds: float = 60.0
    hold_seconds: float = 60.0
    _requests: dict[str, Request] = field(init=False, repr=False, default_factory=dict)
    _offered: deque[tuple[float, int, float]] = field(init=False, repr=False, default_factory=deque)  # at, tokens, TPOT
    _ended: deque[tuple[float, Request, bool]] = field(init=False, repr=False, default_factory=deque)  # at, ..., missed
    _joined_at: float = field(init=False, repr=False, default=-inf)
    _fits_since: float | None = field(init=False, repr=False, default=None)
    _next_check_at: float = field(init=False, repr=False, default=-inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.target, bool) or not isinstance(self.target, int | float) or not 0.0 < self.target <= 1.0:
            raise ValueError(f"target is {self.target!r}: give a share above 0, at most 1")
        check_seconds(window_seconds=self.window_seconds, hold_seconds=self.hold_seconds)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Offered):
                request = event.request
                self._requests[event.id] = request
                tpot = min((s.slo.tpot for s in request.stages if s.slo.tpot is not None), default=inf)
                self._offered.append((event.at, sum(stage.prompt for stage in request.stages), tpot))
            elif isinstance(event, Finished):
                ended = self._requests.pop(event.id, None)
                is_judged = event.outcome != "cancelled" and not event.verdict.unjudged
                if ended is not None and not ended.best_effort and is_judged:
                    self._ended.append((event.at, ended, event.verdict.missed))
            elif isinstance(event, Joined):
                self._joined_at = event.at

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        replica_count = len(fleet) + starting
        if now < self._next_check_at:
            return Scaling(self._bounded_add(0, replica_count), wake_at=self._next_check_at)
        self._next_check_at = now + CHECK_S
        self._forget(now - self.window_seconds)
        tiers = self._tiers(unplaced, fleet, now)
        lowest_share = min((1.0 - t.missed / t.all for t in tiers.values() if t.missed >= MIN_MISSES), default=1.0)
        missing = ceil(len(fleet) * (self.target - lowest_share)) if lowest_share < self.target and not starting else 0
        if not starting and not self._fits(fleet, len(fleet)):
            missing = max(missing, 1)  # before they miss: a start takes time
        add = self._bounded_add(missing, replica_count)
        drain: list[str] = []
        is_surplus = lowest_share >= self.target and not (unplaced or starting) and len(fleet) > self.min
        if not (is_surplus and self._fits(fleet, len(fleet) - 1)):
            self._fits_since = None
        else:
            since = self._fits_since = now if self._fits_since is None else self._fits_since
            if now >= since + self.hold_seconds:
                drain = [min(reversed(fleet), key=lambda view: view.count).id]
                self._fits_since = None
        check_again = unplaced or self._requests or self._offered or len(fleet) - len(drain) > self.min
        return Scaling(add, drain, self._next_check_at if check_again else None)

    def _forget(self, before: float) -> None:
        while self._offered and self._offered[0][0] < before:
            self._offered.popleft()
        while self._ended and self._ended[0][0] < before:
            self._ended.popleft()

    def _tiers(self, unplaced: Sequence[SeqView], fleet: Sequence[View], now: float) -> Mapping[str, _Tier]:
        tiers: dict[str, _Tier] = {}

        def count(request: Request, missed: bool) -> None:
            if not request.best_effort and request.arrival >= self._joined_at:
                tiers.setdefault(request.tier, _Tier()).add(missed)

        for _, request, missed in self._ended:
            count(request, missed)
        for view in fleet:
            for seq in (*view.running, *view.moving):
                count(seq.request, seq.missed or seq.demoted or seq.due < now)
            for seq, late in _late(view.waiting, view, max(now, view.busy_until)):
                count(seq.request, late)
        for seq in unplaced:  # as if it could begin anywhere
            count(seq.request, any(late for _, late in _late((seq,), fleet[0], now)))
        return tiers

    def _fits(self, fleet: Sequence[View], replicas: int) -> bool:
        """Returns whether this number of replicas would hold the present and the offered load."""
        view = fleet[0]
        chunk = view.limits.max_num_batched_tokens
        offered = sum(tokens for _, tokens, _ in self._offered) / max(self.window_seconds, CHECK_S)
        prefill = offered * view.latency.step_time(Shape.prefill(chunk)) / chunk
        tightest = min((tpot for _, _, tpot in self._offered), default=inf)
        seqs = ceil(sum(view.count for view in fleet) / replicas)
        blocks = sum(view.kv_total - view.kv_free for view in fleet) / replicas
        kv = ceil(sum(seq.length for view in fleet for seq in view.running) / replicas)
        decode = view.latency.step_time(Shape(seqs, seqs, kv)) / tightest if seqs else 0.0
        time = prefill / replicas + decode
        return (
            time <= MAX_UTILIZATION
            and seqs <= MAX_UTILIZATION * view.limits.max_num_seqs
            and blocks <= MAX_UTILIZATION * view.kv_total
        )


def _late(waiting: Iterable[SeqView], view: View, start: float) -> Iterable[tuple[SeqView, bool]]:
    """Pairs each waiting request with whether it misses its due time, if this replica prefills them in order of due
    times from `start` on. Requests that are late anyway take no time of the others."""
    chunk = view.limits.max_num_batched_tokens
    for seq in sorted(waiting, key=lambda seq: seq.due):
        seconds = prefill_time(view.latency, seq.pending, 0, chunk)
        late = seq.missed or seq.demoted or start + seconds > seq.due
        if not late:
            start += seconds
        yield seq, late


AUTOSCALERS = Registry(
    "autoscaler", "Autoscaler", {"pool": PoolAutoscaler, "attainment": AttainmentAutoscaler}, ("observe", "scale")
)
