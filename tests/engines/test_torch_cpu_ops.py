"""The compiled kernels compute what plain PyTorch does in float32, whatever lies in KV that is not a sequence's own."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite")

from rubato.core.plan import Batch, Entry  # noqa: E402
from rubato.core.request import Sampling  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from rubato_torch.batch_tensors import pack  # noqa: E402
from rubato_torch.cpu import llvm_jit, native  # noqa: E402
from rubato_torch.model import Model  # noqa: E402
from rubato_torch.model_config import Config, load_config  # noqa: E402
from rubato_torch.weights import _rotation, load_weights  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

pytestmark = pytest.mark.skipif(not llvm_jit.available(), reason="no LLVM kernels on this platform")

CPU = torch.device("cpu")
BLOCKS = 400
CLOSE = 0.02  # bfloat16 outputs of up to about 4, whose weights were bfloat16 too


@pytest.fixture(scope="module")
def bundled_config(bundled_folder: Path) -> Config:
    return replace(load_config(bundled_folder), layers=1, context=2048, windows=(None,))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@dataclass
class Attention:
    """One layer's attention over random q, k and v, beside what it should be: every key and value kept in float32."""

    config: Config
    threads: int
    block: int = 16
    norm: Any = None
    kernels: native.Native = field(init=False)
    kv: Any = field(init=False)
    free: list[int] = field(default_factory=lambda: random.Random(4).sample(range(BLOCKS), BLOCKS))
    blocks: dict[str, list[int]] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cos, self.sin = _rotation(self.config, torch.bfloat16, CPU)
        self.kernels = native.Native(self.config, self.cos, self.sin, self.threads)
        self.kv = self.kernels.kv(BLOCKS, self.block).fill_(float("nan"))

    def run(self, counts: Mapping[str, int], scale: float = 1.5) -> tuple[Any, Any]:
        """So many further tokens of each sequence: (found, expected), (rows, heads * head_dim) in float32."""
        c = self.config
        entries = [self._entry(seq, counts[seq]) for seq in sorted(counts, key=lambda seq: counts[seq] > 1)]
        batch = Batch(tuple(entries))
        packed = pack(
            batch, {e.seq: [0] * (e.start + e.count) for e in entries}, self.block, torch.bfloat16, CPU, (None,), True
        )
        qkv = (torch.randn(len(packed.ids), (c.heads + 2 * c.kv_heads) * c.head_dim) * scale).bfloat16()
        parts = qkv.float().view(len(qkv), -1, c.head_dim)
        turned = self._rotated(self._normed(parts[:, : c.heads + c.kv_heads]), packed.positions)
        new = torch.stack((turned[:, c.heads :], parts[:, c.heads + c.kv_heads :]), 1)
        assert packed.work is not None
        found = self.kernels.attention(qkv, self.kv[0], packed.work, c.windows[0], self.norm).float()
        expected = []
        row = 0
        by_start = sorted(entries, key=lambda e: (e.count > 1, e.start if e.count == 1 else 0))
        for e in by_start:
            rows = slice(row, row + e.count)
            before = self.held.get(e.seq, new[:0])
            self.held[e.seq] = torch.cat((before, new[rows]))
            expected.append(self._mixed(turned[rows, : c.heads], self.held[e.seq], e.start))
            row += e.count
        return found, torch.cat(expected)

    def _entry(self, seq: str, count: int) -> Entry:
        start = len(self.held[seq]) if seq in self.held else 0
        blocks = self.blocks.setdefault(seq, [])
        while len(blocks) * self.block < start + count:
            blocks.append(self.free.pop())
        return Entry(seq, start, count, tuple(blocks), True)

    def _normed(self, x: Any) -> Any:
        if self.norm is None:
            return x
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None, self.config.norm_eps) * self.norm.float()

    def _rotated(self, x: Any, positions: Any) -> Any:
        halves = x.unflatten(-1, (2, -1))
        turned = halves * self.cos[positions].float() + halves.flip(2) * self.sin[positions].float()
        return turned.flatten(2).bfloat16().float()

    def _mixed(self, q: Any, held: Any, start: int) -> Any:
        repeats = self.config.heads // self.config.kv_heads
        k, v = (held[:, i].repeat_interleave(repeats, 1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.config.head_dim**0.5
        at = start + torch.arange(len(q))[:, None]
        hidden = torch.arange(len(k)) > at
        if (window := self.config.windows[0]) is not None:
            hidden |= torch.arange(len(k)) <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def assert_close(found: Any, expected: Any, within: float = CLOSE) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < within  # false also for NaN


@pytest.mark.parametrize("threads", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3))])
def test_attention_of_mixed_batches(bundled_config: Config, threads: int) -> None:
    """KV begins as NaN, and blocks are handed out in random order."""
    attention = Attention(bundled_config, threads)
    assert_close(*attention.run({"a": 1, "b": 2, "c": 15, "d": 16, "e": 17, "f": 63, "g": 64, "h": 65, "i": 300}))
    rng = random.Random(threads)
    for _ in range(12):
        members = rng.sample("abcdefghi", rng.randint(1, 9))
        assert_close(*attention.run({seq: rng.choice((1, 1, 1, 1, 2, 7, 33, 64, 270)) for seq in members}))


def test_attention_over_every_length_near_a_boundary(bundled_config: Config) -> None:
    attention = Attention(bundled_config, 2)
    for seq, length in (("a", 1), ("b", 14), ("c", 62), ("d", 254), ("e", 510)):
        assert_close(*attention.run({seq: length}))
    for _ in range(4):
        assert_close(*attention.run(dict.fromkeys("abcde", 1)))


def test_scores_of_any_size(bundled_config: Config) -> None:
    """Weights of almost 0 and almost 1: every value stands for itself."""
    attention = Attention(bundled_config, 2)
    assert_close(*attention.run({"a": 400, "b": 30}, scale=30.0), within=1.0)
    assert_close(*attention.run({"a": 1, "b": 1}, scale=30.0), within=1.0)


MORE = ((8, 1, 64, 32), (7, 1, 32, 16), (8, 2, 128, 16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(4, 4, 32, 16), (4, 2, 96, 48), *(pytest.param(*shape, marks=pytest.mark.full) for shape in MORE)],
)
def test_attention_of_other_shapes(bundled_config: Config, heads: int, kv_heads: int, dim: int, block: int) -> None:
    config = replace(bundled_config, heads=heads, kv_heads=kv_heads, head_dim=dim)
    attention = Attention(config, 2, block)
    assert_close(*attention.run({"a": 1, "b": 75, "c": 33}))
    assert_close(*attention.run({"a": 1, "b": 1, "c": 300}))
    assert_close(*attention.run({"a": 1, "b": 200, "c": 1}))


OTHERS = (pytest.param(window, marks=pytest.mark.full) for window in (2, 63, 100, 256, 700))


@pytest.mark.parametrize("window", [1, 16, 64, 300, *OTHERS])
def test_attention_within_a_window(bundled_config: Config, window: int) -> None:
    """Spans, steps and units that are hidden in whole or in part, for some queries of a tile or all."""
    attention = Attention(replace(bundled_config, windows=(window,)), 2)
    assert_close(*attention.run({"a": 1, "b": 75, "c": 333, "d": 600}))
    assert_close(*attention.run({"a": 1, "b": 300, "c": 1, "d": 270}))
    assert_close(*attention.run({"a": 700, "b": 1, "c": 33, "d": 1}))
    attention.config = replace(bundled_config, windows=(None,))  # another layer of the same model
    attention.held.clear()
    assert_close(*attention.run({"a": 1, "b": 300}))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 128), (4, 4, 32)])
def test_attention_with_normed_queries_and_keys(bundled_config: Config, heads: int, kv_heads: int, dim: int) -> None:
    config = replace(bundled_config, heads=heads, kv_heads=kv_heads, head_dim=dim, qk_norm=True)
    attention = Attention(config, 2, norm=(torch.rand(heads + kv_heads, dim) + 0.5).bfloat16())
    assert_close(*attention.run({"a": 1, "b": 75, "c": 300}))
    assert_close(*attention.run({"a": 1, "b": 1, "c": 1}))


@pytest.mark.parametrize(("mask", "instructions"), [("avx512", "AVX-512"), ("avx2", "AVX2")])
def test_processors_with_fewer_instructions(
    bundled_config: Config, monkeypatch: pytest.MonkeyPatch, mask: str, instructions: str
) -> None:
    """The same kernels from ordinary instructions."""
    features = llvm_jit.llvm.get_host_cpu_features()
    if not features["avx512f" if mask == "avx512" else "avx2"]:
        pytest.skip(f"this CPU has no {instructions} to begin with")
    monkeypatch.setenv("RUBATO_CPU", mask)
    attention = Attention(bundled_config, 2)
    assert attention.kernels.instructions == instructions
    assert_close(*attention.run({"a": 1, "b": 75, "c": 300}))
    assert_close(*attention.run({"a": 1, "b": 1, "c": 1}))


def test_an_unknown_mask_is_refused(bundled_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBATO_CPU", "sse")
    with pytest.raises(ValueError, match="RUBATO_CPU is 'sse': give one of avx512, avx2, or leave it unset"):
        Attention(bundled_config, 2)


def test_fewer_threads_give_the_same(bundled_config: Config) -> None:
    attention = Attention(bundled_config, 2)
    for threads in (1, 2, 1):
        attention.kernels.threads = threads
        assert_close(*attention.run({"a": 1, "b": 75, "c": 300}))


@pytest.mark.parametrize("rows", [1, 100, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 7))])
def test_norm_and_gate(bundled_config: Config, rows: int) -> None:
    kernels = native.Native(bundled_config, *_rotation(bundled_config, torch.bfloat16, CPU), 2)
    x, weight = torch.randn(rows, 576).bfloat16(), torch.rand(576).bfloat16()
    normed = torch.nn.functional.rms_norm(x.float(), (576,), weight.float(), bundled_config.norm_eps)
    torch.testing.assert_close(kernels.norm(x, weight).float(), normed, rtol=0.008, atol=1e-6)
    x = (torch.randn(rows, 2 * bundled_config.intermediate) * 8).bfloat16()
    x[0, :401] = torch.arange(-400, 1)  # e to the power of the first is beyond float32
    gate, up = x.float().chunk(2, -1)
    torch.testing.assert_close(kernels.gate(x).float(), torch.nn.functional.silu(gate) * up, rtol=0.008, atol=1e-6)


# --------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def engine(bundled_folder: Path) -> Iterator[Driver]:
    with Driver(Engine(bundled_folder, device="cpu", kv_gib=0.1)) as drive:
        yield drive


def test_the_engine_chooses_them_for_bfloat16_in_units(bundled_folder: Path, engine: Driver) -> None:
    assert engine.engine._model.native is not None  # type: ignore[attr-defined]
    config = load_config(bundled_folder)
    assert native.suits(config, torch.bfloat16, CPU, 32)
    assert not native.suits(config, torch.float32, CPU, 16)
    assert not native.suits(config, torch.bfloat16, CPU, 8)
    assert not native.suits(config, torch.bfloat16, torch.device("cuda"), 16)
    assert not native.suits(replace(config, head_dim=80), torch.bfloat16, CPU, 16)


def test_a_model_has_memory_for_the_threads_it_is_told_whatever_pytorch_has_now(twin: Callable[[str], Path]) -> None:
    """Another engine of the process may be at its trial on one thread just then."""
    folder = twin("qwen3-mixed")
    config, before = load_config(folder), torch.get_num_threads()
    weights = load_weights(folder, config, torch.bfloat16, CPU)
    try:
        torch.set_num_threads(1)
        model = Model(config, weights, 4, 16, threads=2)
        assert model.native is not None
        assert model.native.scratch.shape[0] == 2
        model.use_threads(1)
        model.use_threads(2)
        assert (model.native.threads, torch.get_num_threads()) == (2, 2)
        with pytest.raises(ValueError, match="3 threads: this model has memory for 1 to 2"):
            model.use_threads(3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["bundled", "qwen3-mixed"])
def test_without_llvm_the_plain_path_gives_the_same_logits(
    name: str, bundled_folder: Path, twin: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has windows, biases, and norms of queries and keys."""
    folder = bundled_folder if name == "bundled" else twin(name)
    config = load_config(folder)
    weights = load_weights(folder, config, torch.bfloat16, CPU)
    compiled = Model(config, weights, 64, 16)
    monkeypatch.setattr(llvm_jit, "llvm", None)
    plain = Model(config, weights, 64, 16)
    assert (compiled.native is None, plain.native is None) == (False, True)
    rng = random.Random(8)
    tokens = {seq: [rng.randrange(100, config.vocab) for _ in range(210)] for seq in "ab"}
    blocks = {"a": tuple(range(20, 5, -1)), "b": tuple(range(30, 60))}

    def entries(*parts: tuple[str, int, int]) -> Batch:
        return Batch(tuple(Entry(seq, start, count, blocks[seq], True) for seq, start, count in parts))

    for batch in (entries(("a", 0, 200)), entries(("a", 200, 1), ("b", 0, 90)), entries(("b", 90, 40), ("a", 201, 1))):
        with torch.inference_mode():
            first, second = (model.forward(model.pack(batch, tokens)).float() for model in (compiled, plain))
        far = (first - second).norm(dim=-1) / second.norm(dim=-1)
        assert far.max() < 0.03


def test_nothing_depends_on_kv_of_others(engine: Driver) -> None:
    """The same greedy tokens after every free block was filled with NaN, through preemption and chunks."""
    prompt = [int(i) for i in torch.randint(100, 49000, (75,))]
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    engine.add("clean", prompt, sampling)
    engine.run()
    with torch.inference_mode():
        engine.engine._model.kv.fill_(float("nan"))  # type: ignore[attr-defined]
    random.Random(9).shuffle(engine.free)
    engine.add("again", prompt, sampling)
    engine.step({"again": 40})
    engine.preempt("again")
    engine.run()
    assert engine.ids["again"] == engine.ids["clean"]
