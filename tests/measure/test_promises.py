"""Which requests count as promised, which promises as broken, and how many break together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rubato.core.events import Verdict
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.promises import Promises, promises
from rubato.measure.records import BenchResult, Record
from rubato.measure.results import run_json, table
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload, scenarios
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from tests.kit import Linear, view

TIERS = {"chat": SLO(ttft=1.0, tpot=0.1), "code": SLO(e2e=2.0), "batch": SLO()}


def record(at: float, times: list[float], tier: str = "chat", met: bool = False, **changes: object) -> Record:
    """Times from the request's arrival."""
    verdict = Verdict(met, "deadline", None, times[0] if times else None, None, times[-1] if times else None)
    came = tuple(at + time for time in times)
    made = Record(f"r{at}", tier, tier, at, "completed", verdict, 9, len(times), came, tuple(range(1, len(times) + 1)))
    return replace(made, **changes)  # type: ignore[arg-type]


def run(*records: Record) -> BenchResult:
    arrivals = tuple(Arrival(r.id, r.at, r.tier, r.app, 10, 3) for r in records)
    return BenchResult("p", Workload("w", 0, 1.0, 10.0, TIERS, arrivals), records, "deadline")


@pytest.mark.parametrize(
    ("what", "counts"),
    [
        (record(0.0, [0.5, 0.6, 0.7], met=True), (1, 0)),
        (record(0.0, [1.0 + 5e-10, 1.1, 1.2], met=True), (1, 0)),  # as in time as the judge has it
        (record(0.0, [0.5, 0.6, 2.0]), (1, 1)),  # a later token is late
        (record(0.0, [1.5, 1.6, 1.7]), (0, 0)),  # the first is
        (record(0.0, []), (0, 0)),
        (record(0.0, [0.5, 0.6, 2.0], best_effort=True, demoted_at=0.3), (0, 0)),  # declined before it began
        (record(0.0, [0.5, 0.6, 2.0], best_effort=True, demoted_at=1.0), (1, 1)),  # given up later
        (record(0.1, [0.2, 0.3, 2.0], best_effort=True, demoted_at=0.3), (1, 1)),  # by the plan after its first token
        (record(0.0, [0.5, 0.6, 2.0], best_effort=True), (0, 0)),  # live nobody says when
        (record(0.0, [0.5, 0.6], outcome="cancelled"), (0, 0)),
        (record(0.0, [0.5], outcome="failed"), (1, 1)),
        (record(0.0, [0.5, 2.5], tier="code"), (1, 1)),
        (record(0.0, [2.1, 2.5], tier="code"), (0, 0)),
        (record(0.0, [0.5, 2.5], tier="batch", met=True), (0, 0)),
    ],
)
def test_a_promise_is_a_first_token_in_time_that_was_not_declined(what: Record, counts: tuple[int, int]) -> None:
    found = promises(run(what))
    assert (found.made, found.broken) == counts


def test_those_broken_within_one_second_are_counted_by_when_a_token_was_late() -> None:
    """Due at 1.0, 1.1, 1.2 s after they came."""
    late = [record(at, [0.5, 0.6, took]) for at, took in ((0.0, 4.0), (1.0, 2.5), (2.0, 2.4), (9.0, 1.3))]
    assert promises(run(*late)) == Promises(4, 4, 3)  # at 4.0, 3.5, 4.4, 10.3
    ended = [record(at, [0.5, 0.6], demoted_at=at + 1.15) for at in (0.0, 0.5, 5.0)]  # no token of theirs was late
    assert promises(run(*ended)) == Promises(3, 3, 2)
    assert promises([run(*late), run(*ended)]) == Promises(7, 7, 3)  # runs are not at the same time
    assert promises(run()) == Promises(0, 0, 0)
    assert Promises(0, 0, 0).share == 0.0


def test_what_broke_off_is_broken_when_the_token_was_due_that_never_came() -> None:
    """All three stop at 6.0 in pace, so half a second before a token is due; their first tokens are 1.5 s apart."""
    off = [record(at, [0.5 + 0.1 * i for i in range(round(55 - 10 * at))], outcome="failed") for at in (0.0, 1.5, 3.0)]
    off = [replace(one, verdict=replace(one.verdict, e2e=None)) for one in off]
    assert promises(run(*off)) == Promises(3, 3, 3)


@pytest.mark.parametrize(("apart", "together"), [(0.9, 2), (1.1, 1)])
def test_of_a_stage_that_never_began_the_first_token_is_due_after_its_tool(apart: float, together: int) -> None:
    """One that stops while its tool runs, at 0.6, has until 0.6 + 2.0 + 1.0; the other is late `apart` after that."""
    parts = (OfferedStage(10, 2, SLO(ttft=1.0, tpot=0.1)), OfferedStage(10, 2, SLO(ttft=1.0, tpot=0.1), pause=2.0))
    off, late = record(0.0, [0.5, 0.6], outcome="failed"), record(1.0, [0.5, 0.6, 2.6 + apart])
    told = run(off, late)
    arrivals = (replace(told.workload.arrivals[0], parts=parts, output_tokens=4), told.workload.arrivals[1])
    assert promises(replace(told, workload=replace(told.workload, arrivals=arrivals))) == Promises(2, 2, together)


def test_they_are_in_the_table_and_in_the_file() -> None:
    told = run(record(0.0, [0.5, 0.6, 2.0]), record(1.0, [0.5, 0.6, 0.7], met=True))
    line = (
        "p: 1 of 2 requests whose first token was in time missed a later one (50.0 %), up to 1 of them within a second"
    )
    assert line in table([told])
    assert "first token was in time" not in table([run(record(1.0, [0.5, 0.6, 0.7], met=True))])
    assert run_json(told)["promises"] == {"made": 2, "broken": 1, "together": 1}
    untimed = replace(told, records=tuple(replace(r, times=(), tokens=()) for r in told.records))
    assert "missed a later one (50.0 %)\n" in table([untimed]) + "\n"
    assert run_json(untimed)["promises"] == {"made": 2, "broken": 1, "together": None}


def test_a_pause_of_the_machine_breaks_those_that_run(tmp_path: Path) -> None:
    """Twenty at once, whose TPOT a step keeps easily, and one step that takes a hundred times as long."""
    kind = Kind("chat", SLO(ttft=1.0, tpot=0.06), prompt=(5, 5), output=(40, 40))
    load = make("load", [kind], 100.0, count=20, seed=1, texts=False)
    hardware = Hardware("test", Linear(), view().limits)
    quiet = simulate(load, RunSpec(hardware, PolicyChoice("vllm")))
    assert promises(quiet) == Promises(20, 0, 0)
    (tmp_path / "pause.txt").write_text("1\n" * 39 + "100\n")
    spec = RunSpec(hardware, PolicyChoice("vllm"), noise=f"replay:{tmp_path}/pause.txt")
    assert promises(simulate(load, spec, seed=6)) == Promises(20, 20, 20)
    untimed = promises(simulate(load, spec, seed=6, times=False))  # as a sweep: nobody knows when they were broken
    assert untimed == Promises(20, 20, None)
    assert promises(simulate(load, replace(spec, noise="0"), seed=6, times=False)) == Promises(20, 0, 0)


def test_a_session_s_turns_are_promised_what_remains_of_its_deadline() -> None:
    load = scenarios.make("agent-sessions", 8.0, count=120, seed=1)
    hardware = packaged_hardware(scenarios.get("agent-sessions").profile)
    found = promises(simulate(load, RunSpec(hardware, PolicyChoice("vllm"), noise="fast:1.5"), 1))
    assert found.made > 60
    assert 0 < found.together <= found.broken < found.made
