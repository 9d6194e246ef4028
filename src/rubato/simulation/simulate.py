"""The production cluster on the virtual clock: requests in, events out; or a workload in, results out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from rubato.core.clock import ARRIVAL, Clock, VirtualClock, run_virtual
from rubato.core.events import Event, Finished, HandedOff, Offered, Tokens
from rubato.core.interfaces import Autoscaler, LatencyModel, LengthPredictor
from rubato.core.plan import Limits, Sample
from rubato.core.request import Request
from rubato.core.slo import StageTimes
from rubato.core.timeline import Timeline, timelines
from rubato.engines.simulated import FREE, Drafter, Engine, Link
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.fair_share import FairShare
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.with_drafter import Drafted
from rubato.measure.records import Record, Run
from rubato.simulation.driver import drive
from rubato.simulation.simulated_host import SimulatedHost
from rubato.workloads import Arrival, Workload


@dataclass(frozen=True)
class SimulationSetup:
    """What a simulation runs on. `latency` makes a model: one for each engine (the truth) and one for each scheduler
    (what it believes; `believed` if it is to differ). learns: the scheduler's model goes on learning from the steps, as
    it does live. noise: relative spread of step times. router: "auto" is the policy's own, or `least_loaded`. link:
    what moving KV to a replica costs. drafter: None = the engines do not speculate; schedulers know its step times.
    autoscaler: makes what adds and drains replicas, None = no scaling; start_seconds: until an added replica serves.
    stated_max_tokens: what each request of a workload asks for at least. With 0 it asks for its true output, which
    then bounds what is predicted of it."""

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
    slo_rule: str = "deadline"
    prefix_cache: bool = False
    link: Link = FREE
    drafter: Drafter | None = None
    fair: Callable[[], FairShare | None] | None = None
    learns: bool = True
    stated_max_tokens: int = 0
    autoscaler: Callable[[], Autoscaler] | None = None
    start_seconds: float = 0.0

    def given(self) -> dict[str, Any]:
        """What a cluster of these replicas is given."""
        return {
            "policy": self.policy, "settings": self.settings, "router": self.router,
            "router_settings": self.router_settings, "lengths": self.lengths, "max_in_flight": self.max_in_flight,
            "slo_rule": self.slo_rule, "prefix_cache": self.prefix_cache, "fair": self.fair() if self.fair else None,
            "autoscaler": self.autoscaler() if self.autoscaler else None,
        }  # fmt: skip

    def scheduler_model(self) -> LatencyModel:
        """One for each replica if they learn, else the same for all."""
        return self._believed() if self.learns else self._fixed

    @cached_property
    def _fixed(self) -> LatencyModel:
        return Fixed(self._believed())

    def _believed(self) -> LatencyModel:
        model = (self.believed or self.latency)()
        if self.drafter is not None and self.drafter.latency is not None:
            model = Drafted(model, self.drafter.latency)
        return model

    def for_load(self, workload: Workload) -> SimulationSetup:
        """With the acceptance that the workload's requests have of their own."""
        own = workload.acceptances()
        if self.drafter is None or not own:
            return self
        return replace(self, drafter=replace(self.drafter, acceptance=replace(self.drafter.acceptance, requests=own)))


@dataclass(frozen=True)
class Fixed(ModelWrapper):
    """A latency model that does not learn, nor forget."""

    def fit(self, samples: Sequence[Sample]) -> None:
        raise ValueError("this latency model is fixed for a simulation: fit it before")

    def update(self, sample: Sample) -> None:
        pass

    def idle(self, seconds: float) -> None:
        pass


def simulate(
    requests: Sequence[Request],
    truth: Mapping[str, Sequence[int]],
    setup: SimulationSetup,
    *,
    watch: Callable[[Cluster, Event], None] | None = None,
    pauses: Mapping[str, Sequence[float]] | None = None,
) -> list[Event]:
    """Run `requests` (arrivals in virtual seconds) to their ends; every event, in order.

    truth: request id -> output tokens of each stage. pauses: request id -> seconds of the tool before each stage, of
    those with a stage that waits for one. As live, a policy that raises fails the requests that are there, and after
    several times in a row the replica; what comes after the last of `requests` is refused. Raises RuntimeError if some
    request never ends, and what ended the cluster.
    """
    return run_virtual(_run(requests, truth, setup, watch, pauses or {}))


async def _run(
    requests: Sequence[Request],
    truth: Mapping[str, Sequence[int]],
    setup: SimulationSetup,
    watch: Callable[[Cluster, Event], None] | None,
    pauses: Mapping[str, Sequence[float]],
) -> list[Event]:
    clock = VirtualClock()
    numbers = count()

    def engine(start_seconds: float = 0.0) -> Engine:
        return Engine(
            setup.latency(), setup.limits, clock, lengths=truth, noise=setup.noise, seed=setup.seed + next(numbers),
            link=setup.link, drafter=setup.drafter, start_seconds=start_seconds,
        )  # fmt: skip

    def spare() -> tuple[Engine, LatencyModel]:
        return engine(setup.start_seconds), setup.scheduler_model()

    pairs = [(engine(), setup.scheduler_model()) for _ in range(setup.replicas)]
    given = setup.given() | ({"spare": spare} if setup.autoscaler else {})
    cluster = local_cluster([e for e, _ in pairs], [model for _, model in pairs], clock, **given)
    events: list[Event] = []
    cluster.listen(events.append)
    if pauses:
        cluster.listen(tools(pauses, cluster, clock))
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


def tools(pauses: Mapping[str, Sequence[float]], cluster: Cluster, clock: Clock) -> Callable[[Event], None]:
    """A listener that runs the tools: each returns so many seconds after the stage before it is done."""

    def follow(event: Event) -> None:
        if isinstance(event, Tokens) and event.stage_done and event.id in pauses:
            returns = event.at + pauses[event.id][event.stage + 1]
            clock.call_at(returns, ARRIVAL, lambda: cluster.resume(event.id))

    return follow


def simulated_run(
    workload: Workload, setup: SimulationSetup, label: str | None = None, *, times: bool = True, causes: bool = True,
    plain: bool = False, listen: Callable[[Event], None] | None = None,
) -> Run:  # fmt: skip
    """A workload simulated, as the results of a bench are: records, judged by `setup.slo_rule`.

    times: keep when each token came out; without, a run of many long requests takes less memory. causes: say of each
    miss why; without, it is faster where many miss. plain: on the virtual event loop, token by token. listen: gets
    every event (`plain`: once all is over).
    """
    setup, pauses = setup.for_load(workload), workload.pauses()
    requests = list(workload.requests(setup.stated_max_tokens))
    if plain:
        events = simulate(requests, workload.truth(), setup, pauses=pauses)
        lines = {line.request.id: line for line in timelines(events)}
        for event in events if listen is not None else ():
            listen(event)  # type: ignore[misc]
    else:
        lines = simulate_fast(
            requests, workload.truth(), setup, times=times, causes=causes, pauses=pauses, listen=listen
        )
    # out of `lines`, which the cluster's cycles hold: else all of it would stay until the next search for such
    records = tuple(_record(arrival, lines.pop(arrival.id), times) for arrival in workload.arrivals)
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
    return Run(label or setup.policy, workload, records, setup.slo_rule, settings=settings)


def simulate_fast(
    requests: Iterable[Request], truth: Mapping[str, Sequence[int]], setup: SimulationSetup, *, times: bool = True,
    causes: bool = True, pauses: Mapping[str, Sequence[float]] | None = None,
    listen: Callable[[Event], None] | None = None,
) -> dict[str, Timeline]:  # fmt: skip
    """What became of each request, by id, with the times of its tokens if wanted. The same as `simulate`, but that the
    steps between two decisions are not walked, that a policy that raises ends the simulation, and that requests may
    come after the last. requests: a sequence, if some are of one group, or wait for tools. Raises as `driver.drive`
    does."""
    lines: dict[str, Timeline] = {}
    came: dict[str, list[float]] = {}
    shared = isinstance(requests, Sequence) and any(r.group or r.tools for r in requests)

    def make(number: int, **given: Any) -> SimulatedHost:
        return simulated_host(
            setup, number, truth, ended=ended if times else None, causes=causes, tokens=bool(pauses),
            counts=not (shared or pauses or setup.prefix_cache), **given,
        )  # fmt: skip

    def ended(event: Finished, stages: Sequence[StageTimes]) -> None:
        came[event.id] = [float(t) for stage in stages for t in stage.tokens]

    def follow(event: Event) -> None:
        if isinstance(event, Offered):
            lines[event.id] = Timeline(event.request)
        elif isinstance(event, HandedOff):
            progress = event.request.progress  # should no replica take it, this is all that it had
            came[event.id] = [] if progress is None else [t for stage in progress.times for t in stage]
        elif isinstance(event, Finished):
            line = lines[event.id]
            line.end = event
            if times:
                line.times = came.pop(event.id, [])
                line.tokens = list(range(1, len(line.times) + 1))
                if setup.drafter is not None:  # of those that came together the last tells how many
                    together = dict(zip(line.times, line.tokens, strict=True))
                    line.times, line.tokens = list(together), list(together.values())

    def ready(cluster: Cluster) -> None:
        cluster.listen(follow)
        if listen is not None:
            cluster.listen(listen)
        if pauses:
            cluster.listen(tools(pauses, cluster, cluster.clock))

    with uncollected():
        drive(requests, setup.replicas, make, ready, **setup.given())
    return lines


def simulated_host(
    setup: SimulationSetup, number: int, truth: Mapping[str, Sequence[int]], **given: Any
) -> SimulatedHost:
    """Replica `number` of a setup. given: what else a `SimulatedHost` takes."""
    engine = Engine(
        setup.latency(), setup.limits, given["clock"], lengths=truth, link=setup.link, drafter=setup.drafter,
        start_seconds=setup.start_seconds if number >= setup.replicas else 0.0,
    )  # fmt: skip
    return SimulatedHost(
        truth=setup.latency(), latency=setup.scheduler_model(), engine=engine, targets=truth, noise=setup.noise,
        seed=setup.seed + number, learns=setup.learns, **given,
    )  # fmt: skip


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which looks at all that is kept again and again (a fifth of the time): those
    made here are few. Also a decorator, `@uncollected()`."""
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
        at=arrival.at,
        outcome=end.outcome,
        verdict=end.verdict,
        asked=arrival.output_tokens,
        output=end.output,
        times=tuple(line.times) if times else (),
        tokens=tuple(line.tokens) if times else (),
        reason="" if end.outcome == "completed" else end.reason,
        prompt_tokens=arrival.prompt_tokens,
        best_effort=end.best_effort,
    )
