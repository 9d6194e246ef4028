"""A pytest plugin, `-p tests.vllm.faked_cuda`: vLLM believes that it runs on an H100.

Its configuration is then that of a GPU: asynchronous scheduling, the V2 model runner, CUDA graphs, FLASH_ATTN; its own
scheduler and KV manager run with it. No kernel runs: `tools/vllm_release.py` unpacks vLLM's CUDA release without its
extensions. Only the facts of a device are faked, in `torch.cuda`, where vLLM asks for them when it has no NVML.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NAME = "NVIDIA H100 80GB HBM3 (faked)"
NEED_KERNELS = {"test_outputs.py", "test_server.py"}


class NoKernels:
    """In place of `torch.ops._C`: no kernel is there, and none is supported."""

    def __getattr__(self, name: str) -> Any:
        if "supports" in name:
            return lambda *args: False
        raise AttributeError(name)


def fake_h100() -> None:
    """Replace what vLLM asks of a device, and the platform that it has found."""
    facts = SimpleNamespace(name=NAME, major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": NAME, "get_device_properties": facts,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    torch.ops._C = NoKernels()  # type: ignore[assignment]

    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()


def take_any_release() -> None:
    """The start check would end each test of a new release alike."""
    import rubato.vllm

    rubato.vllm.check_version = lambda: None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """They start an engine, and so a model."""
    return True if collection_path.name in NEED_KERNELS else None


def pytest_sessionstart() -> None:
    """After conftest.py, which sets what vLLM reads when it is imported."""
    fake_h100()
    take_any_release()
