"""Packaged hardware profiles: what they hold, what can be set, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from rubato.core.plan import Limits, Shape
from rubato.latency import profiles
from rubato.latency.components import Model
from rubato.latency.operation_count import Model as Counted
from rubato.latency.profiles import kernel_profiles
from rubato.simulation.run_spec import packaged_hardware
from tools.packaged_profiles import PACKAGED

WANTED = {
    "llama-3.1-8b-h200", "llama-3.1-8b-a100", "mistral-7b-a100", "opt-13b-a100", "opt-13b-2xa100-40g", "opt-13b-h100",
    "llama-2-7b-a100-40g", "qwen2.5-1.5b-a100-40g", "qwen-14b-a100", "qwen2.5-32b-2xa100", "llama-3.1-70b-4xa100",
    "opt-125m-a100-40g", "llama-3.2-1b-a100", "qwen2.5-0.5b-a100", "qwen2.5-7b-2xv100", "smollm2-135m-cpu",
}  # fmt: skip


def decodes(count: int, kv: int) -> Shape:
    return Shape(count, count, count * kv)


def test_all_that_the_figures_need_are_there() -> None:
    assert set(profiles.names()) >= WANTED
    assert {kernel_profiles.name_of(*which) for which in PACKAGED} <= set(profiles.names())


@pytest.mark.parametrize("name", profiles.names())
def test_each_says_what_it_is_and_where_it_is_from(name: str) -> None:
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.kv_tokens > 1000
    assert profile.kv_bytes_per_token > 0
    assert profile.gpus >= 1
    assert profile.provenance
    assert profile.about
    assert all(factor.source for factor in profile.factors.values())
    assert profile.host_term is None or profile.host_term.source
    if profile.dims is not None:
        assert profile.kv_bytes_per_token == profile.dims.kv_bytes
    model, limits = profile.model(), profile.limits()
    assert isinstance(limits, Limits)
    assert limits.kv_blocks * limits.block_size <= profile.kv_tokens
    assert 0.0 < model.step_time(decodes(1, 100)) < model.step_time(Shape().plus(1024, 0)) < 60.0


def test_the_kernels_of_llama_on_an_h200_sum_to_what_polyserve_says_of_its_host() -> None:
    # 15 ms a token at batch 1 by the paper's text, 4.8 ms of kernels: the rest is the host's.
    kernels = profiles.load("llama-3.1-8b-h200", host=0.0, host_per_seq=0.0).model().step_time(decodes(1, 128))
    assert kernels == pytest.approx(4.8e-3, rel=0.02)
    whole = profiles.load("llama-3.1-8b-h200", host=profiles.POLYSERVE_HOST_S, host_per_seq=0.0).model()
    assert whole.step_time(decodes(1, 128)) == pytest.approx(15e-3, rel=0.01)


def test_decode_steps_of_the_a100_profiles_without_factors() -> None:
    # milliseconds of kernels at (batch, context), as the composition of the same tables gives them elsewhere
    plain = {"decode_gemm": 1.0, "prefill_gemm": 1.0, "context_attention": 1.0}
    for name, at in {
        "llama-3.1-8b-a100": {(1, 128): 11.63, (32, 1024): 15.58, (128, 1024): 24.75},
        "llama-3.1-70b-4xa100": {(1, 128): 26.66, (64, 1024): 36.36},
        "qwen2.5-32b-2xa100": {(8, 1024): 26.5, (128, 1024): 42.92},
        "opt-13b-a100": {(1, 128): 19.2, (32, 1024): 35.8},
    }.items():
        model = profiles.load(name, host=0.0, host_per_seq=0.0, **plain).model()
        for (count, kv), ms in at.items():
            assert model.step_time(decodes(count, kv)) == pytest.approx(ms / 1e3, rel=0.03), (name, count, kv)


def test_host_and_factors_can_be_set() -> None:
    shape = decodes(10, 500)
    own = profiles.load("llama-3.1-8b-a100@vllm-2024")
    assert (own.host_term.host, own.host_term.host_per_seq) == (4.4e-3, 5.8e-5)  # type: ignore[union-attr]
    base = profiles.load("llama-3.1-8b-a100@vllm-2024", host_scale=0.0).model().step_time(shape)
    for scale in (0.5, 1.0, 1.5):
        scaled = profiles.load("llama-3.1-8b-a100@vllm-2024", host_scale=scale).model().step_time(shape)
        assert scaled - base == pytest.approx(scale * (4.4e-3 + 10 * 5.8e-5), rel=0.05)  # kernels evened out a little
    later = profiles.load("llama-3.1-8b-a100@vllm-2024", host=9.4e-3).model().step_time(shape)
    assert later - own.model().step_time(shape) == pytest.approx(5e-3)
    model = profiles.load("llama-3.1-8b-a100@vllm-2024", host=0.001, host_per_seq=0.0, prefill_gemm=1.0).model()
    assert isinstance(model, Model)
    assert (model.factors.prefill_gemm, model.factors.decode_gemm) == (1.0, 0.9)
    assert model.step_time(shape) - base == pytest.approx(0.001, rel=0.01)
    drafter = profiles.load("opt-125m-a100-40g")
    assert drafter.host_term is not None
    assert drafter.host_term.host == 0.0


def test_a_host_term_of_a_profile_is_named_behind_it(tmp_path: Path) -> None:
    drafters = {kernel_profiles.name_of(model, "a100", 1) for model in ("llama-3.2-1b", "qwen2.5-0.5b")}
    for name in {kernel_profiles.name_of(*which) for which in PACKAGED} - drafters - {"opt-125m-a100-40g"}:
        named, zero = profiles.load(f"{name}@vllm-2024"), profiles.load(name, host=0.0, host_per_seq=0.0)
        assert named.name == f"{name}@vllm-2024"
        shape = decodes(10, 500)
        assert isinstance(model := named.model(), Model)
        assert (model.host, model.host_per_seq) == (4.4e-3, 5.8e-5)
        assert model.step_time(shape) - zero.model().step_time(shape) == pytest.approx(4.4e-3 + 10 * 5.8e-5, rel=0.05)
    own = tmp_path / "mine@home.json"
    own.write_bytes(orjson.dumps(profiles.load("opt-13b-a100").to_json()))
    assert profiles.load(f"{own}@vllm-2024").host_term == profiles.load("opt-13b-a100@vllm-2024").host_term
    assert packaged_hardware("opt-13b-a100@vllm-2024").name == "opt-13b-a100@vllm-2024"
    with pytest.raises(ValueError, match=r"profile 'opt-13b-a100' has no host term 'vllm-2042': it has .*vllm-2024"):
        profiles.load("opt-13b-a100@vllm-2042")
    with pytest.raises(ValueError, match="profile 'opt-13b-a100' has no host term ''"):
        profiles.load("opt-13b-a100@")
    with pytest.raises(ValueError, match="profile 'opt-125m-a100-40g' has no host term 'vllm-2024': it has none"):
        profiles.load("opt-125m-a100-40g@vllm-2024")


def test_quantised_weights_and_kv_are_smaller_and_embeddings_are_not() -> None:
    plain, fp8 = (kernel_profiles.MODELS[name].dims for name in ("llama-3.1-70b", "llama-3.1-70b-fp8"))
    fp4 = kernel_profiles.MODELS["llama-3.1-70b-fp4"].dims
    matrices = plain.layers * plain.layer_weights
    assert matrices == 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert plain.weight_bytes - fp8.weight_bytes == matrices
    assert plain.weight_bytes - fp4.weight_bytes == 2 * matrices - matrices * 9 // 16
    assert replace(fp8, kv_size=1).kv_bytes * 2 == fp8.kv_bytes == plain.kv_bytes
    work = {size: Counted(dims=replace(plain, weight_size=size, kv_size=size)) for size in (1, 2)}
    decode = decodes(1, 100_000)  # all of it is reading weights and KV
    assert work[1].times(decode)[0] == pytest.approx(work[2].times(decode)[0] / 2, rel=0.02)
    with pytest.raises(ValueError, match="weight_size = 0"):
        replace(plain, weight_size=0)


def test_the_host_term_of_a_profile_is_that_of_the_newest_vllm_measured_on_its_gpu() -> None:
    for name, term in {
        "llama-3.1-8b-a100": "vllm-0.12", "llama-3.1-8b-h100": "vllm-0.12", "llama-3.1-8b-h200": "vllm-2025-async",
        "llama-3.1-8b-b200": "vllm-2025-async",
    }.items():  # fmt: skip
        assert profiles.load(name).host_term == profiles.load(f"{name}@{term}").host_term
        assert profiles.load(name).host_term == kernel_profiles.HOST_TERMS[term]


def test_limits_follow_the_kv() -> None:
    profile = profiles.load("opt-13b-2xa100-40g")
    assert profile.gpus == 2
    assert profile.limits() == Limits(256, 8192, 2048, profile.kv_tokens // 16, 16)
    assert profile.limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1000, block_size=32) == Limits(
        8, 512, 1000, profile.kv_tokens // 32, 32
    )
    small = profiles.load("opt-13b-2xa100-40g", kv_tokens=700)
    assert small.limits().max_model_len == 700


def test_what_is_asked_wrongly_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no profile 'llama-3.1-8b-h300': did you mean 'llama-3.1-8b-"):
        profiles.load("llama-3.1-8b-h300")
    with pytest.raises(ValueError, match="no factor 'prefil_gemm': did you mean 'prefill_gemm'"):
        profiles.load("llama-3.1-8b-a100", prefil_gemm=1.0)
    with pytest.raises(ValueError, match="measured whole"):
        profiles.load("qwen2.5-7b-2xv100", host=0.01)
    with pytest.raises(ValueError, match="host_scale is -1"):
        profiles.load("llama-3.1-8b-a100", host_scale=-1.0)
    (tmp_path / "half.json").write_text('{"format": "rubato-pro')
    with pytest.raises(ValueError, match="cannot be read as a profile"):
        profiles.load(str(tmp_path / "half.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is no profile"):
        profiles.load(str(tmp_path / "other.json"))


def test_a_profile_without_kv_capacity_is_refused_until_it_is_given(tmp_path: Path) -> None:
    data = profiles.load("llama-3.1-8b-a100").to_json()
    path = tmp_path / "mine.json"
    for nothing in (None, 0):
        path.write_bytes(orjson.dumps({**data, "kv_tokens": nothing}))
        with pytest.raises(ValueError, match="has no KV capacity"):
            profiles.load(str(path))
    assert profiles.load(str(path), kv_tokens=5000).kv_tokens == 5000
    path.write_bytes(orjson.dumps(data))
    assert profiles.load(str(path)) == profiles.load("llama-3.1-8b-a100")


def test_config_json_gives_the_dimensions() -> None:
    config = {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    assert kernel_profiles.dims_of(config) == kernel_profiles.MODELS["qwen2.5-7b"].dims
    with pytest.raises(ValueError, match="says nothing of vocab_size"):
        kernel_profiles.dims_of({name: value for name, value in config.items() if name != "vocab_size"})
