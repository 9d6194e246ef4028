"""From a Hugging Face folder to the tensors the forward pass reads: fused, in one dtype, on one device.

The matrices are kept in whichever form `matmul_backends` finds the fastest on this machine, and in no other.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rubato_torch.cpu.matmul_backends import Choice, Form, Linear, Plain, choose
from rubato_torch.model_config import Config, amplitude, frequencies, read_json


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. qkv rows: all q heads, then k, then v; gate_up rows: gate, then up. qk_norm: (heads + kv_heads,
    head_dim), the norm weights of every query and key head, in families that have them."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """embed (vocab, hidden). cos, sin (context, 1, 2, head_dim/2), in the model's dtype: the two halves of a head;
    the sine's first half is negative, so that rotating is x * cos + swapped_halves(x) * sin. products: the form that
    the matrices are in."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    cos: Tensor
    sin: Tensor
    products: Choice


def load_weights(folder: Path, config: Config, dtype: torch.dtype, device: torch.device) -> Weights:
    """Raises FileNotFoundError without safetensors, ValueError (with the tensor's name) where one is missing."""
    tensors = _Tensors(folder, dtype, device)
    products = choose(tensors.get("model.layers.0.mlp.down_proj.weight"))
    tensors.form = products.form
    layers = []
    for i in range(config.layers):
        at = f"model.layers.{i}"
        layers.append(
            Layer(
                tensors.get(f"{at}.input_layernorm.weight"),
                tensors.linear(*(f"{at}.self_attn.{part}_proj" for part in "qkv"), biased=config.qkv_bias),
                _qk_norm(tensors, at, config) if config.qk_norm else None,
                tensors.linear(f"{at}.self_attn.o_proj", biased=config.out_bias),
                tensors.get(f"{at}.post_attention_layernorm.weight"),
                tensors.linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", biased=config.mlp_bias),
                tensors.linear(f"{at}.mlp.down_proj", biased=config.mlp_bias),
            )
        )
    embed = tensors.get("model.embed_tokens.weight")
    head = products.form(embed) if config.tied else tensors.linear("lm_head")
    cos, sin = _rotation(config, dtype, device)
    _give_back()
    return Weights(embed, tuple(layers), tensors.get("model.norm.weight"), head, cos, sin, products)


def _give_back() -> None:
    """Return to the system what loading and builder took and freed, where the C library keeps it (glibc)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _qk_norm(tensors: _Tensors, at: str, config: Config) -> Tensor:
    q, k = (tensors.get(f"{at}.self_attn.{part}_norm.weight") for part in "qk")
    return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))


def _rotation(config: Config, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(config.context).float(), frequencies(config.rope, config.head_dim))
    cos, sin = angles.cos() * amplitude(config.rope), angles.sin() * amplitude(config.rope)
    halves = (config.context, 1, 2, config.head_dim // 2)
    cos, sin = torch.cat((cos, cos), -1).view(halves), torch.cat((-sin, sin), -1).view(halves)
    return cos.to(device, dtype), sin.to(device, dtype)


class _Tensors:
    """The folder's tensors by name, each read from whichever safetensors file holds it; matrices in `form`."""

    form: Form = Plain

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        index = read_json(folder / "model.safetensors.index.json")
        files = sorted(set(index["weight_map"].values())) if index else [p.name for p in folder.glob("*.safetensors")]
        if not files:
            raise FileNotFoundError(
                f"model {str(folder)!r} holds no *.safetensors file: the torch engine reads no other weights (save a "
                "pytorch_model.bin as safetensors with save_pretrained)"
            )
        self.opened: list[Any] = [safe_open(folder / name, framework="pt") for name in files]
        self.where = {name: file for file in self.opened for name in file.keys()}  # noqa: SIM118 (not a dict)

    def get(self, name: str) -> Tensor:
        if name not in self.where:
            raise ValueError(f"the model's safetensors hold no tensor {name!r}: the folder is not complete")
        tensor: Tensor = self.where[name].get_tensor(name)
        return tensor.to(self.device, self.dtype)

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Several projections of the same input as one, their rows (and biases) in order."""
        weight = torch.cat([self.get(f"{name}.weight") for name in names])
        bias = torch.cat([self.get(f"{name}.bias") for name in names]) if biased else None
        return self.form(weight, bias)
