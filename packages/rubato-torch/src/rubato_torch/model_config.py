"""What a model folder's config.json says, as far as the forward pass needs it, with transformers' own meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart.

    A bias is always there, never, or where the field of this name in config.json says so. qk_norm: RMS norm of every
    query and key head. window: which layers see only the last `sliding_window` tokens: none, all, or, if
    `use_sliding_window`, those of `layer_types` (without it, from `max_window_layers` on). defaults: what transformers
    takes for fields that config.json leaves out.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "some"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "LlamaForCausalLM": Family("attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": Family(
        window="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="some", defaults=QWEN),
    "Qwen3ForCausalLM": Family(
        "attention_bias", "attention_bias", qk_norm=True, window="some", defaults={**QWEN, "head_dim": 128}
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: `theta` the base, `scaling` the config's dict with a "rope_type" (or None)."""

    theta: float
    scaling: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes and parts of a model; `context` in tokens, `eos` every id that ends a text by config.json.

    windows: for each layer how many tokens, its own included, a token sees; None = all before it.
    """

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
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    def within(self, length: int) -> Config:
        """The same for sequences of at most `length` tokens: windows that never hide anything are gone."""
        return replace(self, windows=tuple(w if w is not None and w < length else None for w in self.windows))


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
            f"model {str(folder)!r} has no config.json: give a local Hugging Face folder, a GGUF file, or the word "
            "'bundled'"
        )
    family = _family(folder, raw)
    raw = {**family.defaults, **raw}
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    rope = _rope(folder, raw)
    return Config(
        layers=layers,
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab=raw["vocab_size"],
        context=_context(raw, rope),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        rope=rope,
        eos=ids_of(raw.get("eos_token_id")),
        qkv_bias=_switch(family.qkv_bias, raw),
        out_bias=_switch(family.out_bias, raw),
        mlp_bias=_switch(family.mlp_bias, raw),
        qk_norm=family.qk_norm,
        windows=_windows(folder, family, raw, layers),
    )


def _family(folder: Path, raw: dict[str, Any]) -> Family:
    named = raw.get("architectures") or [f"model_type {raw.get('model_type')!r}"]
    found = [FAMILIES[name] for name in named if name in FAMILIES]
    if not found:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model {str(folder)!r} has architecture {', '.join(named)}; the torch engine runs {known}")
    if raw.get("quantization_config"):
        raise ValueError(f"model {str(folder)!r} has quantised weights; the torch engine runs unquantised ones")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"model {str(folder)!r} has activation {raw['hidden_act']!r}; the torch engine runs silu")
    return found[0]


def _switch(bias: bool | str, raw: dict[str, Any]) -> bool:
    return bool(raw.get(bias, False)) if isinstance(bias, str) else bias


def _windows(folder: Path, family: Family, raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if family.window == "none":
        return (None,) * layers
    if family.window == "all":
        kinds = ["sliding_attention" if window is not None else "full_attention"] * layers
    else:
        window = window if raw.get("use_sliding_window") else None
        upper = raw["max_window_layers"] if window is not None else layers
        kinds = raw.get("layer_types") or [
            "sliding_attention" if i >= upper else "full_attention" for i in range(layers)
        ]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"model {str(folder)!r} has layer_types {kinds}: the torch engine needs full_attention or "
            f"sliding_attention for each of its {layers} layers"
        )
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise ValueError(
            f"model {str(folder)!r} has sliding_attention layers and the window {window!r}: give sliding_window 1 or "
            "more (and use_sliding_window true, where the family has it), or full_attention layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(folder: Path, raw: dict[str, Any]) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters` that holds the two."""
    newer = raw.get("rope_parameters") or {}
    scaling = dict(newer or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(newer.get("rope_theta", raw.get("rope_theta", 10000.0)))
    partial = newer.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ValueError(f"model {str(folder)!r} rotates a part of each head ({partial}); the torch engine rotates all")
    if kind == "default":
        return Rope(theta, None)
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"rope scaling {kind!r} is not supported by the torch engine: it knows default, linear, llama3, yarn"
        )
    original = scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048)
    return Rope(theta, {**scaling, "rope_type": kind, "original_max_position_embeddings": original})


def _context(raw: dict[str, Any], rope: Rope) -> int:
    """yarn is put into a config by hand, to go beyond the max_position_embeddings that may stand there unchanged."""
    context: int = raw.get("max_position_embeddings", 2048)
    if rope.scaling is None or rope.scaling["rope_type"] != "yarn":
        return context
    return max(context, int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"]))


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each of the head's head_dim/2 pairs, float32."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    scaling = rope.scaling
    if scaling is None:
        return base
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return base / factor
    original = float(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "yarn":
        kept = _yarn_kept(rope, head_dim, original)
        return base / factor * (1.0 - kept) + base * kept
    # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, those well inside it are
    # kept, and between the two the frequency is interpolated.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / base
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * base / factor + smooth * base


def _yarn_kept(rope: Rope, head_dim: int, original: float) -> Tensor:
    """For each pair how much of its frequency is kept: 1 where it turns more than `beta_fast` times within the original
    context, 0 below `beta_slow` turns, linear in the pair's number between (YaRN, arXiv 2309.00071, section 3.2)."""
    assert rope.scaling is not None

    def pair(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair(rope.scaling.get("beta_fast") or 32)
    high = pair(rope.scaling.get("beta_slow") or 1)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return 1.0 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)


def amplitude(rope: Rope) -> float:
    """What cosine and sine are multiplied by: 1, but for yarn, which sharpens attention over a longer context."""
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def scale(by: float) -> float:
        return 0.1 * by * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    top, bottom = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)
