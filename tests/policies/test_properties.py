"""What every policy must keep, whatever the load: KV barely above the largest request, arrivals and sizes that tie.

The runs go through the production cluster, worker and replica, so every plan is checked; a bad one fails its requests,
which `run` refuses in every property. That these checks can fail is tested in tests/test_harnesses.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, Offered, Stepped
from rubato.core.interfaces import Assigner, View
from rubato.core.plan import Limits, Plan, blocks_for
from rubato.core.request import MAX_SLO_S, MIN_SLO_S, SLO, Request, Sampling, Stage
from rubato.engines.simulated import Drafter, KVLink
from rubato.engines.simulated.acceptance import Acceptance
from rubato.fleet.cluster import Cluster
from rubato.policies import describe, load_router, optional, router_for
from rubato.policies import load as load_policy
from rubato.policy_kit.fair_share import FairShare
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.kit import Linear, changed, integrity, run_spec

SCHEDULERS = sorted({name for name, kind, *_ in describe() if kind == "scheduler"})
ROUTERS = sorted({name for name, kind, *_ in describe() if kind == "router"})


@dataclass(frozen=True)
class Load:
    requests: tuple[Request, ...]
    truth: dict[str, tuple[int, ...]]
    limits: Limits
    prefix_cache: bool = False
    pauses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


USUAL = st.sampled_from(
    [
        SLO(),
        SLO(ttft=0.05),
        SLO(ttft=0.2, tpot=0.02),
        SLO(ttft=1.0, tpot=0.05),
        SLO(tpot=0.03),
        SLO(e2e=0.5),
        SLO(ttft=1.0, tpot=0.05, max_pause=0.06),
    ]
)
TIMES = st.sampled_from([None, MIN_SLO_S, 1e-3, 0.05, 1.0, 1e3, MAX_SLO_S])
EXTREME = st.builds(SLO, TIMES, TIMES, TIMES, TIMES)


@st.composite
def loads(draw: st.DrawFn, slos: st.SearchStrategy[SLO] = USUAL) -> Load:
    """Few distinct times and sizes (ties), KV of 1 to 2 times the largest request (scarcity), prompts that begin alike
    (shared KV), siblings of one group, tools that take time."""
    prefix_cache = draw(st.booleans())
    requests: list[Request] = []
    truth: dict[str, tuple[int, ...]] = {}
    pauses: dict[str, tuple[float, ...]] = {}
    for i in range(draw(st.integers(1, 12))):
        output = draw(st.sampled_from([1, 2, 5, 20]))
        thinking = draw(st.booleans())
        sibling = draw(st.sampled_from(requests)) if requests and draw(st.booleans()) else None
        if sibling is not None and sibling.group:
            ids: tuple[int, ...] = sibling.stages[0].token_ids
        else:
            ids = draw(st.sampled_from([(), (0,), (0, 1)])) * 60  # none known, or one of two that begin alike
            ids = ids[: draw(st.sampled_from([1, 7, 16, 17, 60]))]
        group = sibling.group if sibling is not None else draw(st.sampled_from(["", f"g{i}"]))
        prompt = len(ids) or draw(st.sampled_from([1, 7, 16, 17, 60]))
        if sibling is not None and sibling.group:
            prompt = sibling.stages[0].prompt
        stages = [Stage(prompt, draw(slos), "</think>" if thinking else "eos", ids)]
        truth[f"q{i}"] = (output,)
        if thinking:
            stages.append(Stage(0, draw(slos)))
            truth[f"q{i}"] = (output, 3)
        if tool := draw(st.sampled_from([0.0, 0.0, 0.02, 0.4])):
            stages.append(Stage(draw(st.sampled_from([1, 20])), draw(slos), tool=True))
            truth[f"q{i}"] += (2,)
            pauses[f"q{i}"] = (0.0,) * (len(stages) - 1) + (tool,)
        requests.append(
            Request(
                f"q{i}",
                tuple(stages),
                arrival=draw(st.sampled_from([0.0, 0.0, 0.1, 0.111, 0.5])),
                tier=draw(st.sampled_from(["a", "b"])),
                sampling=Sampling(max_tokens=sum(truth[f"q{i}"])),
                on_decline=draw(st.sampled_from(["best_effort", "refuse"])),
                group=group,
            )
        )
    block = draw(st.sampled_from([1, 4, 16]))
    largest = max(blocks_for(sum(s.prompt for s in r.stages) + r.sampling.max_tokens, block) for r in requests)
    limits = Limits(
        max_num_seqs=draw(st.sampled_from([1, 2, 64])),
        max_num_batched_tokens=draw(st.sampled_from([8, 64, 2048])),
        max_model_len=200,
        kv_blocks=largest + draw(st.integers(0, largest)),
        block_size=block,
        max_running=draw(st.sampled_from([None, None, 1, 3])),
    )
    return Load(tuple(requests), truth, limits, prefix_cache, pauses)


def shared(load: Load) -> Load:
    """The same of two tenants, groups and lone requests in turn."""
    groups = list({r.group or r.id: None for r in load.requests})
    tenants = {group: "ab"[i % 2] for i, group in enumerate(groups)}
    return replace(load, requests=tuple(replace(r, tenant=tenants[r.group or r.id]) for r in load.requests))


def instant(load: Load) -> Load:
    """The same where tools take no time."""
    requests = tuple(replace(r, stages=tuple(replace(s, tool=False) for s in r.stages)) for r in load.requests)
    return replace(load, requests=requests, pauses={})


def spec_for(policy: str, limits: Limits, prefix_cache: bool = False) -> RunSpec:
    """As many replicas as the policy works with; what moves between them takes time."""
    router = router_for(policy, "auto")
    link = KVLink(kv_bytes=8, bandwidth=1e4, latency=0.003)
    replicas = 3 if isinstance(router, Assigner) else 1
    scheduler = load_policy(policy)
    drafts = "draft" in scheduler.needs | optional(scheduler)
    drafter = Drafter(Acceptance(spread=0.1), Linear(0.001, 0.0001)) if drafts else None
    return run_spec(Linear(), limits, policy, replicas=replicas, prefix_cache=prefix_cache, link=link, drafter=drafter)


def run(load: Load, policy: str, seed: int = 0, **changes: object) -> list[Event]:
    """All events; integrity of every replica checked at each one, and the books of the cluster. No step may fail."""

    def watch(cluster: Cluster, event: Event) -> None:
        assert cluster.offered == cluster.finished + cluster.in_flight
        if isinstance(event, Stepped):
            for host in cluster.hosts.values():
                integrity.check(host.replica)  # type: ignore[attr-defined]

    spec = changed(spec_for(policy, load.limits, load.prefix_cache), **changes)
    events = simulate_events(load.requests, load.truth, spec, seed, watch=watch, pauses=load.pauses)
    assert not [e for e in events if isinstance(e, Finished) and e.outcome == "failed"]
    return events


@pytest.mark.parametrize("policy", SCHEDULERS)
@few
@given(load=loads(), noise=st.sampled_from([0.0, 0.2]))
def test_a_run_serves_or_refuses_each_request_once_in_bounded_steps_and_is_the_same_again(
    policy: str, load: Load, noise: float
) -> None:
    """No livelock: preemption may repeat work, but not without end. The policy is watched in the second run: it changes
    nothing of what it sees."""
    events = run(load, policy, noise=noise, seed=7)
    outputs = {e.id: e for e in events if isinstance(e, Finished)}
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)
    for request in load.requests:
        end = outputs[request.id]
        if end.outcome == "completed":
            assert end.output == sum(load.truth[request.id])
        else:
            assert (end.outcome, request.on_decline) == ("refused", "refuse"), end
    assert isinstance(events[-1], Finished | Stepped)
    tokens = sum(r.prompt + sum(load.truth[r.id]) for r in load.requests)
    assert sum(isinstance(e, Stepped) for e in events) <= 40 * (tokens + len(load.requests))
    assert run_watched(load, policy, noise=noise, seed=7) == events


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_what_is_refused_after_a_long_wait_takes_no_other_with_it(policy: str) -> None:
    """Five times what prompts allow, with TTFTs longer than any policy's patience."""
    slo, sampling = SLO(ttft=12.0, tpot=0.05), Sampling(max_tokens=20)
    requests = tuple(
        Request(f"q{i}", (Stage(1000, slo),), 0.2 * i, sampling=sampling, on_decline="refuse") for i in range(80)
    )
    truth = {request.id: (20,) for request in requests}
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=400, block_size=16)
    ends = Counter(e.outcome for e in run(Load(requests, truth, limits), policy) if isinstance(e, Finished))
    assert ends.keys() <= {"completed", "refused"}
    assert ends.total() == len(requests)


@pytest.mark.parametrize("policy", SCHEDULERS)
@few
@given(load=loads(), every=st.integers(1, 9))
def test_rebuildable_mid_run(policy: str, load: Load, every: int) -> None:
    """A policy replaced by a new one of its kind, now and again, still serves everybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.fleet.build.load", lambda name, settings: Amnesiac(name, every))
        events = run(load, policy)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)
    assert {e.outcome for e in events if isinstance(e, Finished)} <= {"completed", "refused"}


def divides(router: str) -> bool:
    """Whether it gives replicas roles, which its own scheduler goes by."""
    made = load_router(router)
    return isinstance(made, Assigner) and bool(made.roles(["r0", "r1"]))


LONE = [router for router in ROUTERS if not divides(router)]  # in front of any scheduler


@pytest.mark.parametrize("router", ROUTERS)
@few
@given(load=loads(), replicas=st.integers(1, 3))
def test_routers_place_everything(router: str, load: Load, replicas: int) -> None:
    policy = "vllm" if not divides(router) else "rubato" if router == "rubato_pd" else router
    events = run(load, policy, router=router, replicas=replicas + (policy != "vllm"))
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


@pytest.mark.parametrize("router", ["minimal", "random"])
@few
@given(load=loads(), replicas=st.integers(2, 4))
def test_routers_place_everything_with_prefill_and_decode_apart(router: str, load: Load, replicas: int) -> None:
    ratio = {"prefill": 1, "decode": 2}
    events = run(load, "distserve", router=router, router_settings=ratio, replicas=replicas)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


@pytest.mark.parametrize(("policy", "router"), [*((s, "auto") for s in SCHEDULERS), *(("vllm", r) for r in LONE)])
@few
@given(load=loads(EXTREME), fair=st.booleans())
def test_no_slo_that_may_be_asked_for_fails_a_request(policy: str, router: str, load: Load, fair: bool) -> None:
    """From the shortest times to the longest, beside each other: none overflows or vanishes in what a policy works out
    from it. That `run` sees no request fail is the test."""
    changes = {"router": router, "replicas": 2} if router != "auto" else {}
    events = run(shared(load), policy, fair=FairShare if fair else None, **changes)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_no_starvation_under_a_steady_stream_of_tighter_requests(policy: str) -> None:
    """One best-effort request against 150 tight ones that fill the replica: it ends before the stream does."""
    tight = [
        Request(f"t{i}", (Stage(20, SLO(ttft=0.1, tpot=0.02)),), 0.05 * i, sampling=Sampling(max_tokens=8))
        for i in range(150)
    ]
    best_effort = Request("patient", (Stage(40),), 0.01, sampling=Sampling(max_tokens=20))
    requests = sorted([*tight, best_effort], key=lambda r: r.arrival)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=12, block_size=8)
    events = simulate_events(requests, {}, spec_for(policy, limits))
    end = next(e for e in events if isinstance(e, Finished) and e.id == "patient")
    last_arrival = max(e.at for e in events if isinstance(e, Offered))
    assert end.outcome == "completed"
    assert end.at < last_arrival


def snapshot(view: View) -> list[tuple[object, ...]]:
    return [
        (s.id, s.stage, s.output, s.length, s.cached, s.blocks, s.demoted, s.missed, s.due)
        for s in [*view.waiting, *view.running, *view.moving]
    ]


class Watching:
    """A scheduler around a scheduler: nothing it is shown may be different afterwards, and `changed` tells what was.

    An assertion here would be a failed step to the worker.
    """

    def __init__(self, policy: str) -> None:
        self.inner = load_policy(policy)
        self.needs = self.inner.needs
        self.plans = 0
        self.changed: list[tuple[object, object]] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.inner.observe(events)

    def plan(self, view: View) -> Plan:
        before = snapshot(view)
        plan = self.inner.plan(view)
        if (after := snapshot(view)) != before:
            self.changed.append((before, after))
        self.plans += 1
        return plan


def run_watched(
    load: Load, policy: str, watching: Callable[[str], Watching] = Watching, **changes: object
) -> list[Event]:
    """A run whose schedulers are watched, one a replica."""
    watched: list[Watching] = []

    def load_watched(name: str, settings: object) -> Watching:
        watched.append(watching(name))
        return watched[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.fleet.build.load", load_watched)
        events = run(load, policy, **changes)
    assert sum(each.plans for each in watched) > 0
    changed = [change for each in watched for change in each.changed]
    assert not changed, f"it changed what it was shown: {changed}"
    return events


class Amnesiac:
    """Forgets everything each `every` plans."""

    def __init__(self, policy: str, every: int) -> None:
        self.policy, self.every, self.plans = policy, every, 0
        self.inner = load_policy(policy)
        self.needs = self.inner.needs

    def observe(self, events: Sequence[Event]) -> None:
        self.inner.observe(events)

    def plan(self, view: View) -> Plan:
        self.plans += 1
        if self.plans % self.every == 0:
            self.inner = load_policy(self.policy)
        return self.inner.plan(view)
