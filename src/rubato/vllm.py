"""Rubato inside vLLM (docs/vllm.md): what its flags and plug-in points name.

vllm serve MODEL --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import rubato
from rubato.config.build import fair_share_of
from rubato.config.for_vllm import ignored_settings, load_for_vllm
from rubato.core.server_url import host_in_url
from rubato.engines.vllm import link
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.settings import LinkSettings, check_version, installed_version

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

        settings, config = load_for_vllm(vllm_config.additional_config)
        if config.tenants and not os.environ.get(link.KEY):
            raise ValueError("tenants are configured, and VLLM_PLUGINS leaves out `rubato`, which they need: name it")
        if ignored := ignored_settings(config):
            log.warning("%s: inside vLLM these have no effect: %s", settings.config, ", ".join(ignored))
        engine = vllm_config.parallel_config.data_parallel_index
        around = {
            "fair": fair_share_of(config),
            "trust_client_slos": not config.tenants,
            "link": _link(settings.link, engine, vllm_config),
            "engine": engine,
        }
        chosen = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncScheduler
        made = chosen(vllm_config, *args, settings=settings, around=around, **kwargs)
        model = vllm_config.model_config
        made.rubato.open_link(model=model.model, vllm=installed_version(), rubato=rubato.__version__)
        return made


def _link(where: LinkSettings | None, engine: int, vllm_config: Any) -> CoreLink | None:
    """The link to API servers, where their folder was announced, and to gateways, where that is configured: its address
    is left in the folder for the API server. Raises ValueError and OSError for what cannot be."""
    folder, key = os.environ.get(link.FOLDER), os.environ.get(link.KEY, "")
    if where is None and folder is None:
        return None
    engines = vllm_config.parallel_config.data_parallel_size
    if where is not None and engines > 1:
        raise ValueError(
            f"rubato.link: data_parallel_size is {engines}, and a gateway places requests on one engine a server: "
            "start a server for each engine"
        )
    made = CoreLink(where, "" if folder is None else link.endpoint(folder, engine), key)
    if where is not None:
        if folder is not None:
            link.leave_address(folder, where.host, made.port)
        log.info("gateways reach this engine at tcp://%s:%d", host_in_url(where.host), made.port)
    return made


def __getattr__(name: str) -> Any:
    if name == "Middleware":  # an engine core needs nothing of a server's
        from rubato.serving.vllm_middleware import Middleware

        return Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
