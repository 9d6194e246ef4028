"""Routers that others use: LMetric's product, and the better of two drawn at random."""

from __future__ import annotations

from collections import Counter

import pytest

from rubato.core.events import Placed
from rubato.core.interfaces import Router, View
from rubato.core.request import Request, Stage
from rubato.policies import PolicyError, load_router
from tests.kit import Seq, idle_fleet, request, shown, view
from tests.kit.plans import decode, fleet, prompt


def ids(id: str, tokens: tuple[int, ...], **more: str) -> Request:
    return Request(id, (Stage(len(tokens), token_ids=tokens),), 0.0, **more)  # type: ignore[arg-type]


def placed(router: Router, fleet: list[View], *requests: Request) -> dict[str, str]:
    """Where they go; the router is told so, as by a cluster."""
    place = dict(router.place(shown(*requests), fleet, 0.0).place)
    router.observe([Placed(0.0, id, to) for id, to in place.items()])
    return place


# --------------------------------------------------------------------------- lmetric


@pytest.mark.parametrize(
    ("first", "second", "to"),
    [
        ((), (), "r0"),  # a tie: the first
        ((prompt("p", 100),), (), "r1"),
        ((prompt("p", 100),), (decode("a"), decode("b")), "r1"),  # (100 + 50) × 2 > 50 × 3
        ((prompt("p", 10),), (decode("a"), decode("b")), "r0"),  # (10 + 50) × 2 < 50 × 3
        ((decode("c"),), (decode("a"), decode("b")), "r0"),  # decodes count by their number alone
    ],
)
def test_lmetric_takes_the_least_product(first: tuple[Seq, ...], second: tuple[Seq, ...], to: str) -> None:
    """A request of 50 tokens; those of 2 tokens or more wait."""
    views = [
        view(tuple(s for s in here if s.pending > 1), tuple(s for s in here if s.pending == 1), id=id)
        for id, here in (("r0", first), ("r1", second))
    ]
    assert load_router("lmetric").place(shown(request("x", 50)), views, 0.0).place == {"x": to}


def test_lmetric_counts_what_it_has_just_placed() -> None:
    held = [request(id, 50) for id in "abc"]
    assert load_router("lmetric").place(shown(*held), fleet(60, 0), 0.0).place == {"a": "r1", "b": "r1", "c": "r0"}


def test_lmetric_counts_no_tokens_that_are_cached() -> None:
    """320 tokens, 256 of them on r0: (64 + p) × 2 against 320, with p pending there in one request."""
    prefix = tuple(range(256))
    for pending, to in ((90, "r0"), (100, "r1")):
        router = load_router("lmetric")
        assert placed(router, idle_fleet(2), ids("a", prefix)) == {"a": "r0"}
        views = [view((prompt("p", pending),), id="r0"), view(id="r1")]
        assert placed(router, views, ids("b", prefix + (7,) * 64)) == {"b": to}


def test_lmetric_shares_prefixes_among_requests_placed_together() -> None:
    prefix = tuple(range(256))
    held = [ids("a", prefix), ids("b", (*prefix, 1)), ids("c", (9,) * 256)]
    views = idle_fleet(2)
    # b: (256 + 1) × 2 on r0 against 257 on r1
    assert placed(load_router("lmetric"), views, *held) == {"a": "r0", "b": "r1", "c": "r0"}
    busy = [view(id="r0"), view((prompt("p", 300),), id="r1")]
    assert placed(load_router("lmetric"), busy, *held[:2]) == {"a": "r0", "b": "r0"}


# --------------------------------------------------------------------------- power_of_two


def test_power_of_two_is_seeded_and_takes_the_one_with_less_work() -> None:
    held = [request(f"q{i}", 10) for i in range(90)]
    runs = [load_router("power_of_two", {"seed": seed}).place(shown(*held), fleet(0, 0, 0), 0.0) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    assert all(27 <= count <= 33 for count in Counter(runs[0].place.values()).values())
    two = load_router("power_of_two").place(shown(*held), fleet(90 * 200, 0), 0.0).place
    assert set(two.values()) == {"r1"}  # of two, both are drawn each time


def test_power_of_two_never_takes_the_most_loaded_of_three() -> None:
    router = load_router("power_of_two")
    chosen = {router.place(shown(request("x", 10)), fleet(900, 10, 500), 0.0).place["x"] for _ in range(60)}
    assert chosen == {"r1", "r2"}


def test_power_of_two_with_one_replica() -> None:
    assert load_router("power_of_two").place(shown(request("x", 10)), fleet(900), 0.0).place == {"x": "r0"}
    with pytest.raises(PolicyError, match="seed is -1"):
        load_router("power_of_two", {"seed": -1})
