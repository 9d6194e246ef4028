"""What is particular to one latency model: its terms, worked out by hand."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Batch, Entry, Sample, Shape
from rubato.latency import affine, bilinear, operation_count, roofline, table
from rubato.latency.components import Factors, Model, Tables
from rubato.latency.model_dims import Dims
from tests.latency.every import COMPONENTS, affines, batch, entries, rooflines

FEATURES = list(Shape._fields)


linear: st.SearchStrategy[LatencyModel] = st.one_of(rooflines, affines)


@given(linear, entries, st.sampled_from(FEATURES), st.integers(1, 100_000))
def test_never_faster_when_any_feature_grows(
    model: LatencyModel, parts: list[tuple[int, int]], name: str, more: int
) -> None:
    shape = batch(parts)
    assert model.step_time(shape._replace(**{name: getattr(shape, name) + more})) >= model.step_time(shape)


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
    assert model.step_time(shape._replace(tokens=50)) - model.step_time(shape) == (4 * 50 + 10) - (11 + 100)


MOST = 10**6


def time2bs(model: roofline.Model, seconds: float, draft_steps: int = 0) -> int:
    return model.largest_chunk(seconds, Shape(spec_steps=draft_steps), 0, MOST)


@given(rooflines, st.integers(1, 5000), st.integers(0, 8))
def test_time2bs_inverts_step_time(model: roofline.Model, tokens: int, steps: int) -> None:
    limit = model.step_time(Shape(tokens=tokens, spec_steps=steps))
    n = time2bs(model, limit, steps)
    assert n >= tokens
    if n != MOST:
        assert model.step_time(Shape(tokens=n, spec_steps=steps)) <= limit
        assert model.step_time(Shape(tokens=n + 1, spec_steps=steps)) > limit


def test_time2bs_by_hand() -> None:
    model = roofline.Model(k1=(0.125, 1.0), k2=(0.5, 0.0), b=(8.0, 2.0))
    assert time2bs(model, 10.0) == 8  # min(16, 8)
    assert time2bs(model, 10.0, 3) == 4  # min(⌊0.5/0.125⌋, 8)
    assert time2bs(model, 7.9) == 0
    assert time2bs(model, 9.0, 3) == 0
    assert time2bs(roofline.Model(k1=(0.0, 0.0), b=(1.0, 0.0)), 1.0) == MOST
    assert time2bs(roofline.Model(k1=(0.0, 0.0), b=(1.0, 0.0)), 0.9) == 0
    # t − b − k2·spec_steps is below 0 by rounding though the step takes exactly t.
    flat = roofline.Model(k1=(0.0, 0.0), k2=(0.0, 0.005026513246001848), b=(0.0625, 0.0625))
    assert time2bs(flat, flat.step_time(Shape(tokens=1, spec_steps=2)), 2) == MOST
    nearly = roofline.Model(k1=(1e-20, 0.0), b=(1.0, 0.0))  # thousands of tokens vanish in rounding, and so fit
    n = time2bs(nearly, 1.0)
    assert nearly.step_time(Shape(tokens=n)) == 1.0 < nearly.step_time(Shape(tokens=n + 1))
    assert time2bs(flat, math.nan) == time2bs(flat, -math.inf) == 0


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


# --------------------------------------------------------------------------- operation_count


def test_operations_and_bytes_counted_by_hand() -> None:
    # two layers, 4 query and 2 KV heads of 8, gated: per layer q 32x32, k and v 32x16, o 32x32, 3 times 32x48
    dims = Dims(layers=2, hidden=32, heads=4, kv_heads=2, head=8, ffn=48, vocab=100)
    model = operation_count.Model(dims=dims, compute=1.0, memory=1.0, block=16)
    shape = Shape().plus(1, 9).plus(5, 3)  # a decode that reads 10, a chunk of 5 that reads 8
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    matrices = 2 * 6 * weights
    attention = 4 * 8 * 4 * 10 + 4 * 8 * 4 * 8 * 5
    assert model.times(shape)[1] == pytest.approx(2 * (matrices + attention) + 2 * 2 * 32 * 100)
    through = 6 * ((32 + 64) + (32 + 32) + (32 + 96) + (48 + 32))
    read = (2 * 10 * 8 * 2 + 2 * 8 * 2) + (2 * 8 * 8 * 2 + 3 * 5 * 8 * 4 * 8 / 16)
    assert model.times(shape)[0] == pytest.approx(2 * (2 * (weights + through + read) + 32 * 100 + 2 * (32 + 100)))
    halved = operation_count.Model(dims=dims, gpus=2, compute=1.0, memory=1.0, block=16)
    assert halved.times(shape) == pytest.approx(tuple(t / 2 for t in model.times(shape)))


def test_an_operation_count_is_the_larger_time_and_parts_of_both() -> None:
    model = operation_count.Model(c2=1.0, c3=0.5, c4=0.25, c5=0.125)
    shape = batch([(1, 500), (300, 20)])
    memory, compute = model.times(shape)
    assert model.step_time(shape) == max(memory, compute) + 0.5 * memory + 0.25 * compute + 0.125
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        operation_count.Model(dims=Dims(1, 8, 3, 2, 8, 8, 8))
    with pytest.raises(ValueError, match="no time"):
        operation_count.Model(c2=0.0, c5=0.0)


def test_dimensions_give_weights_and_kv() -> None:
    assert operation_count.LLAMA_8B.weight_bytes == 2 * 8_030_261_248  # Llama-3.1-8B's own count of parameters
    assert operation_count.LLAMA_8B.kv_bytes == 131_072


# --------------------------------------------------------------------------- bilinear


def test_the_papers_formulas_in_seconds() -> None:
    model = bilinear.Model()
    assert model.prefill(4, 1000) == pytest.approx((0.1 * 4000 + 5.7 * 4 + 0.01 * 1000 + 43.67) / 1e3)
    assert model.step(4, 1000) == pytest.approx((0.0002 * 4000 + 0.275 * 4 + 0.00088 * 1000 + 15.85) / 1e3)
    assert model.decode(4, 700, 90) == pytest.approx(sum(model.step(4, 700 + k) for k in range(1, 91)))


@given(st.integers(5, 32), st.integers(1, 1500))
def test_a_batch_of_one_kind_takes_what_the_formula_says(jobs: int, length: int) -> None:
    model = bilinear.Model()
    decodes = batch([(1, length - 1)] * jobs)
    assert model.step_time(decodes) == pytest.approx(model.step(jobs, length))
    if length > 1:
        assert model.step_time(batch([(length, 0)] * jobs)) == pytest.approx(model.prefill(jobs, length))


def test_a_lone_long_decode_is_lower_than_the_formula_by_little() -> None:
    model = bilinear.Model()
    for length in (100, 313):
        assert model.step_time(batch([(1, length - 1)])) == pytest.approx(model.step(1, length))
    assert 0.96 < model.step_time(batch([(1, 1999)])) / model.step(1, 2000) < 0.97


def test_prefill_that_costs_less_than_decoding_is_refused() -> None:
    with pytest.raises(ValueError, match="at least d"):
        bilinear.Model(p=(0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="bilinear d is"):
        bilinear.Model(d=(0.0, -1.0, 0.0, 1.0))


# --------------------------------------------------------------------------- table


def test_a_table_interpolates_on_both_axes() -> None:
    model = table.Model((0.0, 10.0), (0.0, 100.0), ((1.0, 2.0), (3.0, 8.0)))
    assert model.step_time(Shape(tokens=5, seqs=1, kv=50)) == 3.5
    assert model.step_time(Shape(tokens=10, seqs=1, kv=25)) == 4.25


def test_outside_the_table_its_edge_is_taken_with_one_warning() -> None:
    model = table.Model((1.0, 10.0), (0.0, 100.0), ((1.0, 2.0), (3.0, 8.0)))
    with pytest.warns(UserWarning, match="500 tokens that reads 9 of KV is outside"):
        outside = model.step_time(Shape(tokens=500, seqs=1, kv=9))
    assert outside == model.step_time(Shape(tokens=10, seqs=1, kv=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.step_time(Shape(tokens=500, seqs=1, kv=900)) == 8.0


def test_a_table_that_falls_is_evened_out() -> None:
    model = table.Model((1.0, 2.0, 3.0), (0.0, 1.0), ((1.0, 1.0), (4.0, 4.0), (2.0, 2.0)))
    assert model.seconds == ((1.0, 1.0), (3.0, 3.0), (3.0, 3.0))
    with pytest.raises(ValueError, match="rising"):
        table.Model((2.0, 1.0), (0.0, 1.0), ((1.0, 1.0), (1.0, 1.0)))
    with pytest.raises(ValueError, match="positive and finite"):
        table.Model((1.0, 2.0), (0.0, 1.0), ((0.0, 1.0), (1.0, 1.0)))
    with pytest.raises(ValueError, match="same number of KV"):
        table.Model().fit([Sample(Shape(n, 1, 7), 0.01 * n) for n in range(1, 40)])


# --------------------------------------------------------------------------- components

KERNELS = Tables(
    tokens={"tokens": [1, 100, 1000, 2000], "gemm": [100, 200, 1000, 2000], "elementwise": [1, 1, 1, 1],
            "allreduce": [5, 5, 5, 5]},
    lm_head={"rows": [1, 11], "time": [10, 20]},
    decode={"batch": [1, 4], "kv": [16, 4096], "time": [[16, 4096], [64, 16384]]},  # a microsecond a token of KV
    prefill={"chunk": [10, 100, 1000], "context": [0, 1000],
             "time": [[60 + 3 * c + 0.01 * c * (c + 2 * k) for k in (0, 1000)] for c in (10, 100, 1000)]},
)  # fmt: skip


def test_the_terms_of_the_composition() -> None:
    model = Model(KERNELS, host=0.004, host_per_seq=1e-5)
    decodes = batch([(1, 99), (1, 199)])
    gemm = 106 + 100 / 99
    assert model.step_time(decodes) == pytest.approx(0.004 + 2e-5 + (gemm + 11 + 300) * 1e-6)
    # two chunks of 200, one on 500: the launch, 60, once; each token 3, each pair 0.01, with context twice
    mixed = decodes.plus(200, 0).plus(200, 500)
    gemm = 206 + 302 * 800 / 900
    attention = 60 + 3 * 400 + 0.01 * (2 * 200**2 + 2 * 200 * 500)
    assert model.step_time(mixed) == pytest.approx(0.004 + 4e-5 + (gemm + 13 + 300 + attention) * 1e-6)


def test_a_chunk_reads_its_context_no_faster_than_decodes_do() -> None:
    model = Model(KERNELS)
    short = batch([(2, 3000)])
    assert model.step_time(short) == pytest.approx((106 + 1 / 99 + 10 + 3002) * 1e-6, rel=1e-3)


def test_factors_touch_what_they_name() -> None:
    plain = Model(KERNELS)
    decode, many, first = batch([(1, 99)]), batch([(2000, 0)]), batch([(100, 0)])
    few = Model(KERNELS, Factors(decode_gemm=0.5))
    assert plain.step_time(decode) - few.step_time(decode) == pytest.approx(50e-6)
    assert few.step_time(many) == pytest.approx(plain.step_time(many))
    big = Model(KERNELS, Factors(prefill_gemm=1.5))
    assert big.step_time(many) - plain.step_time(many) == pytest.approx(1000e-6)
    assert big.step_time(first) == pytest.approx(plain.step_time(first), rel=1e-3)
    with pytest.raises(ValueError, match="factor prefill_gemm is 0"):
        Factors(prefill_gemm=0.0)


def test_beyond_the_tables_the_last_slope_goes_on() -> None:
    model = Model(KERNELS)
    at = [model.step_time(batch([(c, 0)])) for c in (2000, 3000, 4000)]
    assert at[2] - at[1] > at[1] - at[0] > 1000e-6
    crowd = [model.step_time(batch([(1, 15)] * n)) for n in (10, 40, 80)]
    assert crowd[0] < crowd[1] < crowd[2]
    assert model.step_time(Shape().plus(1, 1 << 25)) > 33.0


def test_batches_that_nothing_is_known_of_are_left_out() -> None:
    decode = {"batch": [1, 4, 8], "kv": [16, 4096], "time": [[16, 4096], [64, 16384], [128, None]]}
    less = Model(replace(KERNELS, decode=decode))
    assert less.step_time(batch([(1, 99)] * 8)) == Model(KERNELS).step_time(batch([(1, 99)] * 8))
    with pytest.raises(ValueError, match="two lengths measured at two batches"):
        Model(replace(KERNELS, decode={**decode, "time": [[16, 4096], [64, None], [128, None]]}))
    with pytest.raises(ValueError, match="tokens must rise"):
        replace(KERNELS, tokens={**KERNELS.tokens, "tokens": [1, 100, 100, 2000]})


def test_a_copy_shares_the_tables() -> None:
    model = COMPONENTS[0]
    assert copy.deepcopy(model).tables is model.tables
