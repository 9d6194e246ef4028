"""Runs a workload in virtual time, to the record of each request; or requests, to every event or to their timelines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from math import inf

from rubato.core.clock import ARRIVAL, Clock, VirtualClock, run_virtual
from rubato.core.events import Demoted, Event, Finished, HandedOff, Offered, Promoted, Tokens
from rubato.core.interfaces import LatencyModel
from rubato.core.request import NOTHING, Request
from rubato.core.slo import StageTimes
from rubato.core.timeline import Timeline
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.measure.records import BenchResult, Record, not_offered
from rubato.measure.replica_seconds import ReplicaSecondsMeter
from rubato.simulation.driver import drive
from rubato.simulation.run_spec import RunSpec, Truth
from rubato.simulation.simulated_host import HostOptions
from rubato.workloads import Arrival, Workload
from rubato.workloads.offering import Offering

Pauses = Mapping[str, Sequence[float]]  # request id -> seconds of the tool before each stage, where one waits for it


def simulate(
    workload: Workload, spec: RunSpec, seed: int = 0, *, times: bool = True, causes: bool = True,
    listen: Callable[[Event], None] | None = None,
) -> BenchResult:  # fmt: skip
    """Simulates a workload.

    The result is what a bench of a server would write: a record of each request, judged by `spec.slo_rule`.

    Args:
        workload: its requests.
        spec: of the run.
        seed: of the noise in step times.
        times: keep when each token came out; without, a run of many long requests takes less memory.
        causes: say of each miss why; without, it is faster where many miss.
        listen: gets every event.
    """
    spec, offering = spec.for_load(workload), workload.offering(spec.stated_max_tokens)
    requests = list(workload.requests(spec.stated_max_tokens)) if offering is None else offering
    cost = ReplicaSecondsMeter(f"r{i}" for i in range(spec.replicas))

    def follow(event: Event) -> None:
        cost(event)
        if listen is not None:
            listen(event)

    lines = simulate_requests(
        requests, workload.truth(), spec, seed, times=times, causes=causes, pauses=workload.pauses(), listen=follow
    )
    # removed from `lines`, which the cluster's cycles hold: else it would stay until the next collection
    dropped = {} if offering is None else offering.dropped
    paced = None
    if offering is not None:
        paced = max((line.end.at for line in lines.values() if line.end is not None), default=0.0)
    records = tuple(
        not_offered(arrival, *dropped[arrival.id], spec.slo_rule)
        if arrival.id in dropped
        else _record(arrival, lines.pop(arrival.id), times)
        for arrival in workload.arrivals
    )
    settings = {
        "simulated": True,
        "policy": spec.choice.policy,
        "settings": dict(spec.choice.settings),
        "router": spec.choice.router,
        **({"router_settings": dict(spec.choice.router_settings)} if spec.choice.router_settings else {}),
        "replicas": spec.replicas,
        "limits": asdict(spec.hardware.limits),
        "noise": spec.noise,
        "seed": seed,
    }
    if spec.autoscaler is not None:
        settings |= {"autoscale": repr(spec.autoscaler()), "start_seconds": spec.start_seconds}
    return BenchResult(
        spec.choice.label, workload, records, spec.slo_rule, settings=settings, replica_seconds=cost.until_last_end(),
        paced_seconds=paced,
    )  # fmt: skip


def simulate_events(
    requests: Sequence[Request] | Offering, truth: Truth, spec: RunSpec, seed: int = 0, *,
    watch: Callable[[Cluster, Event], None] | None = None, pauses: Pauses = NOTHING,
) -> list[Event]:  # fmt: skip
    """Runs requests to their ends on the virtual event loop, and returns every event, in order.

    As live, a policy that raises fails the requests that are there, and after several times in a row the replica; what
    comes after the last of `requests` is refused.

    Args:
        requests: with arrivals in virtual seconds; or a fresh `Offering`, where their times follow from the run.
        truth: output tokens of each request.
        spec: of the run.
        seed: of the noise in step times.
        watch: called with the cluster and each event.
        pauses: seconds of the requests' tools.

    Raises:
        RuntimeError: some request never ends.
        Exception: whatever ended the cluster.
    """

    async def main() -> list[Event]:
        clock = VirtualClock()
        models, seeds = spec.scheduler_models(), count(seed)

        def replica(start_seconds: float = 0.0) -> tuple[Engine, LatencyModel]:
            engine = Engine(
                spec.hardware.model, spec.hardware.limits, clock, lengths=truth, noise=spec.noise, seed=next(seeds),
                link=spec.link, drafter=spec.drafter, start_seconds=start_seconds,
            )  # fmt: skip
            return engine, next(models)

        pairs = [replica() for _ in range(spec.replicas)]
        extra = (lambda: replica(spec.start_seconds)) if spec.autoscaler is not None else None
        engines, latencies = [engine for engine, _ in pairs], [latency for _, latency in pairs]
        cluster = local_cluster(engines, latencies, clock, spec.cluster_options(truth), extra=extra)
        events: list[Event] = []
        cluster.listen(events.append)
        if pauses:
            cluster.listen(run_tools(pauses, cluster, clock))
        if watch is not None:
            cluster.listen(lambda event: watch(cluster, event))
        await cluster.start()
        if isinstance(requests, Offering):
            all_offered = asyncio.Event()
            cluster.listen(offer_in_turn(requests, cluster, clock, all_offered.set))
            await all_offered.wait()
        else:
            for request in requests:
                clock.call_at(request.arrival, ARRIVAL, lambda r=request: cluster.offer(r))  # type: ignore[misc]
            if requests:
                await clock.sleep_until(max(r.arrival for r in requests), ARRIVAL)
        await cluster.drain()
        await cluster.close()
        if cluster.error is not None:
            raise cluster.error
        return events

    return run_virtual(main())


def run_tools(pauses: Pauses, cluster: Cluster, clock: Clock) -> Callable[[Event], None]:
    """Makes a listener that runs the tools: each returns so many seconds after the stage before it is done."""

    def follow(event: Event) -> None:
        if isinstance(event, Tokens) and event.stage_done and event.id in pauses:
            returns = event.at + pauses[event.id][event.stage + 1]
            clock.call_at(returns, ARRIVAL, lambda: cluster.resume(event.id))

    return follow


def offer_in_turn(
    offering: Offering, cluster: Cluster, clock: Clock, all_offered: Callable[[], None] = lambda: None
) -> Callable[[Event], None]:
    """Makes a listener that offers requests as ends of others say, beginning now.

    Args:
        offering: the requests.
        cluster: to offer them to.
        clock: of the cluster.
        all_offered: called when the last has been offered, or is never to be.
    """
    next_call = inf  # when the clock calls next

    def ask() -> None:
        nonlocal next_call
        if not offering.remaining:
            all_offered()
        elif (at := offering.next_at) < next_call:
            next_call = at
            clock.call_at(at, ARRIVAL, offer)

    def offer() -> None:
        nonlocal next_call
        if clock.now() >= next_call:
            next_call = inf
        for request in offering.due(clock.now()):
            cluster.offer(request)
        ask()

    def follow(event: Event) -> None:
        if isinstance(event, Finished):
            offering.record_end(event.id, event.at, event.outcome)
            ask()

    ask()
    return follow


def simulate_requests(
    requests: Iterable[Request] | Offering, truth: Truth, spec: RunSpec, seed: int = 0, *, times: bool = True,
    causes: bool = True, pauses: Pauses = NOTHING, listen: Callable[[Event], None] | None = None,
) -> dict[str, Timeline]:  # fmt: skip
    """Runs requests to their ends on the queue of events, and returns what became of each, by id.

    Unlike in `simulate_events`, steps between two decisions are not run one by one, a policy that raises ends the
    simulation, and requests may come after the last.

    Args:
        requests: a sequence if some are of one group or wait for tools; or a fresh `Offering`.
        times: keep when each token came out.
        pauses: seconds of the requests' tools.
        listen: gets every event.

    Raises:
        RuntimeError: some request never ends. Whatever a policy raised is raised, too.
    """
    lines: dict[str, Timeline] = {}
    token_times: dict[str, list[float]] = {}
    offering, listed = (requests, requests.requests) if isinstance(requests, Offering) else (None, requests)
    shared = isinstance(listed, Sequence) and any(r.group or r.uses_tools for r in listed)

    def keep_times(event: Finished, stages: Sequence[StageTimes]) -> None:
        token_times[event.id] = [float(t) for stage in stages for t in stage.tokens]

    def follow(event: Event) -> None:
        if isinstance(event, Offered):
            lines[event.id] = Timeline(event.request)
        elif isinstance(event, Demoted):
            lines[event.id].demoted_at = event.at
        elif isinstance(event, Promoted):
            lines[event.id].demoted_at = None
        elif isinstance(event, HandedOff):
            progress = event.request.progress  # should no replica take it, this is all that it had
            token_times[event.id] = [] if progress is None else [t for stage in progress.times for t in stage]
        elif isinstance(event, Finished):
            line = lines[event.id]
            line.end = event
            if times:
                line.times = token_times.pop(event.id, [])
                line.tokens = list(range(1, len(line.times) + 1))
                if spec.drafter is not None:  # of tokens that came together the last tells how many
                    together = dict(zip(line.times, line.tokens, strict=True))
                    line.times, line.tokens = list(together), list(together.values())

    def ready(cluster: Cluster) -> None:
        cluster.listen(follow, Offered, Demoted, Promoted, HandedOff, Finished)
        if listen is not None:
            cluster.listen(listen)
        if pauses:
            cluster.listen(run_tools(pauses, cluster, cluster.clock))
        if offering is not None:
            cluster.listen(offer_in_turn(offering, cluster, cluster.clock))

    counts = not (shared or pauses or spec.prefix_cache)
    host_options = HostOptions(counts, bool(pauses), on_end=keep_times if times else None)
    with gc_paused():
        drive(listed if offering is None else (), truth, spec, host_options, ready, seed=seed, causes=causes)
    return lines


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses Python's cycle collector, which scans all kept objects repeatedly (a fifth of the time); few cycles are
    made here. It is also a decorator, `@gc_paused()`.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _record(arrival: Arrival, line: Timeline, times: bool) -> Record:
    end = line.end
    if end is None:
        raise RuntimeError(f"request {arrival.id!r} has no end")
    return Record(
        id=arrival.id,
        tier=arrival.tier,
        app=arrival.app,
        at=line.request.arrival,
        outcome=end.outcome,
        verdict=end.verdict,
        asked=arrival.output_tokens,
        output=end.output,
        times=tuple(line.times) if times else (),
        tokens=tuple(line.tokens) if times else (),
        reason="" if end.outcome == "completed" else end.reason,
        prompt_tokens=arrival.prompt_tokens,
        best_effort=end.best_effort,
        demoted_at=line.demoted_at,
    )
