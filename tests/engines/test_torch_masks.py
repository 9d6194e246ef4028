"""The engine's equality tests on the CPUs that others have: this one with some of its instructions hidden.

Libraries read their masks once, so each runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("llvmlite")

from rubato_torch.cpu import llvm_jit

pytestmark = pytest.mark.skipif(not llvm_jit.available(), reason="no x86-64 Linux")

ROOT = Path(__file__).parents[2]
QUICK = (
    "tests/engines/test_torch_cpu_ops.py::test_without_llvm_the_plain_path_gives_the_same_logits[qwen3-mixed]",
    "tests/engines/test_torch_matmul_backends.py",
)


@pytest.mark.slow
def test_the_engine_computes_the_same() -> None:
    _passes("avx2", *QUICK)


@pytest.mark.full
@pytest.mark.parametrize("mask", llvm_jit.SHOWN_AS)
def test_the_engine_computes_the_same_in_full(mask: str) -> None:
    """Greedy tokens as transformers', logits as the plain path's, attention of every shape."""
    _passes(
        mask, *(f"tests/engines/test_torch_{name}.py" for name in ("greedy", "cpu_ops", "twins", "matmul_backends"))
    )


def _passes(mask: str, *tests: str) -> None:
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *tests]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **llvm_jit.SHOWN_AS[mask]}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout.splitlines()[-1]
