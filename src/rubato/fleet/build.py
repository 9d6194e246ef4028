"""Clusters from a policy's name: hosts of one kind, their schedulers and the router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rubato.core.clock import Clock
from rubato.core.interfaces import Autoscaler, Engine, Host, LatencyModel, LengthPredictor
from rubato.fleet.cluster import Cluster, HostLost, HostMaker
from rubato.fleet.event_bus import Listener
from rubato.fleet.fair_share import FairShare
from rubato.fleet.local_host import LocalHost
from rubato.policies import load, router_for


def cluster_of(
    makers: Sequence[HostMaker],
    clock: Clock,
    *,
    policy: str,
    settings: Mapping[str, object] | None = None,
    router: str = "auto",
    router_settings: Mapping[str, object] | None = None,
    lengths: LengthPredictor | None = None,
    max_in_flight: int | None = None,
    slo_rule: str = "deadline",
    prefix_cache: bool = False,
    fair: FairShare | None = None,
    autoscaler: Autoscaler | None = None,
    spare: HostMaker | None = None,
    step_timeout: float | None = None,
) -> Cluster:
    """A cluster of hosts r0, r1, ..., one of each maker, with one policy and one router (`auto`: the policy's own, or
    `least_loaded`). autoscaler, spare: what adds and drains hosts, and the maker of those. step_timeout: of a host with
    a real engine, as `LocalHost`.

    Raises PolicyError for an unknown policy, router or setting.
    """
    load(policy, settings)  # an error here, also where hosts load their own in another process
    options: dict[str, Any] = {"lengths": lengths, "slo_rule": slo_rule, "prefix_cache": prefix_cache}
    if step_timeout is not None:
        options["step_timeout"] = step_timeout

    def made(make: HostMaker, id: str, emit: Listener, lost: HostLost) -> Host:
        return make(id, emit=emit, lost=lost, policy=policy, settings=settings, options=options)

    def hosts(emit: Listener, lost: HostLost) -> list[Host]:
        return [made(make, f"r{i}", emit, lost) for i, make in enumerate(makers)]

    placing = router_for(policy, router, router_settings, settings)
    return Cluster(
        hosts, placing, clock, max_in_flight=max_in_flight, slo_rule=slo_rule, fair=fair, lengths=lengths,
        autoscaler=autoscaler, spare=None if spare is None else partial(made, spare),
    )  # fmt: skip


def local_cluster(
    engines: Sequence[Engine], latencies: Sequence[LatencyModel], clock: Clock, *,
    spare: Callable[[], tuple[Engine, LatencyModel]] | None = None, **given: Any,
) -> Cluster:  # fmt: skip
    """A cluster of hosts in this process, one an engine, each with a Scheduler and a latency model of its own. spare:
    makes both for a host that an autoscaler adds.

    given: as `cluster_of` takes and raises; also ValueError for an engine that lacks what the policy needs.
    """

    def maker(engine: Engine, latency: LatencyModel) -> HostMaker:
        def make(id: str, *, emit: Listener, lost: HostLost, policy: str, settings: Mapping[str, object] | None,
                 options: Mapping[str, Any]) -> Host:  # fmt: skip
            scheduler = load(policy, settings)
            return LocalHost(
                id, engine, scheduler, latency, clock, emit=emit, lost=lost, policy=policy, handoff=True, **options
            )

        return make

    def further(id: str, **more: Any) -> Host:
        assert spare is not None
        return maker(*spare())(id, **more)

    pairs = zip(engines, latencies, strict=True)
    return cluster_of([maker(*pair) for pair in pairs], clock, spare=None if spare is None else further, **given)
