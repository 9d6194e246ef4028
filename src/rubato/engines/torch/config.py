"""What a model folder's config.json says, as far as the forward pass needs it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: `theta` the base, `scaling` the config's dict with a "rope_type" (or None)."""

    theta: float
    scaling: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a Llama-shaped model; `context` in tokens, `eos` every id that ends a text by config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    rope: Rope
    eos: frozenset[int]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def ids_of(value: Any) -> frozenset[int]:
    """Token ids as configs write them: null, one id, or a list."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))


def load_config(folder: Path) -> Config:
    """Read folder/config.json. Raises FileNotFoundError or ValueError where this engine cannot serve the model."""
    raw = read_json(folder / "config.json")
    if not raw:
        raise FileNotFoundError(
            f"model {str(folder)!r} has no config.json: give a local Hugging Face folder, or the word 'bundled'"
        )
    named = raw.get("architectures") or [f"model_type {raw.get('model_type')!r}"]
    if not set(named) & set(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"model {str(folder)!r} has architecture {', '.join(named)}; the torch engine runs {known}")
    if raw.get("quantization_config"):
        raise ValueError(f"model {str(folder)!r} has quantised weights; the torch engine runs unquantised ones")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"model {str(folder)!r} has activation {raw['hidden_act']!r}; the torch engine runs silu")
    heads = raw["num_attention_heads"]
    return Config(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab=raw["vocab_size"],
        context=raw.get("max_position_embeddings", 2048),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        rope=_rope(raw),
        eos=ids_of(raw.get("eos_token_id")),
    )


def _rope(raw: dict[str, Any]) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters` that holds the two."""
    newer = raw.get("rope_parameters") or {}
    scaling = dict(newer or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(newer.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(theta, None)
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"rope scaling {kind!r} is not supported by the torch engine: it knows default, linear, llama3"
        )
    return Rope(theta, {**scaling, "rope_type": kind})


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each of the head's head_dim/2 pairs, float32."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    scaling = rope.scaling
    if scaling is None:
        return base
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return base / factor
    # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, those well inside it are
    # kept, and between the two the frequency is interpolated.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / base
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * base / factor + smooth * base
