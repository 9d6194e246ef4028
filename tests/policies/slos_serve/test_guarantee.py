"""Requests that `slos_serve` admits are in time: step times by tokens alone, lengths known, KV for all ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.core.events import Finished
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan, Sample, Shape
from rubato.core.request import SLO, OnDecline, Request, Sampling, Stage
from rubato.latency import affine, components, profiles
from rubato.latency.roofline import Model
from rubato.policies.slos_serve import Scheduler, demand, scheduler
from rubato.simulation.run_spec import oracle_lengths
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.kit import run_spec
from tests.policies.test_properties import Load

SLOW = Model(k1=(0.003, 0.001), b=(0.002, 0.008))  # six tokens in 20 ms
MODELS = {
    "memory- then compute-bound": Model(k1=(0.0, 0.001), b=(0.01, 0.002)),
    "fixed": Model(k1=(0.0, 0.0), b=(0.01, 0.0)),
    "two planes": Model(k1=(0.0005, 0.0003), b=(0.004, 0.007)),
    "slow": SLOW,
    "cheap up to 30 tokens": Model(k1=(0.0001, 0.0004), b=(0.012, 0.003)),
}


@st.composite
def kinds(draw: st.DrawFn, tpots: list[float]) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """Stages and outputs of requests that are alike."""
    slo = SLO(draw(st.sampled_from([0.047, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 1.0])), draw(st.sampled_from(tpots)))
    stage = Stage(draw(st.sampled_from([1, 7, 7, 12, 20, 60, 88, 150, 228])), slo)
    output = draw(st.sampled_from([1, 20, 60, 60]))
    what = draw(st.sampled_from(["plain", "plain", "plain", "reasoning", "best effort"]))
    if what == "reasoning":  # thinking, then a response at a pace of its own
        answer = Stage(0, SLO(tpot=draw(st.sampled_from(tpots))))
        return (replace(stage, ends="</think>"), answer), (output, draw(st.sampled_from([1, 3, 30])))
    return (replace(stage, slo=SLO()) if what == "best effort" else stage,), (output,)


@st.composite
def promised(draw: st.DrawFn) -> tuple[Load, Model]:
    """Requests with TTFT and TPOTs, many alike and at once; batches and places that are scarce."""
    tpots = draw(st.sampled_from([[0.02], [0.02, 0.04], [0.02, 0.03, 0.07], [0.05, 0.1]]))
    alike = draw(st.lists(kinds(tpots), min_size=1, max_size=3))
    gap = st.sampled_from(draw(st.sampled_from([[0.0], [0.0, 0.0, 0.1], [0.001, 0.02, 0.0371]])))
    requests: list[Request] = []
    truth: dict[str, tuple[int, ...]] = {}
    at = 0.0
    for i in range(draw(st.integers(6, 16))):
        at += draw(gap)
        stages, outputs = draw(st.sampled_from(alike))
        sampling = Sampling(max_tokens=sum(outputs) + 10 * (i % 2))
        decline = draw(st.sampled_from(["best_effort", "best_effort", "refuse"]))
        requests.append(Request(f"q{i}", stages, at, on_decline=decline, sampling=sampling))
        truth[f"q{i}"] = outputs
    block = draw(st.sampled_from([1, 16]))
    largest = max(r.prompt + r.sampling.max_tokens for r in requests)
    limits = Limits(
        max_num_seqs=draw(st.sampled_from([3, 64, 64, 64, 64])),
        max_num_batched_tokens=draw(st.sampled_from([16, 40, 512, 512, 512])),
        max_model_len=400,
        kv_blocks=-(-largest // block) * 20,
        block_size=block,
        max_running=draw(st.sampled_from([None, None, None, None, 3])),
    )
    return Load(tuple(requests), truth, limits), draw(st.sampled_from([*MODELS.values(), SLOW]))


class Recording:
    """The policy, and the requests that it promised to be in time."""

    def __init__(self, **settings: Any) -> None:
        self.inner = Scheduler(**settings)
        self.needs = self.inner.needs
        self.observe = self.inner.observe
        self.promised: set[str] = set()

    def plan(self, view: View) -> Plan:
        plan = self.inner.plan(view)
        self.promised.update(self.inner.promised_ids)
        return plan


def kept(load: Load, model: Model | components.Model, scheduler: Any, **spec: Any) -> set[str]:
    """Ids of the requests that a scheduler, which knows their lengths, has in time."""
    spec_ = run_spec(model, load.limits, "slos_serve", lengths=oracle_lengths, learns=False, **spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.fleet.build.load", lambda name, settings: scheduler)
        ends = {e.id: e for e in simulate_events(load.requests, load.truth, spec_) if isinstance(e, Finished)}
    assert {e.outcome for e in ends.values()} <= {"completed", "refused"}
    return {id for id, e in ends.items() if e.verdict.met and not e.best_effort}


def played(
    load: Load, model: Model | components.Model, noise: float = 0.0, **settings: Any
) -> tuple[set[str], set[str]]:
    """Ids of the requests promised to be in time, and of those that were."""
    recording = Recording(**settings)
    met = kept(load, model, recording, noise=noise)
    return recording.promised, met


@settings(max_examples=2 * few.max_examples)
@given(promised())
def test_no_admitted_request_misses(case: tuple[Load, Model]) -> None:
    admitted, met = played(*case)
    assert admitted <= met


@few
@given(promised(), st.sampled_from([0.009, 0.011, 0.014, 0.02, 0.2]), st.sampled_from([0.25, 1.0, 4.0]))
def test_nor_does_one_in_short_batches_or_beside_one_that_has_waited_for_long(
    case: tuple[Load, Model], longest: float, patience: float
) -> None:
    """`max_batch_seconds`: where a batch does not hold all decodes they take turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "PATIENCE_S", patience)
        patch.setattr(demand, "PATIENCE_S", patience)
        patch.setattr(scheduler, "PATIENT_TPOT_S", patience / 16)
        admitted, met = played(*case, max_batch_seconds=longest)
    assert admitted <= met


def alike(count: int, stage: Stage, output: int, limits: Limits) -> Load:
    requests = tuple(Request(f"q{i}", (stage,), 0.0, sampling=Sampling(max_tokens=output)) for i in range(count))
    return Load(requests, {r.id: (output,) for r in requests}, limits)


LARGE = Limits(max_num_seqs=64, max_num_batched_tokens=40, max_model_len=400, kv_blocks=2000, block_size=1)


def test_prompts_done_early_take_no_token_of_others_to_be_even() -> None:
    """Four prompts in three batches of 40, each: the first ones have tokens long before they are due."""
    load = alike(4, Stage(150, SLO(0.15, 0.02)), 8, LARGE)
    admitted, met = played(load, MODELS["fixed"])
    assert len(admitted) == 4
    assert admitted == met


def test_nor_where_the_first_tokens_of_a_prompt_cost_more_than_the_others() -> None:
    """On kernels, in batches that do not hold all decodes: prompts due after 28.5 ms, of which they take nine."""
    profile = profiles.load("qwen2.5-1.5b-a100-40g")
    decoding, short = SLO(20.0, 0.05), SLO(0.0285, 0.05)
    requests = [Request(f"d{i}", (Stage(2000, decoding),), 0.0, sampling=Sampling(max_tokens=500)) for i in range(90)]
    for i in range(30):
        stage = Stage(40 + 37 * i % 160, short)
        requests.append(Request(f"p{i}", (stage,), 6.0 + 0.23 * i, sampling=Sampling(max_tokens=200)))
    truth = {r.id: (r.sampling.max_tokens,) for r in requests}
    load = Load(tuple(requests), truth, Limits(256, 8192, 32768, 69_973, 16))
    admitted, met = played(load, profile.model(), max_batch_seconds=0.018)
    assert len(admitted) > 110
    assert admitted <= met


class Spell:
    """Steps as the latency model says, but for 60 of them, which take 2.5 times as long."""

    def __init__(self) -> None:
        self._model = steady()
        self._steps = 0

    def step_time(self, shape: Shape) -> float:
        self._steps += 1
        return self._model.step_time(shape) * (2.5 if 200 <= self._steps <= 260 else 1.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def steady() -> affine.Model:
    """24 ms and 0.6 a token, fitted as a live one is."""
    shapes = [Shape(n, n, 100 * n) for n in range(1, 16)]
    shapes += [shape.plus(chunk, context) for shape in shapes for chunk in (16, 60, 200) for context in (0, 50, 90)]
    model = affine.Model()
    model.fit([Sample(shape, 0.024 + 0.0006 * shape.tokens) for shape in shapes])
    return model


@pytest.mark.parametrize(
    ("policy", "decline", "fleet"),
    [
        ("slos_serve", "refuse", {}),
        ("slos_serve", "best_effort", {"replicas": 2, "router_settings": {"backup": "refuse"}}),
        ("edf", "refuse", {}),
    ],
    ids=["whose clients ask for it", "by a router", "edf"],
)
def test_a_slow_spell_is_no_reason_to_refuse_for_ever(policy: str, decline: OnDecline, fleet: dict[str, Any]) -> None:
    """One request a second, whose TPOT no step keeps in the spell: a refused request runs no step that would tell."""
    stage = Stage(50, SLO(0.2, 0.05))
    requests = [
        Request(f"q{i}", (stage,), float(i), on_decline=decline, sampling=Sampling(max_tokens=20)) for i in range(120)
    ]
    truth = {r.id: (20,) for r in requests}
    spec = run_spec(
        Spell(), Limits(16, 512, 600, 1000, 16), policy, believed=steady(), learns=True,
        lengths=oracle_lengths, **fleet,
    )  # fmt: skip
    ends = [e for e in simulate_events(requests, truth, spec) if isinstance(e, Finished)]
    refused = [e for e in ends if e.outcome == "refused"]
    assert 5 <= len(refused) <= 40
    assert all(e.verdict.met for e in ends[-50:])


@pytest.mark.parametrize("policy", ["slos_serve", "edf"])
def test_a_server_that_began_slow_does_not_refuse_for_ever(policy: str) -> None:
    """Its first 40 steps take four times as long, and are what the coefficients are first fitted to."""

    class Warming(Spell):
        def step_time(self, shape: Shape) -> float:
            self._steps += 1
            return self._model.step_time(shape) * (4.0 if self._steps <= 40 else 1.0)

    stages = [Stage(50 + 37 * (i % 5), SLO(1.0, 0.0312)) for i in range(240)]
    requests = [
        Request(f"q{i}", (stage,), float(i), on_decline="refuse", sampling=Sampling(max_tokens=20))
        for i, stage in enumerate(stages)
    ]
    truth = {r.id: (20,) for r in requests}
    spec = run_spec(Warming(), Limits(16, 512, 600, 1000, 16), policy, believed=affine.Model(), learns=True)
    ends = {e.id: e for e in simulate_events(requests, truth, spec) if isinstance(e, Finished)}
    refused = [i for i in range(240) if ends[f"q{i}"].outcome == "refused"]
    assert len(refused) >= 5
    assert max(refused) < 160
    assert all(ends[f"q{i}"].verdict.met for i in range(max(refused) + 1, 240))
