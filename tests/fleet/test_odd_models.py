"""Latency models and schedulers that raise or speak nonsense: each request ends, once, and nothing else breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest

from rubato.core.clock import VirtualClock
from rubato.core.events import Event, Finished, HandedOff, Transferred
from rubato.core.plan import Limits, Sample, Shape
from rubato.core.request import Request
from rubato.engines.simulated import Engine, KVLink
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from tests.kit import Linear, request
from tests.kit.clusters import offer, play

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=50, block_size=8)


def boom(*_: object) -> None:
    raise KeyError("mine")


@dataclass
class Odd(Linear):
    """Every n-th step time is something else; `learns` is called with each step."""

    every: int = 1
    odd: Callable[[], Any] | None = None
    learns: Callable[[Sample], None] = lambda sample: None
    asked: int = 0

    def step_time(self, shape: Shape) -> float:
        self.asked += 1
        if self.odd is not None and self.asked % self.every == 0:
            return self.odd()  # type: ignore[no-any-return]
        return super().step_time(shape)

    def update(self, sample: Sample) -> None:
        self.learns(sample)


def served(
    requests: Sequence[Request], model: Callable[[], Linear] = Odd, policy: str = "edf", replicas: int = 1,
    setup: Callable[[Cluster], None] = lambda cluster: None, act: Callable[[Cluster], None] = lambda cluster: None,
) -> list[Event]:  # fmt: skip
    """The events; `setup` is done before all else, `act` at 0.05 s."""

    def build(clock: VirtualClock) -> Cluster:
        engines = [Engine(Linear(), LIMITS, clock, link=KVLink(latency=0.03)) for _ in range(replicas)]
        return local_cluster(engines, [model() for _ in engines], clock, ClusterOptions(PolicyChoice(policy)))

    return play(build, [(0.0, setup), (0.05, act), *((each.arrival, offer(each)) for each in requests)])[1]


def outcomes(events: Sequence[Event]) -> dict[str, str]:
    return {e.id: e.outcome for e in events if isinstance(e, Finished)}


def some(**given: Any) -> list[Request]:
    return [request(f"q{i}", 20, arrival=0.02 * i, most=4, **given) for i in range(8)]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("value", [nan, inf, -inf, -1.0, 0.0])
@pytest.mark.parametrize("policy", ["edf", "slos_serve", "sa", "vllm"])
def test_step_times_that_are_none_hang_no_request(policy: str, value: float, every: int) -> None:
    served(some(ttft=0.2, tpot=0.05), lambda: Odd(every=every, odd=lambda: value), policy)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", ["edf", "slos_serve", "sa", "vllm"])
def test_a_model_that_raises_hangs_no_request(policy: str, every: int) -> None:
    served(some(ttft=0.03, tpot=0.005), lambda: Odd(every=every, odd=boom), policy)


def test_what_has_completed_stays_so_where_the_model_cannot_learn() -> None:
    """The step that ends a request is the one whose time it fails to learn from."""
    events = served([request("a", 20, most=1), request("b", 20, most=2)], lambda: Odd(learns=boom), "vllm")
    assert outcomes(events) == {"a": "completed", "b": "failed"}


def test_what_has_completed_stays_so_where_the_cause_of_anothers_miss_cannot_be_told() -> None:
    """All three end in one step; the model fails as it is asked why the second was late."""
    models: list[Odd] = []

    def model() -> Odd:
        models.append(Odd())
        return models[-1]

    def breaks(cluster: Cluster) -> None:
        models[0].odd = boom

    requests = [request("a", 8, most=4), request("b", 8, ttft=1e-3, most=4), request("c", 8, most=4)]
    outcome = outcomes(served(requests, model, "vllm", act=breaks))
    assert outcome == {"a": "completed", "b": "failed", "c": "failed"}


def fails_on(kind: type[Event], replica: str = "r0", outcome: str = "") -> Callable[[Cluster], None]:
    def observe(events: Sequence[Event]) -> None:
        if any(isinstance(e, kind) and getattr(e, "outcome", "") == outcome for e in events):
            boom()

    def setup(cluster: Cluster) -> None:
        cluster.hosts[replica].scheduler.observe = observe  # type: ignore[attr-defined]

    return setup


def test_a_client_that_leaves_does_not_get_the_error_of_a_scheduler() -> None:
    """The requests beside it do, as after any step that fails."""
    requests = [request("a", 20, most=60), request("b", 20, most=60), request("c", 20, arrival=0.5, most=4)]
    events = served(requests, setup=fails_on(Finished, outcome="cancelled"), act=lambda cluster: cluster.cancel("a"))
    assert outcomes(events) == {"a": "cancelled", "b": "failed", "c": "completed"}


def test_a_scheduler_that_fails_as_kv_arrives_fails_its_own_requests_once() -> None:
    requests = [request("a", 20, most=8), request("b", 20, arrival=0.5, most=1)]
    events = served(requests, policy="distserve", replicas=2, setup=fails_on(Transferred, "r1"))
    assert {HandedOff, Transferred} <= {type(e) for e in events if getattr(e, "id", "") == "a"}
    assert outcomes(events) == {"a": "failed", "b": "completed"}
    assert "failed to observe" in next(e.reason for e in events if isinstance(e, Finished) and e.id == "a")
