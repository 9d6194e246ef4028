"""What `simulator-speed` simulates is what it says: hand-offs, prompts that begin alike, moved KV, drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import simulator_speed
from experiments._handing_off_sarathi import KINDS, Router, Scheduler
from experiments.simulator_speed import CASES, case_spec, workload
from rubato.core.events import Finished, HandedOff, Placed, Started, Tokens, Transferred
from rubato.simulation.simulate import simulate_events
from rubato.workloads.workload import HASH_BLOCK_TOKENS

COUNT, REPLICAS = 16, 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator_speed._machine()  # made once, and for the lengths of the figure
    monkeypatch.setattr(simulator_speed, "LONGEST_OUT", 40)


def test_roles_hand_each_fourth_on_once_to_the_other_kind_before_it_begins() -> None:
    case = CASES["roles"]
    load = workload(case, 4 * COUNT, 6.0, 0)
    events = simulate_events(list(load.requests()), load.truth(), case_spec(case, REPLICAS))
    roles = Router().roles([f"r{i}" for i in range(REPLICAS)])
    moved = [event for event in events if isinstance(event, HandedOff)]
    assert 0.1 < len(moved) / (4 * COUNT) < 0.4
    assert len({event.id for event in moved}) == len(moved)
    begun = {event.id: event.at for event in reversed(events) if isinstance(event, Started)}
    to = {event.id: event.replica for event in events if isinstance(event, Placed)}  # the last place of each
    for event in moved:
        handoff = event.request.handoff
        assert handoff is not None
        assert (handoff.reason, handoff.cached) == ("declined", 0)
        assert roles[to[event.id]].kind != roles[handoff.source].kind
        assert event.at <= begun[event.id]
    ends = [event.outcome for event in events if isinstance(event, Finished)]
    assert ends == ["completed"] * (4 * COUNT)


def test_roles_are_of_two_kinds_in_turn() -> None:
    assert [role.kind for role in Router().roles(["a", "b", "c"]).values()] == [*KINDS, KINDS[0]]
    with pytest.raises(ValueError, match="give 2 replicas or more"):
        Router().roles(["a"])
    with pytest.raises(ValueError, match="give at least 1 of both"):
        Scheduler(every=0)


def test_the_first_half_of_a_prompt_is_one_of_the_texts_the_rest_its_own() -> None:
    case = replace(CASES["prefix"], texts=3)
    prompts = [request.stages[0].token_ids for request in workload(case, COUNT, 1.0, 0).requests()]
    assert len(set(prompts)) == COUNT
    for ids in prompts:
        blocks = ids[::HASH_BLOCK_TOKENS]
        half = len(blocks) // 2
        others = [other[::HASH_BLOCK_TOKENS] for other in prompts if other is not ids]
        assert all(block not in other for other in others for block in blocks[half:])
    assert len({ids[0] for ids in prompts if len(ids) > HASH_BLOCK_TOKENS}) <= 3


@pytest.mark.parametrize(("name", "kind"), [("pd", Transferred), ("drafts", Tokens), ("trees", Tokens)])
def test_cases_move_kv_and_verify_drafts(name: str, kind: type) -> None:
    case = CASES[name]
    load = workload(case, COUNT, 4.0, 0)
    events = simulate_events(list(load.requests()), load.truth(), case_spec(case, REPLICAS))
    seen = [event for event in events if isinstance(event, kind)]
    if kind is Tokens:
        assert any(event.tried for event in seen)
    else:
        assert len(seen) == COUNT
        assert all(event.size == event.tokens * case.link.kv_bytes for event in seen)
