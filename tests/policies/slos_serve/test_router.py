"""Where `slos_serve` sends requests: each rule on a small fleet, then a fleet under bursts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rubato import policies
from rubato.core.events import Event, Finished, Verdict
from rubato.core.interfaces import Dispatch, View
from rubato.core.plan import Limits
from rubato.core.request import SLO, Handoff, Progress, Request, Sampling, Stage
from rubato.latency.roofline import Model
from rubato.policies import PolicyError
from rubato.policies.slos_serve import Router, Scheduler
from rubato.policies.slos_serve.demand import demand_after_current_batch
from rubato.policies.slos_serve.token_budget import Demand
from rubato.simulation.run_spec import oracle_lengths
from rubato.simulation.simulate import simulate_events
from tests.doubles import Seq, request, run_spec, shown
from tests.policies.test_tables import decode, prompt, seen

# A step takes 10 ms and 1 ms a token, at most 100 tokens; 40 blocks of 10 tokens.


def fleet(*waiting: Sequence[Seq], running: Sequence[Seq] = ()) -> list[View]:
    """Replicas r0, r1, ... with these waiting, and these running on r0."""
    return [replace(seen(list(w), [] if i else list(running)), id=f"r{i}") for i, w in enumerate(waiting)]


def asked(router: Router, requests: Sequence[Request], views: Sequence[View]) -> Dispatch:
    return router.place(shown(*requests), views, 0.0)


def place(requests: Sequence[Request], views: Sequence[View], **settings: object) -> Dispatch:
    return policies.load_router("slos_serve", settings).place(shown(*requests), views, 0.0)


FULL = [prompt("full", 85, ttft=0.1)]  # its promise takes all there is until 0.1 s
NEW = request("a", 40, ttft=0.1)


def test_it_lands_in_turn() -> None:
    router = Router()
    four = [request(id, 20, ttft=1.0) for id in "abcd"]
    assert asked(router, four, fleet([], [], [])).place == {"a": "r0", "b": "r1", "c": "r2", "d": "r0"}
    assert asked(router, [request("e", 20, ttft=1.0)], fleet([], [], [])).place == {"e": "r1"}


def test_it_is_handed_on_in_order_while_it_is_declined() -> None:
    assert place([NEW], fleet(FULL, FULL, [])).place == {"a": "r2"}
    busy = [decode(f"d{i}", tpot=0.03, due=0.03) for i in range(20)]  # 20 tokens every 30 ms, all that a batch holds
    assert place([request("a", 40, ttft=0.1, tpot=0.03)], fleet([], [], running=busy)).place == {"a": "r1"}


def test_the_hops_are_limited_and_then_the_backup_decides() -> None:
    views = fleet(FULL, [*FULL, prompt("free", 9)], [prompt("free", 99)])
    assert place([NEW], views).place == {"a": "r2"}
    assert place([NEW], views, max_hops=1) == Dispatch({"a": "r0"}, {})  # the least loaded by pending tokens
    assert place([NEW], fleet(FULL, []), max_hops=0).place == {"a": "r1"}  # the least loaded again
    assert place([NEW], fleet(FULL, []), max_hops=0, backup="refuse").reject == {"a": "rejected-slo-infeasible"}


def test_a_request_that_asked_to_be_refused_is_refused_by_either_backup() -> None:
    asked = request("a", 40, ttft=0.1, refuse=True)
    assert place([asked], fleet(FULL, FULL)) == Dispatch({}, {"a": "rejected-slo-infeasible"})
    assert place([asked], fleet(FULL, [])).place == {"a": "r1"}


def test_a_burst_counts_what_it_has_just_placed() -> None:
    """90 tokens fit until 0.1 s in one batch: two of 40 on each replica, and a fifth nowhere."""
    held = [request(f"q{i}", 40, ttft=0.1) for i in range(5)]
    dispatch = place(held, fleet([], []), backup="refuse")
    assert Counter(dispatch.place.values()) == {"r0": 2, "r1": 2}
    assert set(dispatch.reject) == {"q4"}


def test_a_request_that_the_backup_placed_takes_no_promise_away() -> None:
    """It waits where it was placed, not demoted yet; as soon as it has ended its id is forgotten."""
    router = Router()
    infeasible = request("late", 95, ttft=0.05)
    views = fleet([], [])
    assert asked(router, [infeasible], views).place == {"late": "r0"}
    views = fleet([prompt("late", 95, ttft=0.05)], [])
    assert asked(router, [request("b", 40, ttft=0.1)], views).place == {"b": "r1"}  # r1's turn
    assert asked(router, [request("c", 40, ttft=0.1)], views).place == {"c": "r0"}
    router.observe([Finished(1.0, "late", "completed", "eos", Verdict(False, "deadline"))])
    assert not router._declined


def test_best_effort_and_requests_from_elsewhere_go_to_the_least_loaded() -> None:
    views = fleet([prompt("x", 60)], [prompt("y", 10)], [prompt("z", 30)])
    begun = replace(NEW, progress=Progress((0.0,), ((0.1,),), (), False, {}))
    moved = replace(NEW, handoff=Handoff("r0", "declined", 0.0))
    for one in (request("a", 10), begun, moved):
        assert place([one], views, backup="refuse").place == {"a": "r1"}
    held = [request(id, 15) for id in "abc"]
    assert place(held, views).place == {"a": "r1", "b": "r1", "c": "r2"}


def test_one_replica_decides_itself() -> None:
    held = [request("a", 99, ttft=0.01, refuse=True), request("b", 10)]
    assert place(held, fleet(FULL), backup="refuse") == Dispatch({"a": "r0", "b": "r0"}, {})


def test_it_decides_as_the_replicas_scheduler_does() -> None:
    """Margin, reserve and values count in the controller as they do on the replica."""
    new = request("a", 70, ttft=0.1)
    assert place([new], fleet([], []), backup="refuse").place
    assert place([new], fleet([], []), backup="refuse", safety_margin=0.5).reject
    low = request("low", 250, ttft=2.0)
    settings = {"tier_values": {"gold": 2.0}, "tier_reserve": 0.5, "backup": "refuse"}
    assert place([low], fleet([], []), **settings).reject
    assert place([replace(low, tier="gold")], fleet([], []), **settings).place


def test_asking_changes_nothing() -> None:
    scheduler = Scheduler()
    [view] = fleet([prompt("w", 60, ttft=0.1)], running=[decode("d", tpot=0.05, due=0.05)])
    before = replace(scheduler)
    seq = prompt("a", 40, ttft=1.0)
    assert scheduler.admits(view, seq, view.waiting)  # type: ignore[arg-type]
    assert not scheduler.admits(view, replace(seq, due=0.1), view.waiting)  # type: ignore[arg-type]
    assert vars(scheduler) == vars(before)


def test_what_a_batch_in_flight_does_is_counted() -> None:
    """A decode due before the batch after it has ended is in it; 40 ms more hold at least 30 tokens, so 29 of a prompt;
    a prompt due before it ends is done with it. What is shown as after it is not counted again."""
    d = replace(decode("d", tpot=0.05, due=0.045), in_flight=0)
    p = Seq(request("p", 60, ttft=0.2, tpot=0.05), 60, 20, 2)
    [shown] = fleet([], running=[d, p])
    busy = replace(shown, busy_until=0.04)
    demands = [Demand("d", 0.01, 1, 0.05), Demand("p", 0.16, 40, 0.05)]
    assert demand_after_current_batch(busy, [d, p], demands) == [
        Demand("d", pytest.approx(0.06), 1, 0.05),
        Demand("p", 0.16, 11, 0.05),
    ]
    short = Demand("p", 0.16, 20, 0.05)
    late = Demand("p", -0.01, 35, 0.05)
    ahead = Demand("d", 0.07, 1, 0.05)
    assert demand_after_current_batch(busy, [d, p], [ahead, short]) == [
        ahead,
        Demand("p", pytest.approx(0.21), 1, 0.05),
    ]
    assert demand_after_current_batch(busy, [d, p], [ahead, late])[1] == Demand("p", pytest.approx(0.04), 1, 0.05)
    gone = [replace(s, in_flight=1) for s in (d, p)]
    assert demand_after_current_batch(busy, gone, demands) == demands


def test_a_decode_in_flight_takes_no_promise_away() -> None:
    new = replace(prompt("a", 60, ttft=0.15), due=0.15)

    def admits(in_flight: int) -> bool:
        running = replace(decode("d", tpot=0.05, due=0.045), in_flight=in_flight)
        [shown] = fleet([], running=[running])
        return Scheduler().admits(replace(shown, busy_until=0.04), new, [])

    assert admits(0)
    assert not admits(1)  # it is shown as after that batch: behind


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_hops": -1}, "max_hops -1"),
        ({"backup": "drop"}, "give 0 or more, and one of best_effort, refuse"),
        ({"safety_margin": -0.1}, "0 or more"),
        ({"max_batch_seconds": 0.0}, "seconds, more than 0"),
        ({"tier_reserve": 1.0}, "give a share"),
        ({"tier_values": {"gold": 0}}, "a number above 0"),
        ({"decision_threshold": 2}, "no setting 'decision_threshold'"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        policies.load_router("slos_serve", settings)


def test_it_goes_by_its_schedulers_settings_unless_told_otherwise() -> None:
    own = {"safety_margin": 0.2, "tier_values": {"gold": 2.0}, "decision_threshold": 3, "steady_tokens": True}
    for router in ("auto", "slos_serve"):
        made = policies.router_for("slos_serve", router, {"tier_reserve": 0.1, "max_hops": 1}, own)
        assert made == Router(
            safety_margin=0.2, tier_values={"gold": 2.0}, tier_reserve=0.1, max_hops=1, steady_tokens=True
        )
    made = policies.router_for("slos_serve", "auto", {"safety_margin": 0.3}, own)
    assert made == Router(safety_margin=0.3, tier_values={"gold": 2.0}, steady_tokens=True)
    assert policies.router_for("slos_serve", "round_robin", {}, own) == policies.load_router("round_robin")
    assert policies.router_for("sarathi", "slos_serve", {}, {"budget": 64}) == Router()


def test_even_decodes_are_no_room_there_either() -> None:
    """The prompt takes 105 ms; the decode of r0, far ahead, is to have a token every 50 all the same."""
    views = fleet([], [], running=[replace(decode("d", tpot=0.05, due=1.0), output=11)])
    assert place([request("a", 95, ttft=0.12)], views).place == {"a": "r0"}
    assert place([request("a", 95, ttft=0.12)], views, steady_tokens=True).place == {"a": "r1"}


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


def served(router: str, seed: int, rate: float, count: int = 150) -> tuple[list[Event], list[Request]]:
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
    assert all(e.verdict.met for e in ends if not e.best_effort)
    assert {e.best_effort for e in ends} == {True, False}
