"""The two drivers of a replica, on the virtual event loop and on a queue of events, do the same: events, steps, and
times of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import ARRIVAL
from rubato.core.events import Event, Finished, HandedOff, Offered, Placed, Stepped, Tokens
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.length_prediction import PREDICTORS
from rubato.core.plan import Limits, Plan, Shape
from rubato.core.request import NOTHING, SLO, Request, Sampling, Stage
from rubato.core.slo import StageTimes
from rubato.fleet.cluster import Cluster
from rubato.fleet.local_host import LocalHost
from rubato.latency import profiles
from rubato.policies import describe, load
from rubato.policy_kit.batch_builder import decode_first
from rubato.replica.replica import Replica
from rubato.replica.step_log import StepRun
from rubato.simulation.driver import drive
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import run_tools, simulate_events
from rubato.simulation.simulated_host import HostOptions, SimulatedHost
from tests.conftest import few
from tests.kit import Linear, integrity, request, run_spec
from tests.policies.test_properties import Load, divides, loads, spec_for

SUPPORTS = frozenset({"chunked", "preempt", "mixed"})
ALL = sorted({name for name, kind, *_ in describe() if kind == "scheduler"})
SCHEDULERS = [name for name in ALL if load(name).needs <= SUPPORTS]
ROUTERS = sorted({name for name, kind, *_ in describe() if kind == "router" and not divides(name)})


@dataclass(frozen=True)
class Story:
    """events: of each request, in order; times: of its tokens; steps: of each replica, (end, shape)."""

    events: dict[str, list[Event]]
    times: dict[str, list[float]]
    steps: dict[str, list[tuple[float, Shape]]]


def told(events: Sequence[Event]) -> Story:
    story = Story(defaultdict(list), defaultdict(list), defaultdict(list))
    for event in events:
        if isinstance(event, Stepped):
            story.steps[event.id].append((event.at, event.shape))
        elif isinstance(event, Tokens):
            story.times[event.id] += [event.at] * event.tokens
        else:
            story.events[event.id].append(event)
    return story


@dataclass(frozen=True)
class Act:
    """From outside, at a time: a request is cancelled, or a replica lost."""

    at: float
    what: str

    def on(self, cluster: Cluster) -> None:
        if self.what in cluster.hosts:
            if len(cluster.hosts) > 1:
                lose(cluster, self.what)
        else:
            cluster.cancel(self.what)


def acts(what: st.SearchStrategy[str]) -> st.SearchStrategy[list[Act]]:
    times = st.sampled_from([0.0, 0.012, 0.1, 0.111, 0.15, 0.33, 0.7])
    return st.lists(st.builds(Act, times, what), max_size=3)


CANCELS = acts(st.sampled_from([f"q{i}" for i in range(6)]))
LOSSES = acts(st.sampled_from(["q0", "q1", "r0", "r1"]))


def acting(acts: Sequence[Act]) -> Callable[[Cluster, Event], None]:
    """A listener that has them happen: after what arrives at the same time."""
    left = list(acts)

    def listen(cluster: Cluster, event: Event) -> None:
        while left and isinstance(event, Offered):  # before the first, both drivers have only begun
            act = left.pop(0)
            cluster.clock.call_at(act.at, ARRIVAL, lambda act=act: act.on(cluster))  # type: ignore[misc]

    return listen


def lose(cluster: Cluster, id: str) -> None:
    """As one in another process is lost: it says nothing more, and what it served goes elsewhere."""
    host = cluster.hosts[id]
    assert isinstance(host, LocalHost | SimulatedHost)
    host._flush()
    host._emit = lambda event: None
    replica = host.replica
    assert replica is not None
    replica.sync()
    served = []
    for seq in replica.seqs.values():
        ids, total = seq.token_ids or [], seq.total_output
        seq.token_ids = ids + (list(replica.output_ids(len(ids), total)) if replica.output_ids else [])
        progress = seq.progress(replica.delays(seq)) if total or seq.demoted else None
        if not seq.ended:
            served.append(replace(seq.request, progress=progress, handoff=None, group=""))
    if isinstance(host, LocalHost) and host._task is not None:
        host._task.cancel()
    if isinstance(host, SimulatedHost) and replica.run is not None and host._on_run is not None:
        del replica.run.ends[replica.run.steps_done :]
        host._on_run(id, replica.run)
    replica.fail(cluster.clock.now(), "lost")
    cluster._lose_host(id, RuntimeError("it is gone"), served)


def run_fast(
    requests: Sequence[Request], truth: Mapping[str, Sequence[int]], spec: RunSpec, seed: int = 0,
    pauses: Mapping[str, Sequence[float]] = NOTHING, acts: Sequence[Act] = (),
) -> Story:  # fmt: skip
    """On the queue of events. Tokens that are told are not looked at: their times are those of the ends."""
    story = told([])
    replicas: list[Replica] = []

    def ran(id: str, run: StepRun) -> None:
        story.steps[id] += [(end, run.shape(i)) for i, end in enumerate(run.ends)]

    def ended(event: Finished, stages: Sequence[StageTimes]) -> None:
        story.times[event.id] = [t for stage in stages for t in stage.tokens]

    def follow(event: Event) -> None:
        if isinstance(event, HandedOff) and event.request.progress is not None:
            story.times[event.id] = [t for stage in event.request.progress.times for t in stage]
        if not isinstance(event, Stepped | Tokens):
            story.events[event.id].append(event)
            for replica in replicas:
                integrity.check(replica)

    def ready(cluster: Cluster) -> None:
        replicas.extend(host.replica for host in cluster.hosts.values())  # type: ignore[attr-defined]
        cluster.listen(follow)
        act = acting(acts)
        cluster.listen(lambda event: act(cluster, event))
        if pauses:
            cluster.listen(run_tools(pauses, cluster, cluster.clock))

    counts = not (spec.prefix_cache or pauses or any(r.group for r in requests))
    options = HostOptions(counts, bool(pauses), ran, ended)
    drive(sorted(requests, key=lambda r: r.arrival), truth, spec, options, ready, seed=seed)
    return story


def same(
    requests: Sequence[Request], truth: Mapping[str, Sequence[int]], spec: RunSpec, seed: int = 0,
    pauses: Mapping[str, Sequence[float]] = NOTHING, acts: Sequence[Act] = (),
) -> None:  # fmt: skip
    ordered = sorted(requests, key=lambda r: r.arrival)
    plain = told(simulate_events(ordered, truth, spec, seed, watch=acting(acts), pauses=pauses))
    fast = run_fast(requests, truth, spec, seed, pauses, acts)
    ends = [e for events in plain.events.values() for e in events if isinstance(e, Finished)]
    last = max(e.at for e in ends)  # a step of those who were all cancelled ends later, if anybody looks
    assert upto(last, fast.steps) == upto(last, plain.steps)
    assert len(ends) == len(requests)
    assert "failed" not in {e.outcome for e in ends}  # two that fail alike would be equal
    for each in requests:
        assert fast.events[each.id] == plain.events[each.id]
        assert fast.times[each.id] == plain.times[each.id]


def upto(last: float, steps: Mapping[str, list[tuple[float, Shape]]]) -> dict[str, list[tuple[float, Shape]]]:
    heard = {id: [(end, shape) for end, shape in its if end <= last] for id, its in steps.items()}
    return {id: its for id, its in heard.items() if its}


@pytest.mark.parametrize("policy", ALL)
@few
@given(load=loads(), noise=st.sampled_from([0.0, 0.3]), acts=CANCELS)
def test_whatever_a_policy_does_and_requests_are(policy: str, load: Load, noise: float, acts: list[Act]) -> None:
    """Roles, hand-offs with and without KV, drafts and trees, shared KV, groups, tools; models that learn; cancels."""
    spec = replace(spec_for(policy, load.limits, load.prefix_cache), noise=noise)
    same(load.requests, load.truth, spec, 3, load.pauses, acts)


def alone(load: Load) -> list[Request]:
    """Without shared KV and tools that take time: KV is counted, and a run has many steps."""
    stages = [tuple(Stage(s.prompt, s.slo, s.ends) for s in r.stages) for r in load.requests]
    return [replace(r, stages=s, group="") for r, s in zip(load.requests, stages, strict=True)]


@pytest.mark.parametrize("policy", SCHEDULERS)
@few
@given(load=loads(), noise=st.sampled_from([0.0, 0.3]), per_kv=st.sampled_from([0.0, 1e-5]), acts=CANCELS)
def test_every_event_is_the_same(policy: str, load: Load, noise: float, per_kv: float, acts: list[Act]) -> None:
    limits = load.limits
    spec = run_spec(Linear(0.01, 0.001, per_kv), limits, policy, noise=noise, learns=False)
    same(alone(load), load.truth, spec, 3, acts=acts)


LINES = profiles.load("llama-3.1-8b-h200").model()


@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
@few
@given(load=loads())
def test_with_step_times_that_are_lines(policy: str, load: Load) -> None:
    """Decodes in a row are then worked out without a shape for each."""
    same(alone(load), load.truth, run_spec(LINES, load.limits, policy, learns=False))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", ["vllm", "sarathi", "edf"])
@few
@given(load=loads(), replicas=st.integers(2, 3), acts=LOSSES)
def test_with_several_replicas(router: str, policy: str, load: Load, replicas: int, acts: list[Act]) -> None:
    spec = run_spec(Linear(), load.limits, policy, router=router, replicas=replicas, noise=0.2, learns=False)
    same(alone(load), load.truth, spec, 1, acts=acts)


def first_decode_due(view: View) -> float:
    """As `View` says, from every sequence."""
    return min([seq.due for seq in view.running if seq.pending == 1 and seq.due >= view.now], default=inf)


class Minding:
    """Demotes, waits for times of its own, and writes down what it sees of batches that run."""

    needs = frozenset[str]()

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self._next = 0.0

    def observe(self, events: Sequence[Event]) -> None: ...

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        for view in fleet:
            batch = {s.id: s.in_flight for s in view.running}
            self.seen.append((now, view.in_flight, batch, view.busy_until if view.in_flight.seqs else now))
            assert sum(batch.values()) <= view.in_flight.tokens  # of one that was cancelled nothing is shown
            assert view.first_decode_due == first_decode_due(view)
        if now < self._next - 1e-6:
            return Dispatch(wake_at=self._next)
        self._next = now + 0.013
        id = held[0].id
        return Dispatch({id: fleet[len(self.seen) % 2].id}, demote=() if held[0].best_effort else (id,))


@pytest.mark.parametrize("policy", ["vllm", "sarathi", "edf"])
@few
@given(load=loads())
def test_under_a_router_that_demotes_and_wakes_up(policy: str, load: Load) -> None:
    made: list[Minding] = []

    def router(*_: object) -> Minding:
        made.append(Minding())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.fleet.build.router_for", router)
        same(alone(load), load.truth, run_spec(Linear(), load.limits, policy, replicas=2, learns=False))
    assert made[0].seen == made[1].seen


@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
@few
@given(load=loads(), budget=st.sampled_from([4, 16, 64]))
def test_fixed_budgets_go_on_for_many_steps(policy: str, load: Load, budget: int) -> None:
    spec = run_spec(Linear(), load.limits, policy, {"budget": budget}, learns=False)
    same(alone(load), load.truth, spec)


@few
@given(load=loads(), kind=st.sampled_from(sorted(PREDICTORS)))
def test_with_predicted_lengths(load: Load, kind: str) -> None:
    """A predictor learns on the way, and `gaussian` draws: each driver has one of its own."""
    spec = run_spec(Linear(), load.limits, "slos_serve", replicas=2, learns=False)
    spec = replace(spec, lengths=lambda truth: PREDICTORS[kind](least=1))
    same(alone(load), load.truth, spec)


class Asking:
    """`sarathi`, which looks at when everybody's next token is due: at once and one by one."""

    needs = SUPPORTS

    def __init__(self, budget: int) -> None:
        self.asked = 0
        self._budget = budget

    def observe(self, events: Sequence[Event]) -> None: ...

    def plan(self, view: View) -> Plan:
        assert view.dues.tolist() == [seq.due for seq in view.running]
        assert view.first_decode_due == first_decode_due(view)
        self.asked += len(view.running)
        return decode_first(view, self._budget).plan()


def asked(requests: Sequence[Request], truth: Mapping[str, Sequence[int]], limits: Limits, budget: int) -> int:
    asking = Asking(budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.simulation.driver.load", lambda policy, settings: asking)
        run_fast(requests, truth, run_spec(Linear(), limits, "sarathi", learns=False))
    return asking.asked


@few
@given(load=loads(), budget=st.sampled_from([4, 64]), late=st.booleans())
def test_what_is_due_at_once(load: Load, budget: int, late: bool) -> None:
    requests = alone(load)
    if late:  # promised from the first token on, and nothing after a first token
        slos = (SLO(tpot=0.02), SLO(ttft=0.1), SLO(tpot=0.05, e2e=0.5), SLO(1.0, 0.05, max_pause=0.03))
        requests = [
            replace(r, stages=tuple(replace(s, slo=slos[(i + j) % 3]) for j, s in enumerate(r.stages)))
            for i, r in enumerate(requests)
        ]
    asked(requests, load.truth, load.limits, budget)


def test_it_is_asked() -> None:
    requests = [Request(f"q{i}", (Stage(10, SLO(0.1, 0.02)),), 0.01 * i) for i in range(3)]
    assert asked(requests, {"q0": (9,), "q1": (1,), "q2": (5,)}, Limits(4, 64, 300, 60, 16), 8) > 10


def test_after_a_plan_that_runs_nothing_the_policy_is_asked_again() -> None:
    """One that turns out to be infeasible is dropped; in that step nobody runs."""
    infeasible = Request("h", (Stage(16, SLO(ttft=0.05)),), 0.0, sampling=Sampling(1), on_decline="refuse")
    other = Request("o", (Stage(1),), 0.0, sampling=Sampling(4))
    limits = Limits(
        max_num_seqs=1, max_num_batched_tokens=8, max_model_len=200, kv_blocks=17, block_size=1, max_running=1
    )
    same([other, infeasible], {"o": (4,), "h": (1,)}, run_spec(Linear(), limits, "edf", learns=False))


def test_what_is_due_at_once_of_one_that_was_preempted() -> None:
    """12 blocks of one token: two of 2 + 10 do not fit; the younger resumes when the older has ended."""
    promise = SLO(ttft=0.2, tpot=0.02)
    requests = [Request(id, (Stage(2, promise),), 0.0, sampling=Sampling(10)) for id in "ab"]
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=200, kv_blocks=12, block_size=1)
    assert asked(requests, {"a": (10,), "b": (10,)}, limits, 8) == 18


@pytest.mark.parametrize("plain", [True, False])
def test_the_prefill_of_a_later_stage_is_no_preemption(plain: bool) -> None:
    """It runs alone, so none but itself is to blame for what it takes too long."""
    stages = (Stage(20, SLO(e2e=0.05), "</call>"), Stage(20, SLO(e2e=0.05)))
    alone = [Request("a", stages, 0.0, sampling=Sampling(10))]
    spec = run_spec(Linear(), Limits(8, 100, 500, 40, 10), "vllm", learns=False)
    truth = {"a": (5, 5)}
    story = told(simulate_events(alone, truth, spec)) if plain else run_fast(alone, truth, spec)
    (end,) = (e for e in story.events["a"] if isinstance(e, Finished))
    assert (end.verdict.met, end.verdict.cause) == (False, "infeasible")


def test_steps_that_end_together_end_in_the_order_in_which_they_began() -> None:
    """Also where the first of several steps began before: a's last step begins after b's only one, both end at 1.75. A
    listener offers the next request as each ends (a closed loop), so that the order decides who goes where."""
    first = [replace(request("a", 4, most=5), arrival=0.0), replace(request("b", 8, most=1), arrival=1.0)]
    last = request("last", 1, most=1, arrival=100.0)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=100, block_size=4)
    spec = run_spec(
        Linear(0.25, 0.0625), limits, "sarathi", {"budget": 16}, router="round_robin", replicas=2, learns=False
    )
    truth = {"a": [5], "b": [1], "last": [1]}

    def closed(cluster: Cluster, event: Event) -> None:
        if isinstance(event, Finished) and event.id in ("a", "b"):
            cluster.offer(request(f"{event.id}2", 4, most=3, arrival=cluster.clock.now()))

    def order(events: Sequence[Event]) -> list[tuple[str, str, float]]:
        return [(type(e).__name__, e.id, e.at) for e in events if isinstance(e, Placed | Finished)]

    plain = simulate_events([*first, last], truth, spec, watch=closed)
    fast: list[Event] = []

    def ready(cluster: Cluster) -> None:
        cluster.listen(fast.append)
        cluster.listen(lambda event: closed(cluster, event))

    drive([*first, last], truth, spec, HostOptions(), ready)
    assert [what for what in order(plain) if what[2] == 1.75][:1] == [("Finished", "b", 1.75)]
    assert order(fast) == order(plain)
