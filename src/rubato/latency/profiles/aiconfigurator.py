"""A profile for any model and GPU that NVIDIA's aiconfigurator knows, from its tables of kernel timings (offline).

Its package holds what single kernels took on real GPUs: matrix products by (tokens, columns, rows), attention by
(batch, length, heads), all-reduces by size. What is asked of it here is one kernel at a time; adding them up to a step
is `rubato.latency.components`. Its own estimates of whole steps are not used.

Not measured but worked out: norms, activations and the embedding, as bytes over 0.8 of the memory's bandwidth plus 3 µs
a kernel; attention of a chunk with context, as the share (1 − k²/(c + k)²) of a whole prefill of c + k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rubato.core.did_you_mean import nearest
from rubato.core.extras import extra
from rubato.latency.model_dims import Dims

TOKENS = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80), *range(96, 256, 16), *range(256, 512, 32),
    *range(512, 1024, 64), *range(1024, 1536, 128), *range(1536, 4096, 256), *range(4096, 8193, 1024),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LENGTHS = (16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
CHUNKS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CONTEXTS = (0, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
MEASURED_HEAD = 128  # elements of a head in the attention tables
MEASURED_KV_HEADS = 8  # at most, in the table of decode attention
KERNEL_S = 3e-6
BANDWIDTH_SHARE = 0.8
RESERVE_BYTES = 3e9  # bytes a GPU needs beside weights and KV
USABLE_SHARE = 0.9  # of its memory


@dataclass(frozen=True)
class GPU:
    """A GPU whose kernels were timed.

    Args:
        system, version: aiconfigurator's names of the GPU and of the vLLM its kernels were timed in.
        memory: bytes of the card.
        bandwidth: of the card's memory, bytes/s.
        compute: dense bfloat16 operations/s, by NVIDIA's datasheet.
        measured_bandwidth: of the card that was timed, where that is another.
    """

    system: str
    version: str
    memory: float
    bandwidth: float
    compute: float
    measured_bandwidth: float | None = None


GIB = 2.0**30
# aiconfigurator's names, by bytes of an element. FP8 and NVFP4 with scales fixed beforehand: activations are quantised
# without a pass that finds their range.
WEIGHTS = {2: "bfloat16", 1: "fp8_static", 0.5625: "nvfp4"}
KV = {2: "bfloat16", 1: "fp8"}
GPUS = {
    "h200": GPU("h200_sxm", "0.24.0", 141 * GIB, 4.8e12, 989e12),
    # NVIDIA's datasheet of the HGX B200
    "b200": GPU("b200_sxm", "0.24.0", 180 * GIB, 7.7e12, 2250e12),
    "h100": GPU("h100_sxm", "0.24.0", 80 * GIB, 3.35e12, 989e12),
    "a100": GPU("a100_sxm", "0.14.0", 80 * GIB, 2.039e12, 312e12),
    # NVIDIA's datasheet: HBM2 at 1555 GB/s where the 80 GB card has HBM2e at 2039; the same compute.
    "a100-40g": GPU("a100_sxm", "0.14.0", 40 * GIB, 1.555e12, 312e12, measured_bandwidth=2.039e12),
}


def tables(dims: Dims, gpu: str, gpus: int = 1) -> dict[str, Any]:
    """The component tables of `dims` split over `gpus` cards, microseconds for all layers, as a profile holds them.

    Raises ImportError without the extra, ValueError for an unknown GPU, or a model that cannot be split so or whose
    weights fill the cards.
    """
    if gpu not in GPUS:
        raise ValueError(f"no kernel tables for the GPU {gpu!r}{nearest(gpu, GPUS)}")
    if dims.heads % gpus or dims.ffn % gpus or dims.kv_heads % gpus:
        raise ValueError(
            f"{dims.heads} heads ({dims.kv_heads} KV) and {dims.ffn} wide cannot be split over {gpus} GPUs"
        )
    capacity = kv_tokens(dims, gpu, gpus)
    if capacity < 1:
        raise ValueError(
            f"weights of {dims.weight_bytes / 1e9:.0f} GB leave no room for KV on {gpus} x {gpu}: take more"
        )
    return _Kernels(dims, GPUS[gpu], gpus, capacity).tables()


def kv_tokens(dims: Dims, gpu: str, gpus: int = 1) -> int:
    """Tokens of KV that fit beside the weights: 0.9 of the memory, less 3 GB a card."""
    card = GPUS[gpu]
    room = gpus * (USABLE_SHARE * card.memory - RESERVE_BYTES) - dims.weight_bytes
    return max(0, int(room // dims.kv_bytes))


class _Kernels:
    """The kernels of one model on one kind of GPU, asked one at a time."""

    def __init__(self, dims: Dims, gpu: GPU, gpus: int, capacity: int) -> None:
        with extra("aiconfigurator", "a profile from kernel tables"):
            from aiconfigurator_core.sdk import common, engine, operations, perf_database
        self.dims, self.gpu, self.gpus = dims, gpu, gpus
        self._ops, self._engine, self._common = operations, engine, common
        database = perf_database.get_database(gpu.system, "vllm", gpu.version, shared_layer=False)
        if database is None:
            raise ValueError(f"aiconfigurator has no tables of {gpu.system}, vLLM {gpu.version}")
        self._capacity = capacity
        self._handle = engine.EngineHandle.for_database(database)

    def tables(self) -> dict[str, Any]:
        d, most = self.dims, self._capacity
        gemm = [d.layers * self._layer(t) for t in TOKENS]
        allreduce = [(2 * d.layers + 1) * self._allreduce(t) for t in TOKENS]
        if d.weight_size is not None:
            # The quantised tables hold kernels of few tokens that take up to twice as long as those of more (FP8 on a
            # B200: 9.8 ms for 1 token of Llama-3.1-70B on 4 cards, 4.9 ms for 12); no engine has to run those.
            gemm, allreduce = _never_above_more(gemm), _never_above_more(allreduce)
        head = [self._gemm(d.vocab // self.gpus, d.hidden, r) for r in ROWS]
        ratio = 1.0
        if self.gpu.measured_bandwidth is not None:
            # the card timed has a faster memory: no product is faster than reading weights, all of decode is reading
            ratio = self.gpu.measured_bandwidth / self.gpu.bandwidth
            gemm, head = ([max(t, ratio * min(times)) for t in times] for times in (gemm, head))
        return {
            "tokens": {
                "tokens": list(TOKENS),
                "gemm": [_us(t) for t in gemm],
                "elementwise": [_us(self._elementwise(t)) for t in TOKENS],
                "allreduce": [_us(t) for t in allreduce],
            },
            "lm_head": {"rows": list(ROWS), "time": [_us(t) for t in head]},
            "decode": {
                "batch": list(BATCHES),
                "kv": list(LENGTHS),
                "time": [
                    [_us(ratio * self._decode(b, k)) if b * k <= most else None for k in LENGTHS] for b in BATCHES
                ],
            },
            "prefill": {
                "chunk": list(CHUNKS),
                "context": list(CONTEXTS),
                "time": [[_us(self._prefill(c, k)) if c + k <= most else None for k in CONTEXTS] for c in CHUNKS],
            },
        }

    def _kv_mode(self) -> Any:
        size = self.dims.kv_size or self.dims.dtype
        return self._common.KVCacheQuantMode[KV[size]]

    def _layer(self, tokens: int) -> float:
        d, n = self.dims, self.gpus
        mode = WEIGHTS[d.weight_size or d.dtype]
        return (
            self._gemm((d.heads + 2 * d.kv_heads) * d.head // n, d.hidden, tokens, mode)
            + self._gemm(d.hidden, d.heads * d.head // n, tokens, mode)
            + self._gemm((2 if d.gated else 1) * d.ffn // n, d.hidden, tokens, mode)
            + self._gemm(d.hidden, d.ffn // n, tokens, mode)
        )

    def _gemm(self, n: int, k: int, m: int, mode: str = "bfloat16") -> float:
        op = self._ops.GEMM("gemm", 1.0, n, k, self._common.GEMMQuantMode[mode])
        return self._ask(op, is_context=True, batch_size=1, s=m, x=m)

    def _allreduce(self, tokens: int) -> float:
        if self.gpus == 1:
            return 0.0
        op = self._ops.CustomAllReduce("ar", 1, self.dims.hidden, self.gpus)
        return self._ask(op, is_context=True, batch_size=1, s=tokens, x=tokens)

    def _elementwise(self, tokens: int) -> float:
        """Two norms that read and write activation and residual, and the activation of the feed-forward block."""
        d = self.dims
        ffn = (3 if d.gated else 2) * d.ffn // self.gpus
        moved = d.dtype * tokens * (d.layers * (8 * d.hidden + ffn) + d.hidden)
        return moved / (BANDWIDTH_SHARE * self.gpu.bandwidth) + (3 * d.layers + 1) * KERNEL_S

    def _heads(self, measured_kv: int) -> tuple[int, int, int]:
        """(query heads, KV heads, how many times the batch) with heads of the measured size, no more KV heads than were
        measured. Two heads of 64 read and compute what one of 128 does; a sequence with 40 KV heads is five with 8."""
        d = self.dims
        kv = max(1, d.kv_heads // self.gpus * d.head // MEASURED_HEAD)
        queries = max(1, d.heads // self.gpus * d.head // MEASURED_HEAD) // kv
        times = next(t for t in range(1, kv + 1) if kv % t == 0 and kv // t <= measured_kv)
        return queries * kv // times, kv // times, times

    def _decode(self, batch: int, length: int) -> float:
        heads, kv_heads, times = self._heads(MEASURED_KV_HEADS)
        op = self._ops.GenerationAttention("decode", 1.0, heads, kv_heads, self._kv_mode())
        return self.dims.layers * self._ask(op, is_context=False, batch_size=times * batch, s=length)

    def _prefill(self, chunk: int, context: int) -> float:
        heads, kv_heads, _ = self._heads(10**6)
        op = self._ops.ContextAttention(
            "prefill", 1.0, heads, kv_heads, self._kv_mode(), self._common.FMHAQuantMode.bfloat16
        )
        return self.dims.layers * self._ask(op, is_context=True, batch_size=1, s=chunk, prefix=context)

    def _ask(self, op: Any, **shape: Any) -> float:
        """Seconds of one kernel."""
        found = self._handle.evaluate_ops_json(self._engine.build_ops_json([op]), **shape)
        return float(found[0][1]) / 1e3


def _never_above_more(times: Sequence[float]) -> list[float]:
    """Each time, or the least of those behind it, where that is less."""
    return list(accumulate(reversed(times), min))[::-1]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
