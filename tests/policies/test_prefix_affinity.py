"""`prefix_affinity: true` of any router: what the index remembers, and which requests move where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.cli.main import main
from rubato.config.schema import Config
from rubato.core.events import Event, Finished, Left, Placed, Started, Verdict
from rubato.core.interfaces import Assigner, Dispatch, Router, SeqView, View
from rubato.core.plan import Limits, Role
from rubato.core.request import SLO, Handoff, Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.fleet.router_calls import RouterCalls
from rubato.policies import PolicyError, load_router, router_for
from rubato.policy_kit.prefix_affinity import PrefixAffinity
from rubato.policy_kit.prefix_index import PrefixIndex
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.kit import Linear, changed, idle_fleet, request, run_spec, shown, view
from tests.kit.plans import decode, prompt
from tests.policies.test_properties import LONE, Load, loads, shared
from tests.policies.test_properties import run as run_load

PREFIX = tuple(range(1000, 1256))  # 256 tokens, four blocks of the index


BEST_EFFORT = SLO()


def asks(id: str, ids: tuple[int, ...] = PREFIX, slo: SLO = BEST_EFFORT, **more: Any) -> Request:
    return Request(id, (Stage(len(ids), slo, token_ids=ids),), 0.0, **more)


class Told:
    """Places as it is told to, and rejects nothing else."""

    needs = frozenset({"recall"})
    wants = frozenset({"step"})
    tier_names = ("gold",)

    def __init__(self, **place: str) -> None:
        self.dispatch = Dispatch(place)
        self.seen: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.seen += events

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        return self.dispatch


def settled(place: dict[str, str], *requests: Request, fleet: Sequence[View] = ()) -> PrefixAffinity:
    """A router with affinity that was told where these requests are."""
    router = PrefixAffinity(cast(Router, Told(**place)))
    tell(router, place, *requests, fleet=fleet or idle_fleet(2))
    return router


def tell(router: PrefixAffinity, place: dict[str, str], *requests: Request, fleet: Sequence[View]) -> None:
    router.inner.dispatch = Dispatch(place)  # type: ignore[attr-defined]
    router.place(shown(*requests), fleet, 0.0)
    router.observe([Placed(0.0, id, to) for id, to in place.items()])


def asked(
    router: PrefixAffinity, chosen: dict[str, str], *held: Request, fleet: Sequence[View], **said: Any
) -> dict[str, str]:
    """Where these go that the inner router places so."""
    router.inner.dispatch = Dispatch(chosen, **said)  # type: ignore[attr-defined]
    return dict(router.place(shown(*held), fleet, 0.0).place)


def finished(id: str, output: int, outcome: Any = "completed") -> Finished:
    return Finished(1.0, id, outcome, "stop", Verdict(True, "deadline"), output)


# --------------------------------------------------------------------------- the index


def cached(index: PrefixIndex, asked: Request, replicas: str = "ab") -> list[int]:
    [seq] = shown(asked)
    return [index.cached(seq, id) for id in replicas]


def indexed(*placed: tuple[Request, str], kv_total: int = 1000) -> PrefixIndex:
    index = PrefixIndex()
    for each, to in placed:
        index.begin(shown(each), [view(id=id, kv_total=kv_total) for id in "ab"])
        index.expect(shown(each)[0], to)
        index.observe([Placed(0.0, each.id, to)])
        index.begin((), ())
    return index


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (PREFIX, [255, 0]),  # the last token is to be run
        ((*PREFIX, 1, 2), [256, 0]),
        (PREFIX[:200], [192, 0]),  # whole blocks only
        ((*PREFIX[:128], *range(100)), [128, 0]),
        ((0, *PREFIX), [0, 0]),
        (PREFIX[:63], [0, 0]),
    ],
)
def test_prompts_share_whole_blocks_as_far_as_they_begin_alike(ids: tuple[int, ...], expected: list[int]) -> None:
    assert cached(indexed((asks("x"), "a")), asks("y", ids)) == expected


def test_tenants_share_nothing() -> None:
    index = indexed((asks("x", tenant="t"), "a"), (asks("s", (1,), tenant="t", session="me"), "a"))
    assert cached(index, asks("y", tenant="u")) == [0, 0]
    assert cached(index, asks("y", (5,) * 64, tenant="u", session="me")) == [0, 0]


def test_keys_that_a_request_brings_go_before_its_token_ids() -> None:
    keyed = Request("x", (Stage(200),), 0.0, prefix=(11, 12, 13))
    index = indexed((keyed, "b"))
    assert cached(index, replace(keyed, id="y", prefix=(11, 12, 99))) == [0, 128]
    assert cached(index, replace(keyed, id="z", tenant="other")) == [0, 0]


def test_it_holds_no_more_than_a_replica_does_and_forgets_ends_first() -> None:
    """A memory of 320 tokens: the second prompt takes 128 of them from the end of the first."""
    first, second = asks("x"), asks("y", (7,) * 192)
    index = indexed((first, "a"), (second, "a"), kv_total=20)
    assert cached(index, replace(second, id="z")) == [191, 0]
    assert cached(index, replace(first, id="w")) == [128, 0]


def test_a_replica_that_left_is_forgotten() -> None:
    index = indexed((asks("x"), "a"), (asks("y", session="me"), "a"))
    index.observe([Left(1.0, "a")])
    assert cached(index, asks("z", session="me")) == [0, 0]


def test_a_session_counts_as_cached_where_it_was_served_last() -> None:
    """Prompts without token ids."""
    turn = Request("x", (Stage(100),), 0.0, session="me")
    index = indexed((turn, "a"))
    assert cached(index, replace(turn, id="y", stages=(Stage(500),))) == [100, 0]
    index.observe([finished("x", 40)])
    assert cached(index, replace(turn, id="z", stages=(Stage(500),))) == [140, 0]
    assert cached(index, replace(turn, id="short", stages=(Stage(9),))) == [8, 0]
    index.begin(shown(second := replace(turn, id="w")), [view(id="b")])
    index.expect(shown(second)[0], "b")
    index.observe([Placed(2.0, "w", "b"), finished("w", 900, "cancelled")])
    assert cached(index, replace(turn, id="v", stages=(Stage(500),))) == [0, 100]


def test_a_session_is_forgotten_with_the_memory_that_it_takes() -> None:
    turn = Request("x", (Stage(100),), 0.0, session="me")
    index = indexed((turn, "a"), (asks("y"), "a"), kv_total=20)
    assert cached(index, replace(turn, id="z")) == [0, 0]
    assert (index._sessions, index._caches["a"].tokens) == ({}, 256)


@few
@given(
    placed=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from("ab"), st.sampled_from(["", "s", "t"])),
        max_size=30,
    ),
    ends=st.booleans(),
)
def test_the_index_is_bounded_and_keeps_its_count(placed: list[tuple[int, int, str, str]], ends: bool) -> None:
    index = PrefixIndex()
    fleet = [view(id=id, kv_total=30) for id in "ab"]
    for i, (tokens, kind, to, session) in enumerate(placed):
        each = asks(f"q{i}", (kind,) * (tokens + 1), session=session)
        index.begin(shown(each), fleet)
        assert 0 <= index.cached(shown(each)[0], to) <= tokens
        index.observe([Placed(0.0, each.id, to), *([finished(each.id, 20)] if ends else [])])
        for cache in index._caches.values():
            assert cache.tokens == sum(cache.entries.values()) <= 30 * 16
            assert all(tokens >= 0 for tokens in cache.entries.values())
        held = {key for cache in index._caches.values() for key in cache.entries if isinstance(key, tuple)}
        assert held == set(index._sessions)
    assert not (ends and (index._prompts or index._replica_of))


# --------------------------------------------------------------------------- which requests move

TWO = idle_fleet(2)
TTFT = SLO(ttft=0.2)


def test_a_request_follows_its_prefix_and_says_so() -> None:
    router = settled({"x": "r1"}, asks("x"))
    assert asked(router, {"y": "r0"}, asks("y"), fleet=TWO) == {"y": "r1"}
    dispatch = router.place(shown(asks("y")), TWO, 0.0)
    assert dispatch.why == {"y": "255 tokens cached here, 0 on r0"}


def test_without_a_cached_prefix_the_routers_choice_stands() -> None:
    router = settled({"x": "r1"}, asks("x"))
    assert asked(router, {"y": "r0"}, asks("y", (5,) * 256), fleet=TWO) == {"y": "r0"}
    assert asked(router, {"y": "r0"}, request("y", 256), fleet=TWO) == {"y": "r0"}


def test_of_equal_prefixes_the_routers_choice_is_kept() -> None:
    router = settled({"x": "r1"}, asks("x"))
    tell(router, {"z": "r0"}, request("z", 5), fleet=TWO)
    router.observe([Placed(0.0, "y", "r0")])
    tell(router, {"w": "r0"}, asks("w", slo=SLO(ttft=1e-3)), fleet=TWO)  # late there: it stays, and is cached on r0 too
    assert asked(router, {"y": "r0"}, asks("y"), fleet=TWO) == {"y": "r0"}


@pytest.mark.parametrize(
    ("pending", "ttft", "to"),
    [
        # 10 ms a step and 1 ms a token: 256 tokens, 255 of them cached on r1
        (0, 0.02, "r1"),
        (100, 0.12, "r1"),  # 101 tokens: 111 ms
        (100, 0.11, "r0"),
        (0, 0.01, "r0"),  # late everywhere
    ],
)
def test_it_moves_only_where_its_first_token_is_in_time(pending: int, ttft: float, to: str) -> None:
    router = settled({"x": "r1"}, asks("x"))
    fleet = [view(id="r0"), view([prompt("p", pending)] if pending else [], id="r1")]
    assert asked(router, {"y": "r0"}, asks("y", slo=SLO(ttft=ttft)), fleet=fleet) == {"y": to}


@pytest.mark.parametrize(("tpot", "to"), [(0.0131, "r1"), (0.0129, "r0")])
def test_it_moves_only_where_its_tpot_is_kept(tpot: float, to: str) -> None:
    """10 ms and 1 ms for each of two decodes and this one."""
    router = settled({"x": "r1"}, asks("x"))
    fleet = [view(id="r0"), view([], [decode("a"), decode("b")], id="r1")]
    assert asked(router, {"y": "r0"}, asks("y", slo=SLO(tpot=tpot)), fleet=fleet) == {"y": to}


@pytest.mark.parametrize(("pending", "to"), [(191, "r1"), (192, "r0")])
def test_best_effort_goes_where_no_more_load_is_added_than_it_saves(pending: int, to: str) -> None:
    """It saves 255 tokens; a request that waits counts for 64 beside its own."""
    router = settled({"x": "r1"}, asks("x"))
    fleet = [view(id="r0"), view([prompt("p", pending)], id="r1")]
    assert asked(router, {"y": "r0"}, asks("y"), fleet=fleet) == {"y": to}
    late = asks("z", slo=SLO(ttft=1e-3))
    assert asked(router, {"z": "r0"}, late, fleet=fleet, demote=["z"]) == {"z": to}  # best effort from now on


def test_what_is_placed_together_counts() -> None:
    """Of three that save 255 tokens each by going to r1, 1 ms a token is theirs there: the third is late."""
    router = settled({"x": "r1"}, asks("x"))
    held = [asks(id, slo=SLO(ttft=0.0125)) for id in "abc"]
    assert asked(router, dict.fromkeys("abc", "r0"), *held, fleet=TWO) == {"a": "r1", "b": "r1", "c": "r0"}
    empty = settled({}, fleet=TWO)
    together = [asks("a"), asks("b", slo=TTFT)]  # b follows a, which is placed in the same dispatch
    assert asked(empty, {"a": "r1", "b": "r0"}, *together, fleet=TWO) == {"a": "r1", "b": "r0"}  # behind 256 tokens
    later = [asks("a"), asks("b", slo=SLO(ttft=0.3))]
    assert asked(settled({}, fleet=TWO), {"a": "r1", "b": "r0"}, *later, fleet=TWO) == {"a": "r1", "b": "r1"}


def test_only_replicas_of_the_same_role_are_looked_at() -> None:
    router = settled({"x": "r1"}, asks("x"))
    fleet = [view(id="r0"), view(id="r1", role=Role("prefill"))]
    assert asked(router, {"y": "r0"}, asks("y"), fleet=fleet) == {"y": "r0"}
    changes = {"r0": Role("prefill")}
    assert asked(router, {"y": "r0"}, asks("y"), fleet=fleet, assign=changes) == {"y": "r1"}


def test_a_request_that_was_handed_off_stays_where_the_router_puts_it() -> None:
    router = settled({"x": "r1"}, asks("x"))
    for kv in (0, 100):
        moved = replace(asks("y"), handoff=Handoff("r1", "declined", 0.0, kv))
        assert asked(router, {"y": "r0"}, moved, fleet=TWO) == {"y": "r0"}


def test_choices_of_one_prompt_go_together() -> None:
    router = settled({"x": "r1"}, asks("x"))
    held = [asks(id, group="g", slo=SLO(ttft=0.0115)) for id in "ab"]  # alone, the second would be late there
    assert asked(router, {"a": "r0", "b": "r0"}, *held, fleet=TWO) == {"a": "r1", "b": "r1"}


def test_a_session_follows_its_kv() -> None:
    router = settled({"x": "r1"}, replace(request("x", 300), session="me"))
    router.observe([finished("x", 50)])
    again = replace(request("y", 400, ttft=0.1), session="me")
    assert asked(router, {"y": "r0"}, again, fleet=TWO) == {"y": "r1"}  # 350 of 400 tokens
    assert asked(router, {"y": "r0"}, replace(again, session="you", id="y"), fleet=TWO) == {"y": "r1"}
    assert asked(router, {"z": "r0"}, replace(again, session="you", id="z"), fleet=TWO) == {"z": "r0"}


# --------------------------------------------------------------------------- a router with it is a router


def test_it_has_all_that_the_inner_router_has() -> None:
    inner = Told()
    router: Any = PrefixAffinity(cast(Router, inner))
    assert (router.needs, router.wants, router.tier_names) == (inner.needs, inner.wants, inner.tier_names)
    router.observe([Left(0.0, "r0")])
    assert inner.seen == [Left(0.0, "r0")]
    assert not isinstance(router, Assigner)
    with pytest.raises(AttributeError, match="no_such"):
        _ = router.no_such
    assert RouterCalls(load_router("random", {"prefix_affinity": True})).policy == "random"


def test_any_router_can_be_given_the_setting() -> None:
    router: Any = load_router("least_loaded", {"prefix_affinity": True, "per_request": 5})
    assert (router.prefix_affinity, router.per_request) == (True, 5)
    assert type(load_router("least_loaded", {"prefix_affinity": False})).__name__ == "Router"
    roles = load_router("minimal", {"prefix_affinity": True, "prefill": 1, "decode": 1})
    assert isinstance(roles, Assigner)
    assert [role.phase for role in roles.roles(["a", "b"]).values()] == ["prefill", "decode"]
    auto = router_for("slos_serve", "auto", {"prefix_affinity": True}, {"max_hops": 2})
    assert isinstance(auto, PrefixAffinity)
    assert auto.max_hops == 2
    choice = PolicyChoice.parse("edf@least_loaded:prefix_affinity=true")
    assert (choice.router_settings, choice.label) == (
        {"prefix_affinity": True}, "edf@least_loaded:prefix_affinity=True",
    )  # fmt: skip
    assert PolicyChoice.parse("edf@auto:prefix_affinity=true").label == "edf@auto:prefix_affinity=True"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prefix_afinity": True}, "no setting 'prefix_afinity': did you mean 'prefix_affinity'"),
        ({"prefix_affinity": True, "per_requests": 1}, "no setting 'per_requests': did you mean 'per_request'"),
        ({"prefix_affinity": "yes"}, "setting prefix_affinity is 'yes'; give true or false"),
        ({"prefix_affinity": 1}, "give true or false"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load_router("least_loaded", settings)


def test_a_scheduler_says_whose_setting_it_is() -> None:
    with pytest.raises(PolicyError, match="is a setting of the router: write edf@auto:prefix_affinity=True"):
        PolicyChoice.parse("edf:prefix_affinity=true")


# --------------------------------------------------------------------------- properties

LENGTHS = st.sampled_from([1, 64, 65, 128, 200, 256])
SLOS = st.sampled_from([SLO(), SLO(ttft=0.02), SLO(ttft=0.2, tpot=0.02), SLO(ttft=5.0), SLO(tpot=0.012), SLO(e2e=0.5)])


@st.composite
def views(draw: st.DrawFn) -> list[View]:
    fleet = []
    for i in range(draw(st.integers(1, 4))):
        waiting = [prompt(f"w{i}{j}", n) for j, n in enumerate(draw(st.lists(LENGTHS, max_size=3)))]
        running = [decode(f"d{i}{j}") for j in range(draw(st.integers(0, 3)))]
        role = draw(st.sampled_from([Role(), Role(tier="a")]))
        fleet.append(view(waiting, running, id=f"r{i}", role=role))
    return fleet


@few
@given(data=st.data(), fleet=views(), before=st.integers(0, 6))
def test_it_moves_requests_between_replicas_of_a_role_and_changes_nothing_else(
    data: st.DataObject, fleet: list[View], before: int
) -> None:
    """And never to where the first token is predicted to be late."""
    router = settled({}, fleet=fleet)
    replicas = st.sampled_from([view.id for view in fleet])
    for i in range(before):
        each = asks(f"b{i}", PREFIX[: data.draw(LENGTHS)])
        tell(router, {each.id: data.draw(replicas)}, each, fleet=fleet)
    held = [
        asks(f"q{i}", PREFIX[: data.draw(LENGTHS)], data.draw(SLOS), group=data.draw(st.sampled_from(["", "", "g"])))
        for i in range(data.draw(st.integers(1, 5)))
    ]
    place, reject, demote = {}, {}, []
    together = data.draw(replicas)  # the group's
    for each in held:
        kind = data.draw(st.sampled_from(["place", "place", "place", "reject", "hold"]))
        if kind == "place":
            place[each.id] = together if each.group else data.draw(replicas)
            if not each.best_effort and data.draw(st.booleans()):
                demote.append(each.id)
        elif kind == "reject":
            reject[each.id] = "rejected-toy"
    inner = Dispatch(place, reject, demote, wake_at=3.0)
    router.inner.dispatch = inner  # type: ignore[attr-defined]
    outer = router.place(shown(*held), fleet, 0.0)
    assert outer._replace(place=place, why=inner.why) == inner
    assert list(outer.place) == list(place)
    by_id = {view.id: view for view in fleet}
    for each in held:
        if each.id in place:
            to = outer.place[each.id]
            assert by_id[to].role == by_id[place[each.id]].role
            assert (each.id in outer.why) == (to != place[each.id])
            slo = each.stages[0].slo
            if to != place[each.id] and each.id not in demote and slo.ttft is not None and not each.group:
                waiting = sum(s.pending for s in by_id[to].waiting)
                assert 0.01 + 0.001 * (waiting + 1) <= slo.ttft + 1e-9


@pytest.mark.parametrize("router", LONE)
@few
@given(load=loads(), replicas=st.integers(1, 3), tenants=st.booleans())
def test_all_requests_end_once_with_it(router: str, load: Load, replicas: int, tenants: bool) -> None:
    load = replace(shared(load) if tenants else load, prefix_cache=True)
    events = run_load(load, "vllm", router=router, router_settings={"prefix_affinity": True}, replicas=replicas)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


@pytest.mark.parametrize("policy", ["polyserve", "ascendra", "slos_serve", "distserve", "rubato"])
@few
@given(load=loads(), replicas=st.integers(2, 4))
def test_all_requests_end_once_with_it_where_the_policy_has_its_own_router(
    policy: str, load: Load, replicas: int
) -> None:
    own = {"router": policy, "router_settings": {"prefix_affinity": True}}
    events = run_load(replace(load, prefix_cache=True), policy, **own, replicas=replicas)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


@few
@given(load=loads(), every=st.integers(1, 5))
def test_a_new_index_serves_as_well(load: Load, every: int) -> None:
    """It is derived state: one that is lost now and again, with requests in flight, is learnt anew."""
    calls = 0
    place = PrefixAffinity.place

    def forgets(self: PrefixAffinity, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            self._index = PrefixIndex()
        return place(self, held, fleet, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixAffinity, "place", forgets)
        own = {"router": "lmetric", "router_settings": {"prefix_affinity": True}}
        events = run_load(replace(load, prefix_cache=True), "edf", **own, replicas=3)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


# --------------------------------------------------------------------------- simulated


def talks(seed: int, users: int = 24, seconds: float = 20.0) -> list[Request]:
    """Prompts that begin with one of so many system prompts of 1024 tokens."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0.0, seconds, size=int(12 * seconds)))
    return [
        Request(
            f"q{i}",
            (Stage(1088, SLO(ttft=1.0, tpot=0.1), token_ids=(int(user),) * 1024 + (100 + i,) * 64),),
            float(when),
            sampling=Sampling(max_tokens=40),
        )
        for i, (when, user) in enumerate(zip(at, rng.integers(users, size=len(at)), strict=True))
    ]


def shares(spec: RunSpec, requests: list[Request]) -> tuple[float, float]:
    """Of prompt tokens cached, and of requests that met their SLOs."""
    events = list(simulate_events(requests, {r.id: (40,) for r in requests}, spec))
    cached = {e.id: e.cached for e in events if isinstance(e, Started) and not e.resumed}
    met = [e.verdict.met for e in events if isinstance(e, Finished)]
    return sum(cached.values()) / (1088 * len(requests)), sum(met) / len(met)


@pytest.mark.parametrize("router", ["least_loaded", "round_robin"])
def test_more_of_the_prompts_is_cached_and_no_fewer_slos_are_met(router: str) -> None:
    """Memory of each replica for a third of the system prompts."""
    limits = Limits(64, 2048, 4096, kv_blocks=1100, block_size=16)
    spec = run_spec(Linear(0.005, 0.0001), limits, "edf", router=router, replicas=3, prefix_cache=True, learns=False)
    requests = talks(1, seconds=8.0)
    usual, met = shares(spec, requests)
    moved, met_too = shares(changed(spec, router_settings={"prefix_affinity": True}), requests)
    assert moved > usual + 0.1
    assert met_too >= met


def test_no_request_moves_to_where_its_slo_is_predicted_to_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that move in a run under load, the first token would have been in time by what the replica shows."""
    moved = []
    place = PrefixAffinity.place

    def watched(self: PrefixAffinity, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        outer = place(self, held, fleet, now)
        for id in outer.why:
            [seq] = [s for s in held if s.id == id]
            [view] = [v for v in fleet if v.id == outer.place[id]]
            waits = sum(s.pending for s in view.waiting) + sum(s.pending for s in view.prefilling)
            late = now + 0.0001 * waits > seq.due  # with no step begun: a lower bound
            moved.append((id, late, seq.due))
        return outer

    monkeypatch.setattr(PrefixAffinity, "place", watched)
    limits = Limits(64, 2048, 4096, kv_blocks=1100, block_size=16)
    settings = {"prefix_affinity": True}
    spec = run_spec(
        Linear(0.005, 0.0002), limits, "edf", router="least_loaded", router_settings=settings, replicas=3,
        prefix_cache=True, learns=False,
    )  # fmt: skip
    shares(spec, talks(2, seconds=10.0))
    assert len(moved) > 50
    assert not [id for id, late, due in moved if late and due < inf]


@pytest.mark.parametrize(
    "words",
    [
        ["--policy", "edf", "--router", "least_loaded", "--set", "router.prefix_affinity=true"],
        ["--policy", "edf@least_loaded:prefix_affinity=true"],
    ],
)
def test_the_command_line_takes_it(words: list[str], tmp_path: Path) -> None:
    load = ["--profile", "llama-3.1-8b-a100", "--scenario", "slos-serve-chatbot", "--count", "3", "--replicas", "2"]
    assert main(["simulate", *load, *words, "--json", str(tmp_path / "run.json")]) == 0
    (run,) = json.loads((tmp_path / "run.json").read_bytes())["runs"]
    assert run["settings"]["router_settings"] == {"prefix_affinity": True}


def test_a_configuration_takes_it() -> None:
    config = Config.model_validate({"router": {"name": "least_loaded", "prefix_affinity": True}})
    assert isinstance(load_router(config.router.name, config.router.settings), PrefixAffinity)


@pytest.mark.parametrize("mode", ["co", "pd"])
def test_polyserve_keeps_its_books_by_where_requests_are(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request moves, its seat or its prompt moves with it; when all has ended nobody sits anywhere."""
    routers, moved = set(), 0
    observe = PrefixAffinity.observe

    def watched(self: PrefixAffinity, events: Sequence[Event]) -> None:
        nonlocal moved
        observe(self, events)
        routers.add(self)
        for event in events:
            if isinstance(event, Placed):
                inner: Any = self.inner
                there = inner._prefills.get(event.id) or inner._slots[event.id].replica
                assert there.id == event.replica
                moved += "cached here" in event.why

    monkeypatch.setattr(PrefixAffinity, "observe", watched)
    settings = {"prefix_affinity": True, "mode": mode}
    limits = Limits(64, 2048, 4096, kv_blocks=1100, block_size=16)
    spec = run_spec(
        Linear(0.005, 0.0002), limits, "polyserve", router="polyserve", router_settings=settings, replicas=6,
        prefix_cache=True, learns=False,
    )  # fmt: skip
    shares(spec, talks(3))
    assert moved > 10
    [router] = routers
    for replica in router.inner._replicas.values():
        assert (sum(replica.residents), len(replica.forecast), replica.prompts) == (0, 0, {})
