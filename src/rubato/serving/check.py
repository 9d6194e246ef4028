"""`rubato check`: finds what a start would refuse, without listening, loading weights or asking a server."""

from __future__ import annotations

import contextlib

from rubato.config.schema import Config
from rubato.core.clock import VirtualClock
from rubato.core.event_log import check_event_log
from rubato.frontdoor.tenants import Tenants, tenants_of, tiers_of
from rubato.serving.serve import build, engines_of, tls_settings, tracer_of
from rubato.serving.server_fleets import fleet_of, ray_options, ray_servers_of


def check_start(config: Config) -> None:
    """Raises as a start would (ConfigError, PolicyError, ValueError, OSError), but not for port, servers or Ray."""
    clock = VirtualClock()
    tls_settings(config)
    Tenants(tenants_of(config), tiers_of(config))
    for path in filter(None, (config.event_log, config.step_log)):
        check_event_log(path)
    with contextlib.ExitStack() as stack:
        tracer_of(config, clock, stack)
    if config.servers:
        fleet_of(config, clock, {})
    elif config.engine.name == "vllm":
        ray_servers_of(config)
        ray_options(config)
    elif config.fleet.name == "ray":
        engines_of(config, clock)
        ray_options(config)
    else:
        build(config, clock)
