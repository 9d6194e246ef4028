"""Fitting from scratch: planted coefficients come back, and what cannot be known is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rubato.core.plan import Sample, Shape
from rubato.latency import affine, roofline
from rubato.latency.fit import error_report
from tests.latency.steps import decodes, drafted, mixed, run, with_chunk

PLANTED = affine.Model(k=(1e-5, 1e-4), b=(0.011, 0.004), a=1e-7, d=2e-8, e=3e-8, host_per_seq=1e-4)
ROOF = roofline.Model(k1=(1e-5, 1e-4), k2=(2e-3, 1e-3), b=(0.012, 0.004))


def test_exact_steps_give_back_the_coefficients() -> None:
    model = affine.Model()
    model.fit(run(PLANTED, mixed, 400, random.Random(1)))
    for name in ("k", "b", "a", "d", "e", "host_per_seq"):
        assert getattr(model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6), name


def test_noise_and_odd_steps_do_not_wreck_it() -> None:
    model = affine.Model()
    model.fit(run(PLANTED, mixed, 1500, random.Random(2), noise=0.03, odd=0.1))
    report = error_report(model, run(PLANTED, mixed, 500, random.Random(3)))
    assert report.p50 < 0.01
    assert report.p95 < 0.03
    assert report.r2 > 0.99
    assert model.k[1] == pytest.approx(PLANTED.k[1], rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_knee_is_found(seed: int) -> None:
    rng = random.Random(seed)
    knee = rng.randint(60, 400)  # tokens
    truth = roofline.Model(k1=(1e-5, 1e-4), b=(0.05, 0.05 - 9e-5 * knee))
    model = roofline.Model()
    model.fit(run(truth, lambda r: Shape(tokens=r.randint(1, 600), seqs=1), 300, rng, noise=0.01))
    found = (model.b[0] - model.b[1]) / (model.k1[1] - model.k1[0])
    assert found == pytest.approx(knee, abs=25)


def test_a_roofline_with_draft_steps() -> None:
    model = roofline.Model()
    model.fit(run(ROOF, drafted, 500, random.Random(5), noise=0.01, odd=0.05))
    assert model.k1[1] == pytest.approx(ROOF.k1[1], rel=0.02)
    assert model.k2 == pytest.approx(ROOF.k2, rel=0.1)
    assert model.b == pytest.approx(ROOF.b, rel=0.1)
    assert error_report(model, run(ROOF, drafted, 300, random.Random(6))).p95 < 0.02


def test_small_steps_weigh_as_much_as_large_ones() -> None:
    # 3 ms and 300 ms with the same relative noise: the small ones are predicted as well as the large ones.
    truth = roofline.Model(k1=(0.0, 1e-3), b=(3e-3, 0.0))
    model = roofline.Model()
    steps = lambda r: Shape(tokens=r.choice([1, 2, 300]), seqs=1)  # noqa: E731
    model.fit(run(truth, steps, 300, random.Random(7), noise=0.05))
    assert model.step_time(Shape(tokens=1)) == pytest.approx(3e-3, rel=0.02)
    assert model.step_time(Shape(tokens=300)) == pytest.approx(0.3, rel=0.02)


def test_host_is_held_and_the_rest_fitted() -> None:
    truth = replace(PLANTED, host=0.005)
    steps = run(truth, mixed, 400, random.Random(8))
    told, untold = affine.Model(host=0.005), affine.Model()
    told.fit(steps)
    untold.fit(steps)
    assert (told.host, untold.host) == (0.005, 0.0)
    assert told.b[0] == pytest.approx(PLANTED.b[0], rel=1e-6)
    assert untold.b[0] == pytest.approx(PLANTED.b[0] + 0.005, rel=1e-6)
    half = replace(told, host=0.001)
    shape = steps[0].shape
    assert told.step_time(shape) - half.step_time(shape) == pytest.approx(0.004)


def test_context_unseen_is_priced_by_the_square() -> None:
    whole = lambda r: decodes(r).plus(r.randint(2, 512), 0)  # noqa: E731
    model = affine.Model()
    model.fit(run(PLANTED, whole, 200, random.Random(9)))
    assert model.d == pytest.approx(2 * PLANTED.e, rel=1e-5)


def test_what_samples_cannot_determine_is_refused() -> None:
    rng = random.Random(10)
    good = run(PLANTED, mixed, 50, rng)
    before = affine.Model()
    for samples, words in [
        (good[:5], "5 samples cannot determine"),
        ([], "0 samples cannot determine"),
        ([next(s for s in good if s.shape.chunk_sq)] * 50, "never move apart"),
        (run(PLANTED, decodes, 50, rng), "no sample runs a chunk"),
        (run(PLANTED, lambda r: Shape().plus(r.randint(2, 500), 0), 50, rng), "never move apart"),
        ([*good, Sample(Shape(1, 1, 1), 0.0)], "no time"),
        ([*good, Sample(Shape(1, 1, 1), float("nan"))], "no time"),
    ]:
        with pytest.raises(ValueError, match=words):
            before.fit(samples)
        assert before == affine.Model()
    with pytest.raises(ValueError, match="smaller host"):
        affine.Model(host=5.0).fit(good)


def test_what_cannot_determine_a_roofline_is_refused() -> None:
    with pytest.raises(ValueError, match="3 samples cannot"):
        roofline.Model().fit(run(ROOF, drafted, 3, random.Random(1)))
    with pytest.raises(ValueError, match="1 different"):
        roofline.Model().fit([Sample(Shape(8, 8, 900), 0.01)] * 40)
    with pytest.raises(ValueError, match="no time"):
        roofline.Model().fit([*run(ROOF, drafted, 30, random.Random(1)), Sample(Shape(1), -1.0)])


def test_the_report() -> None:
    model = roofline.Model(k1=(1.0, 0.0), b=(0.0, 0.0))
    samples = [Sample(Shape(tokens=n), n * slow) for n, slow in ((1, 1.0), (2, 1.0), (4, 2.0))]
    report = error_report(model, samples)
    around = (8 / 3) ** 2 + (5 / 3) ** 2 + (13 / 3) ** 2  # of 1, 2 and 8 around their mean 11/3
    assert report.r2 == pytest.approx(1 - 16 / around)
    assert (report.p50, report.n) == (0.0, 3)
    assert report.p95 == pytest.approx(0.45)
    assert report.format() == "R² 0.4419, relative error p50 0.00% p95 45.00%, 3 steps"
    with pytest.raises(ValueError, match="no samples"):
        error_report(model, [])


def test_a_fit_does_not_depend_on_what_was_there_before() -> None:
    steps = run(PLANTED, mixed, 200, random.Random(11), noise=0.02)
    fresh, used = affine.Model(), affine.Model(k=(1.0, 1.0))
    for sample in run(PLANTED, with_chunk, 100, random.Random(12), slow=3.0):
        used.update(sample)
    fresh.fit(steps)
    used.fit(steps)
    assert used == fresh
    assert used.step_time(steps[0].shape) == fresh.step_time(steps[0].shape)
