"""What every latency model has besides its step time: defaults, wrappers that leave nothing out, and a knee."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.config.build import latency_of
from rubato.config.schema import ConfigError, load
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency import affine, profiles, roofline, table
from rubato.latency.model_base import MAX_KNEE_TOKENS, MEMBERS, with_defaults
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.with_drafter import WithDrafter
from rubato.planning.fleet_size_model import Faster
from rubato.simulation.run_spec import Fixed
from tests.kit import Linear
from tests.latency.every import Entries, batch, entries, models

pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* is outside the measured table")


def features(shape: Shape) -> tuple[int, int, int, int, int, int, int]:
    return (
        shape.tokens, shape.seqs, shape.kv, shape.chunk_context, shape.chunk_sq, shape.chunks, shape.chunk_kv
    )  # fmt: skip


def around(model: LatencyModel) -> list[LatencyModel]:
    return [ModelWrapper(model), Fixed(model), Faster(model, 2.0), WithDrafter(model, Linear())]


@given(models, entries, st.integers(1, 64), st.integers(0, 40_000))
def test_seconds_of_and_lines_are_step_times_to_the_last_bit(
    model: LatencyModel, parts: Entries, seqs: int, more: int
) -> None:
    decodes = Shape(seqs, seqs, seqs + more)
    for each in [model, *around(model)]:
        for shape in (batch(parts), decodes):
            assert each.seconds_of(*features(shape)) == each.step_time(shape)
        line = each.line(seqs, decodes.kv)
        if line is not None:
            fixed, y, slope, x, until = line
            assert decodes.kv < until
            assert fixed + (y + slope * (decodes.kv - x)) == each.step_time(decodes)


def test_a_wrapper_has_all_that_is_asked_of_a_model() -> None:
    public = {name for name in vars(LatencyModel) if not name.startswith("_")}
    assert public == set(MEMBERS) == {name for name in vars(ModelWrapper) if not name.startswith("_")}


def test_a_model_that_is_fixed_neither_learns_nor_forgets() -> None:
    model = affine.Model()
    for _ in range(20):
        model.update(Sample(Shape(10, 10, 100), 0.03))
    before = model.step_time(Shape(10, 10, 100))
    fixed = Fixed(model)
    fixed.update(Sample(Shape(10, 10, 100), 1.0))
    fixed.idle(1e9)
    assert (fixed.step_time(Shape(10, 10, 100)), fixed.spread) == (before, model.spread)


ONE = Shape(1, 1, 512)


@pytest.mark.parametrize(
    ("model", "base", "tokens"),
    [
        (affine.Model(), ONE, 99),  # 10 ms, or 0.1 ms a token
        (affine.Model(k=(0.0, 1e-4), b=(0.01, 0.002)), ONE, 79),
        (affine.Model(host=0.005), ONE, 99),  # the host's time is in both
        (affine.Model(), Shape(40, 40, 4000), 60),
        (affine.Model(), ONE.plus(500, 0), 0),  # a chunk that is compute-bound already
        (affine.Model(k=(1e-4, 1e-4), b=(0.01, 0.01)), ONE, 50),  # one line: half as long again
        (roofline.Model(), ONE, 99),
        (roofline.Model(k2=(0.0, 2e-3)), ONE._replace(spec_steps=2), 59),  # each draft step costs compute of 20 tokens
        (table.Model((1.0, 65.0), (0.0, 1e6), ((0.01, 0.01), (0.012, 0.012))), ONE, 64),  # not beyond what was measured
        (Linear(0.01, 0.001), ONE, 5),
        (Linear(0.01, 0.0), ONE, MAX_KNEE_TOKENS),
        (Faster(affine.Model(), 3.0), ONE, 99),
        (WithDrafter(affine.Model(), Linear()), ONE._replace(spec_steps=4), 99),
    ],
)
def test_the_knee_is_where_compute_takes_as_long_as_memory(model: LatencyModel, base: Shape, tokens: int) -> None:
    assert model.knee(base) == tokens


def test_the_knees_of_packaged_hardware_are_where_adaserve_has_its_budgets() -> None:
    """The authors verify 512 tokens a step at most with Llama-3.1-70B, on kernels that are slower beyond 128."""
    knees = {
        name: profiles.load(f"{name}@vllm-2024").model().knee(ONE)
        for name in ("llama-3.1-70b-4xa100", "llama-3.1-8b-h200")
    }
    assert knees == {"llama-3.1-70b-4xa100": 133, "llama-3.1-8b-h200": 414}


@given(models, entries.filter(bool), st.integers(1, 200))
def test_a_batch_with_its_knee_has_none(model: LatencyModel, parts: Entries, more: int) -> None:
    base = batch(parts)
    knee = model.knee(base)
    assert knee >= 0
    if more <= knee < MAX_KNEE_TOKENS:
        assert model.knee(base._replace(tokens=base.tokens + more)) == knee - more


class Own:
    """A model of somebody's, from before there was more to it."""

    spread = 0.25

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds, self.seen = seconds, 0

    def step_time(self, shape: Shape) -> float:
        return self.seconds * (1 + shape.tokens)

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return most

    def fit(self, samples: Any) -> None:
        self.seconds = samples[0].seconds

    def update(self, sample: Sample) -> None:
        self.seen += 1


Model = Own


def test_a_model_of_anyones_is_completed_by_defaults() -> None:
    model = latency_of(load({"latency": {"kind": __name__, "seconds": 0.02}}))
    assert [model.step_time(ONE), model.seconds_of(*features(ONE))] == [0.04, 0.04]
    assert (model.spread, model.line(1, 512), model.largest_chunk(1.0, ONE, 0, 7)) == (0.25, None, 7)
    assert model.knee(ONE) == 1
    model.update(Sample(ONE, 1.0))
    model.idle(100.0)
    model.fit([Sample(ONE, 0.5)])
    assert model.step_time(Shape()) == 0.5
    assert with_defaults(affine.Model()) == affine.Model()


def test_what_is_no_latency_model_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Own, "largest_chunk")
    with pytest.raises(ConfigError, match=r"test_protocol': Model lacks largest_chunk; it must have step_time"):
        latency_of(load({"latency": __name__}))
