"""PolyServe's router: what it may never do, on random workloads, and its rules on small fleets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Assigned, Event, Finished, HandedOff, Placed
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request
from rubato.policies import polyserve
from rubato.policies.polyserve import Router
from rubato.policies.polyserve.replica_model import PREFILL
from rubato.simulation.simulate import simulate_events
from tests.doubles import Linear, request, run_spec
from tests.policies.test_properties import Load, few, loads, run
from tests.simulation.test_equal import same

TIERS = (0.005, 0.02, 0.1)
MODES = st.sampled_from(["co", "pd"])


class Watched(Router):
    """Looks at each decision before it is made, and at what is held after."""

    def _take(self, replica: Any, request: Any, turn: Any, rule: str, when: float) -> None:
        assert not replica.draining
        assert request.seq.id not in turn.place, "placed twice"
        if replica.group != PREFILL:
            assert replica.group <= request.tier, "a looser tier's replica"
        if rule.startswith("promoted") or rule in ("scaled up", "claimed"):
            for group in range(request.tier, -1, -1) if rule in ("scaled up", "claimed") else [request.tier]:
                for other in self._groups[group]:
                    if other is not replica and not other.draining and replica.group != PREFILL:
                        assert self._fits(other, group, request, turn.now) is None, "its own tier had room"
        super()._take(replica, request, turn, rule, when)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        before, freed = set(self._held_until), set(self._freed)
        dispatch = super().place(held, fleet, now)
        for seq in held:
            if seq.id not in self._held_until:
                continue
            wanted = self._request(seq)
            assert wanted is not None
            if wanted.moves or self.mode == "pd":
                continue  # those that prefill share their replicas: tried as they come
            tried = self._replicas.values() if seq.id not in before else [self._replicas[id] for id in freed]
            for replica in tried:
                if replica.group is not None and replica.group <= wanted.tier and not replica.draining:
                    assert self._fits(replica, replica.group, wanted, now) is None, (
                        "held though a replica would take it"
                    )
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
                guests = [id for id, at in where.items() if at == event.id]
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
    free = replace(request("free", 8, most=150), stages=(replace(request("free", 8).stages[0], slo=SLO()),))
    events = served([free, tight("t0", 0.02, 5), loose("l0", 0.5, 5)], 1)
    roles = [(e.role.tier, e.role.kind) for e in events if isinstance(e, Assigned)]
    assert roles == [("", "best_effort"), ("0.01", "tier"), ("", "best_effort")] + [("0.05", "tier")] * 1
    assert rules(events)[:2] == [("free", "r0", "best effort"), ("t0", "r0", "scaled up")]
    assert ("free", "r0", "best effort") in rules(events)[2:], "what was recalled goes on in the pool"


def test_prompts_and_decodes_apart() -> None:
    events = served([tight("t0"), loose("l0", 0.001)], 4, mode="pd")
    assert rules(events) == [
        ("t0", "r0", "scaled up"),
        ("l0", "r0", "prefill"),
        ("t0", "r1", "scaled up"),
        ("l0", "r1", "promoted from 50 ms"),
    ]


def test_too_late_is_best_effort() -> None:
    """A prompt that would take longer than its TTFT alone."""
    late = request("late", 60, most=4, ttft=0.003, tpot=0.06)
    assert rules(served([late], 1)) == [("late", "r0", "best effort")]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "both"}, "mode is 'both': give co or pd"),
        ({"tiers": []}, r"tiers are \(\): give TPOTs in seconds, above 0 and ascending"),
        ({"tiers": [0.1, 0.02]}, r"tiers are \(0.1, 0.02\): give TPOTs"),
        ({"budget": 0}, "budget is 0: give the tokens of a prefill batch, at least 1"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Router(**settings)
