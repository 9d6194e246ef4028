"""Every form of a weight multiplies as float32 does, up to rounding; and which one is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rubato_torch.cpu import matmul_backends  # noqa: E402
from rubato_torch.cpu.matmul_backends import FBGEMM, Form, OneDNN, Plain, choose  # noqa: E402

FORMS: dict[str, tuple[Form, bool]] = {
    "plain": (Plain, True),
    "onednn": (OneDNN, matmul_backends.onednn_takes_bfloat16()),
    "fbgemm": (FBGEMM, matmul_backends.has_fbgemm()),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(11)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
@pytest.mark.parametrize(("biased", "threads"), [(False, 1), (True, 2)])
def test_products(name: str, rows: int, biased: bool, threads: int) -> None:
    form, able = FORMS[name]
    if not able:
        pytest.skip(f"{name} does not run on this CPU")
    torch.set_num_threads(threads)
    x, weight = torch.randn(rows, 96).bfloat16(), (torch.randn(160, 96) / 8).bfloat16()
    bias = torch.randn(160).bfloat16() if biased else None
    residual = torch.randn(rows, 160).bfloat16()
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    linear, before = form(weight, bias), residual.clone()
    with torch.inference_mode():
        torch.testing.assert_close(linear(x).float(), exact, rtol=0.01, atol=0.01)
        torch.testing.assert_close(linear.add(x, residual).float(), exact + residual.float(), rtol=0.02, atol=0.02)
    assert linear(x).dtype == linear.add(x, residual).dtype == torch.bfloat16
    assert torch.equal(residual, before)


def test_small_weights_are_not_lost_in_float16() -> None:
    if not matmul_backends.has_fbgemm():
        pytest.skip("no FBGEMM here")
    weight = torch.full((16, 16), 3e-6).bfloat16()
    found = FBGEMM(weight)(torch.ones(2, 16).bfloat16()).float()
    torch.testing.assert_close(found, torch.full((2, 16), 16 * 3e-6), rtol=0.02, atol=0.0)


def test_the_faster_form_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, and the only one where there is one."""
    if not (matmul_backends.has_fbgemm() and matmul_backends.onednn_takes_bfloat16()):
        pytest.skip("one of the two does not run here")
    weight = torch.zeros(64, 64).bfloat16()
    for seconds, form in (([0.002, 0.001], FBGEMM), ([0.001, 0.002], OneDNN)):
        monkeypatch.setattr(matmul_backends, "least_seconds", lambda linears, x, seconds=seconds: seconds)
        assert choose(weight).form is form
        assert "1.00 ms for 64 rows" in choose(weight).why
    monkeypatch.setattr(matmul_backends, "onednn_takes_bfloat16", lambda: False)
    assert choose(weight).form is FBGEMM
    monkeypatch.setattr(matmul_backends, "has_fbgemm", lambda: False)
    assert choose(weight).form is Plain


def test_other_dtypes_keep_pytorchs_product() -> None:
    assert choose(torch.zeros(8, 8)).form is Plain
    assert choose(torch.zeros(8, 8).half()).form is Plain


def test_choosing_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    seen: list[int] = []

    def timed(linears: Any, x: Any) -> list[float]:
        seen.append(torch.get_num_threads())
        return [1.0] * len(linears)

    monkeypatch.setattr(matmul_backends, "least_seconds", timed)
    monkeypatch.setattr(matmul_backends, "has_fbgemm", lambda: True)
    monkeypatch.setattr(matmul_backends, "onednn_takes_bfloat16", lambda: True)
    monkeypatch.setattr(matmul_backends, "OneDNN", Plain)
    monkeypatch.setattr(matmul_backends, "FBGEMM", Plain)
    choose(torch.zeros(8, 8).bfloat16())
    assert (seen, torch.get_num_threads()) == ([1], 2)
