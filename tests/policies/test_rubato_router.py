"""The router of `rubato`: all replicas alike, and divided by TPOT; what changes when, and what it may never do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Finished, Placed
from rubato.core.interfaces import Assigner, Dispatch, View
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Stage
from rubato.policies import least_loaded, rubato_pd
from rubato.policies.rubato import Router, Scheduler, router
from rubato.policies.rubato.division import Recent, divide_by_tpot, gain_of_prompts
from rubato.policies.rubato.router import MIN_GAIN, RECENT_REQUESTS, STEP_TIMES
from tests.conftest import few
from tests.fleet.routers import serve
from tests.fleet.test_conservation import LIMITS as SMALL
from tests.kit import Linear, Seq, idle_fleet, request, shown
from tests.kit.fleets import LINK, Breaks, Disturbances, Elsewhere, disturbances
from tests.policies.test_properties import Load, loads, run

MODES = st.sampled_from(["co", "auto"])
SOONER = {"RECENT_REQUESTS": 8, "MIN_REPLICAS_TO_DIVIDE": 2, "MIN_GAIN": 1.15}
EVERY = RECENT_REQUESTS // 4  # requests from decision to decision


@few
@given(load=loads(), mode=MODES, replicas=st.integers(1, 5))
def test_every_request_ends(load: Load, mode: str, replicas: int) -> None:
    with mock.patch.multiple(router, **SOONER):
        events = run(load, "rubato", replicas=replicas, router_settings={"mode": mode})
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


class Strict(Router):
    """It names no replica but those of the fleet, no request but those that are held and each once, recalls nothing and
    gives no roles. It places in divided fleets and in alike ones."""

    def place(self, held: Sequence[Any], fleet: Sequence[View], now: float) -> Dispatch:
        dispatch = super().place(held, fleet, now)
        ids, replicas = {seq.id for seq in held}, {view.id for view in fleet}
        assert {*dispatch.place, *dispatch.demote, *dispatch.reject} <= ids
        assert not dispatch.place.keys() & dispatch.reject.keys()
        assert set(dispatch.place.values()) <= replicas
        assert not dispatch.recall
        assert not dispatch.assign
        assert len(dispatch.place) + len(dispatch.reject) == len(held) or dispatch.wake_at is not None
        return dispatch


@few
@given(
    mode=MODES,
    slos=st.lists(
        st.sampled_from([SLO(), SLO(0.5, 0.1), SLO(0.05, 0.02), SLO(0.3, 0.02), SLO(tpot=0.05), SLO(e2e=1.0)]),
        min_size=1,
    ),
    disturbed=disturbances(),
)
def test_every_request_ends_where_replicas_are_lost(mode: str, slos: list[SLO], disturbed: Disturbances) -> None:
    """Each is at one replica at a time: between two placements it was lost there. `serve` checks that each ends
    once."""
    requests = [Request(f"q{i}", (Stage(8 + 4 * i, slo),), 0.01 * i) for i, slo in enumerate(slos[:12])]
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=10)) for r in requests]
    with mock.patch.multiple(router, **SOONER):
        events = serve(
            "simulated", Strict(mode=mode), requests, replicas=3, scheduler=Scheduler, limits=SMALL, host=Elsewhere,
            engine=Breaks, link=LINK, acts=disturbed.acts,
        )  # fmt: skip
    if not any(disturbed):
        assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}
        placed = Counter(e.id for e in events if isinstance(e, Placed))
        assert placed == Counter(r.id for r in requests)


# --------------------------------------------------------------------------- when it divides

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4000, kv_blocks=500, block_size=8)
STEP = Linear(0.002, 0.0001)  # 2 ms and 0.1 ms a token


def fleet(count: int, **changes: Any) -> list[View]:
    own = {"supports": STEP_TIMES, "latency": STEP, **changes}
    return idle_fleet(count, kv_free=500, kv_total=500, limits=LIMITS, **own)


def asked(id: str, tpot: float | None, **more: Any) -> Request:
    return request(id, 20, **{"ttft": 1.0, "tpot": tpot, **more})


def many(name: str, tpot: float | None, count: int = RECENT_REQUESTS, **more: Any) -> list[Seq]:
    return shown(*(asked(f"{name}{i}", tpot, **more) for i in range(count)))


def is_divided(own: Router, fleet: list[View]) -> bool:
    """Whether the next one goes elsewhere than the least loaded."""
    tight, loose = (own.place(shown(asked("next", tpot)), fleet, 0.0) for tpot in (0.003, 0.06))
    return tight.place != loose.place


def test_mode_auto_starts_with_all_alike() -> None:
    """Whatever their number, and whether KV can move."""
    for supports in (STEP_TIMES | {"kv_transfer", "recall"}, STEP_TIMES):
        views, own = fleet(8, supports=supports), Router()
        held = [*many("t", 0.003, EVERY // 4), *many("l", 0.06, EVERY // 4)]
        assert own.place(held, views, 0.0) == least_loaded.Router().place(held, views, 0.0)
        assert not isinstance(own, Assigner), "all replicas have the same role, also those that join"


def test_mode_auto_divides_and_joins_again() -> None:
    """By the TPOTs of late: a step takes 2.1 ms at least, so that those of 3 and 60 ms leave prompts 0.3 and 0.965 of
    the time on replicas of their own, and 0.3 of all where both are on one."""
    assert gain_of_prompts([0.003, 0.06], fleet(4)) == pytest.approx((0.3 + 0.965) / 2 / 0.3)
    views, own = fleet(8), Router()
    told = [own.place(many("l", 0.06, EVERY), views, 0.0)]
    assert not is_divided(own, views)
    told.append(own.place([*many("m", 0.06, EVERY), *many("t", 0.003, EVERY)], views, 1.0))
    assert is_divided(own, views)
    told.append(own.place(many("n", 0.06, RECENT_REQUESTS - EVERY), views, 2.0))
    assert is_divided(own, views), "a quarter are still tight"
    told.append(own.place(many("o", 0.06, EVERY), views, 3.0))
    assert not is_divided(own, views)
    assert all(len(each.place) and not (each.recall or each.assign) for each in told), "residents stay"


def test_replicas_whose_step_times_are_not_known_are_alike() -> None:
    """As servers without a link: also one that comes to a divided fleet, which is joined."""
    blind, own = fleet(8, supports=frozenset()), Router()
    requests = [*many("t", 0.003, EVERY), *many("l", 0.06, EVERY)]
    assert own.place(requests, blind, 0.0) == least_loaded.Router().place(requests, blind, 0.0)
    views, own = fleet(8), Router()
    own.place(requests, views, 0.0)
    assert is_divided(own, views)
    assert not is_divided(own, [*views[:7], blind[7]])


def test_between_the_bounds_it_stays_as_it_is() -> None:
    """Of those of 4.35 ms and 60 ms prompts get 1.65 times as much."""
    between = [*many("t", 0.00435, RECENT_REQUESTS // 4), *many("m", 0.06, RECENT_REQUESTS // 4 * 3)]
    assert gain_of_prompts([0.00435, 0.06, 0.06, 0.06], fleet(4)) == pytest.approx(MIN_GAIN, rel=0.02)
    views, alike, split = fleet(4), Router(), Router()
    split.place([*many("t", 0.003), *many("l", 0.06, RECENT_REQUESTS // 2)], views, 0.0)
    for own, what in ((alike, False), (split, True)):
        own.place(between, views, 1.0)
        assert is_divided(own, views) is what


@pytest.mark.parametrize(
    ("others", "divides"),
    [
        (many("t", 0.003, RECENT_REQUESTS // 10), True),
        (many("t", 0.003, RECENT_REQUESTS // 40), False),  # too few to decide
        (many("t", 0.001, RECENT_REQUESTS // 10), False),  # shorter than any step
        (many("t", 0.02, RECENT_REQUESTS // 10), False),  # 0.9 of the time is left
        (many("e", None, RECENT_REQUESTS // 10, ttft=None, e2e=0.05), False),  # which TPOT that takes varies
    ],
)
def test_what_divides(others: list[Seq], divides: bool) -> None:
    own, views = Router(), fleet(4)
    own.place([*many("l", 0.06, RECENT_REQUESTS - len(others)), *others], views, 0.0)
    assert is_divided(own, views) is divides


def test_by_the_number_of_replicas_that_there_are() -> None:
    own, held = Router(), [*many("t", 0.003, 60), *many("l", 0.06, 60)]
    for count, divides in ((3, False), (4, True), (3, False), (5, True)):
        own.place(held, fleet(count), 0.0)
        assert is_divided(own, fleet(count)) is divides


# --------------------------------------------------------------------------- for which TPOTs a replica is


@pytest.mark.parametrize(
    ("works", "replicas", "tpots"),
    [
        ({0.02: 1.0, 0.1: 1.0}, 4, [0.02, 0.02, 0.1, 0.1]),  # 2 and 1.1 replicas' time
        ({0.02: 1.0, 0.1: 5.0}, 4, [0.02, 0.1, 0.1, 0.1]),
        ({0.02: 0.3, 0.03: 0.3, 0.1: 1.0}, 2, [0.02, 0.1]),  # neighbours share one
        ({0.05: 1.0, 0.055: 1.0}, 3, [0.05] * 3),  # much alike
        ({0.02: 1.0, inf: 3.0}, 3, [0.02, inf, inf]),
        ({0.005: 1.0, 0.1: 1.0}, 2, [0.1, 0.1]),  # what no step keeps takes no replica
        ({}, 2, [inf, inf]),
    ],
)
def test_replicas_are_divided_by_the_work_of_late(works: dict[float, float], replicas: int, tpots: list[float]) -> None:
    recent = [Recent(tpot, work / 10) for tpot, work in works.items() for _ in range(10)]
    assert divide_by_tpot(recent, 0.01, replicas) == tpots


@given(
    st.lists(st.tuples(st.sampled_from([0.011, 0.02, 0.03, 0.05, 0.1, inf]), st.floats(0.01, 10.0)), min_size=1),
    st.integers(1, 9),
)
def test_every_tpot_of_late_has_a_replica(recent: list[tuple[float, float]], replicas: int) -> None:
    tpots = divide_by_tpot([Recent(*one) for one in recent], 0.01, replicas)
    assert len(tpots) == replicas
    assert tpots == sorted(tpots)
    assert tpots[0] == min(tpot for tpot, _ in recent)
    assert set(tpots) <= {tpot for tpot, _ in recent}


# --------------------------------------------------------------------------- where it goes in a divided fleet


def split(tpots: Sequence[float]) -> tuple[Router, list[View]]:
    own, views = Router(mode="co"), fleet(len(tpots))
    own._tpots = {view.id: tpot for view, tpot in zip(views, tpots, strict=True)}
    return own, views


def running(count: int, tpot: float, due: float = 0.0) -> list[Seq]:
    made = [request(f"d{i}", 20, ttft=1.0, tpot=tpot) for i in range(count)]
    return [Seq(one, length=21, cached=20, blocks=3, output=1, due=due) for one in made]


def test_the_nearest_tpot_that_keeps_it() -> None:
    own, views = split([0.003, 0.02, 0.05])
    held = shown(*(asked(f"a{tpot}", tpot) for tpot in (0.002, 0.003, 0.03, 0.05, None)))
    dispatch = own.place(held, views, 0.0)
    assert dispatch.place == {"a0.002": "r0", "a0.003": "r0", "a0.03": "r1", "a0.05": "r2", "aNone": "r2"}
    assert dispatch.why["a0.03"] == "for TPOTs from 20 ms"
    full = [*views[:2], replace(views[2], running=running(64, 0.05))]
    assert own.place(shown(asked("b", 0.05)), full, 0.0).place == {"b": "r1"}, "a tighter one"


def test_it_is_held_while_it_would_be_late_and_best_effort_once_it_is() -> None:
    """A prompt waits that takes 26 ms and is due in 50. This one would be in time, in 30 of 40 ms, and that one not."""
    own, [view] = split([0.05])
    busy = replace(view, waiting=[Seq(request("w", 256, ttft=0.05, tpot=0.05), length=256, due=0.05)])
    [one] = shown(asked("a", 0.05, ttft=0.04))
    held = own.place([one], [busy], 0.0)
    assert (held.place, list(held.demote)) == ({}, [])
    assert held.wake_at == pytest.approx(0.04 - view.latency.step_time(Shape().plus(256, 0))), "when it is late"
    assert own.place([one], [view], 0.0).place == {"a": "r0"}
    late = own.place([one], [busy], 0.02)
    assert (late.place, list(late.demote), late.reject) == ({"a": "r0"}, ["a"], {}), "the only best effort"
    [refused] = shown(asked("a", 0.05, ttft=0.04, refuse=True))
    assert list(own.place([refused], [busy], 0.02).reject) == ["a"]


def test_decodes_that_are_ahead_lend_their_time() -> None:
    """40 decodes of 6 ms leave 0.4 of each 10 ms; before the first is due a prompt of 30 ms has all of it."""
    own, [view] = split([0.01])
    [one] = shown(asked("a", 0.01, ttft=0.05))
    for due, there in ((0.005, {}), (0.1, {"a": "r0"})):
        assert own.place([one], [replace(view, running=running(40, 0.01, due))], 0.0).place == there


def test_best_effort_goes_where_no_prompt_waits_of_the_loosest() -> None:
    own, views = split([0.02, 0.05])
    free = shown(asked("f", None, ttft=None), asked("g", None, ttft=None))
    busy = [replace(view, running=running(3, 0.05, 1.0)) for view in views]
    assert own.place(free, busy, 0.0).place == {"f": "r1"}, "one prompt at a time"
    prompts = [replace(view, waiting=shown(asked(f"w{view.id}", 0.05))) for view in busy]
    assert own.place(free, prompts, 0.0).place == {"f": "r1"}, "one in the whole fleet: so each ends"
    assert own.place(free, [views[0], prompts[1]], 0.0).place == {"f": "r0"}, "an idle one"


@pytest.mark.parametrize(
    ("made", "settings", "says"),
    [
        (Router, {"mode": "both"}, "mode is 'both': give co, pd, auto"),
        (rubato_pd.Router, {"tiers": []}, r"tiers are \(\): give TPOTs in seconds, above 0 and ascending"),
        (rubato_pd.Router, {"best_effort": 0.0}, "best_effort is 0.0: give a share of the fleet, above 0 and up to 1"),
    ],
)
def test_impossible_setting_is_named(made: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**settings)


def test_mode_pd_is_the_other_router() -> None:
    own = Router(mode="pd")
    assert isinstance(own, Assigner)
    assert {role.kind for role in own.roles(["r0", "r1"]).values()} == {"best_effort"}
    assert own.needs == {"recall", "step_times", "kv_transfer"}
    assert (Router().needs, Router(mode="co").needs) == (frozenset(), {"step_times"})
    held, views = shown(asked("a", 0.05)), fleet(3, supports=frozenset({"kv_transfer", "recall"}))
    dispatch = own.place(held, views, 0.0)
    assert {id: role.phase for id, role in dispatch.assign.items()} == {"r0": "prefill", "r1": "decode"}
