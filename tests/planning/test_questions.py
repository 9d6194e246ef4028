"""What Python asks in a line: policies and loads in every spelling, the same numbers as the verbs, errors that help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rubato
from rubato import BatchBuilder, Plan, View, admit_in_order, run_in_order
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.records import fingerprint
from rubato.planning import sweep as sweeps
from rubato.planning.questions import Load
from rubato.planning.sweep import Sweep
from rubato.policies import edf, least_loaded
from rubato.workloads import write
from tests.planning.machine import KINDS, MACHINE, mix, spec

SCENARIO, PROFILE = "slos-serve-mixed", "opt-13b-2xa100-40g@vllm-2024"
YAML = "tiers: {a: {ttft_ms: 500}}\nkinds: [{app: chat, tier: a, prompt: 20, output: 5}]\n"


@dataclass
class Fifo:
    budget: int = 64
    needs = frozenset({"chunked", "mixed"})

    def observe(self, events: object) -> None: ...

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget)
        run_in_order(builder, view.running)
        admit_in_order(builder, view.waiting)
        return builder.plan()


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        ("edf:safety_margin=0@least_loaded", "edf:safety_margin=0@least_loaded"),
        (PolicyChoice("sarathi", {"budget": 64}), "sarathi:budget=64"),
        (edf.Scheduler, "edf"),
        (edf.Scheduler(safety_margin=0.0), "edf:safety_margin=0.0"),
        (Fifo, "Fifo"),
        (Fifo(32), "Fifo:budget=32"),
    ],
)
def test_a_policy_by_name_or_object_runs_under_its_label(policy: Any, label: str) -> None:
    found = rubato.simulate(policy, list(KINDS), profile=MACHINE, count=10)
    assert [run.label for run in found.runs] == [label]
    assert found.attainment["all"].value == sum(r.verdict.met for r in found.runs[0].records) / 10


def test_a_class_that_is_written_anew_takes_the_place_of_the_old_one() -> None:
    class Fifo:
        needs = frozenset[str]()
        observe = plan = None

    with pytest.raises(ValueError, match="policy 'Fifo': Scheduler is no dataclass"):
        rubato.simulate(Fifo, list(KINDS), profile=MACHINE, count=1)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    load = mix(10).make(0)
    write(load, tmp_path / "load.jsonl")
    (tmp_path / "trace.csv").write_text("t_s,input_tokens,output_tokens\n" + "".join(f"{i},20,5\n" for i in range(10)))
    (tmp_path / "kinds.yaml").write_text(YAML)
    return {path.suffix: str(path) for path in tmp_path.iterdir()}


def test_a_load_in_every_spelling(files: dict[str, str]) -> None:
    loads: list[tuple[Load, dict[str, Any]]] = [
        (mix(10).make(0), {}),
        (mix(10), {}),
        (KINDS, {"count": 10}),
        (SCENARIO, {"count": 10}),
        (files[".jsonl"], {}),
        (Path(files[".csv"]), {"kinds": KINDS}),
        (files[".yaml"], {"count": 10}),
    ]
    found = [rubato.simulate("sarathi", load, profile=MACHINE, **how).runs[0].workload for load, how in loads]
    assert [len(load.arrivals) for load in found] == [10] * len(loads)
    assert fingerprint(found[0]) == fingerprint(found[1]) == fingerprint(found[4])
    faster = rubato.simulate("sarathi", mix(10).make(0), profile=MACHINE, rate=50.0, seeds=(0, 1))
    assert [run.workload.rate for run in faster.runs] == [50.0, 50.0]
    assert len({fingerprint(run.workload) for run in faster.runs}) == 2  # the second is resampled


def test_a_sweep_in_python_has_the_numbers_of_the_verb() -> None:
    found = rubato.sweep(["sarathi", "vllm"], mix(), profile=MACHINE, rates=[20.0], seeds=(0, 1))
    same = sweeps.run(Sweep(mix(), (spec("sarathi"), spec("vllm")), (20.0,), (0, 1)), workers=1)
    assert found.points() == same.points()
    assert {row["tier"] for row in found.rows()} == {"chat", "code", "summary", "all"}


def test_the_other_questions_answer() -> None:
    held = rubato.capacity(["sarathi", Fifo], mix(30), profile=MACHINE, targets=(0.9,), tolerance=0.3, seeds=(0, 1))
    assert [c.policy for c in held.capacities()] == ["sarathi", "Fifo"]
    fleet = rubato.plan("sarathi", KINDS, profile=MACHINE, count=30, rate=1.0, seeds=(2, 2))
    assert fleet.replicas >= 1
    most = rubato.bound(mix(20), profile=MACHINE, rate=40.0, seeds=(0,))
    assert 0.0 < most.rows()[0]["bound"] <= 1.0


def test_a_configuration_says_what_schedulers_know() -> None:
    config = {
        "lengths": "oracle",
        "slo_rule": "mean",
        "replicas": 2,
        "engine": {"kind": "simulated", "max_num_seqs": 8},
    }
    (run,) = rubato.simulate("sarathi", SCENARIO, profile=PROFILE, count=5, config=config).runs
    assert (run.slo_rule, run.settings["replicas"], run.settings["limits"]["max_num_seqs"]) == ("mean", 2, 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": "edff"}, "unknown policy 'edff': did you mean 'edf'"),
        ({"policy": 3}, r"int is no policy: give a Scheduler \(with needs, observe, plan\) or a Router"),
        ({"policy": least_loaded.Router}, "policy 'least_loaded' has no Scheduler"),
        ({"load": "slos-serve-mixe"}, "no scenario and no file 'slos-serve-mixe': did you mean 'slos-serve-mixed'"),
        ({"load": mix(5).make(0), "count": 3}, "a workload has its own requests"),
        ({"profile": "opt-13b"}, "no profile 'opt-13b': did you mean"),
        ({"rate": 0.0}, "rate is 0.0 requests/s"),
        ({"count": 0}, "count is 0: give 1 or more"),
        ({"duration": -1.0}, "duration is -1.0: give seconds above 0"),
        ({"replicas": 0}, "0 replicas: give 1 or more"),
        ({"config": {"lengts": "oracle"}}, "unknown setting: did you mean 'lengths'"),
        ({"config": {"autoscale": "attainment"}}, "autoscale: a question is of a fleet as it is"),
    ],
)
def test_what_is_impossible_says_what_would_be_right(changes: dict[str, Any], says: str) -> None:
    asked = {"policy": "sarathi", "load": SCENARIO, "profile": PROFILE} | changes
    with pytest.raises(ValueError, match=says):
        rubato.simulate(asked.pop("policy"), asked.pop("load"), **asked)


def test_a_policy_of_this_process_runs_in_no_other() -> None:
    with pytest.raises(ValueError, match="Fifo is known to this process only: leave out workers"):
        rubato.sweep(Fifo, mix(5), profile=MACHINE, rates=[1.0], workers=2)
    with pytest.raises(ValueError, match=r"rate=2 is for a scenario or kinds"):
        rubato.plan("sarathi", mix(5).make(0), profile=MACHINE, rate=2.0)
