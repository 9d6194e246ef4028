"""Requests of several prompts: one that has begun its next prompt keeps earlier KV until that is decided."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, Preempted
from rubato.core.plan import Limits, blocks_for
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies.slos_serve.scheduler import MAX_DECISIONS
from rubato.simulation.run_spec import Hardware, oracle_lengths
from tests.conftest import few
from tests.kit import Linear
from tests.policies.test_properties import Load, run


def crowd(holders: int, others: int, ttft: float, at: float, blocks: int, tool: float = 0.0) -> Load:
    """`holders`, two blocks of 16 each, begin their second prompt in one step; `others` of one prompt come at `at`."""
    requests: list[Request] = []
    truth: dict[str, tuple[int, ...]] = {}
    second = Stage(2, SLO(10.0, 0.1), tool=tool > 0.0)
    for i in range(holders):
        prompt, output = (
            (20, 5) if i < MAX_DECISIONS else (21, 4)
        )  # the first that are decided are a token ahead of the others
        stages = (Stage(prompt, SLO(1.0, 0.1)), second)
        requests.append(Request(f"t{i:02}", stages, 0.0, sampling=Sampling(max_tokens=output + 3)))
        truth[f"t{i:02}"] = (output, 3)
    for i in range(others):
        stage = Stage(40, SLO(ttft, 0.1))
        requests.append(Request(f"f{i:02}", (stage,), at, sampling=Sampling(max_tokens=8)))
        truth[f"f{i:02}"] = (8,)
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=600, kv_blocks=blocks, block_size=16)
    return Load(
        tuple(requests), truth, limits, pauses={f"t{i:02}": (0.0, tool) for i in range(holders)} if tool else {}
    )


@st.composite
def crowds(draw: st.DrawFn) -> Load:
    """More requests than are decided at once, of up to three prompts, in KV that few of them fill."""
    requests: list[Request] = []
    truth: dict[str, tuple[int, ...]] = {}
    pauses: dict[str, tuple[float, ...]] = {}
    tool, outputs = draw(st.booleans()), st.sampled_from([1, 2, 5, 20])
    slos = st.sampled_from([SLO(1.0, 0.1), SLO(0.2, 0.05), SLO(10.0, 0.1), SLO(10.0, 0.1)])
    alike = [
        tuple(
            (draw(st.sampled_from([2, 7, 20, 40])), draw(slos), draw(outputs)) for _ in range(draw(st.integers(1, 3)))
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    for i in range(draw(st.integers(2, 3 * MAX_DECISIONS))):
        kind = draw(st.sampled_from([*alike, ()]))
        id, arrival = f"q{i:02}", draw(st.sampled_from([0.0, 0.0, 0.0, 0.03, 0.045, 0.1]))
        stages = [Stage(prompt, slo, tool=tool and at > 0) for at, (prompt, slo, _) in enumerate(kind)]
        truth[id] = tuple(output for *_, output in kind) or (20,)
        sampling = Sampling(max_tokens=sum(truth[id]))
        decline = draw(st.sampled_from(["best_effort", "best_effort", "refuse"]))
        requests.append(Request(id, tuple(stages) or (Stage(20),), arrival, sampling=sampling, on_decline=decline))
        if tool:
            pauses[id] = (0.0, *[draw(st.sampled_from([0.0, 0.02, 0.4])) for _ in stages[1:]])
    block = draw(st.sampled_from([1, 16]))
    largest = max(blocks_for(sum(s.prompt for s in r.stages) + r.sampling.max_tokens, block) for r in requests)
    limits = Limits(
        max_num_seqs=draw(st.sampled_from([3, 64, 64])),
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 512])),
        max_model_len=600,
        kv_blocks=largest * draw(st.sampled_from([1, 2, 5, 20])),
        block_size=block,
        max_running=draw(st.sampled_from([None, None, None, 3])),
    )
    return Load(tuple(requests), truth, limits, pauses=pauses)


def ends(load: Load, **settings: object) -> tuple[list[Event], dict[str, Finished]]:
    """Steps of 10 ms, and lengths that are known, so that many begin the next prompt at once."""
    hardware = Hardware("test", Linear(0.01, 0.0), load.limits)
    events = run(load, "slos_serve", settings=settings, hardware=hardware, lengths=oracle_lengths, drafter=None)
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in load.requests)
    return events, {e.id: e for e in events if isinstance(e, Finished)}


@few
@given(crowds())
@example(crowd(24, 16, 0.5, 0.045, 48))
@example(crowd(30, 16, 0.5, 0.045, 60))
@example(crowd(4, 1, 0.5, 0.045, 8, tool=0.02))
def test_whatever_is_undecided_every_request_ends_once_and_no_step_fails(load: Load) -> None:
    ends(load)


def test_no_request_is_promised_memory_that_an_undecided_one_holds() -> None:
    """Requests whose second prompt has begun have all KV; more that are due sooner came than are decided at once."""
    events, finished = ends(crowd(20, MAX_DECISIONS, 0.5, 0.045, 40))
    assert not [e for e in events if isinstance(e, Preempted)]
    assert all(end.verdict.met for id, end in finished.items() if id.startswith("t"))
