"""Rubato inside vLLM: `--scheduler-cls rubato.vllm.Scheduler` (docs/vllm.md)."""

from __future__ import annotations

from typing import Any

from rubato.engines.vllm.settings import check_version

__all__ = ["Scheduler"]


class Scheduler:
    """vLLM's scheduler, steered by a policy: synchronous or asynchronous, as vLLM's configuration has it.

    vLLM calls it as it calls a scheduler class of its own. Raises RuntimeError for a version of vLLM that it is not
    written for, ValueError for settings and configurations that it cannot serve.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        check_version()
        from rubato.engines.vllm.scheduler import AsyncPolicyScheduler, SyncScheduler

        chosen = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncScheduler
        return chosen(vllm_config, *args, **kwargs)
