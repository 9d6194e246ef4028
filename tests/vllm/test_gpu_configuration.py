"""What vLLM resolves to by its own defaults on the H100 that `faked_cuda` fakes; without it there is nothing to see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend

if not current_platform.is_cuda():
    pytest.skip("no GPU, real or faked", allow_module_level=True)


def test_by_default_a_gpu_schedules_asynchronously_with_graphs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    args = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=256, scheduler_cls="rubato.vllm.Scheduler"
    )
    config = args.create_engine_config()
    assert config.scheduler_config.async_scheduling
    assert config.use_v2_model_runner
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    with set_current_vllm_config(config):
        backend = get_attn_backend(128, torch.bfloat16, "auto")
    assert backend.get_name() == "FLASH_ATTN"
