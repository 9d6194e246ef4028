"""GGUF files: converted once to a Hugging Face folder in the cache, which anything that reads such folders can serve.

The folder holds the weights dequantised (to bfloat16, or as they are where the file's matrices are all float32 or
float16), with config, tokenizer, chat template and generation config. Architectures llama (with Mistral), qwen2, qwen3.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from rubato_torch.gguf_tokenizer import special_ids, tokenizer, tokenizer_config
from rubato_torch.model_config import FAMILIES, Rope, frequencies

EDITION = 1  # of the conversion: folders of another one are not read
SHARD = 2 << 30  # bytes of tensors in one file, and so what a conversion holds in memory


# GGUF's name for an architecture, and transformers'.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MISTRAL = "MistralForCausalLM"  # to GGUF a llama with a sliding window

# Per layer, Hugging Face's name of what GGUF calls the middle of `blk.N.<part>.weight` (or .bias).
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Keys that change what is computed, which these architectures do not have, with the value that changes nothing.
IDLE = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.sliding_window_pattern": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
CURE = "set XDG_CACHE_HOME to a folder that this user may write to"
ROPE_FACTORS = "rope_freqs.weight"  # how much each pair's wavelength is stretched: no weight, but llama3's rope


def models_folder() -> Path:
    """Where converted models lie, one folder each. Raises ValueError for a user without a home."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ValueError(
            f"a model is converted to a folder in the user's cache, and this user has no home: {CURE}"
        ) from None
    return Path(cache) / "rubato" / "models"


def ensure(file: Path) -> Path:
    """The folder that `file` was converted to, converted first if it is not there: another file, or the same after a
    change, has another folder. Raises ValueError, saying what, for what the torch engine cannot serve."""
    if _magic(file) != b"GGUF":
        raise ValueError(f"model {str(file)!r} is a file but no GGUF: give one, or a local Hugging Face folder")
    there = file.resolve()
    stat = there.stat()
    words = f"{EDITION} {there} {stat.st_size} {stat.st_mtime_ns}"
    name = f"{there.stem}-{blake2b(words.encode(), digest_size=6).hexdigest()}"
    return make_once(name, lambda made, _: convert(there, made))


def make_once(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder of this name among the converted models; if it is not there, `make(folder, scratch)` fills it.

    Safe when several processes do it at once: each makes a folder of its own, the first to rename wins. Raises
    ValueError where none can be made.
    """
    final = models_folder() / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent)
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise ValueError(f"model {name}: its converted weights cannot be written to {final} ({why}): {CURE}") from error
    with folder as scratch:
        made = Path(scratch) / name
        made.mkdir()
        make(made, Path(scratch))
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was first: its folder is as good
                raise
    return final


def convert(file: Path, into: Path) -> None:
    """Write the Hugging Face folder `into` (it exists and is empty). Raises ValueError as `ensure`."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{file.name} cannot be read as GGUF, is it whole? ({error})") from error
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"):
        if key not in fields:
            raise ValueError(f"{file.name} does not say {key}: it holds no model with a tokenizer")
    architecture = _architecture(file, fields)
    made = tokenizer(file.name, fields)
    factors = next((t.data for t in reader.tensors if t.name == ROPE_FACTORS), None)
    config = _config(file, fields, architecture, factors)
    tensors = [t for t in reader.tensors if t.name != ROPE_FACTORS]
    dtype = _dtype({t.tensor_type.name for t in tensors if len(t.shape) > 1})
    names = _write_weights(into, ((name, values.to(dtype)) for name, values in _weights(file, tensors, config)))
    config |= _facts(file, names, architecture)
    _complete(file, names, config)
    ends = special_ids(fields)
    _write(into / "config.json", {**config, **ends, "torch_dtype": str(dtype).removeprefix("torch.")})
    _write(into / "generation_config.json", ends)
    made.save(str(into / "tokenizer.json"))
    _write(into / "tokenizer_config.json", tokenizer_config(fields, config["max_position_embeddings"]))


def _weights(file: Path, tensors: Iterable[Any], config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's name of each of a reader's tensors, and what it holds, float32."""
    import gguf

    # GGUF has the rows of a llama's q and k in an order of its own
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    permuted = heads if config["architectures"][0] in (ARCHITECTURES["llama"], MISTRAL) else {}
    for tensor in tensors:
        name = _hf_name(file, tensor.name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(
                f"{file.name}: tensor {tensor.name!r} is of type {kind}, which is not read here"
            ) from error
        if (part := name.split(".")[-2]) in permuted:
            values = unpermute(values, permuted[part])
        yield name, torch.from_numpy(np.ascontiguousarray(values))


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k matrix (or bias) from GGUF's order, the two halves of a head interleaved, to Hugging Face's."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _magic(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(4)


def _architecture(file: Path, fields: dict[str, Any]) -> str:
    """transformers' name for the file's architecture."""
    name = fields["general.architecture"]
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.name} has architecture {name!r}; the torch engine reads GGUF of {known}")
    if fields.get("split.count", 1) > 1:
        raise ValueError(f"{file.name} is one of {fields['split.count']} parts: merge them into one file first")
    if fields.get(f"{name}.expert_count", 0):
        raise ValueError(f"{file.name} is a mixture of experts, which the torch engine does not run")
    for key, idle in IDLE.items():
        if (value := fields.get(f"{name}.{key}", idle)) != idle:
            raise ValueError(f"{file.name} sets {name}.{key} to {value}, which the torch engine does not know")
    window = fields.get(f"{name}.attention.sliding_window")
    if not window or window >= fields.get(f"{name}.context_length", 0):
        return ARCHITECTURES[name]
    if name != "llama":  # GGUF does not say which of its layers have the window
        raise ValueError(
            f"{file.name} is a {name} with a sliding window of {window} tokens, which is not read from GGUF"
        )
    return MISTRAL


def _dtype(kinds: set[str]) -> torch.dtype:
    """That of the file's matrices where it is one that both sides have, else bfloat16."""
    return {frozenset({"F32"}): torch.float32, frozenset({"F16"}): torch.float16}.get(frozenset(kinds), torch.bfloat16)


def _hf_name(file: Path, name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES or parts[3] not in ("weight", "bias"):
        raise ValueError(f"{file.name} has a tensor {name!r}, which this engine's architectures do not")
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"


def _config(file: Path, fields: dict[str, Any], architecture: str, factors: Any) -> dict[str, Any]:
    of = fields["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{of}.{key}", default)
        if value is None:
            raise ValueError(f"{file.name} does not say {of}.{key}")
        if isinstance(value, list):
            raise ValueError(f"{file.name} has a {of}.{key} for each layer; the torch engine needs one for all")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    rotated = get("rope.dimension_count", hidden // heads)
    dim = get("attention.key_length", rotated)
    if not dim == get("attention.value_length", dim) == get("rope.dimension_count", dim):
        raise ValueError(
            f"{file.name}: keys, values and rotation of different sizes, which the torch engine does not run"
        )
    theta = get("rope.freq_base", 10000.0)
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon")), 10),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, fields, of, factors) or _llama3(file, factors, theta, dim),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    if architecture == MISTRAL:
        config["sliding_window"] = get("attention.sliding_window")
    return config


def _rope_scaling(file: Path, fields: dict[str, Any], of: str, factors: Any) -> dict[str, Any] | None:
    kind = fields.get(f"{of}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.name} has rope scaling {kind!r}; the torch engine reads linear and yarn from GGUF")
    keys = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if factors is not None:
        raise ValueError(f"{file.name} has both rope scaling {kind!r} and {ROPE_FACTORS}: one of them is meant")
    found = {hf: fields[key] for part, hf in keys.items() if (key := f"{of}.rope.scaling.{part}") in fields}
    if "factor" not in found:
        raise ValueError(f"{file.name} has rope scaling {kind!r} without {of}.rope.scaling.factor")
    return {"rope_type": kind, **found}


def _llama3(file: Path, factors: Any, theta: float, dim: int) -> dict[str, Any] | None:
    """GGUF holds what llama3's rope comes to, not its four numbers. Two of them are the same in every Llama, and the
    other two follow: the largest factor is the factor, and the original context is a power of two."""
    if factors is None:
        return None
    stretched = torch.from_numpy(np.array(factors, dtype=np.float32)).flatten()
    plain = frequencies(Rope(theta, None), dim)
    for power in range(6, 21):
        scaling = {
            "rope_type": "llama3",
            "factor": float(stretched.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1 << power,
        }
        own = plain / frequencies(Rope(theta, scaling), dim)
        if own.shape == stretched.shape and torch.allclose(own, stretched, rtol=1e-4, atol=0.0):
            return scaling
    raise ValueError(f"{file.name} has rope factors other than Llama 3's, which the torch engine does not run")


def _facts(file: Path, names: Collection[str], architecture: str) -> dict[str, Any]:
    """What GGUF does not say but shows by the tensors that are there."""

    def some(*parts: str) -> bool:
        there = [f"model.layers.0.{part}.bias" in names for part in parts]
        if any(there) != all(there):
            raise ValueError(f"{file.name} has biases in some of {', '.join(parts)} only, which is not run here")
        return all(there)

    qkv, out = some("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), some("self_attn.o_proj")
    mlp = some("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    family = FAMILIES[architecture]
    # a switch in config.json (a string) says either; else the family says it
    fixed = ((family.qkv_bias, qkv), (family.out_bias, out), (family.mlp_bias, mlp))
    fits = all(isinstance(own, str) or own == has for own, has in fixed)
    if not fits or (family.qkv_bias == family.out_bias and qkv != out):
        raise ValueError(
            f"{file.name} has biases (attention {qkv}, its output {out}, MLP {mlp}) that {architecture} has not"
        )
    tied = "lm_head.weight" not in names
    return {"attention_bias": qkv and out, "mlp_bias": mlp, "tie_word_embeddings": tied}


def _complete(file: Path, names: Collection[str], config: Mapping[str, Any]) -> None:
    """Raise ValueError unless every layer has the tensors that the first has, and the first all it needs."""
    first = {name for name in names if name.startswith("model.layers.0.")}
    family = FAMILIES[config["architectures"][0]]
    parts = [part for part in LAYER_NAMES.values() if family.qk_norm or not part.endswith(("q_norm", "k_norm"))]
    first |= {f"model.layers.0.{part}.weight" for part in parts}
    wanted = {name.replace(".0.", f".{i}.", 1) for i in range(config["num_hidden_layers"]) for name in first}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    missing, more = sorted(wanted - set(names)), sorted(set(names) - wanted - {"lm_head.weight"})
    if not family.qk_norm:
        more += sorted(name for name in first if name.endswith(("q_norm.weight", "k_norm.weight")))
    for what, found in (("lacks", missing), ("has, of which this architecture knows nothing,", more)):
        if found:
            raise ValueError(f"{file.name} {what} {', '.join(found[:3])}{' and others' if len(found) > 3 else ''}")


def _write_weights(into: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Write model.safetensors, or several files of at most about `SHARD` bytes with an index. Returns the names."""
    where: dict[str, str] = {}
    total = 0
    for number, held in enumerate(_shards(tensors), 1):
        file = f"model-{number:05}.safetensors"
        save_file(held, into / file, metadata={"format": "pt"})
        (into / file).chmod(0o644)  # as the files beside it, for a cache that users share
        where |= dict.fromkeys(held, file)
        total += sum(tensor.nbytes for tensor in held.values())
    if len(set(where.values())) == 1:
        (into / file).rename(into / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write(into / "model.safetensors.index.json", index)
    return set(where)


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one file at a time, in one dict that is emptied for the next."""
    held: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD:
            yield held
            held.clear()
            size = 0
        held[name] = tensor
        size += tensor.nbytes
    yield held


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
