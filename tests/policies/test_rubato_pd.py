"""`rubato` with prefill and decode apart: what its router may never do, whatever comes and goes, and its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, HandedOff, Left, Placed
from rubato.core.interfaces import Dispatch, View
from rubato.core.plan import Limits, Role
from rubato.core.request import SLO, Handoff, Request, Stage
from rubato.policies.rubato import Scheduler
from rubato.policies.rubato_pd import Router
from rubato.policies.rubato_pd.prefill_step import prefill_step
from rubato.policies.rubato_pd.prompt import PromptPlan
from rubato.policies.rubato_pd.replica_model import MAX_PREFILL_WAIT_S, FleetReplica
from rubato.policy_kit.step_table import StepTable
from rubato.policy_kit.tier_fleet import PREFILL_GROUP
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.fleet.routers import serve
from tests.fleet.test_conservation import LIMITS as SMALL
from tests.kit import Linear, Seq, request, run_spec, shown, view
from tests.kit.fleets import LINK, Breaks, Disturbances, Elsewhere, disturbances
from tests.policies.test_properties import Load, loads, run

TIERS = (0.005, 0.02, 0.1)


@few
@given(load=loads(), replicas=st.integers(2, 5), mode=st.booleans())
def test_every_request_ends(load: Load, replicas: int, mode: bool) -> None:
    """Whether it is named or is the mode of the other router."""
    router, settings = ("rubato", {"mode": "pd"}) if mode else ("rubato_pd", {"tiers": list(TIERS)})
    events = run(load, "rubato", replicas=replicas, router=router, router_settings=settings)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


class Strict(Router):
    """It names no replica but those of the fleet, and no request but those that are held."""

    def place(self, held: Sequence[Any], fleet: Sequence[View], now: float) -> Dispatch:
        dispatch = super().place(held, fleet, now)
        ids, replicas = {seq.id for seq in held}, {view.id for view in fleet}
        assert {*dispatch.place, *dispatch.demote, *dispatch.reject} <= ids
        assert {*dispatch.place.values(), *dispatch.assign, *dispatch.recall} <= replicas
        assert len(dispatch.place) == len(held) or dispatch.wake_at is not None
        return dispatch


@few
@given(
    slos=st.lists(st.sampled_from([SLO(), SLO(0.5, 0.1), SLO(0.05, 0.02), SLO(tpot=0.05), SLO(e2e=1.0)]), min_size=1),
    disturbed=disturbances(),
)
def test_every_request_ends_where_replicas_are_lost(slos: list[SLO], disturbed: Disturbances) -> None:
    """`serve` checks that each ends once, and that no KV is left. With one replica left, KV that only this one holds
    finds no other, and is refused in the end."""
    requests = [Request(f"q{i}", (Stage(8 + 4 * i, slo),), 0.01 * i) for i, slo in enumerate(slos[:12])]
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=10)) for r in requests]
    router = Strict(tiers=TIERS)
    events = serve(
        "simulated", router, requests, replicas=3, scheduler=Scheduler, limits=SMALL, host=Elsewhere, engine=Breaks,
        link=LINK, acts=disturbed.acts,
    )  # fmt: skip
    if not any(disturbed):
        assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}
    assert not any((router._queue, router._parked, router._slots, router._prefills, router._moving))
    for replica in router._replicas.values():
        assert (sum(replica.residents), len(replica.forecast), replica.prompts) == (0, 0, {})
    assert max(map(abs, router._replicas_needed)) < 1e-9


# --------------------------------------------------------------------------- its rules, one by one

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=4000, kv_blocks=500, block_size=8)
STEP = Linear(0.002, 0.0001)  # 2 ms and 0.1 ms a token


def replica(id: str, **changes: Any) -> View:
    own = {"latency": STEP, "limits": LIMITS, "supports": frozenset({"kv_transfer", "recall"}), **changes}
    return view(id=id, kv_free=500, kv_total=500, **own)


def fleet(count: int, **changes: Any) -> list[View]:
    return [replica(f"r{i}", **changes) for i in range(count)]


def asked(id: str, prompt: int = 20, ttft: float | None = 1.0, tpot: float | None = 0.06, **more: Any) -> Request:
    return request(id, prompt, ttft=ttft, tpot=tpot, **more)


def made() -> Router:
    return Router(tiers=(0.01, 0.05))


def roles(dispatch: Dispatch) -> dict[str, tuple[str, str]]:
    return {id: (role.phase, role.tier) for id, role in dispatch.assign.items()}


def test_a_prompt_is_placed_with_a_seat() -> None:
    dispatch = made().place(shown(asked("a"), asked("b")), fleet(3), 0.0)
    assert dispatch.place == {"a": "r0", "b": "r0"}  # they share steps
    assert roles(dispatch) == {"r0": ("prefill", ""), "r1": ("decode", "0.05")}
    assert dispatch.why["a"] == "prefill, then r1"


@pytest.mark.parametrize(
    ("slo", "what"),
    [
        (SLO(0.001, 0.06), "demoted"),  # not even alone
        (SLO(1.0, 0.005), "demoted"),  # tighter than every tier
        (SLO(1.0, None), "prefilled"),  # of the loosest tier
        (SLO(None, 0.06), "prefilled"),
        (SLO(e2e=0.001), "demoted"),
        (SLO(), "in the pool"),
    ],
)
def test_what_is_promised(slo: SLO, what: str) -> None:
    one = replace(asked("a"), stages=(Stage(20, slo),))
    dispatch = made().place(shown(one), fleet(4), 0.0)
    assert (list(dispatch.demote) == ["a"]) is (what == "demoted")
    assert dispatch.place["a"] == "r0"
    assert ("prefill" in dispatch.why["a"]) is (what == "prefilled")
    if what == "demoted":
        refused = made().place(shown(replace(one, on_decline="refuse")), fleet(4), 0.0)
        assert (list(refused.reject), dict(refused.place)) == (["a"], {})


def test_a_tier_that_the_hardware_cannot_keep_claims_nothing() -> None:
    slow = fleet(3, latency=Linear(0.02, 0.0001))
    dispatch = made().place(shown(asked("a", tpot=0.01)), slow, 0.0)
    assert list(dispatch.demote) == ["a"]
    assert dispatch.why == {"a": "best effort: in the pool"}


def test_a_slow_replica_gets_no_prompt_that_it_would_delay() -> None:
    views = [replica("r0", latency=Linear(0.02, 0.001)), replica("r1"), replica("r2")]
    assert made().place(shown(asked("a", 60, ttft=0.05)), views, 0.0).place == {"a": "r1"}
    assert made().place(shown(asked("a", 60, ttft=0.5)), views, 0.0).place == {"a": "r0"}


def test_kv_goes_to_its_seat() -> None:
    router = made()
    router.place(shown(asked("a")), fleet(3), 0.0)
    router.observe([Placed(0.0, "a", "r0")])
    came = replace(asked("a"), handoff=Handoff("r0", "prefilled", 0.1, cached=20))
    router.observe([HandedOff(0.1, "a", came)])
    views = [replica(f"r{i}", now=0.1) for i in range(3)]
    full = [views[0], replace(views[1], kv_free=0), views[2]]
    assert router.place(shown(came), full, 0.1).place == {}, "held while its seat's replica lacks memory"
    assert router.place(shown(came), views, 0.1).place == {"a": "r1"}


def test_kv_whose_seat_is_lost_finds_another_and_never_where_it_is() -> None:
    router = made()
    router.place(shown(asked("a")), fleet(3), 0.0)
    came = replace(asked("a"), handoff=Handoff("r0", "prefilled", 0.1, cached=20))
    router.observe([HandedOff(0.1, "a", came), Left(0.1, "r1")])
    dispatch = router.place(shown(came), [replica("r0", now=0.1), replica("r2", now=0.1)], 0.1)
    assert (dispatch.place, dispatch.assign["r2"].phase) == ({"a": "r2"}, "decode")
    router.observe([Left(0.2, "r2")])
    alone = [replica("r0", now=0.2)]
    held = router.place(shown(came), alone, 0.2)
    assert (held.place, held.reject, held.wake_at) == ({}, {}, 0.7)
    assert list(router.place(shown(came), [replica("r0", now=31.0)], 31.0).reject) == ["a"]


def test_a_looser_request_is_a_guest_before_its_tier_takes_a_replica() -> None:
    """Three replicas: one prefills, one serves the tight tier, and the last stays in the pool."""
    router = made()
    router.place(shown(asked("t", tpot=0.01)), fleet(3), 0.0)
    views = [replica(f"r{i}", role=role) for i, role in enumerate((Role("prefill"), Role("decode", "0.01"), Role()))]
    dispatch = router.place(shown(asked("l")), views, 0.0)
    assert dispatch.why["l"] == "prefill, then r1"


def test_best_effort_leaves_a_part_of_the_pool_idle_and_comes_back_when_it_is_claimed() -> None:
    free = [replace(asked(f"free{i}"), stages=(Stage(1900, SLO()),)) for i in range(4)]
    router = made()
    dispatch = router.place(shown(*free, asked("a")), fleet(4), 0.0)
    assert dispatch.place == {"a": "r0", "free0": "r3", "free1": "r3"}, "r2 stays idle, and r3 has KV for two"
    views = [replica(f"r{i}", now=0.01) for i in range(4)]
    dispatch = router.place(shown(asked("b", tpot=0.01), *free[2:]), views, 0.01)
    assert (dispatch.place["b"], dispatch.recall) == ("r0", {}), "r2 serves the tight tier"


def test_best_effort_has_its_share_while_no_replica_is_idle() -> None:
    """Two replicas have more to do than they can for 9 s. What is asked for without SLO ends before."""
    busy = [request(f"q{i}", 400, most=5, ttft=0.5, tpot=0.06, arrival=0.03 * i) for i in range(300)]
    free = [replace(request(f"free{i}", 8, most=5, arrival=0.05), stages=(Stage(8, SLO()),)) for i in range(3)]
    spec = run_spec(
        STEP, replace(LIMITS, max_num_seqs=16), "rubato", replicas=2, learns=False, router="rubato_pd",
        router_settings={"tiers": [0.05]},
    )  # fmt: skip
    events = simulate_events([*busy[:2], *free, *busy[2:]], {}, spec)
    ends = {e.id: e.at for e in events if isinstance(e, Finished)}
    assert 5.0 < max(ends[f"free{i}"] for i in range(3)) < 8.0
    assert 0.5 < sum(e.verdict.met for e in events if isinstance(e, Finished)) / 303 < 0.9


# --------------------------------------------------------------------------- prompts at a replica


def prompt(id: str, order: float, tokens: int = 20, until: float = 0.0) -> PromptPlan:
    seconds = STEP.fixed + STEP.per_token * tokens
    seq = Seq(request(id, tokens, ttft=1.0, tpot=0.05), length=tokens)
    return PromptPlan(seq, 0, order, order, until, tokens, 4.0, seconds, seconds)


@pytest.mark.parametrize(
    ("queued", "own", "backlog"),
    [
        ([], (0.1, 500), 0.0),
        ([], (0.05, 500), None),  # 52 ms alone
        ([(0.3, 500)], (0.5, 500), 0.052),  # behind the nearer deadline
        ([(0.5, 500)], (0.1, 500), 0.052),  # before the other one
        ([(0.11, 500)], (0.1, 500), None),  # which would be late
        ([(0.01, 500)], (0.2, 500), 0.052),  # what is late already cannot be made late
        ([(0.9, 500)] * 2, (1.0, 500), None),  # it could not begin soon
    ],
)
def test_which_prompts_a_replica_takes(
    queued: list[tuple[float, int]], own: tuple[float, int], backlog: float | None
) -> None:
    here = FleetReplica(replica("r0"), 0, 1, StepTable(STEP, 64))
    here.group = PREFILL_GROUP
    for i, (due, tokens) in enumerate(queued):
        here.queue(prompt(f"q{i}", due, tokens))
    assert here.seconds_before(prompt("own", *own)) == (None if backlog is None else pytest.approx(backlog))
    assert MAX_PREFILL_WAIT_S == 0.1


def test_behind_what_is_promised_nothing_no_prompt_is_sent() -> None:
    """So it ends, though it gives way to every other."""
    here = FleetReplica(replica("r0"), 0, 1, StepTable(STEP, 64))
    here.queue(prompt("patient", -inf, 2000, until=inf))
    assert here.seconds_before(prompt("own", 1.0)) is None


def test_a_prompt_that_has_begun_gives_way_to_a_nearer_deadline() -> None:
    long = Seq(request("long", 9000, ttft=9.0, tpot=0.05), length=9000, cached=2048, blocks=1125, due=9.0)
    short = Seq(request("short", 100, ttft=0.5, tpot=0.05), length=100, due=0.5)
    free = Seq(request("free", 100), length=100)
    limits = replace(LIMITS, max_num_batched_tokens=8192)
    view = replica("r0", waiting=[free, short], running=[long], limits=limits, role=Role("prefill"))
    work = [(w.seq, w.tokens) for w in prefill_step(view).work]
    assert work == [("short", 100), ("long", 1948)]
    urgent = replace(view, running=[replace_due(long, 0.6)], waiting=[free])
    assert [(w.seq, w.tokens) for w in prefill_step(urgent).work] == [("long", 6952)], "in one step, to be in time"


def replace_due(seq: Seq, due: float) -> Seq:
    return replace(seq, due=due)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tiers": []}, r"tiers are \(\): give TPOTs in seconds, above 0 and ascending"),
        ({"tiers": [0.1, 0.02]}, r"tiers are \(0.1, 0.02\): give TPOTs"),
        ({"best_effort": 0.0}, "best_effort is 0.0: give a share of the fleet, above 0 and up to 1"),
    ],
)
def test_impossible_setting_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Router(**settings)
    with pytest.raises(ValueError, match="at least 2 replicas"):
        Router().roles(["r0"])


def test_events_of_replicas_it_does_not_know() -> None:
    events: list[Event] = [Left(0.0, "r9"), Placed(0.0, "a", "r9")]
    made().observe(events)
