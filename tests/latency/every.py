"""Any latency model at all, for the properties that hold for every one of them."""

from __future__ import annotations

from hypothesis import strategies as st

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.latency import affine, bilinear, components, operation_count, profiles, roofline, table
from rubato.latency.model_dims import Dims
from rubato.latency.model_kinds import MODELS

Entries = list[tuple[int, int]]
entries = st.lists(st.tuples(st.one_of(st.just(1), st.integers(1, 400)), st.integers(0, 3000)), max_size=8)
TINY = Dims(layers=2, hidden=64, heads=4, kv_heads=2, head=16, ffn=128, vocab=500, gated=False)


def seconds(most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(1e-12, most))


def _pair(most: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(seconds(most), seconds(most))


positive = st.floats(1e-5, 0.1)
rooflines = st.builds(
    lambda k1, k2, b, first: roofline.Model(k1=k1, k2=k2, b=(first, b)),
    _pair(1e-3),
    _pair(1e-2),
    seconds(0.1),
    positive,
)
affines = st.builds(
    lambda k, b, a, d, e, host, per: affine.Model(k=k, b=b, a=a, d=d, e=e, host=host, host_per_seq=per),
    _pair(1e-3), _pair(0.1), seconds(1e-6), seconds(1e-7), seconds(1e-7), positive, seconds(1e-3),
)  # fmt: skip
operation_counts = st.builds(
    lambda dims, gpus, c2, c3, c4, c5: operation_count.Model(dims=dims, gpus=gpus, c2=c2, c3=c3, c4=c4, c5=c5),
    st.sampled_from([operation_count.LLAMA_8B, TINY]), st.sampled_from([1, 2]), seconds(3.0), seconds(3.0),
    seconds(3.0), positive,
)  # fmt: skip
bilinears = st.builds(
    lambda a, b, y, d, more: bilinear.Model(
        p=(a + y + more[0], b + more[1], more[2], d + more[3]), d=(a, b, y, d)
    ),
    seconds(1e-6), seconds(1e-3), seconds(1e-5), positive,
    st.tuples(seconds(1e-3), seconds(1e-2), seconds(1e-4), seconds(0.1)),
)  # fmt: skip


@st.composite
def _tables(draw: st.DrawFn) -> table.Model:
    tokens, kv = (sorted(draw(st.sets(st.integers(0, most), min_size=2, max_size=5))) for most in (3000, 20000))
    rows = [[draw(positive) for _ in kv] for _ in tokens]
    return table.Model(tuple(map(float, tokens)), tuple(map(float, kv)), tuple(map(tuple, rows)))


COMPONENTS = [
    model
    for name in ("llama-3.1-8b-h200", "opt-13b-a100", "llama-3.1-70b-4xa100", "opt-125m-a100-40g")
    for options in ({"host_scale": 0.0}, {"host_scale": 0.0, "context_attention": 1.0, "prefill_gemm": 1.3}, {})
    if isinstance(model := profiles.load(name, **options).model(), components.Model)  # type: ignore[arg-type]
]
fitted: st.SearchStrategy[LatencyModel] = st.one_of(rooflines, affines, operation_counts, bilinears, _tables())
models: st.SearchStrategy[LatencyModel] = st.one_of(fitted, st.sampled_from(COMPONENTS))
DEFAULTS: list[LatencyModel] = [*(cls() for cls in MODELS.values()), COMPONENTS[0]]


def batch(parts: Entries, spec_steps: int = 0) -> Shape:
    shape = Shape(spec_steps=spec_steps)
    for tokens, cached in parts:
        shape = shape.plus(tokens, cached)
    return shape
