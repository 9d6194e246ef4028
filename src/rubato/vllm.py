"""Rubato inside vLLM (docs/vllm.md): what its flags and plug-in points name.

vllm serve MODEL --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import rubato
from rubato.config.build import fair_share_of
from rubato.config.for_vllm import configured, left_to_vllm
from rubato.core.server_url import host_in_url
from rubato.engines.vllm import link
from rubato.engines.vllm.gateway_link import GatewayLink, LinkSettings
from rubato.engines.vllm.gateway_reports import GatewayReports
from rubato.engines.vllm.settings import check_version, installed_version

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
        gateways = _gateways(settings.link, folder, vllm_config)
        around = {
            "fair": fair_share_of(config),
            "strangers": not config.tenants,
            "publisher": link.Publisher(folder, vllm_config.parallel_config.data_parallel_index) if folder else None,
            "gateways": gateways,
        }
        chosen = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncScheduler
        made = chosen(vllm_config, *args, settings=settings, around=around, **kwargs)
        model = vllm_config.model_config
        made.rubato.open_to_gateways(model=model.model, vllm=installed_version(), rubato=rubato.__version__)
        return made


def _gateways(asked: Mapping[str, Any] | None, folder: str | None, vllm_config: Any) -> GatewayReports | None:
    """The link to gateways, where one is configured; its address is left in the folder for the API server. Raises
    ValueError and OSError for what cannot be."""
    if asked is None:
        return None
    where = LinkSettings.of(asked)
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1:
        raise ValueError(
            f"rubato.link: data_parallel_size is {engines}, and a gateway places requests on one engine a server: "
            "start a server for each engine"
        )
    made = GatewayLink(where)
    if folder is not None:
        link.leave_address(folder, where.host, made.port)
    log.info("gateways reach this engine at tcp://%s:%d", host_in_url(where.host), made.port)
    return GatewayReports(made)


def __getattr__(name: str) -> Any:
    if name == "Middleware":  # an engine core needs nothing of a server's
        from rubato.serving.vllm_middleware import Middleware

        return Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
