"""PolyServe's baselines: CO-Chunk as a setting of `sarathi`, and the routers Random and Minimal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rubato.core.interfaces import View
from rubato.policies import PolicyError, load_router
from tests.kit import Linear, Seq, request, shown
from tests.kit.plans import decode, fleet, load, moved, prompt, seen, work


def test_sarathi_with_a_budget_gives_decodes_their_tokens_then_the_prompt_that_has_begun_then_the_oldest() -> None:
    begun = Seq(request("begun", 60), 60, 20, 2)
    plan = load("sarathi", {"budget": 60}).plan(seen([prompt("a", 30), prompt("b", 30)], [begun, decode("r")]))
    assert list(work(plan).items()) == [("r", 1), ("begun", 40), ("a", 19)]


def test_sarathis_budget_is_static_whatever_the_tpot() -> None:
    tight = decode("r", tpot=0.02)  # tuned, it would give 10 tokens: 10 ms + 1 ms a token
    assert work(load("sarathi", {"budget": 50}).plan(seen([prompt("a", 90)], [tight]))) == {"r": 1, "a": 49}


@pytest.mark.parametrize("name", ["vllm", "sarathi", "prefill_first", "vllm_spec"])
def test_whole_starts_nobody_who_would_have_to_give_its_memory_up(name: str) -> None:
    """40 blocks of 10: the running one takes 20 in the end, the first prompt 15; the second fits now, and not then."""
    running = replace(decode("r", 101), predicted=99.0)
    first, second = (replace(prompt(id, 30), predicted=120.0) for id in "ab")
    shown = seen([first, second], [running], kv_free=30)
    assert work(load(name).plan(shown)).keys() >= {"a", "b"}
    assert work(load(name, {"reserve_kv": True}).plan(shown)).keys() & {"a", "b"} == {"a"}
    huge = replace(prompt("a", 30), predicted=999.0)  # a guess that no memory holds: it starts on an empty replica
    assert work(load(name, {"reserve_kv": True}).plan(seen([huge], []))) == {"a": 30}


def test_random_is_seeded_and_even() -> None:
    held = [request(f"q{i}", 10) for i in range(600)]
    place = load_router("random", {"seed": 5}).place(shown(*held), fleet(0, 0, 0), 0.0).place
    assert place == load_router("random", {"seed": 5}).place(shown(*held), fleet(0, 0, 0), 0.0).place
    assert place != load_router("random", {"seed": 6}).place(shown(*held), fleet(0, 0, 0), 0.0).place
    assert all(150 < count < 250 for count in Counter(place.values()).values())


def replica(id: str, waiting: list[Seq], running: list[Seq]) -> View:
    return seen(waiting, running, id=id, latency=Linear(per_kv=0.0001))


def test_minimal_takes_the_shortest_next_iteration() -> None:
    """One long decode (10 ms + 1 + 40 of KV) against two short ones (10 + 2 + 4.2)."""
    two = replica("r1", [], [decode("b"), decode("c")])
    one = replica("r0", [], [decode("a", 401)])
    router = load_router("minimal")
    assert router.place(shown(request("x", 10)), [one, two], 0.0).place == {"x": "r1"}
    assert router.place(shown(request("x", 10)), [one, replica("r2", [], [])], 0.0).place == {"x": "r2"}


def test_minimal_counts_what_it_has_just_placed_and_what_waits() -> None:
    router = load_router("minimal")
    held = [request(id, 50) for id in "abc"]
    assert router.place(shown(*held), fleet(70, 0), 0.0).place == {"a": "r1", "b": "r1", "c": "r0"}


def test_minimal_tells_full_batches_apart_by_what_waits_behind() -> None:
    """Both next batches hold 100 tokens of prefill; the second replica has less behind them."""
    views = [
        replica("r0", [prompt("a", 100), prompt("b", 300)], []),
        replica("r1", [prompt("c", 100), prompt("d", 9)], []),
    ]
    assert load_router("minimal").place(shown(request("x", 10)), views, 0.0).place == {"x": "r1"}


@pytest.mark.parametrize(
    ("build", "name", "settings", "says"),
    [
        (load, "sarathi", {"budget": -1}, "budget -1, .*: give >= 0"),
        (load_router, "random", {"seed": -1}, "seed is -1"),
        (load, "minimal", {}, "has no Scheduler; it defines Router"),
    ],
)
def test_what_is_wrong_is_named(build: object, name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        build(name, settings)  # type: ignore[operator]


@pytest.mark.parametrize("router", ["random", "minimal"])
def test_prompts_go_to_who_prefills_and_kv_to_who_decodes_and_has_room(router: str) -> None:
    """The second decode replica has memory for one of the two that bring 200 tokens, the third for none."""
    made = load_router(router, {"prefill": 1, "decode": 3})
    roles = made.roles(["p", "a", "b", "c"])  # type: ignore[attr-defined]
    assert [roles[id].phase for id in "pabc"] == ["prefill", "decode", "decode", "decode"]
    views = [
        replace(replica(id, [], []), role=roles[id], kv_free=free)
        for id, free in zip("pabc", (40, 0, 25, 19), strict=True)
    ]
    held = shown(request("n", 50), moved("x", 200), moved("y", 200))
    assert made.place(held, views, 0.0).place == {"n": "p", "x": "b"}
    with pytest.raises(ValueError, match="needs at least 2 replicas"):
        made.roles(["p"])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="prefill 1, decode 0"):
        load_router(router, {"prefill": 1})
