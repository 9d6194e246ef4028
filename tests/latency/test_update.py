"""Learning while serving: drift within ten steps and out again, and nothing forgotten for want of traffic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rubato.core.plan import Sample, Shape
from rubato.latency import affine, roofline
from rubato.latency.fit import error_report
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_kinds import MODELS
from tests.conftest import examples
from tests.latency.steps import decodes, mixed, run, with_chunk

TRUTH = affine.Model(k=(1e-5, 1e-3), b=(0.04, 0.025), a=3e-7, d=1e-8, e=1e-8, host=0.001, host_per_seq=1e-4)
Models = Callable[[], affine.Model | roofline.Model]
BOTH = pytest.mark.parametrize("new", [affine.Model, roofline.Model])


def learn(model: FittedModel, steps: list[Sample]) -> None:
    for sample in steps:
        model.update(sample)


def known() -> affine.Model:
    return affine.Model.from_dict(TRUTH.to_dict())


@BOTH
def test_before_any_step_the_prior_speaks_and_soon_the_steps_do(new: Models) -> None:
    model = new()
    probe = run(TRUTH, mixed, 200, random.Random(1))
    assert model.step_time(probe[0].shape) == new().step_time(probe[0].shape)
    learn(model, run(TRUTH, mixed, 16, random.Random(2), noise=0.03))
    assert error_report(model, probe).p50 < 0.15
    learn(model, run(TRUTH, mixed, 496, random.Random(3), noise=0.03, odd=0.05))
    report = error_report(model, probe)
    assert report.p50 < 0.06
    assert report.p95 < 0.15


@BOTH
@pytest.mark.parametrize("seed", range(examples(3, 3)))
def test_a_machine_half_as_fast_shows_within_ten_steps_and_so_does_its_end(new: Models, seed: int) -> None:
    rng = random.Random(seed)
    model = new()
    probe = run(TRUTH, mixed, 100, rng)
    slow_probe = [Sample(s.shape, 2 * s.seconds) for s in probe]
    learn(model, run(TRUTH, mixed, 700, rng, noise=0.03, odd=0.03))
    for spell in (10, 60, 300, 1000):
        learn(model, run(TRUTH, mixed, 10, rng, noise=0.03, slow=2.0))
        assert error_report(model, slow_probe).p50 < 0.12
        learn(model, run(TRUTH, mixed, spell, rng, noise=0.03, slow=2.0))
        assert error_report(model, slow_probe).p50 < 0.12
        learn(model, run(TRUTH, mixed, 10, rng, noise=0.03))
        assert error_report(model, probe).p50 < 0.12


def test_one_odd_step_changes_nothing() -> None:
    model = known()
    learn(model, run(TRUTH, mixed, 200, random.Random(4)))
    shape = with_chunk(random.Random(5))
    before = model.step_time(shape)
    learn(model, [Sample(shape, 10 * before)])
    assert model.step_time(shape) == pytest.approx(before, rel=1e-6)


@BOTH
def test_a_long_run_of_decodes_does_not_spoil_prefill(new: Models) -> None:
    rng = random.Random(6)
    model = new()
    probe = run(TRUTH, with_chunk, 200, rng)
    learn(model, run(TRUTH, mixed, 500, rng, noise=0.03))
    learn(model, run(TRUTH, decodes, 2000, rng, noise=0.03, odd=0.03))
    report = error_report(model, probe)
    assert report.p50 < 0.08
    assert report.p95 < 0.2


def test_decodes_alone_do_not_spoil_what_a_profile_knows_of_prefill() -> None:
    rng = random.Random(7)
    model = known()
    probe = run(TRUTH, with_chunk, 200, rng)
    learn(model, run(TRUTH, decodes, 1500, rng, noise=0.05, odd=0.05))
    assert error_report(model, probe).p95 < 0.15
    learn(model, run(TRUTH, decodes, 1000, rng, noise=0.05, slow=2.0))
    assert error_report(model, [Sample(s.shape, 2 * s.seconds) for s in probe]).p95 < 0.2


@BOTH
@pytest.mark.parametrize("shape", [Shape().plus(1, 500), Shape().plus(1, 20).plus(200, 0)])
def test_one_shape_for_ever_gives_no_wild_coefficients(new: Models, shape: Shape) -> None:
    model = new()
    rng = random.Random(8)
    learn(model, run(TRUTH, lambda _: shape, 1000, rng, noise=0.05))
    assert model.step_time(shape) == pytest.approx(TRUTH.step_time(shape), rel=0.1)
    for other in (Shape().plus(1, 1000), Shape().plus(400, 0), Shape().plus(1, 9).plus(1, 9)):
        slower = model.step_time(other) / new().step_time(other)
        assert 0.5 < slower / (model.step_time(shape) / new().step_time(shape)) < 2.0


def test_a_better_structure_is_learnt_though_decodes_are_most_of_the_traffic() -> None:
    rng = random.Random(9)
    model = known()
    changed = affine.Model(k=(1e-5, 5e-4), b=(0.04, 0.025), a=3e-6, d=1e-8, e=1e-8, host=0.001, host_per_seq=1e-4)
    learn(model, run(changed, mixed, 1500, rng, noise=0.03, odd=0.03))
    assert error_report(model, run(changed, mixed, 300, rng)).p95 < 0.12
    assert model.host == 0.001


@pytest.mark.parametrize("size", [32, 100, 512])
@pytest.mark.parametrize("last", [decodes, with_chunk])
def test_the_window_is_bounded_and_keeps_every_kind_of_step(size: int, last: Callable[[random.Random], Shape]) -> None:
    rng = random.Random(10)
    model = affine.Model(window=size)
    learn(model, run(TRUTH, with_chunk if last is decodes else decodes, 900, rng))
    learn(model, run(TRUTH, last, 900, rng))
    window = model.online.window
    assert window.count == len(window.rows()) == size
    chunks = sum(1 for row in window.rows() if row[5] > 0)
    assert size // 4 <= chunks <= size - size // 4


@BOTH
def test_a_fit_is_not_forgotten_by_the_first_updates(new: Models) -> None:
    rng = random.Random(11)
    model = new()
    model.fit(run(TRUTH, mixed, 2000, rng, noise=0.02))
    probe = run(TRUTH, mixed, 200, rng)
    learn(model, run(TRUTH, decodes, 200, rng, noise=0.02))
    assert error_report(model, probe).p50 < 0.06
    assert model.online.window.count == 512


@BOTH
def test_what_cannot_be_learnt_from_is_refused(new: Models) -> None:
    model = new()
    with pytest.raises(ValueError, match="no tokens"):
        model.update(Sample(Shape(), 0.1))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive, finite"):
            model.update(Sample(Shape(1, 1, 1), wrong))
    assert model.online.window.count == 0


@BOTH
def test_the_spread_is_that_of_the_last_steps_around_what_was_predicted(new: Models) -> None:
    """Nothing is known of it before 16 steps; odd steps count as twice as long at most; a slower machine is no spread
    once the factor has followed it."""
    model = new()
    assert model.spread == 0.0
    learn(model, run(TRUTH, mixed, 600, random.Random(1), noise=0.1))
    assert 0.08 < model.spread < 0.15
    learn(model, run(TRUTH, mixed, 300, random.Random(2), noise=0.03, slow=2.0))
    assert 0.02 < model.spread < 0.08


def test_steps_as_predicted_have_no_spread() -> None:
    model = known()
    learn(model, run(TRUTH, mixed, 200, random.Random(1)))
    assert model.spread == 0.0


PROBE = Shape(8, 8, 800)


def slowed(slow: float, steps: int = 8) -> affine.Model:
    """One whose last steps took so many times what its coefficients say."""
    model = known()
    learn(model, [Sample(PROBE, slow * TRUTH.step_time(PROBE))] * steps)
    return model


@pytest.mark.parametrize(
    ("slow", "idle", "predicted"),
    [
        (4.0, 10.0, 4.0),  # a slowdown stands for ten seconds
        (4.0, 12.0, 2.0),  # then its logarithm halves every two
        (4.0, 14.0, 2.0**0.5),
        (4.0, 30.0, 1.0),
        (4.0, 40.0, 0.5),  # after thirty the coefficients are doubted, too
        (4.0, 1e9, 0.125),
        (0.5, 20.0, 0.5),  # what was fast is not forgotten
        (0.5, 40.0, 0.25),
        (1.0, 20.0, 1.0),
    ],
)
def test_what_was_slow_is_forgotten_while_nothing_runs(slow: float, idle: float, predicted: float) -> None:
    model = slowed(slow)
    for seconds in (3.0, idle):
        model.idle(seconds)
    own = TRUTH.step_time(PROBE)
    assert model.step_time(PROBE) == pytest.approx(predicted * own, rel=0.01)
    assert model.largest_chunk(predicted * own * 1.01, PROBE._replace(tokens=0, seqs=0, kv=0), 0, 100) >= 0
    model.idle(0.0)  # as if it had not been asked
    assert model.step_time(PROBE) == pytest.approx(slow * own, rel=0.01)


def test_a_step_ends_the_doubt_and_what_was_forgotten_stays_so() -> None:
    own = TRUTH.step_time(PROBE)
    model = slowed(4.0)
    model.idle(1000.0)
    model.update(Sample(PROBE, own))
    model.idle(0.01)
    assert model.step_time(PROBE) == pytest.approx(own)
    model = slowed(4.0)
    model.idle(1000.0)
    learn(model, [Sample(PROBE, 4.0 * own)] * 5)  # it was no spell
    assert model.step_time(PROBE) == pytest.approx(4.0 * own)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_that_learns_forgets(kind: str) -> None:
    model = MODELS[kind]()
    before = model.step_time(PROBE)
    learn(model, [Sample(PROBE, 3.0 * before)] * 8)
    assert model.step_time(PROBE) == pytest.approx(3.0 * before)
    model.idle(30.0)
    assert model.step_time(PROBE) == pytest.approx(before, rel=0.01)


def test_the_spread_is_forgotten_with_the_slowdown() -> None:
    """A margin as wide as the spread could refuse everybody, too."""
    model = known()
    learn(model, run(TRUTH, mixed, 200, random.Random(1), noise=0.1))
    spread = model.spread
    model.idle(12.0)
    assert model.spread == pytest.approx(spread / 2)
    model.idle(60.0)
    assert model.spread == 0.0
    learn(model, run(TRUTH, mixed, 1, random.Random(2)))
    assert model.spread == pytest.approx(spread)  # it is not off what it doubted
