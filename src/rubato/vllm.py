"""Rubato inside vLLM (docs/vllm.md): what its flags and plug-in points name.

vllm serve MODEL --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from rubato.config.build import fair_share_of
from rubato.config.for_vllm import configured, left_to_vllm
from rubato.engines.vllm import link
from rubato.engines.vllm.settings import check_version

if TYPE_CHECKING:
    from rubato.serving.vllm_middleware import Middleware as Middleware

__all__ = ["Middleware", "Scheduler"]

log = logging.getLogger("vllm.rubato")


class Scheduler:
    """vLLM's scheduler, steered by a policy: synchronous or asynchronous, as vLLM's configuration has it.

    vLLM calls it as it calls a scheduler class of its own. Raises RuntimeError for a version of vLLM that it is not
    written for, ValueError for settings and configurations that it cannot serve.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        check_version()
        from rubato.engines.vllm.scheduler import AsyncPolicyScheduler, SyncScheduler

        settings, config = configured(vllm_config.additional_config)
        if config.tenants and not os.environ.get(link.KEY):
            raise ValueError("tenants are configured, and VLLM_PLUGINS leaves out `rubato`, which they need: name it")
        if ignored := left_to_vllm(config):
            log.warning("%s: inside vLLM these have no effect: %s", settings.config, ", ".join(ignored))
        folder = os.environ.get(link.FOLDER)
        around = {
            "fair": fair_share_of(config),
            "strangers": not config.tenants,
            "publisher": link.Publisher(folder, vllm_config.parallel_config.data_parallel_index) if folder else None,
        }
        chosen = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncScheduler
        return chosen(vllm_config, *args, settings=settings, around=around, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "Middleware":  # an engine core needs nothing of a server's
        from rubato.serving.vllm_middleware import Middleware

        return Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
