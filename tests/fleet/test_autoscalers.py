"""What both autoscalers want of a fleet that they see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rubato.config.build import autoscaler_of
from rubato.config.schema import ConfigError, load
from rubato.core.events import Finished, Joined, Offered, Verdict
from rubato.core.interfaces import Scaling, View
from rubato.core.plan import Limits, Role
from rubato.core.request import Request
from rubato.fleet.autoscalers import AttainmentAutoscaler, PoolAutoscaler
from tests.kit import Linear, Seq, request, shown, view

POOL, TIER, PREFILL = Role(kind="best_effort"), Role("both", "0.02", kind="tier"), Role("prefill", kind="prefill")
PENDING, LEFT = replace(TIER, kind="pending"), replace(TIER, group="empty")


def fleet(*roles: Role, busy: str = "") -> list[View]:
    """r0, r1, ... with these roles; those named in `busy` run something, and those of a tier, but for `LEFT`."""
    runs = [Seq(request(f"s{i}"), cached=9) for i in range(len(roles))]
    return [
        replace(
            view(running=[runs[i]] if f"r{i}" in busy.split() or role in (TIER, PREFILL, PENDING) else []),
            id=f"r{i}", role=role,
        )
        for i, role in enumerate(roles)
    ]  # fmt: skip


# what the pool holds, held requests, starting, what is wanted at 0 s and 1 s
EMPTY = [
    ("a tier has the last", [TIER], 0, 0, (0, 1)),
    ("a tier has left it empty", [LEFT], 0, 0, (0, 0)),
    ("one starts already", [TIER], 0, 1, (0, 0)),
    ("one is left", [TIER, POOL], 0, 0, (0, 0)),
    ("a replica that just joined is in the pool", [TIER, Role()], 0, 0, (0, 0)),
    ("prefill and pending replicas are not", [PREFILL, PENDING], 1, 0, (0, 1)),
    ("at the maximum", [TIER] * 4, 3, 0, (0, 0)),
    ("below the minimum", [], 0, 0, (1, 1)),
]


@pytest.mark.parametrize(("roles", "held", "starting", "wanted"), [row[1:] for row in EMPTY], ids=[r[0] for r in EMPTY])
def test_the_pool_is_kept_from_running_dry(roles: list[Role], held: int, starting: int, wanted: Any) -> None:
    scaler = PoolAutoscaler(max=4, add_seconds=1.0)
    waiting = shown(*(request(f"h{i}") for i in range(held)))
    seen = fleet(*roles)
    got = [scaler.scale(waiting, seen, starting, now) for now in (0.0, 1.0)]
    assert tuple(scaling.add for scaling in got) == wanted
    assert not any(scaling.drain for scaling in got)


def test_without_spare_only_held_requests_add() -> None:
    scaler, full = PoolAutoscaler(spare=0, add_seconds=1.0), fleet(TIER, busy="r0")
    held = shown(request("h"))
    assert scaler.scale([], full, 0, 0.0) == Scaling(drain=[])
    assert scaler.scale(held, full, 0, 5.0) == Scaling(drain=[], wake_at=6.0)
    assert scaler.scale([], full, 0, 5.5) == Scaling(drain=[])  # it was placed: the second begins anew
    assert scaler.scale(held, full, 0, 6.0) == Scaling(drain=[], wake_at=7.0)
    assert scaler.scale(held, full, 0, 7.0).add == 1


def test_idle_pool_replicas_beyond_the_spare_ones_leave_the_last_first() -> None:
    scaler = PoolAutoscaler(min=2, spare=1, drain_seconds=30.0)
    seen = fleet(TIER, POOL, POOL, POOL, POOL, busy="r0 r3")
    assert scaler.scale([], seen, 0, 0.0) == Scaling(drain=[], wake_at=30.0)
    assert list(scaler.scale([], seen, 0, 30.0).drain) == ["r4", "r2"]
    again = PoolAutoscaler(min=4, spare=1, drain_seconds=30.0)
    again.scale([], seen, 0, 0.0)
    again.scale([], fleet(TIER, POOL, POOL, POOL, POOL, busy="r0 r3 r4"), 0, 20.0)  # r4 works in between
    assert list(again.scale([], seen, 0, 30.0).drain) == ["r2"]  # one only: the minimum is 4


def test_what_a_tier_has_left_empty_leaves_too() -> None:
    """The router, which would give it back to the pool, is asked only when a request is held."""
    scaler = PoolAutoscaler(spare=1, drain_seconds=30.0)
    seen = fleet(LEFT, LEFT, LEFT)
    assert scaler.scale([], seen, 0, 0.0) == Scaling(drain=[], wake_at=30.0)
    assert list(scaler.scale([], seen, 0, 30.0).drain) == ["r2", "r1"]


def ended(scaler: AttainmentAutoscaler, requests: list[Request], met: int, at: float) -> None:
    """All were offered when they arrived and end at `at`, so many of them in SLO."""
    for i, one in enumerate(requests):
        verdict = Verdict(i < met, "deadline")
        scaler.observe([Offered(one.arrival, one.id, one), Finished(at, one.id, "completed", "stop", verdict)])


def several(tier: str, count: int, arrival: float = 0.0) -> list[Request]:
    return [request(f"{tier}{i}", ttft=1.0, arrival=arrival, tier=tier) for i in range(count)]


# per tier offered and met; replicas that serve; to be added
SHARES = [
    ("every tier at the target", {"chat": (20, 19), "code": (20, 20)}, 2, 0),
    ("the worst tier counts", {"chat": (20, 20), "code": (20, 17)}, 2, 1),
    ("one miss alone adds nothing", {"chat": (4, 3)}, 2, 0),
    ("more the further it is off", {"chat": (20, 9)}, 4, 2),
    ("not beyond the maximum", {"chat": (20, 0)}, 7, 1),
]


@pytest.mark.parametrize(("tiers", "replicas", "added"), [row[1:] for row in SHARES], ids=[row[0] for row in SHARES])
def test_misses_in_a_tier_add_replicas(tiers: dict[str, tuple[int, int]], replicas: int, added: int) -> None:
    scaler = AttainmentAutoscaler(max=8, target=0.95)
    for tier, (offered, met) in tiers.items():
        ended(scaler, several(tier, offered), met, 5.0)
    assert scaler.scale([], fleet(*[Role()] * replicas), 0, 5.0).add == added


def test_what_came_before_the_last_change_or_the_window_counts_no_more() -> None:
    def scaler() -> AttainmentAutoscaler:
        made = AttainmentAutoscaler(window_seconds=60.0)
        ended(made, several("chat", 4), 0, 5.0)
        return made

    seen = fleet(Role())
    assert scaler().scale([], seen, 0, 65.0).add == 1
    assert scaler().scale([], seen, 0, 65.1).add == 0
    assert scaler().scale([], seen, 1, 6.0).add == 0  # one starts already
    joined = scaler()
    joined.observe([Joined(7.0, "r1")])
    assert joined.scale([], seen, 0, 8.0).add == 0
    best_effort = AttainmentAutoscaler()
    ended(best_effort, [request(f"b{i}") for i in range(4)], 0, 5.0)
    assert best_effort.scale([], seen, 0, 6.0).add == 0


def test_those_that_wait_in_vain_are_predicted_to_miss() -> None:
    """A prompt of 1,000 tokens takes 1.01 s: of four due at 3 s two can be in time; held ones due at 0.5 s cannot."""
    wait = [Seq(request(f"w{i}", 1000, ttft=3.0), length=1000, due=3.0) for i in range(4)]
    seen = [view(waiting=wait)]
    assert AttainmentAutoscaler().scale([], [view(waiting=wait[:2])], 0, 0.0).add == 0
    assert AttainmentAutoscaler().scale([], seen, 0, 0.0).add == 1
    held = shown(*(request(f"h{i}", 1000, ttft=0.5) for i in range(2)))
    assert AttainmentAutoscaler().scale(held, [view()], 0, 0.0).add == 1
    late = [Seq(request(f"r{i}", tpot=0.1), cached=9, due=1.0) for i in range(2)]
    assert AttainmentAutoscaler().scale([], [view(running=late)], 0, 2.0).add == 1
    assert AttainmentAutoscaler().scale([], [view(running=late)], 0, 1.0).add == 0


def test_the_emptiest_leaves_when_the_others_could_serve_all() -> None:
    seqs = [Seq(request(f"s{i}", tpot=0.1), cached=9) for i in range(5)]
    seen = [replace(view(running=seqs[:3]), id="r0"), replace(view(running=seqs[3:]), id="r1")]

    def drained(limits: Limits | None = None, **latency: float) -> list[str]:
        scaler = AttainmentAutoscaler(hold_seconds=10.0)
        for seq in seqs:
            scaler.observe([Offered(0.0, seq.id, seq.request)])
        views = [replace(each, latency=Linear(**latency), limits=limits or each.limits) for each in seen]
        first = scaler.scale([], views, 0, 1.0)
        assert not first.drain
        assert first.wake_at == 2.0
        assert not scaler.scale([], views, 0, 10.9).drain
        return list(scaler.scale([], views, 0, 11.9).drain)

    slow = [replace(each, latency=Linear(fixed=0.09)) for each in seen]  # a step of 3 decodes: 0.093 of the 0.1 s
    scaler = AttainmentAutoscaler()
    scaler.observe([Offered(0.0, seqs[0].id, seqs[0].request)])
    assert (scaler.scale([], slow, 0, 1.0).add, scaler.scale([], slow, 1, 2.0).add) == (1, 0)
    assert drained() == ["r1"]
    assert drained(fixed=0.09) == []  # 5 decodes in a step of 0.095 s: nothing is left of the TPOT of 0.1 s
    assert drained(Limits(6, 2048, 4096, 1000, 16)) == []  # 5 of 6 places: more than 80 %


def test_at_the_minimum_nothing_is_asked_again_once_all_is_over() -> None:
    """Else a simulation would never end."""
    scaler = AttainmentAutoscaler(hold_seconds=10.0, window_seconds=5.0)
    ended(scaler, several("chat", 1), 1, 0.0)
    now, replicas = 0.0, 3
    while (wanted := scaler.scale([], fleet(*[Role()] * replicas), 0, now)).wake_at is not None:
        replicas -= len(wanted.drain)
        now = wanted.wake_at
    assert replicas - len(wanted.drain) == 1
    assert now < 30.0


WRONG = [
    ("autoscale={kind: attainment, most: 3}", "autoscaler 'attainment' has no setting 'most'"),
    ("autoscale={kind: attainment, min: 4, max: 3}", "autoscaler 'attainment': min is 4, above max, 3"),
    ("autoscale={kind: attainment, max: 0}", "max is 0: give a whole number of replicas, 1 or more"),
    ("autoscale={kind: attainment, target: 95}", "target is 95: give a share above 0, at most 1"),
    ("autoscale={kind: attainment, hold_seconds: -1}", "hold_seconds is -1: give a number of seconds, 0 or more"),
    ("autoscale={kind: attainment, min: 2}", "replicas is 1: give as many as there are to be at the start, from"),
    ("autoscale={kind: pool}", "'rubato' has none: choose autoscale.kind=attainment, or policy polyserve"),
]


@pytest.mark.parametrize(("setting", "says"), WRONG)
def test_a_wrong_setting_is_named(setting: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        autoscaler_of(load({}, [setting]))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("config", "kind", "says"),
    [
        ({"policy": "ascendra", "replicas": 3}, "attainment", "'ascendra' gives its replicas roles at the start"),
        ({"policy": "distserve", "replicas": 3}, "attainment", "'distserve' gives its replicas roles at the start"),
        (
            {"policy": "polyserve", "router": {"name": "auto", "mode": "pd"}, "replicas": 2}, "pool",
            "autoscale: with 1 replicas, polyserve in mode pd needs at least 2 replicas",
        ),
        ({"policy": "ascendra", "replicas": 3}, "pool", "'ascendra' has none: choose autoscale.kind=attainment"),
    ],
)  # fmt: skip
def test_a_router_that_cannot_follow_the_fleet_is_refused(config: dict[str, Any], kind: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        autoscaler_of(load(config, [f"autoscale={kind}"]))
    assert says in str(caught.value)


def test_what_the_configuration_asks_for_is_made() -> None:
    assert autoscaler_of(load({})) is None
    assert autoscaler_of(load({"policy": "polyserve"}, ["autoscale={kind: pool, max: 3}"])) == PoolAutoscaler(max=3)
    assert autoscaler_of(load({}, ["autoscale=attainment"])) == AttainmentAutoscaler()
