"""Clusters from a policy's name: hosts of one kind, their schedulers and the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from rubato.core.clock import Clock
from rubato.core.interfaces import Engine, LatencyModel, Router
from rubato.fleet.cluster import Cluster, HostLost, HostMaker
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.event_bus import Listener
from rubato.fleet.local_host import LocalHost
from rubato.policies import load, router_for


def cluster_of(
    makers: Sequence[HostMaker], clock: Clock, options: ClusterOptions, extra_host: HostMaker | None = None, *,
    wrap_router: Callable[[Router], Router] = lambda router: router,
) -> Cluster:  # fmt: skip
    """Returns a cluster of hosts r0, r1, ..., one of each maker, with one policy and one router.

    Args:
        extra_host: makes the hosts that the autoscaler adds.
        wrap_router: returns the router to ask, given the policy's.

    Raises:
        PolicyError: the policy, the router or a setting is unknown.
    """
    choice, replica = options.choice, options.replica
    load(choice.policy, choice.settings)  # an error here, also where hosts load their own in another process
    router = wrap_router(router_for(choice.policy, choice.router, choice.router_settings, choice.settings))
    return Cluster(
        makers, router, clock, max_in_flight=options.max_in_flight, slo_rule=replica.slo_rule, fair=options.fair,
        lengths=replica.lengths, autoscaler=options.autoscaler, extra_host=extra_host,
    )  # fmt: skip


def local_cluster(
    engines: Sequence[Engine], latencies: Sequence[LatencyModel], clock: Clock, options: ClusterOptions, *,
    extra: Callable[[], tuple[Engine, LatencyModel]] | None = None, step_timeout: float | None = None,
) -> Cluster:  # fmt: skip
    """Returns a cluster of hosts in this process, one per engine, each with its own Scheduler and latency model.

    Args:
        extra: makes an engine and its latency model for a host that the autoscaler adds.
        step_timeout: seconds, as in `LocalHost`.

    Raises:
        PolicyError: as in `cluster_of`.
        ValueError: an engine lacks what the policy needs.
    """
    choice = options.choice
    first = list(zip(engines, latencies, strict=True))
    pairs = chain(first, () if extra is None else iter(extra, None))

    def host(id: str, emit: Listener, lost: HostLost) -> LocalHost:
        engine, latency = next(pairs)
        return LocalHost(
            id, engine, load(choice.policy, choice.settings), latency, clock, emit=emit, lost=lost,
            policy=choice.policy, options=options.replica, step_timeout=step_timeout,
        )  # fmt: skip

    return cluster_of([host] * len(first), clock, options, None if extra is None else host)
