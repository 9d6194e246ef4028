"""Profiles of kernel tables, for models known by name or by their config.json: `rubato profile --aiconfigurator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rubato.core.did_you_mean import nearest
from rubato.latency.model_dims import Dims
from rubato.latency.profiles import aiconfigurator
from rubato.latency.profiles.profile import Factor, HostTime, Profile

NVFP4 = 0.5625  # a weight and its share of a scale, in bytes
MAX_CONTEXT_TOKENS = 32768  # tokens: what the attention tables reach, for models that could take more


@dataclass(frozen=True)
class Known:
    """A model that is known by name: what it is called, its dimensions, the context it was trained for."""

    title: str
    dims: Dims
    context: int = MAX_CONTEXT_TOKENS


MODELS: Mapping[str, Known] = {
    "llama-3.1-8b": Known("Llama-3.1-8B", Dims(32, 4096, 32, 8, 128, 14336, 128256)),
    "llama-3.1-70b": Known("Llama-3.1-70B", Dims(80, 8192, 64, 8, 128, 28672, 128256)),
    "llama-3.1-8b-fp8": Known("Llama-3.1-8B", Dims(32, 4096, 32, 8, 128, 14336, 128256, weight_size=1)),
    "llama-3.1-70b-fp8": Known("Llama-3.1-70B", Dims(80, 8192, 64, 8, 128, 28672, 128256, weight_size=1)),
    "llama-3.1-70b-fp4": Known("Llama-3.1-70B", Dims(80, 8192, 64, 8, 128, 28672, 128256, weight_size=NVFP4)),
    "llama-3.2-1b": Known("Llama-3.2-1B", Dims(16, 2048, 32, 8, 64, 8192, 128256, tied=True)),
    "llama-2-7b": Known("Llama-2-7B (ToolLlama)", Dims(32, 4096, 32, 32, 128, 11008, 32000), 4096),
    "mistral-7b": Known("Mistral-7B", Dims(32, 4096, 32, 8, 128, 14336, 32000)),
    "opt-125m": Known("OPT-125M", Dims(12, 768, 12, 12, 64, 3072, 50272, gated=False, tied=True), 2048),
    "opt-6.7b": Known("OPT-6.7B", Dims(32, 4096, 32, 32, 128, 16384, 50272, gated=False, tied=True), 2048),
    "opt-13b": Known("OPT-13B", Dims(40, 5120, 40, 40, 128, 20480, 50272, gated=False, tied=True), 2048),
    "opt-30b": Known("OPT-30B", Dims(48, 7168, 56, 56, 128, 28672, 50272, gated=False, tied=True), 2048),
    "qwen-14b": Known("Qwen-14B", Dims(40, 5120, 40, 40, 128, 13696, 152064), 8192),
    "qwen2.5-0.5b": Known("Qwen2.5-0.5B", Dims(24, 896, 14, 2, 64, 4864, 151936, tied=True)),
    "qwen2.5-1.5b": Known("Qwen2.5-1.5B (DeepSeek-R1-Distill)", Dims(28, 1536, 12, 2, 128, 8960, 151936)),
    "qwen2.5-7b": Known("Qwen2.5-7B", Dims(28, 3584, 28, 4, 128, 18944, 152064)),
    "qwen2.5-32b": Known("Qwen2.5-32B", Dims(64, 5120, 40, 8, 128, 27648, 152064)),
    "qwen3-32b": Known("Qwen3-32B", Dims(64, 5120, 64, 8, 128, 25600, 151936)),
    "qwen3-32b-fp8": Known("Qwen3-32B", Dims(64, 5120, 64, 8, 128, 25600, 151936, weight_size=1)),
}
TITLES = {
    "b200": "B200 SXM 180 GB", "h200": "H200 SXM 141 GB", "h100": "H100 SXM 80 GB", "a100": "A100 SXM 80 GB",
    "a100-40g": "A100 SXM 40 GB",
}  # fmt: skip
PRECISIONS = {None: "bfloat16", 1: "FP8", NVFP4: "NVFP4"}  # of weights, by bytes of an element
DRAFTERS = ("opt-125m", "llama-3.2-1b", "qwen2.5-0.5b")

VLLM_2024 = (
    "vLLM (2024) with OPT-13B on one A100: what its steps took beyond their kernels, 4.4 ms + 0.058 ms a sequence"
)
SILICON = "TPOT measured in closed loops beyond kernels, fitted by figure `silicon`"
# Of every profile but drafters', after `@` in its name.
HOST_TERMS: Mapping[str, HostTime] = {
    "vllm-2024": HostTime(4.4e-3, 5.8e-5, VLLM_2024),
    "vllm-0.12": HostTime(9.5e-4, 7.4e-5, f"vLLM 0.12.0 with Qwen3-32B on H100: {SILICON}"),
    "vllm-2025-async": HostTime(
        1.4e-4, 3.2e-5, f"vLLM of October 2025, asynchronous scheduling, Llama-3.1-70B on H100, H200, B200: {SILICON}"
    ),
}
# The newest vLLM that was measured on a GPU; on an A100 none of them was, and the synchronous one is the slower.
DEFAULT_HOST = {
    "b200": "vllm-2025-async", "h200": "vllm-2025-async", "h100": "vllm-0.12", "a100": "vllm-0.12",
    "a100-40g": "vllm-0.12",
}  # fmt: skip
DRAFT_HOST = HostTime(0.0, 0.0, "none: a drafter runs within its target's step, whose profile has the host's time")
VIDUR = "Vidur's A100 measurements of the same kernels beside these tables"
A100_FACTORS: Mapping[str, Factor] = {
    "decode_gemm": Factor(0.9, VIDUR),
    "prefill_gemm": Factor(1.2, VIDUR),
    "context_attention": Factor(1.4, VIDUR),
}


def _factors(gpu: str) -> Mapping[str, Factor]:
    """Of the A100's kernels; nothing is known of the others'."""
    if gpu.startswith("a100"):
        return A100_FACTORS
    return {name: Factor(1.0, f"no independent {gpu.upper()} measurement was found") for name in A100_FACTORS}


def _precision(dims: Dims) -> str:
    """Of weights, and of KV where it is another."""
    return PRECISIONS[dims.weight_size] + (" weights and FP8 KV" if dims.kv_size == 1 else "")


PROVENANCE = (
    "kernel times: NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0), systems/data/{system}, vLLM {version}; "
    "norms, activations and context worked out as rubato.latency.profiles.aiconfigurator says"
)


def name_of(model: str, gpu: str, gpus: int) -> str:
    """`opt-13b-2xa100-40g`."""
    return f"{model}-{gpu}" if gpus == 1 else f"{model}-{gpus}x{gpu}"


def compose_by_name(model: str, gpu: str, gpus: int = 1) -> Profile:
    """A profile of a model known by name. Raises ImportError without the extra, ValueError for unknown names."""
    if model not in MODELS:
        raise ValueError(
            f"the dimensions of {model!r} are not known by name{nearest(model, MODELS)}; give its config.json"
        )
    host = DRAFT_HOST if model in DRAFTERS else None
    return compose(name_of(model, gpu, gpus), MODELS[model], gpu, gpus, host)


def compose(name: str, model: Known, gpu: str, gpus: int, host: HostTime | None = None) -> Profile:
    """Makes a profile of kernel tables.

    Args:
        host: the host term; None: that of the newest vLLM that was measured, with all others by name.

    Raises:
        ImportError: the extra is not installed.
        ValueError: a model that the GPU cannot hold, or that cannot be split over so many.
    """
    tables = aiconfigurator.tables(model.dims, gpu, gpus)
    card = aiconfigurator.GPUS[gpu]
    provenance = PROVENANCE.format(system=card.system, version=card.version)
    if card.measured_bandwidth is not None:
        ratio = card.measured_bandwidth / card.bandwidth
        provenance += f"; of the 80 GB card, what its memory bounds {ratio:.3f} times as long"
    return Profile(
        name=name,
        about=f"{model.title}, {_precision(model.dims)}, on {gpus} x {TITLES[gpu]}",
        gpu=gpu,
        gpus=gpus,
        kv_tokens=aiconfigurator.kv_tokens(model.dims, gpu, gpus),
        kv_bytes_per_token=model.dims.kv_bytes,
        max_model_len=model.context,
        data={"model": "components", **tables},
        host_term=HOST_TERMS[DEFAULT_HOST[gpu]] if host is None else host,
        factors=_factors(gpu),
        provenance=provenance,
        dims=model.dims,
        host_terms=HOST_TERMS if host is None else {},
    )


def dims_of(config: Mapping[str, Any]) -> Dims:
    """The dimensions that a Hugging Face config.json states. Raises ValueError naming the field that is missing."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Dims(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"] if "intermediate_size" in config else config["ffn_dim"],
            vocab=config["vocab_size"],
            gated=config.get("model_type") != "opt",
            tied=bool(config.get("tie_word_embeddings", config.get("model_type") == "opt")),
        )
    except KeyError as error:
        raise ValueError(
            f"config.json says nothing of {error.args[0]}: only dense decoders of one width are known"
        ) from None
