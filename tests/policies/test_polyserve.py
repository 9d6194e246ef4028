"""PolyServe's router: what it may never do, on random workloads, and its rules on small fleets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Assigned, Demoted, Event, Finished, HandedOff, Placed
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Limits, Role
from rubato.core.request import SLO, Handoff, Request, Stage
from rubato.policies import polyserve
from rubato.policies.polyserve import Router
from rubato.policies.polyserve.replica_model import HeldRequest, TierReplica
from rubato.policy_kit.prefill_queue import QueuedPrompt, prefill_chunks
from rubato.policy_kit.step_table import StepTable
from rubato.policy_kit.tier_fleet import PREFILL_GROUP
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, Seq, request, run_spec
from tests.policies.test_properties import Load, few, loads, run
from tests.simulation.test_equal import same

TIERS = (0.005, 0.02, 0.1)
MODES = st.sampled_from(["co", "pd"])


class Watched(Router):
    """Looks at each decision before it is made, and at what is held after."""

    def _reserve_slot(self, request: HeldRequest, slot: Any, routing: Any) -> None:
        replica, group, rule = slot
        assert request.seq.id not in self._slots, "placed twice"
        assert not replica.draining or rule == "claimed"
        assert group <= request.tier or (rule == "has room" and request.due == inf), "a looser tier's replica"
        if rule not in ("own tier", "has room"):
            for nearer in range(request.tier, group if rule.startswith("promoted") else -1, -1):
                for other in self._groups[nearer]:
                    assert other.draining or not self._takes(other, request, routing.now), "a nearer tier had room"
        super()._reserve_slot(request, slot, routing)

    def _takes(self, replica: TierReplica, request: HeldRequest, now: float) -> bool:
        assert replica.group is not None
        later = self.mode == "pd" and not request.moves
        return replica.next_token_at(request, self.tiers[replica.group], now, later=later) is not None

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        before, freed = set(self._held_until), set(self._changed_replicas)
        dispatch = super().place(held, fleet, now)
        for seq in held:
            if seq.id not in self._held_until or self.mode == "pd":
                continue
            wanted = self._request(seq, now)
            assert wanted is not None
            tried = self._replicas.values() if seq.id not in before else [self._replicas[id] for id in freed]
            for replica in tried:
                if replica.group is not None and replica.group <= wanted.tier and not replica.draining:
                    assert not self._takes(replica, wanted, now), "held though a replica would take it"
        return dispatch


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyserve, "Router", Watched)


def on(load: Load, mode: str, replicas: int = 4) -> list[Event]:
    return run(load, "polyserve", replicas=replicas, router_settings={"mode": mode, "tiers": list(TIERS)})


@pytest.mark.usefixtures("watched")
@few
@given(load=loads(), mode=MODES)
def test_what_it_may_never_do(load: Load, mode: str) -> None:
    events = on(load, mode)
    assert sorted(e.id for e in events if isinstance(e, Finished)) == sorted(r.id for r in load.requests)
    tier: dict[str, str] = {}
    where: dict[str, str] = {}
    for event in events:
        if isinstance(event, Assigned):
            if tier.get(event.id, "") not in ("", event.role.tier):
                # one that waits for a tool is not recalled from the pool
                guests = [id for id, at in where.items() if at == event.id and id not in load.pauses]
                assert not guests or event.role.kind == "tier", "a replica left its tier with residents"
            tier[event.id] = event.role.tier
        elif isinstance(event, Placed):
            where[event.id] = event.replica
        elif isinstance(event, Finished | HandedOff):
            where.pop(event.id, None)


@few
@given(load=loads(), noise=st.sampled_from([0.0, 0.3]))
def test_both_drivers_move_replicas_between_tiers_alike(load: Load, noise: float) -> None:
    spec = run_spec(
        Linear(), load.limits, "polyserve", replicas=4, prefix_cache=load.prefix_cache, noise=noise,
        router_settings={"mode": "pd", "tiers": list(TIERS)},
    )  # fmt: skip
    same(load.requests, load.truth, spec, 3, load.pauses)


# --------------------------------------------------------------------------- its rules, one by one

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, kv_blocks=200, block_size=8)
LONG_PROMPTS = replace(LIMITS, max_num_batched_tokens=8192, max_model_len=100_000, kv_blocks=10_000)
STEP = Linear(0.002, 0.0001)  # 2 ms and 0.1 ms a token


def served(requests: Sequence[Request], replicas: int, limits: Limits = LIMITS, mode: str = "co") -> list[Event]:
    spec = run_spec(
        STEP, limits, "polyserve", replicas=replicas, learns=False,
        router_settings={"mode": mode, "tiers": [0.01, 0.05]},
    )  # fmt: skip
    events = simulate_events(requests, {r.id: [r.sampling.max_tokens] for r in requests}, spec)
    assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}
    return events


def rules(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    return [(e.id, e.replica, e.why.split(":")[0]) for e in events if isinstance(e, Placed)]


def loose(id: str, at: float = 0.0, most: int = 50) -> Request:
    return request(id, 8, most=most, ttft=1.0, tpot=0.06, arrival=at)


def tight(id: str, at: float = 0.0, most: int = 50, tpot: float = 0.012) -> Request:
    return request(id, 8, most=most, ttft=1.0, tpot=tpot, arrival=at)


def test_the_order_of_attempts() -> None:
    """Own tier until it is full (four sequences), then a tighter one's, the pool; else it waits until one ends."""
    requests = [tight("t0"), *(loose(f"l{i}", 0.001 * (i + 1)) for i in range(8))]
    assert rules(served(requests, 2)) == [
        ("t0", "r0", "scaled up"),
        ("l0", "r0", "promoted from 50 ms"),
        ("l1", "r0", "promoted from 50 ms"),
        ("l2", "r0", "promoted from 50 ms"),
        ("l3", "r1", "scaled up"),
        ("l4", "r1", "own tier"),
        ("l5", "r1", "own tier"),
        ("l6", "r1", "own tier"),
        ("l7", "r0", "claimed"),  # t0 has ended: only guests were left
    ]


def test_a_replica_goes_back_when_it_is_empty_and_best_effort_leaves_for_a_tier() -> None:
    events = served([request("free", 8, most=150), tight("t0", 0.02, 5), loose("l0", 0.5, 5)], 1)
    roles = [(e.role.tier, e.role.kind) for e in events if isinstance(e, Assigned)]
    assert roles == [("", "best_effort"), ("0.01", "tier"), ("", "best_effort")] + [("0.05", "tier")] * 1
    assert rules(events)[:2] == [("free", "r0", "best effort"), ("t0", "r0", "scaled up")]
    assert ("free", "r0", "best effort") in rules(events)[2:], "what was recalled goes on in the pool"


def test_prompts_and_decodes_apart() -> None:
    events = served([tight("t0"), loose("l0", 0.001)], 4, mode="pd")
    assert rules(events) == [
        ("t0", "r1", "prefill, then r0"),
        ("l0", "r1", "prefill, then r0"),
        ("t0", "r0", "decodes"),
        ("l0", "r0", "decodes"),
    ]


def test_a_tier_does_not_take_a_replica_whose_last_prompt_has_just_left() -> None:
    """Else few are left that prefill, and none is to be had again until one that decodes is empty."""
    burst = [request(f"b{i}", 60, most=100, ttft=0.05, tpot=0.06) for i in range(4)]
    placed = rules(served([*burst, loose("next", 0.1)], 3, mode="pd"))
    assert {r for id, r, why in placed if id.startswith("b") and why.startswith("prefill")} == {"r1", "r2"}
    assert [p for p in placed if p[0] == "next"] == [("next", "r1", "prefill, then r0"), ("next", "r0", "decodes")]


def test_best_effort_that_waits_has_an_idle_prefill_replica_as_soon_as_it_goes_back() -> None:
    events = served([loose("l0", most=180), request("free", 8, arrival=0.05)], 2, mode="pd")
    placed = next(e for e in events if isinstance(e, Placed) and e.id == "free")
    assert (placed.replica, round(placed.at, 3)) == ("r1", 0.303)


def test_too_late_is_best_effort() -> None:
    """A prompt that would take longer than its TTFT alone."""
    late = request("late", 60, most=4, ttft=0.003, tpot=0.06)
    assert rules(served([late], 1)) == [("late", "r0", "best effort")]


def test_a_tpot_tighter_than_every_tier_is_best_effort() -> None:
    events = served([tight("fast", tpot=0.005)], 2)
    assert rules(events) == [("fast", "r0", "best effort")]
    assert [e.id for e in events if isinstance(e, Demoted)] == ["fast"]


@pytest.mark.parametrize(
    ("e2e", "tier"),
    [(3.0, "0.05"), (1.0, "0.01"), (0.2, "")],  # 50 tokens at 50 ms take 2.5 s, at 10 ms 0.5 s
)
def test_an_e2e_slo_belongs_to_the_loosest_tier_that_ends_in_time(e2e: float, tier: str) -> None:
    whole = replace(loose("e", most=50), stages=(replace(loose("e").stages[0], slo=SLO(e2e=e2e)),))
    events = served([whole], 2)
    assert [e.role.tier for e in events if isinstance(e, Assigned) and e.id == "r0"][1:2] == ([tier] if tier else [])
    assert bool([e for e in events if isinstance(e, Demoted)]) == (not tier)


def test_best_effort_is_a_guest_when_no_replica_is_in_the_pool_for_long() -> None:
    """The tiers hold both replicas for 25 s; one at a time it is served on the loosest tier's."""
    busy = [tight("t0", most=120), *(loose(f"l{i}", 0.2 * i, most=120) for i in range(130))]
    free = [replace(request(f"free{i}", 8, most=20, arrival=1.0), stages=(Stage(8, SLO()),)) for i in range(2)]
    events = served([*busy, *free], 1)
    ends = {e.id: e.at for e in events if isinstance(e, Finished)}
    first, second = [e.at for e in events if isinstance(e, Placed) and e.id in ("free0", "free1")]
    assert 11.0 <= first < 12.0, "10 s after it came"
    assert second >= min(ends["free0"], ends["free1"]), "one at a time"
    assert second < max(at for id, at in ends.items() if id.startswith("l"))


def test_what_no_replica_has_the_kv_for_is_sent_at_once_and_refused() -> None:
    """Held, it would wait for ever beside tiers that leave no replica in the pool, and keep best effort from the
    pool."""
    busy = [tight("t0", most=120), *(loose(f"l{i}", 0.2 * i, most=120) for i in range(130))]
    long = request("long", 1700, most=20, ttft=1.0, tpot=0.06, arrival=1.0)
    spec = run_spec(
        STEP, replace(LIMITS, max_model_len=4000), "polyserve", replicas=1, learns=False,
        router_settings={"mode": "co", "tiers": [0.01, 0.05]},
    )  # fmt: skip
    requests = [*busy, long]
    events = simulate_events(requests, {r.id: [r.sampling.max_tokens] for r in requests}, spec)
    (end,) = [e for e in events if isinstance(e, Finished) and e.id == "long"]
    assert end.outcome == "refused"
    assert end.at < 1.1


def test_a_prompt_that_has_begun_gives_way_to_a_nearer_deadline() -> None:
    """In mode pd, between chunks."""
    long = request("long", 190, most=5, ttft=5.0, tpot=0.06)
    short = request("short", 8, most=5, ttft=0.08, tpot=0.06, arrival=0.01)
    spec = run_spec(
        STEP, replace(LIMITS, max_num_batched_tokens=16), "polyserve", {"budget": 16}, replicas=2, learns=False,
        router_settings={"mode": "pd", "tiers": [0.05]},
    )  # fmt: skip
    events = simulate_events([long, short], {"long": [5], "short": [5]}, spec)
    assert [e.id for e in events if isinstance(e, HandedOff)] == ["short", "long"]


@pytest.mark.parametrize(
    ("decode_due", "prompts_due", "taken"),
    [
        (0.009, (1.0, 1.0), (29, 0)),  # hardly ahead: what a step of 5 ms has room for
        (0.01601, (1.0, 1.0), (39, 0)),  # a step may take 6 ms: a TPOT before it is due
        (9.0, (1.0, 1.0), (40, 23)),  # all that the limits allow
        (9.0, (0.01621, 1.0), (40, 1)),  # 6.2 ms, a TPOT before the prompt that it completes is due
        (9.0, (0.004, 1.0), (40, 23)),  # one that is late already limits nothing
        (-1.0, (1.0, 1.0), (40, 23)),  # nor does a late decode
    ],
)
def test_decodes_lend_their_lead(decode_due: float, prompts_due: tuple[float, float], taken: tuple[int, int]) -> None:
    decode = Seq(request("d", tpot=0.005), length=10, cached=9, blocks=2, output=1, due=decode_due)
    prompts = [Seq(request(f"p{i}", 40), length=40, due=due) for i, due in enumerate(prompts_due)]
    view = View(
        "r0", 0.005, prompts, [decode], kv_free=100, kv_total=200, limits=LIMITS, latency=STEP,
        role=Role("both", "0.005", kind="tier"),
    )  # fmt: skip
    plan = polyserve.Scheduler().plan(view)
    work = {w.seq: w.tokens for w in plan.work}
    assert plan.decode_all
    assert (work.get("p0", 0), work.get("p1", 0)) == taken
    assert plan.repeat_steps == 0, "the lead changes with each step"


def test_a_prefill_step_ends_before_a_prompt_in_it_is_due() -> None:
    """Two prompts fit the budget; together they would make the first one late."""
    first, second = QueuedPrompt(0.007, 40, 0), QueuedPrompt(1.0, 60, 0)
    chunks, shape = prefill_chunks([first, second], 0.0, budget=100, most=200, latency=STEP)
    assert (chunks, shape.tokens) == ([40, 10], 50)
    chunks, _ = prefill_chunks([first._replace(due=0.005), second], 0.0, budget=100, most=200, latency=STEP)
    assert chunks == [40], "late anyway, and no later than it must be"
    assert prefill_chunks([QueuedPrompt(1.0, 500, 0)], 0.0, 100, 400, STEP)[0] == [100]
    assert prefill_chunks([QueuedPrompt(0.05, 500, 0)], 0.0, 100, 400, STEP)[0] == [400], (
        "in few steps, where it is urgent"
    )


@pytest.mark.parametrize(
    ("queued", "own", "in_time"),
    [  # when the prompt queued and the new one are due, in times that one of them takes alone
        (1.5, 2.3, True),
        (1.5, 2.1, False),  # behind the nearer deadline, where it may be late by a tenth
        (2.3, 1.01, True),  # first, and without a margin
        (2.1, 1.01, False),  # it would make the one behind it late
        (0.5, 2.3, True),  # what is late already counts, and promises nothing
    ],
)
def test_prompts_of_a_prefill_replica_count_one_after_the_other(queued: float, own: float, in_time: bool) -> None:
    view = View("r0", 0.0, [], [], kv_free=100, kv_total=200, limits=LIMITS, latency=STEP)
    replica = TierReplica(view, 0, 1, StepTable(STEP, 40))
    replica.group = PREFILL_GROUP
    alone = replica.steps.isolated_seconds(20)

    def prompt(id: str, due: float) -> HeldRequest:
        return HeldRequest(Seq(request(id, 20), length=20), 0, due * alone, 20, 20, 4.0, False)

    replica.queue(prompt("queued", queued))
    assert replica.prefills_in_time(prompt("own", own), 0.0) is in_time


class WithoutRoom(TierReplica):
    """Looks at each prompt behind the new one."""

    def _find_rooms(self, line: Sequence[Any]) -> Sequence[float]:
        return [inf] * (len(line) + 1)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.0, 1.0)), max_size=8), st.floats(0.0, 0.2))
def test_room_in_a_prefill_line_only_saves_looking_at_it(queued: list[tuple[int, float]], busy_until: float) -> None:
    """The line is kept from one question to the next, as prompts come."""
    view = View("r0", 0.0, [], [], kv_free=400, kv_total=400, limits=LIMITS, latency=STEP, busy_until=busy_until)
    both = [kind(view, 0, 1, StepTable(STEP, 40)) for kind in (TierReplica, WithoutRoom)]
    for n, (tokens, due) in enumerate(queued):
        own = HeldRequest(Seq(request(f"p{n}", tokens), length=tokens), 0, due, tokens, tokens, 4.0, False)
        kept, looked = (replica.prefills_in_time(own, 0.0) for replica in both)
        assert kept == looked
        for replica in both:
            replica.queue(own)


@pytest.mark.parametrize(
    ("done", "due", "in_time"),
    [  # seconds: the second half of this prompt of 16,384 tokens takes 0.22, the whole 0.36, and a margin
        (8192, 0.20, False),
        (8192, 0.25, True),
        (0, 0.25, False),
        (0, 0.41, True),
    ],
)
def test_the_rest_of_a_prompt_attends_to_what_is_done(done: int, due: float, in_time: bool) -> None:
    """The second half alone, as if nothing were in KV, would take 0.15 s."""
    model, limits = Linear(0.0, 1e-5, 8e-6), LONG_PROMPTS
    begun = Seq(request("begun", 16_384), length=16_384, cached=done)
    view = View("r0", 0.0, [], [begun], kv_free=10_000, kv_total=10_000, limits=limits, latency=model)
    replica = TierReplica(view, 0, 1, StepTable(model, 8192))
    replica.queue(HeldRequest(begun, 0, due, 16_384, 16_384, 4.0, False))
    own = HeldRequest(Seq(request("own", 1), length=1), 0, 0.1, 1, 1, 4.0, False)
    assert replica.prefills_in_time(own, 0.0) is in_time


@pytest.mark.parametrize(
    ("first_due", "own_due", "in_time"),
    [  # 8,192 tokens take 0.122 s in four chunks, 0.092 s in one step
        (0.15, 0.23, False),  # the first runs in chunks
        (0.15, 0.24, True),
        (0.10, 0.21, True),  # in one step, since it would be late otherwise
    ],
)
def test_prompts_count_in_the_chunks_that_run(first_due: float, own_due: float, in_time: bool) -> None:
    model, limits = Linear(0.01, 1e-5), LONG_PROMPTS
    view = View("r0", 0.0, [], [], kv_free=10_000, kv_total=10_000, limits=limits, latency=model)
    replica = TierReplica(view, 0, 1, StepTable(model, 8192))

    def prompt(id: str, due: float) -> HeldRequest:
        return HeldRequest(Seq(request(id, 8192), length=8192), 0, due, 8192, 8192, 4.0, False)

    replica.queue(prompt("first", first_due))
    assert replica.prefills_in_time(prompt("own", own_due), 0.0) is in_time


@pytest.mark.parametrize(
    ("seconds", "busy_until", "at"),
    [  # seconds; a step of this one alone takes 2.1 ms
        (0.0, 0.0, 0.0021),
        (0.010, 0.0, 0.0121),  # an idle replica waits for the KV
        (0.010, 0.020, 0.0221),  # it is there before the step ends
        (0.010, 0.009, 0.0132),  # it waits for the next step's end
        (0.060, 0.0, None),
    ],
)
def test_arriving_kv_has_its_way_first(seconds: float, busy_until: float, at: float | None) -> None:
    view = View("r0", 0.0, [], [], kv_free=100, kv_total=200, limits=LIMITS, latency=STEP, busy_until=busy_until)
    replica = TierReplica(view, 0, 1, StepTable(STEP, 40))
    held = HeldRequest(Seq(request("a", 20), length=21, cached=20), 0, 0.05, 1, 21, 4.0, True, seconds)
    assert replica.next_token_at(held, 0.05, 0.0) == (None if at is None else pytest.approx(at))


@pytest.mark.parametrize(
    ("kept_until", "other_until", "to"),
    [  # when the steps in flight end; the next token is due at 0.06 s
        (0.05, 0.0, "r0"),
        (0.07, 0.05, "r2"),
        (0.07, 0.07, "r0"),  # late everywhere: where its seat is kept
    ],
)
def test_a_kept_seat_is_given_up_where_the_next_token_would_be_late(
    kept_until: float, other_until: float, to: str
) -> None:
    """r0 and r2 serve the tier, r1 prefills, r3 is in the pool and stays there."""
    router, limits = Router(mode="pd", tiers=[0.05]), replace(LIMITS, max_num_seqs=2)
    views = [View(f"r{n}", 0.0, [], [], kv_free=100, kv_total=200, limits=limits, latency=STEP) for n in range(4)]
    seqs = [Seq(loose(id), length=8, due=1.0) for id in ("a", "b", "c")]
    sent = router.place(seqs, views, 0.0)
    assert [sent.why[id].split(":")[0] for id in ("a", "b", "c")] == ["prefill, then r0"] * 2 + ["prefill, then r2"]
    handed = replace(seqs[0].request, handoff=Handoff("r1", "prefilled", 0.02, cached=8))
    moves = Seq(handed, length=9, cached=8, output=1, due=0.06)
    views[0], views[2] = replace(views[0], busy_until=kept_until), replace(views[2], busy_until=other_until)
    assert router.place([moves], views, 0.02).place == {"a": to}


@pytest.mark.parametrize(("tiers", "to"), [([0.05], "r2"), ([0.01, 0.05], "r0")])
def test_a_kept_seat_that_has_come_to_be_full_is_left_for_its_own_tier_only(tiers: list[float], to: str) -> None:
    """r0 keeps a's seat beside b, whose KV takes all of it by now; c sits on r2, with two tiers the tighter one's."""
    router, limits = Router(mode="pd", tiers=tiers), replace(LIMITS, max_num_seqs=2)
    views = [View(f"r{n}", 0.0, [], [], kv_free=100, kv_total=200, limits=limits, latency=STEP) for n in range(4)]
    seqs = [Seq(one, length=8, due=1.0) for one in (loose("a"), loose("b"), tight("c") if tiers[1:] else loose("c"))]
    sent = router.place(seqs, views, 0.0)
    assert [sent.why[id].split()[2] for id in ("a", "b", "c")] == ["r0:", "r0:", "r2:"]
    grown = Seq(seqs[1].request, length=1590, cached=1589, output=1582, due=1.0)
    views[0] = replace(views[0], running=[grown], steps=100)  # past b's predicted end
    handed = replace(seqs[0].request, handoff=Handoff("r1", "prefilled", 0.02, cached=8))
    assert router.place([Seq(handed, length=9, cached=8, output=1, due=1.0)], views, 0.02).place == {"a": to}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "both"}, "mode is 'both': give co or pd"),
        ({"tiers": []}, r"tiers are \(\): give TPOTs in seconds, above 0 and ascending"),
        ({"tiers": [0.1, 0.02]}, r"tiers are \(0.1, 0.02\): give TPOTs"),
    ],
)
def test_impossible_setting_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Router(**settings)
    with pytest.raises(ValueError, match="budget is 0: give the tokens of a prefill batch, at least 1"):
        polyserve.Scheduler(budget=0)
