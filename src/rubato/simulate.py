"""The production cluster on the virtual clock: requests in, events out; or a workload in, results out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rubato.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.cluster import Cluster, local_cluster
from rubato.engines.simulated import FREE, Drafter, Engine, Link
from rubato.fairness import FairShare
from rubato.interfaces import LatencyModel, LengthPredictor
from rubato.metrics import Timeline, timelines
from rubato.records import Record, Run
from rubato.types import Event, Limits, Request
from rubato.workload import Arrival, Workload


@dataclass(frozen=True)
class Setup:
    """What a simulation runs on. `latency` makes a model: one for each engine (the truth) and one for each scheduler
    (what it believes; `believed` if it is to differ, and it goes on learning). noise: relative spread of step times.
    router: "auto" is the policy's own, or `least_loaded`. link: what moving KV to a replica costs.
    drafter: None = the engines do not speculate."""

    latency: Callable[[], LatencyModel]
    limits: Limits
    policy: str
    settings: Mapping[str, object] = field(default_factory=dict)
    router: str = "auto"
    router_settings: Mapping[str, object] = field(default_factory=dict)
    replicas: int = 1
    believed: Callable[[], LatencyModel] | None = None
    lengths: LengthPredictor | None = None
    noise: float = 0.0
    seed: int = 0
    max_in_flight: int | None = None
    rule: str = "deadline"
    prefix_cache: bool = False
    link: Link = FREE
    drafter: Drafter | None = None
    fair: Callable[[], FairShare] | None = None


def simulate(
    requests: Sequence[Request],
    truth: Mapping[str, Sequence[int]],
    setup: Setup,
    *,
    watch: Callable[[Cluster, Event], None] | None = None,
) -> list[Event]:
    """Run `requests` (arrivals in virtual seconds) to their ends; every event, in order.

    truth: request id -> output tokens of each stage. Raises RuntimeError if some request never ends, and whatever
    an engine or a policy raised.
    """
    return run_virtual(_run(requests, truth, setup, watch))


async def _run(
    requests: Sequence[Request],
    truth: Mapping[str, Sequence[int]],
    setup: Setup,
    watch: Callable[[Cluster, Event], None] | None,
) -> list[Event]:
    clock = VirtualClock()
    engines = [
        Engine(
            setup.latency(),
            setup.limits,
            clock,
            lengths=truth,
            noise=setup.noise,
            seed=setup.seed + i,
            link=setup.link,
            drafter=setup.drafter,
        )
        for i in range(setup.replicas)
    ]
    cluster = local_cluster(
        engines,
        [(setup.believed or setup.latency)() for _ in engines],
        clock,
        policy=setup.policy,
        settings=setup.settings,
        router=setup.router,
        router_settings=setup.router_settings,
        lengths=setup.lengths,
        max_in_flight=setup.max_in_flight,
        rule=setup.rule,
        prefix_cache=setup.prefix_cache,
        fair=setup.fair() if setup.fair else None,
    )
    events: list[Event] = []
    cluster.listen(events.append)
    if watch is not None:
        cluster.listen(lambda event: watch(cluster, event))
    await cluster.start()
    for request in requests:
        clock.call_at(request.arrival, ARRIVAL, lambda r=request: cluster.offer(r))  # type: ignore[misc]
    if requests:
        await clock.sleep_until(max(r.arrival for r in requests), ARRIVAL)
    await cluster.drain()
    await cluster.close()
    if cluster.error is not None:
        raise cluster.error
    return events


def simulated_run(workload: Workload, setup: Setup, label: str | None = None) -> Run:
    """A workload simulated, as the results of a bench are: records, judged by `setup.rule`."""
    requests = list(workload.requests())
    truth = {a.id: (a.output_tokens,) for a in workload.arrivals}
    events = simulate(requests, truth, setup)
    lines = {line.request.id: line for line in timelines(events)}
    records = tuple(_record(arrival, lines[arrival.id]) for arrival in workload.arrivals)
    settings = {
        "simulated": True,
        "policy": setup.policy,
        "settings": dict(setup.settings),
        "router": setup.router,
        "replicas": setup.replicas,
        "limits": asdict(setup.limits),
        "noise": setup.noise,
        "seed": setup.seed,
    }
    return Run(label or setup.policy, workload, records, setup.rule, settings=settings)


def _record(arrival: Arrival, line: Timeline) -> Record:
    end = line.end
    if end is None:
        raise RuntimeError(f"request {arrival.id!r} has no end")
    return Record(
        id=arrival.id,
        tier=arrival.tier,
        app=arrival.app,
        at=arrival.at,
        outcome=end.outcome,
        verdict=end.verdict,
        asked=arrival.output_tokens,
        output=end.output,
        times=tuple(line.times),
        tokens=tuple(line.tokens),
        reason="" if end.outcome == "completed" else end.reason,
        prompt_tokens=arrival.prompt_tokens,
        best_effort=end.best_effort,
    )
