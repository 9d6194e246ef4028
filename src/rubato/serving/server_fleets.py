"""Makes the gateway from a configuration: over running OpenAI servers, or over vLLM servers started on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from rubato.config.build import (
    autoscaler_of,
    check_names,
    choice_of,
    fair_share_of,
    in_flight_bound,
    latency_of,
    lengths_of,
    most_in_flight,
)
from rubato.config.schema import Config, ConfigError
from rubato.config.vllm_server import VllmServers, vllm_command
from rubato.core.clock import Clock, unix_time
from rubato.core.did_you_mean import nearest
from rubato.core.extras import MissingExtra, extra
from rubato.core.interfaces import Autoscaler, LengthPredictor
from rubato.core.replica_options import ReplicaOptions
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.http_client import HttpServer
from rubato.fleet.relay import Trips
from rubato.fleet.server_actor import ServerCommand
from rubato.fleet.server_fleet import Server, ServerFleet, server_cluster
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_probe import DEFAULT_LIMITS, HomogeneityCheck
from rubato.fleet.upstream import Upstream
from rubato.frontdoor.tenants import Tenants
from rubato.serving.gateway import GatewayService, create_gateway

AppMaker = Callable[[Tenants, Callable[[], int]], FastAPI]  # takes the tenants, and a counter of dropped log lines
RAY_ACTOR_SETTINGS = ["address", "num_cpus", "num_gpus", "resources", "runtime_env"]  # settings of fleet 'ray'


async def gateway_of(config: Config, clock: Clock) -> tuple[Cluster, AppMaker]:
    """Returns a cluster over `servers`, and the gateway's app. Raises ConfigError, PolicyError or ValueError."""
    trips: Trips = {}
    fleet, options, key = fleet_of(config, clock, trips)
    cluster = await server_cluster(fleet, clock, options)
    return cluster, _app_maker(config, clock, cluster, trips, fleet.homogeneity, key)


def fleet_of(
    config: Config, clock: Clock, trips: Trips, *, transport: Callable[[str], Upstream] = HttpServer,
    link: Callable[[str], Link] | None = ZmqLink,
) -> tuple[ServerFleet, ClusterOptions, str]:  # fmt: skip
    """Returns the fleet of `servers`, the options of a cluster over it, and the key of the servers' API.

    Args:
        transport: as in `ServerFleet`.
        link: as in `ServerFleet`.

    Raises:
        ConfigError, PolicyError: for an impossible configuration.
    """
    check_names(config)
    if config.autoscale is not None:
        raise ConfigError("autoscale: servers that run already are not started here; leave it out")
    bound = in_flight_bound(config, len(config.servers) * DEFAULT_LIMITS.max_num_seqs)
    options = cluster_options(config, lengths_of(config), bound)
    servers = [Server(one.url, one.link, one.key) for one in config.servers]
    keys = {server.key for server in servers}
    if len(keys) > 1:
        raise ConfigError("servers: they have different keys; give all of them the same")
    profile = (lambda: latency_of(config)) if config.latency is not None else lambda: None
    fleet = ServerFleet(
        servers, clock, options, trips,
        profile=profile, transport=transport, link=link, step_timeout=config.step_timeout_seconds,
    )  # fmt: skip
    return fleet, options, min(keys)


def servers_on_ray(config: Config, clock: Clock) -> tuple[Cluster, AppMaker]:
    """Returns a cluster over `replicas` vLLM servers, each started by a Ray actor, and the gateway's app. Lost servers
    are replaced unless `autoscale` is set. Raises ConfigError, PolicyError or ValueError."""
    command, key, scaled = ray_servers_of(config)
    gpus = {"num_gpus": VllmServers.of(config.engine.settings, "engine.").tensor_parallel_size}
    resources = {**gpus, **started_ray(config)}
    from rubato.fleet.ray_servers import RayServers, ReplaceLost

    trips: Trips = {}
    autoscaler = scaled or ReplaceLost(config.replicas)
    options = cluster_options(config, lengths_of(config), most_in_flight(config, DEFAULT_LIMITS), autoscaler)
    fleet = RayServers(
        command, clock, options, trips, resources=resources, key=key, step_timeout=config.step_timeout_seconds
    )  # fmt: skip
    cluster = cluster_of([fleet.host] * config.replicas, clock, options, fleet.host, wrap_router=fleet.restrict_router)
    return cluster, _app_maker(config, clock, cluster, trips, fleet.homogeneity, key)


def ray_servers_of(config: Config) -> tuple[ServerCommand, str, Autoscaler | None]:
    """Returns the command that starts a vLLM server, its API key, and the autoscaler. Raises ConfigError."""
    check_names(config)
    if config.fleet.name != "ray" and "fleet" in config.model_fields_set:
        raise ConfigError(f"fleet: engine 'vllm' runs in Ray actors, not {config.fleet.name!r}: set it to ray")
    return *vllm_command(config), autoscaler_of(config)


def cluster_options(
    config: Config, lengths: LengthPredictor | None, max_in_flight: int | None, autoscaler: Autoscaler | None = None
) -> ClusterOptions:  # fmt: skip
    """Returns the options of the cluster of a configuration."""
    replica = ReplicaOptions(lengths, config.slo_rule, config.prefix_cache)
    return ClusterOptions(choice_of(config), replica, max_in_flight, fair_share_of(config), autoscaler)


def app_settings(
    config: Config, clock: Clock, tenants: Tenants, log_lines_dropped: Callable[[], int]
) -> dict[str, Any]:  # fmt: skip
    """Returns the settings of `AppService` that a configuration states for every app."""
    return {
        "tenants": tenants,
        "has_fair_share": bool(config.tenants),
        "max_body_bytes": config.max_body_bytes,
        "created_offset": unix_time() - clock.now(),
        "log_lines_dropped": log_lines_dropped,
        "policy": config.policy.name,
    }


def _app_maker(
    config: Config, clock: Clock, cluster: Cluster, trips: Trips, homogeneity: HomogeneityCheck, key: str
) -> AppMaker:  # fmt: skip
    """Returns what makes the gateway's app; `key` is that of the servers' API."""

    def app(tenants: Tenants, dropped: Callable[[], int]) -> FastAPI:
        first = homogeneity.first_server
        assert first is not None, "the cluster has started"
        return create_gateway(
            GatewayService(
                cluster, config.served_model_name or first.model, first.limits.max_model_len, trips, key,
                lambda: bool(first.version), homogeneity.models, max_choices=config.max_choices,
                **app_settings(config, clock, tenants, dropped),
            )
        )  # fmt: skip

    return app


def started_ray(config: Config) -> dict[str, Any]:
    """Joins the Ray cluster of `fleet.address`, or starts one on loopback. Returns Ray's options for each actor, such
    as `num_gpus`, from `fleet`. Raises ConfigError."""
    address, resources = ray_options(config)
    if address == "local":
        # Ray turns a node address of 127.0.0.1 into the host's own and then listens on all interfaces. With this set
        # before its import, which is the default on macOS, it stays on loopback.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        with extra("ray", "fleet 'ray'"):
            import ray
    except MissingExtra as error:
        raise ConfigError(str(error)) from None
    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=False if address == "local" else None, configure_logging=False)
    return resources


def ray_options(config: Config) -> tuple[str, dict[str, Any]]:
    """Returns the Ray cluster's address, `local` to start one, and each actor's Ray options. Raises ConfigError."""
    resources = dict(config.fleet.settings)
    address = resources.pop("address", None) or "local"  # with None Ray would join any cluster it finds
    for name in resources:
        if name not in RAY_ACTOR_SETTINGS:
            raise ConfigError(f"fleet 'ray' has no setting {name!r}{nearest(name, RAY_ACTOR_SETTINGS)}")
    return address, resources
