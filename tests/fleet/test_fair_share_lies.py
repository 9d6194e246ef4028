"""What a tenant states, sends and does not wait for takes nothing from the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.core.events import Event, Finished
from rubato.core.plan import Limits
from rubato.core.request import SLO, Outcome, Request, Sampling, Stage
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency.affine import Model
from rubato.policy_kit.fair_share import FairShare
from tests.kit import Linear, request, view

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=16384, block_size=16)
SECONDS = 10.0
HONEST = SLO(1.0, 0.05)


def cluster_on(clock: VirtualClock, fair: FairShare) -> Cluster:
    model = Model(k=(2e-4, 0.0), b=(0.01, 0.0))
    return local_cluster([Engine(model, LIMITS, clock)], [model], clock, ClusterOptions(PolicyChoice("edf"), fair=fair))


@cache
def beside(evil: SLO, prompt: int = 100) -> tuple[int, int]:
    """What a good tenant completes and attains in 10 s over 8 connections, beside one with 2 of 10 + 4 tokens."""

    async def main() -> tuple[int, int]:
        clock = VirtualClock()
        cluster = cluster_on(clock, FairShare())
        await cluster.start()
        done: Counter[str] = Counter()

        def again(tenant: str, tokens: int, most: int, slo: SLO) -> None:
            id = f"{tenant}{cluster.offered}"
            offered = Request(id, (Stage(tokens, slo),), clock.now(), tenant=tenant, sampling=Sampling(most))

            def heard(event: Event) -> None:
                if isinstance(event, Finished) and event.at < SECONDS:
                    done[f"{tenant} {event.outcome}"] += 1
                    done[f"{tenant} met"] += event.verdict.met
                    clock.call_at(event.at, ARRIVAL, lambda: again(tenant, tokens, most, slo))

            cluster.offer(offered, heard)

        for _ in range(8):
            again("good", prompt, 32, HONEST)
        for _ in range(2):
            again("evil", 10, 4, evil)
        await clock.sleep_until(SECONDS, ARRIVAL)
        await cluster.close()
        return done["good completed"], done["good met"]

    return run_virtual(main())


LIES = [
    SLO(1e-6, 0.05), SLO(1.0, 1e-6), SLO(1e-6, 1e-6),  # impossible
    SLO(0.013, 0.05), SLO(1.0, 0.0105), SLO(0.013, 0.0105),  # just possible: alone it has its token after 12 ms
    SLO(0.025, 0.05), SLO(1.0, 0.0201), SLO(0.06, 0.025),  # possible on half of the machine
    SLO(1.0, 0.05, 1e-6), SLO(1.0, 0.05, 0.05), SLO(None, None, 1e-6), SLO(1e6, 1e6, 1e6),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_what_a_tenant_states_takes_little_from_another(lie: SLO) -> None:
    completed, met = beside(HONEST)
    assert completed == met > 100
    assert beside(lie)[0] >= 0.9 * completed
    assert beside(lie)[1] >= 0.9 * met


def test_beside_a_liar_longer_prompts_have_what_half_a_machine_gives() -> None:
    """28 of 400 + 32 tokens in 10 s, with every step twice as long."""
    assert min(beside(lie, 400)[0] for lie in (SLO(0.013, 0.05), SLO(1.0, 0.0105))) >= 28


# --------------------------------------------------------------------------- what the mean is learned from


@pytest.mark.parametrize("outcome", ["refused", "cancelled", "failed"])
def test_only_what_completed_says_how_long_answers_are(outcome: Outcome) -> None:
    fair, replicas = FairShare(), [view(latency=Linear(0.02, 1e-5))]

    def ends(id: str, how: Outcome, output: int, at: float) -> float:
        one = replace(request(id, 200, tpot=0.05, most=1000), tenant="evil")
        fair.add_request(one, at)
        expected = fair._entries[id].expected
        assert fair.release([one], replicas, at) == [one]
        fair.record_placement(id)
        fair.record_end(id, how, output, at)
        return expected

    before = ends("first", "completed", 100, 0.0), ends("second", "completed", 100, 0.0)
    account = fair._accounts["evil"]
    for i in range(2000):
        finish = account.finish
        assert ends(f"q{i}", outcome, i % 3, 0.005 * i) > before[0]
        assert account.finish - finish == pytest.approx(200 + i % 3)  # its prompt and what it emitted
    assert ends("last", "completed", 0, 11.0) == pytest.approx(before[1] + 0.1 * (100 - before[1]))
    for i in range(400):
        ends(f"none{i}", "completed", 0, 12.0)
    assert ends("after", "completed", 1, 13.0) == 1.0


# --------------------------------------------------------------------------- any tenants, any requests, any ends

EXTREME = st.none() | st.sampled_from([1e-6, 0.0105, 0.02, 1.0, 1e6])
SLOS = st.builds(SLO, EXTREME, EXTREME, EXTREME)
TOKENS = st.sampled_from([1, 2, 100, 4096, 10**6])
REQUESTS = st.tuples(st.sampled_from("abc"), SLOS, TOKENS, st.sampled_from([1, 16, 4096, 10**400]))
OUTCOMES = st.sampled_from(["completed", "refused", "cancelled", "failed"])
ACTS = st.one_of(
    st.tuples(st.just("enter"), REQUESTS),
    st.tuples(st.just("end"), st.tuples(st.integers(0, 50), OUTCOMES, st.sampled_from([0, 1, 16, 4096]))),
    st.tuples(st.just("lose"), st.integers(0, 50)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 1e-6, 0.01, 3.0, 1e4])),
)


@given(acts=st.lists(ACTS, max_size=40), window=st.none() | st.just(3), replicas=st.integers(1, 3))
def test_accounts_stay_finite_and_end_empty(acts: list[Any], window: int | None, replicas: int) -> None:
    fair = FairShare({"a": 3.0}, window)
    fleet = [view(f"r{i}", latency=Linear(0.01, 2e-4, 1e-7)) for i in range(replicas)]
    held: dict[str, Request] = {}
    placed: dict[str, Request] = {}
    now, made = 0.0, 0

    def books() -> None:
        for account in fair._accounts.values():
            for value in (account.finish, account.load, account.output, account.debt):
                assert isfinite(value)
                assert value >= 0.0
            assert account.placed_count >= 0
            assert account.waiting >= 0
        assert sum(a.waiting for a in fair._accounts.values()) == len(held)
        assert sum(a.placed_count for a in fair._accounts.values()) == len(placed)

    def passes() -> None:
        while through := fair.release(list(held.values()), fleet, now):
            for one in through[:2]:  # the router takes some of them
                fair.record_placement(one.id)
                placed[one.id] = held.pop(one.id)
            books()
        assert fair.wake_at is None or now < fair.wake_at < float("inf")

    def end(id: str, outcome: Outcome, output: int) -> None:
        fair.record_end(id, outcome, 0 if id in held else output, now)
        (held if id in held else placed).pop(id)

    for kind, given_ in acts:
        if kind == "enter":
            tenant, slo, prompt, most = given_
            one = Request(f"q{made}", (Stage(prompt, slo),), now, tenant=tenant, sampling=Sampling(most))
            made += 1
            fair.beyond_share(one, 4, now)
            fair.add_request(one, now)
            held[one.id] = one
        elif kind == "end" and (ids := [*held, *placed]):
            end(ids[given_[0] % len(ids)], given_[1], given_[2])
        elif kind == "lose" and placed:
            id = list(placed)[given_ % len(placed)]
            fair.record_return(id)
            held[id] = placed.pop(id)
        elif kind == "wait":
            now += given_
        books()
        passes()
    # whoever waits passes in the end: nothing else is there, and time goes on
    for _ in range(10 * made):
        for id in list(placed):
            end(id, "completed", 16)
        if not held:
            break
        passes()
        if not placed:
            assert fair.wake_at is not None
            now = fair.wake_at
            passes()
    assert not held
    for account in fair._accounts.values():
        assert (account.placed_count, account.waiting, account.load) == (0, 0, 0.0)
