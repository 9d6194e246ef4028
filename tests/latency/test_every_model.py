"""What every latency model promises: positive, finite, never less for a larger batch, exactly inverted, storable."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency import components
from rubato.latency.fit import error_report
from rubato.latency.model_kinds import MODELS
from tests.latency.every import COMPONENTS, DEFAULTS, Entries, batch, entries, fitted, models
from tests.latency.steps import mixed, run

pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* is outside the measured table")
EVERY = pytest.mark.parametrize("model", DEFAULTS, ids=lambda m: type(m).__module__.rpartition(".")[2])


@given(models, entries.filter(bool))
def test_a_batch_takes_some_finite_time(model: LatencyModel, parts: Entries) -> None:
    assert 0.0 < model.step_time(batch(parts)) < math.inf


@given(models, entries, st.integers(1, 600), st.integers(0, 9000))
def test_never_faster_with_one_entry_more(model: LatencyModel, parts: Entries, tokens: int, cached: int) -> None:
    assert model.step_time(batch([*parts, (tokens, cached)])) >= model.step_time(batch(parts))


@given(models, entries.filter(bool), st.data(), st.integers(0, 500), st.integers(0, 5000))
def test_never_faster_when_an_entry_grows(
    model: LatencyModel, parts: Entries, data: st.DataObject, more: int, longer: int
) -> None:
    i = data.draw(st.integers(0, len(parts) - 1))
    if isinstance(model, components.Model) and parts[i][0] == 1:
        more = 0  # as a chunk beside others it would need another kernel, which is running already
    grown = [(c + more, k + longer) if j == i else (c, k) for j, (c, k) in enumerate(parts)]
    assert model.step_time(batch(grown)) >= model.step_time(batch(parts))


@given(
    models, entries, st.integers(0, 3000), st.integers(0, 300), st.integers(0, 400), st.sampled_from((0.5, 1.0, 1.001))
)
def test_largest_chunk_is_what_trying_every_chunk_finds(
    model: LatencyModel, parts: Entries, cached: int, most: int, reach: int, part: float
) -> None:
    base = batch(parts, spec_steps=len(parts))
    limit = model.step_time(base.plus(reach, cached)) * part
    fits = [c for c in range(1, most + 1) if model.step_time(base.plus(c, cached)) <= limit]
    assert model.largest_chunk(limit, base, cached, most) == max(fits, default=0)


@EVERY
def test_largest_chunk_at_the_ends(model: LatencyModel) -> None:
    assert model.largest_chunk(math.inf, Shape(), 0, 700) == 700
    assert model.largest_chunk(math.inf, Shape(), 0, 20_000) == 20_000
    for nothing in (0.0, -1.0, math.nan):
        assert model.largest_chunk(nothing, Shape(), 0, 700) == 0
    assert model.largest_chunk(math.inf, Shape(), 0, 0) == 0


@given(fitted)
def test_it_survives_json(model: LatencyModel) -> None:
    kept = type(model).from_dict(json.loads(json.dumps(model.to_dict())))  # type: ignore[attr-defined]
    assert kept == model
    shape = batch([(1, 300), (200, 30)])
    assert kept.step_time(shape) == model.step_time(shape)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_such_a_model_is_refused_in_words(name: str) -> None:
    cls = MODELS[name]
    with pytest.raises(ValueError, match=f"not an? {name}"):
        cls.from_dict({**cls().to_dict(), "extra": 1})
    with pytest.raises(ValueError, match=f"not an? {name}"):
        cls.from_dict({**cls().to_dict(), "model": "other"})


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_to_its_own_steps_gives_them_back(name: str) -> None:
    truth, model = MODELS[name](), MODELS[name]()
    samples = run(truth, mixed, 1500, random.Random(1))
    model.fit(samples)
    report = error_report(model, samples)
    assert report.p50 < 0.01
    assert report.p95 < 0.03
    assert report.r2 > 0.995


@pytest.mark.parametrize("name", MODELS)
def test_a_machine_half_as_fast_shows_within_ten_steps(name: str) -> None:
    truth, model = MODELS[name](), MODELS[name]()
    for sample in run(truth, mixed, 10, random.Random(2), noise=0.03, slow=2.0):
        model.update(sample)
    probe = run(truth, mixed, 100, random.Random(3), slow=2.0)
    assert error_report(model, probe).p50 < 0.1


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_learnt_from_is_refused(name: str) -> None:
    model = MODELS[name]()
    with pytest.raises(ValueError, match="no tokens"):
        model.update(Sample(Shape(), 0.1))
    with pytest.raises(ValueError, match="positive, finite"):
        model.update(Sample(Shape(1, 1, 1), math.nan))
    with pytest.raises(ValueError, match="3 samples cannot"):
        model.fit(run(model, mixed, 3, random.Random(4)))
    with pytest.raises(ValueError, match="no time"):
        model.fit([*run(model, mixed, 50, random.Random(4)), Sample(Shape().plus(1, 1), 0.0)])


def test_components_learn_the_host_term_alone_and_only_when_asked() -> None:
    kernels = COMPONENTS[0]
    truth = components.Model(kernels.tables, kernels.factors, 0.004, 6e-5)
    model = components.Model(kernels.tables, kernels.factors)
    samples = run(truth, mixed, 100, random.Random(5))
    for sample in samples:
        model.update(sample)
    assert model == components.Model(kernels.tables, kernels.factors)
    model.fit(samples)
    assert (model.host, model.host_per_seq) == pytest.approx((0.004, 6e-5), rel=1e-3)
    assert error_report(model, samples).p95 < 1e-4
    with pytest.raises(ValueError, match="two batch sizes"):
        model.fit(samples[:1])
