"""A flooding tenant takes what others leave, not what is theirs.

A tenant's fair-share value is what it attains alone on a machine of its share of the speed: with two equal tenants,
every step twice as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Finished
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies import describe, load
from rubato.policy_kit.fair_share import FairShare
from rubato.simulation.simulate import simulate_events
from tests.conftest import examples
from tests.kit import Linear, request, run_spec, view

SCHEDULERS = sorted(
    {name for name, kind, *_ in describe() if kind == "scheduler" and not load(name).needs & {"draft", "handoff"}}
)
LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048, kv_blocks=4000, block_size=16)
SECONDS = 12.0
SEEDS = examples(2, 2)
FULL = pytest.mark.full


def stream(tenant: str, rate: float, seed: int, scale: int = 1, tiers: Sequence[str] = ("chat",)) -> list[Request]:
    rng = np.random.default_rng([seed, ord(tenant[0])])
    found: list[Request] = []
    at = float(rng.exponential(1 / rate))
    while at < SECONDS:
        prompt, output = int(rng.integers(50, 300)) * scale, int(rng.integers(20, 80))
        stage = Stage(prompt, SLO(ttft=0.6, tpot=0.03))
        name = f"{tenant}{len(found)}"
        tier = tiers[len(found) % len(tiers)]
        found.append(Request(name, (stage,), at, tier=tier, tenant=tenant, sampling=Sampling(output)))
        at += float(rng.exponential(1 / rate))
    return found


def ends(policy: str, requests: list[Request], fair: Callable[[], FairShare] | None, slow: float = 1.0,
         most: int | None = None) -> dict[str, list[Finished]]:  # fmt: skip
    """Per tenant what became of its requests."""
    spec = run_spec(Linear(0.01 * slow, 0.0004 * slow, 2e-7 * slow), LIMITS, policy, fair=fair, max_in_flight=most)
    tenants = {r.id: r.tenant for r in requests}
    found: dict[str, list[Finished]] = {}
    for event in simulate_events(sorted(requests, key=lambda r: r.arrival), {}, spec):
        if isinstance(event, Finished):
            found.setdefault(tenants[event.id], []).append(event)
    assert Counter({t: len(e) for t, e in found.items()}) == Counter(tenants.values())
    return found


def attained(
    policy: str, rates: Mapping[str, float], *args: object, scale: int = 1, tiers: Sequence[str] = ("chat",)
) -> float:
    """Of tenant `victim`, over so many seeds."""
    met = offered = 0
    for seed in range(SEEDS):
        requests = [r for t, rate in rates.items() for r in stream(t, rate, seed, scale if t != "victim" else 1, tiers)]
        mine = ends(policy, requests, *args)["victim"]  # type: ignore[arg-type]
        met += sum(e.verdict.met for e in mine)
        offered += len(mine)
    return met / offered


# the others run in `make test-full`
EACH = [policy if policy in ("edf", "vllm") else pytest.param(policy, marks=FULL) for policy in SCHEDULERS]


@pytest.mark.parametrize("policy", EACH)
def test_a_flood_leaves_another_tenant_its_fair_share_value(policy: str) -> None:
    own = attained(policy, {"victim": 1.2}, None, 2.0)
    flooded = attained(policy, {"victim": 1.2, "flood": 20.0}, FairShare)
    unfair = attained(policy, {"victim": 1.2, "flood": 20.0}, None)
    assert flooded >= own > 0.5
    assert unfair < 0.6 * flooded  # there was something to protect from


def shaped(prompt: int, output: int, rate: float, seed: int) -> list[Request]:
    """A flood of requests that are all alike."""
    rng = np.random.default_rng([seed, 7])
    times = np.cumsum(rng.exponential(1 / rate, size=int(3 * rate * SECONDS)))
    stage = Stage(prompt, SLO(ttft=0.6, tpot=0.03))
    return [
        Request(f"f{i}", (stage,), float(at), tier="chat", tenant="flood", sampling=Sampling(output))
        for i, at in enumerate(times)
        if at < SECONDS
    ]


@pytest.mark.parametrize(
    ("policy", "prompt", "output", "rate", "share"),
    [
        ("edf", 4, 1, 60.0, 1.0), pytest.param("edf", 10, 400, 20.0, 1.0, marks=FULL), ("edf", 1500, 100, 6.0, 1.0),
        ("edf", 1500, 1, 8.0, 1.0), ("vllm", 4, 1, 60.0, 1.0), pytest.param("vllm", 10, 400, 20.0, 1.0, marks=FULL),
        ("vllm", 1500, 100, 6.0, 0.8), ("vllm", 1500, 1, 8.0, 0.6),
    ],
)  # fmt: skip
def test_whatever_the_flood_is_made_of(policy: str, prompt: int, output: int, rate: float, share: float) -> None:
    """But for prompts as long to prefill as the other's TTFT, in a policy that runs them whole: on an idle fleet they
    pass, whoever may come next."""
    own = attained(policy, {"victim": 1.2}, None, 2.0)
    met = offered = 0
    for seed in range(SEEDS):
        mine = ends(policy, [*stream("victim", 1.2, seed), *shaped(prompt, output, rate, seed)], FairShare)["victim"]
        met += sum(e.verdict.met for e in mine)
        offered += len(mine)
    assert met / offered >= own * share


def test_one_tenant_alone_is_not_held_to_anything_but_the_window() -> None:
    def last(fair: Callable[[], FairShare] | None) -> float:
        return max(e.at for e in ends("vllm", shaped(400, 40, 6.0, 0), fair)["flood"])

    assert last(FairShare) <= 1.3 * last(None)


def test_also_a_flood_of_longer_prompts() -> None:
    own = attained("edf", {"victim": 1.2}, None, 2.0)
    assert attained("edf", {"victim": 1.2, "flood": 7.0}, FairShare, scale=3) >= own


@pytest.mark.parametrize("policy", ["vllm", "edf"])
def test_a_flood_of_every_tier_has_one_share_not_one_in_each(policy: str) -> None:
    own = attained(policy, {"victim": 1.2}, None, 2.0, tiers="abc")
    flooded = attained(policy, {"victim": 1.2, "flood": 20.0}, FairShare, tiers="abc")
    assert flooded >= own > 0.5


def test_what_is_too_late_even_alone_waits_for_what_can_be_in_time() -> None:
    fair = FairShare(window=1)
    first, second = (request(id, 200, ttft=0.2, arrival=at) for id, at in (("late", 0.0), ("hopeful", 0.05)))
    for r in (first, second):
        fair.add_request(r, r.arrival)
    slow = [view(latency=Linear(0.01, 0.0008))]  # 0.17 s for a prompt
    assert [r.id for r in fair.release([first, second], slow, 0.02)] == ["late"]
    assert [r.id for r in fair.release([first, second], slow, 0.06)] == ["hopeful"]


def test_weights_divide_the_tokens_of_those_who_all_want_more() -> None:
    requests = [*stream("heavy", 15.0, 0), *stream("light", 15.0, 0)]
    sizes = {r.id: r.stages[0].prompt + r.sampling.max_tokens for r in requests}
    found = ends("vllm", requests, lambda: FairShare({"heavy": 3.0}))
    served = {t: sum(sizes[e.id] for e in events if e.at < SECONDS) for t, events in found.items()}
    assert 2.5 < served["heavy"] / served["light"] < 3.5


def test_one_tenant_cannot_take_all_places() -> None:
    requests = [*stream("flood", 20.0, 1), *stream("victim", 1.0, 1)]
    refused = {
        t: sum(e.reason == "rejected-saturated" for e in events)
        for t, events in ends("vllm", requests, FairShare, 1.0, 20).items()
    }
    assert refused["flood"] > 50
    assert refused["victim"] == 0


def test_alone_a_tenant_has_the_whole_window() -> None:
    fair = FairShare(window=4)
    asked = [request(f"a{i}", 10) for i in range(6)]
    for r in asked:
        fair.add_request(r, 0.0)
    through = fair.release(asked, [view()], 0.0)
    assert len(through) == 4
    for r in through:
        fair.record_placement(r.id)
    assert fair.release(asked[4:], [view()], 0.0) == []
    fair.record_end("a0", "completed", 16, 1.0)
    assert [r.id for r in fair.release(asked[4:], [view()], 1.0)] == ["a4"]
    fair.record_return("a1")  # its replica is gone: it goes before those who came later
    assert next(r.id for r in fair.release([*asked[4:], asked[1]], [view()], 1.0)) == "a1"


def test_the_window_is_what_keeps_the_tightest_tpot() -> None:
    fair = FairShare()
    for i in range(8):
        fair.add_request(request(f"a{i}", 90, tpot=0.05, most=30), 0.0)
    # 0.01 + 0.001 * (n + 3 n) <= 0.05
    assert fair._sustained(view(latency=Linear(0.01, 0.001)), 90, 30) == 10
    # a long prompt for one token: (0.05 - 0.011) / (1.011 - 0.011) of one
    assert fair._sustained(view(latency=Linear(0.01, 0.001)), 1000, 1) == pytest.approx(0.039)
    assert FairShare()._sustained(view(), 90, 30) == 64  # nothing is promised: what the engine takes


@pytest.mark.parametrize("wrong", [{"weights": {"a": 0.0}}, {"window": 0}])
def test_setting_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give"):
        FairShare(**wrong)  # type: ignore[arg-type]


def test_a_tpot_below_the_shortest_step_holds_nobody_back_while_nothing_runs() -> None:
    """A step takes 50 ms and 40 are promised: what a request takes of the replicas is then without bound, what it has
    to pay back is not. Two tenants with ten requests each, one at a time, are done a little later than `PAUSE` times
    what all take alone."""
    requests = [
        Request(f"{tenant}{i}", (Stage(10, SLO(tpot=0.04)),), 0.0, tenant=tenant, sampling=Sampling(60))
        for tenant in "ab"
        for i in range(10)
    ]
    spec = run_spec(Linear(0.05, 0.0, 0.0), LIMITS, "vllm", fair=FairShare)
    done = [event.at for event in simulate_events(requests, {}, spec) if isinstance(event, Finished)]
    assert len(done) == 20
    assert max(done) < 3 * 20 * 60 * 0.05


@dataclass
class Counting(Linear):
    asked: int = 0

    def step_time(self, shape: Shape) -> float:
        self.asked += 1
        return super().step_time(shape)


def test_what_thousands_held_cost_is_by_their_lengths_not_by_their_number() -> None:
    """Each event asks `open` about all that is held: the model is asked once for each length of prompt and replica."""
    model, fair = Counting(), FairShare()
    waiting = [replace(request(f"q{i}", 100 + i % 5, ttft=1.0, tpot=0.05), tenant="ab"[i % 2]) for i in range(2000)]
    for each in waiting:
        fair.add_request(each, 0.0)
    fleet = [view(latency=model), view(latency=model)]
    fair.release(waiting, fleet, 0.0)  # works out each one's load, once
    model.asked = 0
    fair.release(waiting, fleet, 0.1)
    assert model.asked == 2 * 5 + 2


@given(
    prompts=st.lists(st.sampled_from([4, 50, 51, 900, 4000]), min_size=1, max_size=12),
    ttft=st.lists(st.sampled_from([None, 0.05, 0.2, 2.0]), min_size=12, max_size=12),
    placed=st.sets(st.integers(0, 11)),
    now=st.floats(0.0, 5.0),
)
def test_step_times_asked_once_decide_as_those_asked_for_each_request(
    prompts: list[int], ttft: list[float | None], placed: set[int], now: float
) -> None:
    def opened() -> tuple[list[str], float | None]:
        fair = FairShare({"a": 2.0})
        asked = [
            replace(request(f"q{i}", prompt, ttft=ttft[i], tpot=0.03), tenant="abc"[i % 3])
            for i, prompt in enumerate(prompts)
        ]
        fleet = [view(latency=Linear(0.01)), view(latency=Linear(0.005, 0.002))]
        for each in asked:
            fair.add_request(each, 0.0)
        for each in fair.release(asked, fleet, 0.0):
            if int(each.id[1:]) in placed:
                fair.record_placement(each.id)
        held = [each for each in asked if not fair._entries[each.id].is_placed]
        return [each.id for each in fair.release(held, fleet, now)], fair.wake_at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.policy_kit.fair_share.cache", lambda ask: ask)
        expected = opened()
    assert opened() == expected
