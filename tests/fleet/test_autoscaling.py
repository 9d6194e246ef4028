"""Machines that are added and drained while requests are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Draining, Event, Finished, Joined, Left, Placed, Stepped, Tokens
from rubato.core.interfaces import Scaling, SeqView, View
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.autoscalers import AttainmentAutoscaler, PoolAutoscaler
from rubato.fleet.cluster import Cluster
from rubato.measure.replica_seconds import ReplicaSecondsMeter
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate_events, simulate_requests
from tests.conftest import few
from tests.kit import Linear, run_spec
from tests.policies.test_properties import Load, loads, spec_for


class AtRandom:
    """Adds and drains replicas by a seed, and looks again now and then."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        draw = self._draw
        add = draw.choice((0, 0, 1, 2)) if len(fleet) + starting < 6 else 0
        most = len(fleet) - 1
        drain = draw.sample([view.id for view in fleet], draw.randint(0, min(2, most))) if draw.random() < 0.5 else []
        busy = unplaced or any(view.running or view.waiting for view in fleet)
        return Scaling(add, drain, now + draw.choice((0.003, 0.05)) if busy else None)

    def observe(self, events: Sequence[Event]) -> None:
        pass


def checked(events: Sequence[Event], load: Load) -> None:
    """Each request ends once; nothing is placed on a replica that drains or has left, and it leaves after it drains."""
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)
    assert not [e for e in events if isinstance(e, Finished) and e.outcome == "failed"]
    closed: set[str] = set()
    left: list[str] = []
    for event in events:
        if isinstance(event, Draining):
            closed.add(event.id)
        elif isinstance(event, Placed):
            assert event.replica not in closed
        elif isinstance(event, Left):
            assert event.id in closed
            left.append(event.id)
    assert len(left) == len(set(left))


def scaled(policy: str, load: Load, seed: int) -> RunSpec:
    spec = spec_for(policy, load.limits, load.prefix_cache)
    return run_spec(
        Linear(), load.limits, policy, replicas=spec.replicas + 1, link=spec.link, prefix_cache=load.prefix_cache,
        autoscaler=lambda: AtRandom(seed), start_seconds=0.02, learns=False,
    )  # fmt: skip


def ungrouped(load: Load) -> bool:
    return not any(r.group for r in load.requests)


def until_all_ended(events: Sequence[Event]) -> list[tuple[float, str, str]]:
    """What happens up to the last end, but for tokens and steps; no driver goes on as long as the other after that."""
    last = max(i for i, event in enumerate(events) if isinstance(event, Finished))
    return [(round(e.at, 9), type(e).__name__, e.id) for e in events[: last + 1] if not isinstance(e, Tokens | Stepped)]


@pytest.mark.parametrize("policy", ["edf", "polyserve", "distserve", "ascendra", "rubato"])
@few
@given(load=loads().filter(ungrouped), seed=st.integers(0, 99))
def test_nothing_is_lost_as_machines_come_and_go(policy: str, load: Load, seed: int) -> None:
    def watch(cluster: Cluster, event: Event) -> None:
        assert cluster.offered == cluster.finished + cluster.in_flight
        if isinstance(event, Left):
            assert event.id not in cluster.hosts

    spec = scaled(policy, load, seed)
    checked(simulate_events(load.requests, load.truth, spec, watch=watch, pauses=load.pauses), load)
    fast: list[Event] = []
    simulate_requests(load.requests, load.truth, spec, pauses=load.pauses, listen=fast.append)
    checked(fast, load)


@pytest.mark.parametrize("policy", ["edf", "polyserve", "slos_serve", "rubato"])
def test_both_drivers_scale_alike(policy: str) -> None:
    """60 requests while some 70 replicas come and go."""
    stage = Stage(20, SLO(ttft=1.0, tpot=0.05))
    requests = tuple(Request(f"q{i}", (stage,), 0.02 * i, sampling=Sampling(max_tokens=30)) for i in range(60))
    load = Load(requests, {r.id: (20,) for r in requests}, Limits(8, 256, 400, 80, 8), False, {})
    fast: list[Event] = []
    simulate_requests(requests, load.truth, scaled(policy, load, 1), listen=fast.append)
    assert min(sum(isinstance(e, kind) for e in fast) for kind in (Joined, Draining, Left)) > 50
    plain = simulate_events(requests, load.truth, scaled(policy, load, 1))
    assert until_all_ended(fast) == until_all_ended(plain)


def test_what_cannot_be_drained_is_said() -> None:
    """The autoscaler's error leaves the fleet as it is, and every request is served."""

    class Drains:
        def __init__(self, id: str) -> None:
            self.id = id

        def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
            return Scaling(drain=[self.id])

        def observe(self, events: Sequence[Event]) -> None:
            pass

    requests = tuple(Request(f"q{i}", (Stage(20),), 0.1 * i, sampling=Sampling(max_tokens=5)) for i in range(3))
    limits = Limits(8, 256, 400, 80, 8)
    for id, says in (("r7", "no replica 'r7': there are r0, r1"), ("r0", "replica 'r1' is the last that serves")):
        spec = run_spec(Linear(), limits, "edf", replicas=2, autoscaler=lambda id=id: Drains(id), learns=False)
        errors: list[str] = []

        def watch(cluster: Cluster, event: Event, errors: list[str] = errors, id: str = id) -> None:
            if isinstance(event, Finished) and not errors:
                with pytest.raises(ValueError) as caught:
                    cluster._scaling.drain("r1" if id == "r0" else id)
                errors.append(str(caught.value))

        events = simulate_events(requests, {}, spec, watch=watch)
        assert errors[0].startswith(says)
        assert sum(isinstance(e, Finished) and e.outcome == "completed" for e in events) == 3


def wave(tpot: float) -> list[Request]:
    """2 requests/s for 60 s, 16/s for 60 s, then 2/s for 120 s; each some 0.5 s of decoding alone."""
    times = [i / 2 for i in range(120)] + [60 + i / 16 for i in range(960)] + [120 + i / 2 for i in range(240)]
    return [
        Request(f"q{i}", (Stage(20, SLO(1.0, tpot)),), at, f"t{i % 2}", sampling=Sampling(max_tokens=40))
        for i, at in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("policy", "scaler"),
    [("edf", AttainmentAutoscaler(max=6, hold_seconds=15.0)), ("polyserve", PoolAutoscaler(max=6, drain_seconds=15.0))],
)
def test_replicas_follow_a_load_that_rises_and_falls(policy: str, scaler: Any) -> None:
    requests, cost, count, most = wave(0.03), ReplicaSecondsMeter(["r0"]), [(0.0, 1)], 1
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        cost(event)
        if isinstance(event, Joined | Left):
            count.append((event.at, count[-1][1] + (1 if isinstance(event, Joined) else -1)))

    spec = run_spec(
        Linear(0.012, 0.002), Limits(32, 256, 400, 800, 8), policy, learns=False,
        autoscaler=lambda: deepcopy(scaler), start_seconds=3.0,
    )  # fmt: skip
    simulate_requests(requests, {}, spec, listen=listen)
    ends = [e for e in events if isinstance(e, Finished)]
    assert Counter(e.id for e in ends) == Counter(r.id for r in requests)
    assert {e.outcome for e in ends} == {"completed"}
    most = max(n for _, n in count)
    assert 3 <= most <= 6
    assert count[-1][1] <= 2
    total = cost.until_last_end()
    last = ends[-1].at  # a replica may leave after it
    steps = zip(count, [*count[1:], (last, 0)], strict=True)
    assert sum(n * max(0.0, min(until, last) - at) for (at, n), (until, _) in steps) == pytest.approx(
        total.total - total.starting
    )
    assert set(total.tiers) == {"t0", "t1"}
    assert total.starting == pytest.approx(3.0 * sum(isinstance(e, Joined) for e in events))
    assert total.total < 0.8 * most * last
