"""The packaged profiles, made again: `python tools/packaged_profiles.py src/rubato/latency/profiles/data`.

Needs the extra `aiconfigurator`. `smollm2-135m-cpu` is measured, by `rubato profile bundled`, and not among them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from rubato.latency import bilinear
from rubato.latency.profiles import aiconfigurator
from rubato.latency.profiles.kernel_profiles import MAX_CONTEXT_TOKENS, MODELS, compose_by_name
from rubato.latency.profiles.profile import Profile

# name of the model, of the GPU, how many
PACKAGED = (
    ("llama-3.1-8b", "h200", 1),
    ("llama-3.1-8b", "a100", 1),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-8b", "b200", 1),
    ("mistral-7b", "a100", 1),
    ("opt-6.7b", "a100-40g", 1),
    ("opt-13b", "a100", 1),
    ("opt-13b", "a100-40g", 2),
    ("opt-13b", "h100", 1),
    ("opt-30b", "a100-40g", 4),
    ("llama-2-7b", "a100-40g", 1),
    ("qwen2.5-1.5b", "a100-40g", 1),
    ("qwen-14b", "a100", 1),
    ("qwen2.5-32b", "a100", 2),
    ("llama-3.1-70b", "a100", 4),
    ("llama-3.1-70b", "h100", 4),
    ("opt-125m", "a100-40g", 1),
    ("llama-3.2-1b", "a100", 1),
    ("qwen2.5-0.5b", "a100", 1),
)


def paper_v100() -> Profile:
    """The SA paper's Qwen2.5-7B on two V100s: its coefficients of whole steps, capacity worked out as elsewhere."""
    dims = MODELS["qwen2.5-7b"].dims
    room = (
        2 * (aiconfigurator.USABLE_SHARE * 32 * aiconfigurator.GIB - aiconfigurator.RESERVE_BYTES) - dims.weight_bytes
    )
    return Profile(
        name="qwen2.5-7b-2xv100",
        about="Qwen2.5-7B, float16, on 2 x V100 32 GB",
        gpu="v100",
        gpus=2,
        kv_tokens=int(room // dims.kv_bytes),
        kv_bytes_per_token=dims.kv_bytes,
        max_model_len=MAX_CONTEXT_TOKENS,
        data=bilinear.Model().to_dict(),
        host_term=None,
        factors={},
        provenance="coefficients: the SA paper, Table 2 (whole steps, vLLM); "
        "capacity: 0.9 of the memory less weights and 3 GB a card",
        dims=dims,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for profile in [*(compose_by_name(*which) for which in PACKAGED), paper_v100()]:
        (folder / f"{profile.name}.json").write_bytes(orjson.dumps(profile.to_json()))


if __name__ == "__main__":
    main()
