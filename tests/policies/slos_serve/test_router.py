"""Where `slos_serve` sends requests: each rule on a small fleet, then a fleet under bursts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rubato import policies
from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import Dispatch, View
from rubato.core.plan import Limits
from rubato.core.request import SLO, Handoff, Request, Sampling, Stage
from rubato.latency.roofline import Model
from rubato.policies import PolicyError
from rubato.policies.slos_serve import Router
from rubato.simulation.run_spec import oracle_lengths
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, Seq, request, run_spec, shown
from tests.kit.plans import SpelledOut, prompt, seen

# A step takes 10 ms and 1 ms a token, at most 100 tokens; 40 blocks of 10 tokens.


def fleet(*waiting: Sequence[Seq]) -> list[View]:
    """Replicas r0, r1, ... with these waiting."""
    return [seen(list(w), [], id=f"r{i}") for i, w in enumerate(waiting)]


def place(requests: Sequence[Request], views: Sequence[View], **settings: object) -> Dispatch:
    return policies.load_router("slos_serve", settings).place(shown(*requests), views, 0.0)


def declined(by: str, hops: int, refuse: bool = False, prompt: int = 40, ttft: float = 0.1) -> Request:
    return replace(request("a", prompt, ttft=ttft, refuse=refuse), handoff=Handoff(by, "declined", 0.0, hops=hops))


def test_it_lands_in_turn() -> None:
    router, views = Router(), fleet([], [], [])
    four = shown(*[request(id, 20, ttft=1.0) for id in "abcd"])
    assert router.place(four, views, 0.0).place == {"a": "r0", "b": "r1", "c": "r2", "d": "r0"}
    assert router.place(shown(request("e", 20, ttft=1.0)), views, 0.0).place == {"e": "r1"}


def test_a_replica_hands_on_what_it_declines_as_often_as_it_may() -> None:
    """Nothing of 95 tokens ends within 50 ms."""
    infeasible = prompt("a", 95, ttft=0.05)
    for hops, on in ((0, True), (3, True), (4, False)):
        handoff = Handoff("r1", "declined", 0.0, hops=hops) if hops else None
        seq = replace(infeasible, request=replace(infeasible.request, handoff=handoff))
        view = seen([seq], [], supports=frozenset({"handoff"}))
        made = SpelledOut("slos_serve").plan(view)
        assert made.handoff == ({"a": "declined"} if on else {})
        assert made.demote == (() if on else ("a",))
        assert not SpelledOut("slos_serve").plan(replace(view, supports=frozenset())).handoff


def test_a_declined_request_goes_to_the_next_replica() -> None:
    views = fleet([], [], [])
    assert [place([declined(by, 1)], views).place["a"] for by in ("r0", "r1", "r2")] == ["r1", "r2", "r0"]


def test_when_all_have_declined_it_the_backup_decides() -> None:
    views = fleet([prompt("x", 60)], [prompt("y", 9)], [prompt("z", 99)])
    assert place([declined("r1", 3)], views) == Dispatch({"a": "r2"}, demote=["a"])
    assert place([declined("r0", 2)], views, max_hops=1) == Dispatch({"a": "r1"}, demote=["a"])
    assert place([declined("r1", 3)], views, backup="refuse").reject == {"a": "rejected-slo-late"}
    assert place([declined("r1", 3, refuse=True)], views).reject == {"a": "rejected-slo-late"}


def test_declined_by_all_and_by_each_even_alone_it_is_infeasible_where_step_times_are_known() -> None:
    told = [replace(view, supports=view.supports | {"step_times"}) for view in fleet([], [], [])]
    fast = replace(told[1], latency=Linear(0.001, 0.0001))
    asked = [declined("r1", 3, refuse=True, prompt=95, ttft=0.05)]
    assert place(asked, told).reject == {
        "a": "rejected-slo-infeasible: the prompt of 95 tokens takes 105 ms here alone; asked 50 ms"
    }
    for views in ([told[0], fast, told[2]], [*told[:2], replace(told[2], supports=frozenset())]):
        assert place(asked, views).reject == {"a": "rejected-slo-late"}


def test_best_effort_goes_to_the_least_loaded() -> None:
    views = fleet([prompt("x", 60), prompt("w", 60)], [prompt("y", 10)], [prompt("z", 30)])
    assert place([request(id, 15) for id in "abc"], views).place == {"a": "r1", "b": "r2", "c": "r0"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_hops": -2}, "max_hops -2"),
        ({"backup": "drop"}, "one of best_effort, refuse"),
        ({"safety_margin": 0.1}, "no setting 'safety_margin'"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        policies.load_router("slos_serve", settings)


def test_it_goes_by_its_schedulers_hops_unless_told_otherwise() -> None:
    own = {"safety_margin": 0.2, "max_hops": 2}
    assert policies.router_for("slos_serve", "auto", {}, own) == Router(max_hops=2)
    assert policies.router_for("slos_serve", "slos_serve", {"max_hops": 1}, own) == Router(max_hops=1)
    assert policies.router_for("slos_serve", "round_robin", {}, own) == policies.load_router("round_robin")


# ----------------------------------------------------------------- a fleet


def bursts(seed: int, rate: float, count: int) -> tuple[list[Request], dict[str, tuple[int, ...]]]:
    """Requests of three kinds in bursts of one to twelve, at `rate` requests a second."""
    rng = np.random.default_rng([seed, 7])
    requests: list[Request] = []
    truth: dict[str, tuple[int, ...]] = {}
    at = 0.0
    while len(requests) < count:
        size = int(rng.integers(1, 13))
        at += float(rng.exponential(size / rate))
        for _ in range(size):
            tokens, output = int(rng.integers(20, 900)), int(rng.integers(2, 120))
            slo = (SLO(0.4, 0.05), SLO(1.0, 0.1), SLO())[int(rng.choice(3, p=[0.5, 0.4, 0.1]))]
            id = f"q{len(requests)}"
            requests.append(Request(id, (Stage(tokens, slo),), at, sampling=Sampling(max_tokens=output)))
            truth[id] = (output,)
    return requests, truth


def served(router: str, seed: int, rate: float, count: int = 80) -> tuple[list[Event], list[Request]]:
    requests, truth = bursts(seed, rate, count)
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, kv_blocks=1500, block_size=16)
    model = Model(k1=(0.00002, 0.0001), b=(0.015, 0.004))
    spec = run_spec(model, limits, "slos_serve", router=router, replicas=3, lengths=oracle_lengths, learns=False)
    return simulate_events(requests, truth, spec), requests


@pytest.mark.parametrize("router", ["slos_serve", "round_robin", "least_loaded"])
@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_a_fleet_keeps_its_promises(router: str, rate: float) -> None:
    """Step times as predicted, by tokens alone, and all the same length: a request that was not declined is in time."""
    events, requests = served(router, 0, rate)
    ends = [e for e in events if isinstance(e, Finished)]
    assert Counter(e.id for e in ends) == Counter(r.id for r in requests)
    assert {e.outcome for e in ends} == {"completed"}
    hops = Counter(e.id for e in events if isinstance(e, HandedOff))
    assert max(hops.values(), default=0) <= 4
    if router == "slos_serve":  # handed on twice, then to the backup
        assert max(hops.values(), default=0) <= 3
        assert hops or rate < 60.0
    assert all(e.verdict.met for e in ends if not e.best_effort)
    assert {e.best_effort for e in ends} == {True, False}
