"""Minimal places as it would if it looked at every sequence, whatever a replica keeps count of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies import minimal
from rubato.simulation.simulate import simulate_events, simulate_requests
from tests.conftest import few
from tests.kit import Linear, Seq, request, run_spec, shown

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=80, max_model_len=400, kv_blocks=200, block_size=16)


def load_of(view: View) -> tuple[Shape, int]:
    """A replica's next iteration and the tokens of prefill pending there, by the rule, sequence by sequence."""
    shape = Shape()
    for seq in [s for s in view.running if s.pending == 1][: view.limits.max_num_seqs]:
        shape = shape.plus(1, seq.cached)
    prefills = [*(s for s in view.running if s.pending > 1), *view.waiting]
    for seq in prefills:
        shape = with_prefill(shape, view.limits, seq.pending, seq.cached)
    return shape, sum(s.pending for s in prefills)


def cost(view: View, shape: Shape, pending: int) -> tuple[float, int]:
    return (view.latency.step_time(shape) if shape.seqs else 0.0, pending)


def by_sequence(held: Sequence[SeqView], fleet: Sequence[View]) -> Mapping[str, str]:
    loads, place = [load_of(view) for view in fleet], {}
    for seq in held:
        costs = [cost(view, *load) for view, load in zip(fleet, loads, strict=True)]
        least = costs.index(min(costs))
        place[seq.id] = fleet[least].id
        shape, pending = loads[least]
        loads[least] = with_prefill(shape, fleet[least].limits, seq.pending, seq.cached), pending + seq.pending
    return place


def with_prefill(shape: Shape, limits: Limits, pending: int, cached: int) -> Shape:
    tokens = min(pending, limits.max_num_batched_tokens - shape.tokens) if shape.seqs < limits.max_num_seqs else 0
    return shape.plus(tokens, cached) if tokens > 0 else shape


@st.composite
def views(draw: st.DrawFn) -> list[View]:
    sizes = st.tuples(st.integers(1, 120), st.sampled_from([0, 1, 1, 1, 2, 30]))  # cached and pending of one that runs
    fleet = []
    for r in range(draw(st.integers(1, 4))):
        running = [
            Seq(request(f"r{r}-{i}", 10), cached + pending, cached)
            for i, (cached, pending) in enumerate(draw(st.lists(sizes, max_size=9)))
        ]
        prompts = draw(st.lists(st.integers(1, 120), max_size=4))
        waiting = [Seq(request(f"w{r}-{i}", p), p) for i, p in enumerate(prompts)]
        fleet.append(View(f"r{r}", 0.0, waiting, running, 99, 99, LIMITS, Linear(per_kv=0.0001)))
    return fleet


@given(fleet=views(), prompts=st.lists(st.integers(1, 120), min_size=1, max_size=6))
def test_the_same_as_by_sequence(fleet: list[View], prompts: list[int]) -> None:
    held = shown(*(request(f"q{i}", p) for i, p in enumerate(prompts)))
    assert minimal.Router().place(held, fleet, 0.0).place == by_sequence(held, fleet)


@pytest.mark.parametrize("policy", ["edf", "sarathi", "vllm", "prefill_first"])
@few
@given(seed=st.integers(0, 999), gap=st.sampled_from([0.01, 0.03, 0.1]), plain=st.booleans())
def test_the_same_in_the_middle_of_steps(policy: str, seed: int, gap: float, plain: bool) -> None:
    """Under policies that let decodes rest and on both drivers."""
    asked = 0

    def place(router: minimal.Router, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        nonlocal asked
        asked += 1
        assert [minimal._Load(view).cost for view in fleet] == [cost(view, *load_of(view)) for view in fleet]
        dispatch = original(router, held, fleet, now)
        assert dispatch.place == by_sequence(held, fleet)
        return dispatch

    draw = Random(seed)
    sizes = [(draw.randint(1, 200), draw.randint(1, 60)) for _ in range(40)]
    offered = [
        Request(f"q{i}", (Stage(p, SLO(0.5, 0.03)),), i * gap, sampling=Sampling(out))
        for i, (p, out) in enumerate(sizes)
    ]
    truth = {f"q{i}": (out,) for i, (_, out) in enumerate(sizes)}
    spec = run_spec(Linear(), LIMITS, policy, router="minimal", replicas=3, learns=False)
    original = minimal.Router.place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal.Router, "place", place)
        if plain:
            simulate_events(offered, truth, spec)
        else:
            simulate_requests(offered, truth, spec)
    assert asked
