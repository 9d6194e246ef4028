"""Matrix products x @ weight.T + bias on a CPU, by whichever kept library is fastest on this machine.

Three forms of a weight: `Plain` is PyTorch's own product in the model's dtype. `OneDNN` keeps bfloat16 in oneDNN's
blocked layout: the fastest where the CPU has BF16 instructions. `FBGEMM` keeps float16 in FBGEMM's panels and computes
in float32: the fastest everywhere else, at every number of rows, since it needs AVX2 only and reads 16 bits a weight.
bfloat16 weights are exact in float16 from 6e-5 to 65504; smaller ones are off by at most 3e-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rubato.core.clock import measure_cost

LAYOUT_ROWS = 256  # that oneDNN's layout is chosen for; one layout serves all batch sizes (measured, 1 to 1,400 rows)
TRIAL_ROWS = 64  # a product of so many rows decides: with and without BF16 instructions the two are twice apart there
TRIAL_RUNS = 7


class Linear(Protocol):
    """One weight (out, in), ready to be multiplied by."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out), in the dtype of x."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the product; residual (rows, out) is not changed."""
        ...


class Form(Protocol):
    """Makes a `Linear` of a weight (out, in) and a bias (out) or None."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...


class Plain:
    """PyTorch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, self.weight, self.bias)


class OneDNN:
    """bfloat16 in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS), bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y


class FBGEMM:
    """float16 in FBGEMM's panels; activations and sums are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype = weight.dtype
        given = None if bias is None else bias.float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), given)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed)
        return y.to(self.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed)
        return y.add_(residual).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Choice:
    """form: of every weight of a model; why: for the log."""

    form: Form
    why: str


def choose(weight: Tensor) -> Choice:
    """The form for a model with weights like this one (out, in): the only one that works here, or the faster of two,
    by a product of TRIAL_ROWS rows on one thread."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return Choice(Plain, f"PyTorch, {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    able: dict[str, Form] = {}
    if onednn_takes_bfloat16():
        able["oneDNN, bfloat16"] = OneDNN
    if has_fbgemm():
        able["FBGEMM, float16"] = FBGEMM
    if not able:
        return Choice(Plain, "PyTorch, bfloat16: no faster library runs on this CPU")
    if len(able) == 1:
        (name,) = able
        return Choice(able[name], f"{name}: the only fast one on this CPU")
    (best, name), (next_best, other) = sorted(zip(_trial(weight, list(able.values())), able, strict=True))
    why = f"{name}: {1e3 * best:.2f} ms for {TRIAL_ROWS} rows on one thread, {other} {1e3 * next_best:.2f} ms"
    return Choice(able[name], why)


def _trial(weight: Tensor, forms: Sequence[Form]) -> list[float]:
    """Seconds of a product in each form, the least of some runs in turn. On one thread: another program may have the
    second core, and both forms use threads alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.ones(TRIAL_ROWS, weight.shape[1], dtype=weight.dtype)
        return least_seconds([form(weight) for form in forms], x)
    finally:
        torch.set_num_threads(threads)


def least_seconds(linears: Sequence[Linear], x: Tensor) -> list[float]:
    """Of a product with each of these, run in turn: the first round does not count."""
    rounds = [[measure_cost(partial(linear, x))[1].wall for linear in linears] for _ in range(TRIAL_RUNS + 1)]
    return [min(seconds) for seconds in zip(*rounds[1:], strict=True)]


def onednn_takes_bfloat16() -> bool:
    """Whether it multiplies bfloat16 on this CPU; not that it does so fast."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fbgemm() -> bool:
    """Whether FBGEMM runs on this CPU: x86-64 with AVX2."""
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.cpu._is_avx2_supported()
