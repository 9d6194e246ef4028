"""Requests whose times follow from how others end: both drivers offer them alike, and when they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, Offered, Stepped, Tokens
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.measure.records import rejudged, summarise
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate, simulate_events, simulate_requests
from rubato.workloads import Arrival, Workload
from rubato.workloads.offering import Follows, Offering
from tests.conftest import few
from tests.kit import Linear, run_spec
from tests.policies.test_properties import Load, loads
from tests.simulation.test_equal import alone, told

GAPS = st.sampled_from([0.0, 0.02, 0.111])


@dataclass(frozen=True)
class Paced:
    """A load, sorted, of which some requests go on from others; perhaps in a closed loop."""

    load: Load
    follows: Follows
    concurrency: int | None

    def offering(self) -> Offering:
        return Offering(self.load.requests, self.follows, self.concurrency)


@st.composite
def paced(draw: st.DrawFn, shared: bool = False) -> Paced:
    load = draw(loads())
    load = replace(load, requests=sorted(load.requests if shared else alone(load), key=lambda r: r.arrival))
    ids = [r.id for r in load.requests]
    before = {id: draw(st.sampled_from(["", *ids[:place]])) for place, id in enumerate(ids)}
    follows = {id: (other, draw(GAPS)) for id, other in before.items() if other}
    return Paced(load, follows, draw(st.sampled_from([None, None, 1, 2, 3])))


def check(asked: Paced, spec: RunSpec) -> None:
    offering, again = asked.offering(), asked.offering()
    events = simulate_events(offering, asked.load.truth, spec, 3, pauses=asked.load.pauses)
    fast: list[Event] = []
    lines = simulate_requests(again, asked.load.truth, spec, 3, pauses=asked.load.pauses, listen=fast.append)
    plain = told(events)
    quick = told([event for event in fast if not isinstance(event, Stepped | Tokens)])
    assert quick.events == plain.events
    assert {id: line.times for id, line in lines.items() if line.times} == plain.times
    assert offering.dropped == again.dropped
    as_it_should_be(asked, events, offering)


def as_it_should_be(asked: Paced, events: Sequence[Event], offering: Offering) -> None:
    came = {e.id: e.request for e in events if isinstance(e, Offered)}
    ends = {e.id: e for e in events if isinstance(e, Finished)}
    assert came.keys() == ends.keys()
    assert came.keys() | offering.dropped.keys() == {r.id for r in asked.load.requests}
    assert not came.keys() & offering.dropped.keys()
    earliest = {r.id: r.arrival for r in asked.load.requests}
    for id, (before, gap) in asked.follows.items():
        completed = before in ends and ends[before].outcome == "completed"
        assert (id in came) == completed
        if completed:
            earliest[id] = max(earliest[id], ends[before].at + gap)
    most = asked.concurrency or inf
    for id, request in came.items():
        at = request.arrival
        assert next(e.at for e in events if e.id == id) == at  # offered at that instant
        assert at >= earliest[id]
        if asked.concurrency is None:
            assert at == earliest[id]
        # all N are in flight until the moment at which it comes
        waited = at > earliest[id]
        assert not waited or any(end.at == at for end in ends.values())
        for moment in {earliest[id], *(e.at for e in events if earliest[id] <= e.at < at)} if waited else ():
            busy = sum(came[o].arrival <= moment < ends[o].at for o in came)
            assert busy == most
    for moment in (e.at for e in events):
        assert sum(came[o].arrival <= moment < ends[o].at for o in came) <= most


@pytest.mark.parametrize("policy", ["vllm", "rubato"])
@few
@given(asked=paced(), replicas=st.integers(1, 2))
def test_both_drivers_offer_alike(policy: str, asked: Paced, replicas: int) -> None:
    spec = run_spec(Linear(), asked.load.limits, policy, router="least_loaded", replicas=replicas, learns=False)
    check(asked, replace(spec, noise=0.2))


@few
@given(asked=paced(shared=True))
def test_also_with_tools_groups_and_shared_kv(asked: Paced) -> None:
    spec = run_spec(Linear(), asked.load.limits, "sarathi", learns=False, prefix_cache=asked.load.prefix_cache)
    check(asked, spec)


def test_what_goes_on_from_a_refused_turn_is_missed_for_a_reason_of_its_own() -> None:
    turns = [Arrival(f"t{i}", 0.0, "t", "", 8, 3, after=f"t{i - 1}" if i else "", gap=1.0) for i in range(4)]
    other = Arrival("other", 1.0, "t", "", 8, 30)  # in flight when t1 comes, and there is room for one
    load = Workload("s", 0, 1.0, 9.0, {"t": SLO(e2e=9.0)}, (*turns, other))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, kv_blocks=100, block_size=4)
    run = simulate(load, run_spec(Linear(), limits, "vllm", max_in_flight=1))
    assert [r.id for r in run.records] == ["t0", "t1", "t2", "t3", "other"]
    assert [r.outcome for r in run.records] == ["completed", "refused", "failed", "failed", "completed"]
    first, second, *never, _ = run.records
    assert second.at == pytest.approx(first.times[-1] + 1.0)
    assert {r.reason for r in never} == {"not offered: an earlier turn was refused"}
    assert {(r.at, r.verdict.met, r.output) for r in never} == {(second.at, False, 0)}
    assert summarise(run)[-1].offered == 5
    assert rejudged(run, "mean").records[0].verdict.ttft == first.verdict.ttft
    assert rejudged(run, "mean").records[1].verdict.met is False
