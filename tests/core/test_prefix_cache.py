"""Shared KV: found by content, kept from other tenants, given back in the end."""

from __future__ import annotations

import random

import pytest

from rubato.core.events import Finished, Started, Stepped
from rubato.core.plan import Emitted, Limits, Plan, StepResult, Work
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Progress, Request, Sampling, Stage
from rubato.policies import describe, load
from rubato.replica.kv_blocks import KVBlocks, first_key, next_key
from rubato.replica.replica import Replica
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, integrity, run_spec, run_step

SCHEDULERS = sorted({name for name, kind, *_ in describe() if kind == "scheduler"})
PLAIN = [name for name in SCHEDULERS if not load(name).needs & {"draft", "handoff"}]
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, kv_blocks=12, block_size=8)


def asks(
    id: str, ids: tuple[int, ...], *, tenant: str = "t", group: str = "", most: int = 16, **more: object
) -> Request:
    return Request(
        id, (Stage(len(ids), token_ids=ids),), 0.0, tenant=tenant, group=group, sampling=Sampling(most), **more
    )  # type: ignore[arg-type]


def replica(**changes: object) -> Replica:
    return Replica("r0", LIMITS, Linear(), ReplicaOptions(**{"prefix_cache": True, **changes}))  # type: ignore[arg-type]


def pendings(r: Replica) -> dict[str, int]:
    return {s.id: s.pending for s in r.view(0.0).waiting}


def end() -> Emitted:
    return Emitted(1, "x", (7,), finish="stop")


# --------------------------------------------------------------------------- between requests


def test_what_one_computed_the_next_starts_with() -> None:
    r = replica()
    ids = tuple(range(20))
    r.submit(asks("a", ids), 0.0)
    run_step(r, {"a": 20}, a=end())
    assert (r.kv.free, r.empty) == (12, True)
    r.submit(asks("b", (*ids, 50)), 1.0)
    assert pendings(r) == {"b": 5}  # two full blocks of eight are there
    events = run_step(r, {"b": 5}, 1.0)
    assert events[0] == Started(1.0, "b", cached=16)
    assert r.running["b"].cached == 21


def test_output_is_found_by_the_next_turn() -> None:
    r = replica()
    r.submit(asks("a", tuple(range(6))), 0.0)
    run_step(r, {"a": 6}, token=100)
    run_step(r, {"a": 1}, token=101)
    run_step(r, {"a": 1}, token=102)
    run_step(r, {"a": 1}, a=end())
    r.submit(asks("b", (*range(6), 100, 101, 102, 9)), 1.0)
    assert pendings(r) == {"b": 2}


def test_one_token_is_always_left_to_run() -> None:
    r = replica()
    r.submit(asks("a", tuple(range(16))), 0.0)
    run_step(r, {"a": 16}, a=end())
    r.submit(asks("b", tuple(range(16))), 0.0)
    assert pendings(r) == {"b": 8}


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {}])
def test_off_or_another_tenant_finds_nothing(changes: dict[str, object]) -> None:
    r = replica(**changes)
    r.submit(asks("a", tuple(range(20))), 0.0)
    run_step(r, {"a": 20}, a=end())
    r.submit(asks("b", tuple(range(20)), tenant="t" if changes else "other"), 0.0)
    assert pendings(r) == {"b": 20}


def test_blocks_shared_by_the_running_are_not_freed_by_preempting_one() -> None:
    r = replica()
    for id in "ab":
        r.submit(asks(id, tuple(range(24))), 0.0)
    run_step(r, {"a": 24})
    run_step(r, {"a": 1, "b": 8})
    a, b = r.running["a"], r.running["b"]
    assert a.block_ids[:2] == b.block_ids[:2]
    assert (a.own_blocks, b.own_blocks) == (2, 1)
    free = r.kv.free
    batch, _ = r.apply(Plan((Work("b", 1),), preempt=("a",)), 1.0, "test")
    assert r.kv.free == free + 2 - len(b.block_ids) + 3
    r.commit(batch, StepResult({"b": Emitted(1, "x", (1,))}, 0.1), 1.1)
    integrity.check(r)


def test_a_preempted_one_resumes_from_its_own_blocks() -> None:
    r = replica()
    r.submit(asks("a", tuple(range(24))), 0.0)
    run_step(r, {"a": 24})
    r.apply(Plan(preempt=("a",)), 1.0, "test")
    assert pendings(r) == {"a": 1}
    assert run_step(r, {"a": 1}, 2.0)[0] == Started(2.0, "a", resumed=True, cached=24)


def test_an_engine_that_began_afresh_holds_nothing() -> None:
    r = replica()
    r.submit(asks("a", tuple(range(24))), 0.0)
    run_step(r, {"a": 24}, a=end())
    r.fail(1.0, "broken")
    r.submit(asks("b", tuple(range(24))), 2.0)
    assert pendings(r) == {"b": 24}


# --------------------------------------------------------------------------- choices of one request


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_siblings_wait_for_the_prompt_and_share_it(prefix_cache: bool) -> None:
    r = replica(prefix_cache=prefix_cache)
    for i in range(3):
        r.submit(asks(f"c{i}", tuple(range(20)), group="c"), 0.0)
    assert pendings(r) == {"c0": 20}
    run_step(r, {"c0": 10})
    assert pendings(r) == {}
    run_step(r, {"c0": 10})
    assert pendings(r) == {"c1": 4, "c2": 4}
    run_step(r, {"c1": 4, "c2": 4, "c0": 1})
    assert len({b for s in r.running.values() for b in s.block_ids}) == 2 + 3
    run_step(r, dict.fromkeys(("c0", "c1", "c2"), 1), c0=end(), c1=end(), c2=end())
    assert (r.kv.free, r.empty) == (12, True)
    r.submit(asks("d", tuple(range(20))), 0.0)
    assert pendings(r) == {"d": 4 if prefix_cache else 20}


def test_when_the_first_of_a_group_goes_the_next_leads() -> None:
    r = replica(prefix_cache=False)
    for i in range(3):
        r.submit(asks(f"c{i}", tuple(range(20)), group="c"), 0.0)
    r.cancel("c1", 0.0, "gone")
    r.cancel("c0", 0.0, "gone")
    integrity.check(r)
    assert pendings(r) == {"c2": 20}
    run_step(r, {"c2": 20}, c2=end())
    assert r.empty


# --------------------------------------------------------------------------- moved here


def test_a_moved_request_goes_on_where_it_was() -> None:
    r = replica()
    progress = Progress(starts=(0.0,), times=((0.5, 0.6, 0.7),), token_ids=(100, 101, 102))
    r.submit(asks("a", tuple(range(20)), most=5, progress=progress), 1.0)
    (seq,) = r.waiting
    assert (seq.length, seq.output, seq.first_token_at, seq.total_output) == (23, 3, 0.5, 3)
    events = run_step(r, {"a": 23}, 1.0)
    assert events[0] == Started(1.0, "a", resumed=True)
    (_, last) = run_step(r, {"a": 1}, 1.2, a=Emitted(1, "y", (2,), finish="length"))
    assert isinstance(last, Finished)
    assert (last.output, last.verdict.ttft) == (5, 0.5)
    assert last.verdict.tpot == pytest.approx((1.3 - 0.5) / 4)


# --------------------------------------------------------------------------- under every policy


@pytest.mark.parametrize("policy", PLAIN)
def test_policies_compute_a_shared_prompt_once(policy: str) -> None:
    ids = tuple(range(48))
    requests = [
        Request(f"q{i}", (Stage(48, token_ids=ids),), 1.0 * i, tenant="t", sampling=Sampling(4)) for i in range(5)
    ]

    def run(on: bool) -> tuple[int, int]:
        events = simulate_events(requests, {}, run_spec(Linear(), LIMITS, policy, prefix_cache=on))
        cached = sum(e.cached for e in events if isinstance(e, Started))
        return sum(e.shape.tokens for e in events if isinstance(e, Stepped)), cached

    assert run(False) == (5 * (48 + 3), 0)
    assert run(True) == (48 + 3 + 4 * (8 + 3), 4 * 40)


# --------------------------------------------------------------------------- the books alone


def test_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    kv = KVBlocks(4, 2, keep=True)
    keys = [first_key("t")]
    for ids in ((1, 2), (3, 4), (5, 6)):
        keys.append(next_key(keys[-1], ids))
    held: list[int] = []
    kv.grow(held, 6)
    for b, key in zip(held, keys[1:], strict=True):
        kv.name(b, key)
    kv.release(held)
    assert (kv.free, len(kv.find(keys[1:]))) == (4, 3)
    kv.grow(held, 4)  # one block nobody named, then the end of the prefix
    assert len(kv.find(keys[1:])) == 2
    with pytest.raises(MemoryError, match="3 KV blocks needed, 2 of 4 free"):
        kv.grow(held, 10)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_lost_whatever_is_done(keep: bool, seed: int) -> None:
    rng = random.Random(seed)
    kv = KVBlocks(20, 2, keep=keep)
    keys = [first_key("t")]
    for i in range(8):
        keys.append(next_key(keys[-1], (i, i)))
    users: list[list[int]] = []
    for _ in range(400):
        if users and rng.random() < 0.4:
            kv.release(users.pop(rng.randrange(len(users))))
        else:
            held: list[int] = []
            found = kv.find(keys[1 : 1 + rng.randrange(8)])
            kv.take(held, found)
            if len(held) < 8 and kv.free > 1:
                kv.grow(held, 2 * len(held) + 2)
                kv.name(held[-1], keys[len(held)])
            users.append(held)
        integrity.check_blocks(kv, users)
    for held in users:
        kv.release(held)
    integrity.check_blocks(kv, [])
    assert kv.free == 20
