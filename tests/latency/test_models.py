"""What every latency model promises: monotone, positive, exactly inverted, storable."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.interfaces import LatencyModel
from rubato.latency import affine, roofline
from rubato.types import Batch, Entry, Shape

FEATURES = [f.name for f in fields(Shape)]


def seconds(most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(1e-12, most))


def two(most: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(seconds(most), seconds(most))


positive = st.floats(1e-5, 0.1)
rooflines = st.builds(
    lambda k1, k2, b, first: roofline.Model(k1=k1, k2=k2, b=(first, b)), two(1e-3), two(1e-2), seconds(0.1), positive
)
affines = st.builds(
    lambda k, b, a, d, e, host, per: affine.Model(k=k, b=b, a=a, d=d, e=e, host=host, host_per_seq=per),
    two(1e-3),
    two(0.1),
    seconds(1e-6),
    seconds(1e-7),
    seconds(1e-7),
    positive,
    seconds(1e-3),
)
models: st.SearchStrategy[LatencyModel] = st.one_of(rooflines, affines)
entries = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), max_size=8)


def batch(parts: list[tuple[int, int]], spec_steps: int = 0) -> Shape:
    shape = Shape(spec_steps=spec_steps)
    for tokens, cached in parts:
        shape = shape.plus(tokens, cached)
    return shape


@given(models, entries, st.sampled_from(FEATURES), st.integers(1, 100_000))
def test_never_faster_when_any_feature_grows(
    model: LatencyModel, parts: list[tuple[int, int]], name: str, more: int
) -> None:
    shape = batch(parts)
    assert model.step_time(replace(shape, **{name: getattr(shape, name) + more})) >= model.step_time(shape)


@given(models, entries.filter(bool))
def test_a_batch_takes_some_finite_time(model: LatencyModel, parts: list[tuple[int, int]]) -> None:
    assert 0.0 < model.step_time(batch(parts)) < math.inf


@given(
    models, entries, st.integers(0, 3000), st.integers(0, 300), st.integers(0, 400), st.sampled_from((0.5, 1.0, 1.001))
)
def test_largest_chunk_is_what_trying_every_chunk_finds(
    model: LatencyModel, parts: list[tuple[int, int]], cached: int, most: int, reach: int, part: float
) -> None:
    base = batch(parts, spec_steps=len(parts))
    limit = model.step_time(base.plus(reach, cached)) * part
    fits = [c for c in range(1, most + 1) if model.step_time(base.plus(c, cached)) <= limit]
    assert model.largest_chunk(limit, base, cached, most) == max(fits, default=0)


@pytest.mark.parametrize("model", [affine.Model(), roofline.Model()])
def test_largest_chunk_at_the_ends(model: LatencyModel) -> None:
    assert model.largest_chunk(math.inf, Shape(), 0, 700) == 700
    assert model.largest_chunk(0.0, Shape(), 0, 700) == 0
    assert model.largest_chunk(-1.0, Shape(), 0, 700) == 0
    assert model.largest_chunk(math.nan, Shape(), 0, 700) == 0
    assert model.largest_chunk(math.inf, Shape(), 0, 0) == 0


def test_one_token_is_a_decode_and_two_are_a_chunk() -> None:
    # The second token brings the whole chunk into the chunk features: 1 fits where 2 is far off.
    model = affine.Model(k=(0.0, 0.0), b=(1.0, 0.0), d=1.0)
    assert model.step_time(Shape().plus(1, 100)) == 1.0
    assert model.step_time(Shape().plus(2, 100)) == 201.0
    assert model.largest_chunk(200.0, Shape(), 100, 50) == 1
    assert model.largest_chunk(301.0, Shape(), 100, 50) == 3


def test_the_terms_of_the_affine_form() -> None:
    model = affine.Model(k=(1.0, 4.0), b=(100.0, 10.0), a=0.5, d=0.25, e=0.125, host=1000.0, host_per_seq=7.0)
    entries = (Entry("d", 9, 1, (), True), Entry("p", 4, 10, (), False))
    shape = Batch(entries).shape
    assert model.step_time(shape) == 1000.0 + 2 * 7.0 + (11 + 100) + 0.5 * 24 + 0.25 * 40 + 0.125 * 100
    assert model.step_time(replace(shape, tokens=50)) - model.step_time(shape) == (4 * 50 + 10) - (11 + 100)


@given(rooflines, st.integers(1, 5000), st.integers(0, 8))
def test_time2bs_inverts_step_time(model: roofline.Model, tokens: int, steps: int) -> None:
    limit = model.step_time(Shape(tokens=tokens, spec_steps=steps))
    n = model.time2bs(limit, steps)
    assert n >= tokens
    if n != sys.maxsize:
        assert model.step_time(Shape(tokens=n, spec_steps=steps)) <= limit
        assert model.step_time(Shape(tokens=n + 1, spec_steps=steps)) > limit


def test_time2bs_by_hand() -> None:
    model = roofline.Model(k1=(0.125, 1.0), k2=(0.5, 0.0), b=(8.0, 2.0))
    assert model.time2bs(10.0) == 8  # min(16, 8)
    assert model.time2bs(10.0, 3) == 4  # min(⌊0.5/0.125⌋, 8)
    assert model.time2bs(7.9) == 0
    assert model.time2bs(9.0, 3) == 0
    assert roofline.Model(k1=(0.0, 0.0), b=(1.0, 0.0)).time2bs(1.0) == sys.maxsize
    assert roofline.Model(k1=(0.0, 0.0), b=(1.0, 0.0)).time2bs(0.9) == 0
    # t − b − k2·spec_steps is below 0 by rounding though the step takes exactly t.
    flat = roofline.Model(k1=(0.0, 0.0), k2=(0.0, 0.005026513246001848), b=(0.0625, 0.0625))
    assert flat.time2bs(flat.step_time(Shape(tokens=1, spec_steps=2)), 2) == sys.maxsize
    nearly = roofline.Model(k1=(1e-20, 0.0), b=(1.0, 0.0))  # thousands of tokens vanish in rounding, and so fit
    n = nearly.time2bs(1.0)
    assert nearly.step_time(Shape(tokens=n)) == 1.0 < nearly.step_time(Shape(tokens=n + 1))
    assert flat.time2bs(math.nan) == flat.time2bs(-math.inf) == 0


@given(rooflines)
def test_a_roofline_survives_json(model: roofline.Model) -> None:
    assert roofline.Model.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@given(affines)
def test_an_affine_model_survives_json(model: affine.Model) -> None:
    assert affine.Model.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_what_is_not_a_model_is_refused_in_words() -> None:
    stored = affine.Model().to_dict()
    with pytest.raises(ValueError, match="not a roofline"):
        roofline.Model.from_dict(stored)
    with pytest.raises(ValueError, match="wants model = affine"):
        affine.Model.from_dict({**stored, "extra": 1})
    with pytest.raises(ValueError, match="affine host is -1"):
        affine.Model.from_dict({**stored, "host": -1})
    with pytest.raises(ValueError, match="roofline k1"):
        roofline.Model(k1=(math.nan, 0.0))
    with pytest.raises(ValueError, match="no time"):
        affine.Model(k=(0.0, 0.0), b=(0.0, 0.0))
    with pytest.raises(ValueError, match="no time"):
        roofline.Model(k1=(0.0, 0.0), b=(0.0, 0.0))
    with pytest.raises(ValueError, match="window is 3"):
        affine.Model(window=3)
