"""`sweep`, `capacity`, `bound` and `plan` as a user types them, and what each says when it cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rubato import policies
from rubato.cli.main import main
from rubato.core.plan import Shape
from rubato.latency.profiles import load
from rubato.simulation.run_spec import packaged_hardware

REPLICA = ["--set", "latency.kind=affine", "--set", "latency.k=[1e-5, 2e-4]", "--set", "latency.b=[0.01, 0.002]",
           "--kv-tokens", "8192", "--max-num-batched-tokens", "512"]  # fmt: skip
GUESS = ["--set", "latency.kind=affine", "--set", "engine.kv_blocks=512"]
QUIET = ["--workers", "1", "--no-progress"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.5},{100 + 7 * (i % 50)},{5 + i % 9}" for i in range(120)]
    path.write_text("\n".join(["t_s,input_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def test_sweep_writes_everything_and_goes_on(tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, jobs, report = (str(tmp_path / name) for name in ("out.json", "jobs.jsonl", "report.html"))
    words = ["sweep", "--trace", trace, "--rates", "2,8", "--seeds", "0,1", *REPLICA, *QUIET]
    words += ["--policy", "sarathi", "--policy", "sarathi:budget=64@minimal"]
    words += ["--json", out, "--resume", jobs, "--report", report]
    assert main(words) == 0
    data = json.loads(Path(out).read_text())
    assert len(data["jobs"]) == 8
    assert len(Path(jobs).read_text().splitlines()) == 9  # and the head
    with open(jobs, "rb+") as file:
        file.truncate(Path(jobs).stat().st_size - 5)
    assert main(words) == 0
    again = json.loads(Path(out).read_text())
    assert [c["tiers"] for c in again["jobs"]] == [c["tiers"] for c in data["jobs"]]
    assert "7 of 8 jobs were in the file already" in again["notes"][0]
    assert "1 half-written line dropped" in again["notes"][1]
    assert "sarathi:budget=64@minimal" in Path(report).read_text()
    assert "1 half-written line dropped" in capsys.readouterr().out
    assert main([*words, "--noise", "0.1"]) == 2
    assert (
        "holds the jobs of another run (what differs: sweep.settings.0.noise, sweep.settings.1.noise)"
        in capsys.readouterr().err
    )


DRAFTER = ["--set", "engine.drafter=opt-125m-a100-40g", "--set", "engine.drafter.alpha=0.9"]


def test_a_drafter_and_a_link_from_the_configuration(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    words = ["sweep", "--trace", trace, "--rates", "2", "--seeds", "0", *REPLICA, *QUIET, "--json", out]
    words += ["--policy", "vllm_spec:n=2", "--policy", "slos_serve", "--set", "engine.link.kv_bytes=1000"]
    assert main([*words, *DRAFTER]) == 0
    for setting in json.loads(Path(out).read_text())["settings"]:
        assert setting["drafter"]["acceptance"]["alpha"] == 0.9
        assert setting["link"]["kv_bytes"] == 1000
    for wrong, says in (
        ("drafter=opt", "no profile 'opt'"),
        ("drafter.seed=1", "give the name of a profile"),
        ("link=3", "give kv_bytes, bandwidth, latency"),
        ("link.kv_byte=3", "did you mean 'kv_bytes'"),
    ):
        assert main([*words, "--set", f"engine.{wrong}"]) == 2
        assert says in capsys.readouterr().err
    assert main([*words, *DRAFTER, "--set", "engine.drafter.alfa=1"]) == 2
    assert "has no setting 'alfa': did you mean 'alpha'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sweep", "capacity"])
def test_a_policy_that_cannot_run_is_left_out_and_said(
    verb: str, tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few replicas, no drafter, no such policy, a router that does not go with it, a need that nothing knows, and a
    fault in the first step."""
    typo, faulty, out = tmp_path / "typo.py", tmp_path / "faulty.py", tmp_path / "out.json"
    typo.write_text(FAULTY.replace("frozenset()", "frozenset({'preemption'})"))
    faulty.write_text(FAULTY)
    reasons = {
        "ascendra": "ascendra needs at least 2 replicas",
        "vllm_spec:n=2": "give it a drafter (--set engine.drafter.alpha=0.7",
        "vlm": "did you mean 'vllm'",
        "distserve@minimal": "replica 'r0' has no phase",
        str(typo): "'preemption': did you mean 'preempt'? (known are chunked, draft,",
        str(faulty): "replica 'r0', t=",
    }
    given = {"sweep": ["--rates", "2"], "capacity": ["--targets", "0.9", "--tolerance", "0.5"]}
    words = [verb, *given[verb], "--trace", trace, "--seeds", "0", *REPLICA, *QUIET, "--json", str(out)]
    able = ["--policy", "sarathi", "--policy", "vllm"]
    assert main([*words, *(word for policy in reasons for word in ("--policy", policy)), *able]) == 0
    data = json.loads(out.read_text())
    assert list(data["skipped"]) == list(reasons)
    printed = capsys.readouterr().out
    for policy, why in reasons.items():
        assert why in data["skipped"][policy]
        assert f"Note: {policy} is left out, as it cannot run: {data['skipped'][policy]}." in printed
    assert {one["policy"] for one in data["points" if verb == "sweep" else "capacities"]} == {"sarathi", "vllm"}
    assert "(one seed)" in printed
    assert "inf" not in printed.split("Note:")[0]
    assert "give several (--seeds 0,1,2)" in printed
    assert main([*words, "--policy", "vlm", "--policy", "ascendra"]) == 2
    assert "no policy can run: vlm: unknown policy 'vlm'" in capsys.readouterr().err


def test_a_sweep_goes_on_when_the_policy_left_out_can_run(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "out.json"
    mine.write_text(FAULTY)
    words = ["sweep", "--trace", trace, "--rates", "2", "--seeds", "0", *REPLICA, *QUIET, "--json", str(out)]
    words += ["--policy", str(mine), "--policy", "vllm", "--resume", str(tmp_path / "jobs.jsonl")]
    assert main(words) == 0
    assert list(json.loads(out.read_text())["skipped"]) == [str(mine)]
    mine.write_text("from rubato.policies.sarathi import Scheduler")
    sys.modules.pop(policies.module_of(str(mine)).__name__)  # as in a process of its own
    assert main(words) == 0
    data = json.loads(out.read_text())
    assert data["skipped"] == {}
    assert [point["policy"] for point in data["points"]] == [str(mine), "vllm"]
    assert data["notes"][0] == "1 of 2 jobs were in the file already"


def test_capacity_per_replica(trace: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    words = [
        "capacity",
        "--trace",
        trace,
        "--seeds",
        "0,1",
        "--targets",
        "0.9",
        "--tolerance",
        "0.2",
        "--replicas",
        "2",
        "--policy",
        "sarathi",
    ]
    assert main([*words, *REPLICA, *QUIET, "--json", "-"]) == 0
    captured = capsysbinary.readouterr()
    (found,) = json.loads(captured.out)["capacities"]
    assert found["fleet"]["value"] == pytest.approx(2 * found["replica"]["value"])
    assert b"| policy" in captured.err


def test_a_bound_says_what_is_out_of_reach_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bound.json"
    words = ["bound", "--count", "20", "--seeds", "1,2", *REPLICA, *QUIET, "--json", str(out)]

    def bounds(*asked: str) -> tuple[str, dict[str, float]]:
        assert main([*words, *asked]) == 0
        data = json.loads(out.read_text())
        return capsys.readouterr().out, {alike: own["value"] for alike, own in data["bounds"].items()}

    said, shares = bounds("--rate", "40")
    assert f"| all, whoever is dropped  | {100 * shares['anybody']:.1f} %" in said
    assert f"| the worst decile of cost | {100 * shares['deciles']:.1f} %" in said
    assert "work of a whole period" in said
    assert shares["lottery"] <= shares["deciles"] <= shares["anybody"] < 0.9
    said, rates = bounds("--tolerance", "0.3")
    assert f"{rates['anybody']:.3g} " in said
    assert rates["anybody"] < 40.0
    said, once = bounds("--once", "--rate", "40")  # so few can wait until the last has come
    assert set(once.values()) == {1.0}
    assert "nothing: all can be attained" in said


def test_plan_on_a_trace(tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = ["plan", "--trace", trace, "--scale", "3", "--chat", "300,30", "--least-seeds", "2", "--price", "2"]
    assert main([*words, *REPLICA, *QUIET, "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["whole"]["offered"] == 360
    assert data["attainment"][str(data["replicas"])]["low"] >= 0.9
    assert " of the configured replica (" in capsys.readouterr().out


def test_plan_prints_the_optimum(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    words = ["plan", "--optimum", "--profile", "llama-3.1-8b-h200", "--scenario", "polyserve-uniform-512-512"]
    assert main([*words, "--count", "50", *QUIET, "--json", "-"]) == 0
    captured = capsysbinary.readouterr()
    pd, co = json.loads(captured.out)["optimum"]
    assert (pd["mode"], co["mode"], pd["requests"]) == ("pd", "co", 50)
    assert pd["rate"] == pytest.approx(1.0 / pd["cost"])
    assert b"| co-located" in captured.err


def test_a_packaged_profile_and_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, jobs = tmp_path / "out.json", tmp_path / "jobs.jsonl"
    words = ["sweep", "--scenario", "slos-serve-chatbot", "--rates", "2", "--seeds", "4", "--count", "30", *QUIET]
    words += ["--json", str(out)]
    assert main([*words, "--profile", "opt-13b-a100", "--resume", str(jobs)]) == 0
    data = json.loads(out.read_text())
    (job,) = data["jobs"]
    assert (job["workload"]["name"], job["workload"]["requests"]) == ("slos-serve-chatbot", 30)
    hardware = data["settings"][0]["hardware"]
    assert (hardware["name"], hardware["gpus"]) == ("opt-13b-a100", 1)
    assert hardware["limits"]["kv_blocks"] == load("opt-13b-a100").kv_tokens // 16
    assert main([*words, "--profile", "opt-13b-a100", "--resume", str(jobs)]) == 0  # step times have the same digest
    assert "1 of 1 jobs were in the file already" in json.loads(out.read_text())["notes"][0]
    without = tmp_path / "without.json"
    without.write_text(json.dumps(load("opt-13b-a100").to_json() | {"kv_tokens": None}))
    assert main([*words, "--profile", str(without)]) == 2
    assert "has no KV capacity" in capsys.readouterr().err
    assert main([*words, "--profile", str(without), "--kv-tokens", "8192"]) == 0
    assert main([*words, "--profile", "opt-13b-a10"]) == 2
    assert "did you mean 'opt-13b-a100'" in capsys.readouterr().err


def test_step_times_keep_their_digest_when_they_have_been_asked_for() -> None:
    machine = packaged_hardware("opt-13b-a100")
    before = machine.describe()
    for batch in (1, 3, 70):
        machine.model.step_time(Shape(batch, batch, 900 * batch))
    assert machine.describe() == before == packaged_hardware("opt-13b-a100").describe()
    assert packaged_hardware("opt-6.7b-a100-40g").describe()["model"] != before["model"]


FAULTY = """
from dataclasses import dataclass

@dataclass
class Scheduler:
    needs = frozenset()
    def observe(self, events): pass
    def plan(self, view): return None
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "what is a replica? give --profile NAME"),
        (["plan", "--set", "latency.kind=affine"], "a replica without KV capacity"),
        (["plan", *GUESS], "latency 'affine' has no k and no b; give what `rubato fit` prints"),
        (["capacity", *GUESS, "--set", "latency.k=[1e-5, 2e-4]"], "latency 'affine' has no b; give"),
        (["sweep", "--rates", "1", *GUESS, "--set", "latency.kind=table"], "has no tokens and no kv and no seconds"),
        (["plan", *REPLICA, "--rate", "0"], "rate is 0.0 requests/s: give a positive number"),
        (["sweep", *REPLICA, "--rates", "1,0"], "rate is 0.0 requests/s: give a positive number"),
        (["capacity", *REPLICA, "--start", "0"], "rate is 0.0 requests/s: give a positive number"),
        (["plan", *REPLICA, "--trace", "TRACE", "--scale", "0"], "scale is 0.0: give how many times"),
        (["plan", *REPLICA, "--trace", "TRACE", "--rate", "1"], "a trace has its own, times --scale"),
        (["plan", *REPLICA, "--trace", "nowhere.csv"], "plan: --trace nowhere.csv cannot be opened: no such file"),
        (["plan", *REPLICA, "--trace", "BAD"], "bad.csv, line 3"),
        (["plan", *REPLICA, "--trace", "TRACE", "--chat", "5,1"], "no number of replicas attains 90 %"),
        (["capacity", *REPLICA, "--trace", "TRACE", "--chat", "5,1"], "no number of replicas attains 98 %"),
        (
            ["sweep", *REPLICA, "--rates", "1", "--workload", "STILL"],
            "still.jsonl, line 1: rate is 0: should be greater than 0",
        ),
        (["plan", *REPLICA, "--policy", "vllm", "--policy", "edf"], "a plan is for one --policy"),
        (["plan", *REPLICA, "--policy", "vlm"], "did you mean 'vllm'"),
        (["sweep", "--profile", "qwen2.5-7b-2xv100", "--scenario", "sa-mixed", "--rates", "1"], "offers all at once"),
        (["plan", *REPLICA, "--trace", "t", "--workload", "w"], "requests come from one of them"),
        (["sweep", *REPLICA, "--rates", "1", "--count", "0"], "--count 0: give 1 or more"),
        (["sweep", *REPLICA, "--rates", "1", "--duration", "-1"], "--duration -1.0: give seconds above 0"),
        (["sweep", *REPLICA, "--rates", "1", "--replicas", "0"], "--replicas 0: give 1 or more"),
        (["sweep", *REPLICA, "--rates", "1", "--noise", "2"], "noise 2.0: give a relative spread"),
        (["plan", *REPLICA, "--trace", "TRACE", "--max-num-seqs", "0"], "--max-num-seqs 0: give 1 or more"),
        (
            ["plan", *REPLICA, "--trace", "TRACE", "--max-num-batched-tokens", "-4"],
            "--max-num-batched-tokens -4: give 1 or more",
        ),
        (["plan", *REPLICA, "--trace", "TRACE", "--kv-tokens", "3"], "--kv-tokens 3: give at least a block"),
        (["capacity", *REPLICA, "--trace", "TRACE", "--host-scale", "0.5"], "--host-scale 0.5 without --profile"),
        (["plan", *REPLICA, "--trace", "TRACE", "--policy", "sarathi:budget=["], "'[' is no value for budget"),
        (["bound", *REPLICA, "--set", "autoscale.kind=attainment"], "autoscale: a bound is of a fleet as it is"),
        (["plan", *REPLICA, "--trace", "TRACE", "--count", "1"], "there is no stretch of time to size a fleet on"),
        (["plan", *REPLICA, "--trace", "TRACE", "--count", "20", "--target", "0.999"], "too few to show 99.9 %"),
        (["plan", *REPLICA, "--trace", "TRACE", "--price", "inf"], "price is inf a GPU-hour"),
        (["plan", *REPLICA, "--trace", "TRACE", "--window", "inf"], "the busiest stretch is inf s long"),
        (["sweep", *REPLICA, "--rates", "1", "--policy", "FAULTY"], "replica 'r0', t="),
        (["sweep", *REPLICA, "--rates", "1e-300", "--count", "5"], "not exact to a microsecond any more"),
        (["sweep", *REPLICA, "--rates", "1", "--json", "nowhere/a.json"], "--json nowhere/a.json cannot be written"),
        (["bound", *REPLICA, "--noise", "0.1"], "a bound is of step times as they are"),
        (["bound", *REPLICA, "--set", "slo_rule=mean"], "slo_rule 'mean': a bound is worked out for the deadline rule"),
        (["bound", *REPLICA, *DRAFTER], "a bound is of policies without drafts"),
        (["bound", *REPLICA, "--target", "1.5"], "target is 1.5: give a share"),
        (["bound", *REPLICA, "--replicas", "0"], "0 replicas: give 1 or more"),
        (["bound", "--profile", "llama-2-7b-a100-40g", "--scenario", "slos-serve-toolllm"], "has several stages"),
        (["bound", "--profile", "qwen2.5-7b-2xv100", "--scenario", "ascendra-sharegpt4-llama"], "give a packaged"),
        (["plan", *REPLICA, "--report", "."], "--report . cannot be written: it is a folder"),
        (["plan", *REPLICA, "--set", "latency.k=abc"], "'affine': setting k is 'abc'; give a list"),
        (["plan", *REPLICA, "--set", "latency.a=abc"], "'affine': setting a is 'abc'; give a number"),
        (["sweep", *REPLICA, "--rates", "1", "--seeds", "-1"], "--seeds -1: give 0 or more"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(
    words: list[str], says: str, tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("t_s,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    still = tmp_path / "still.jsonl"
    still.write_text(
        '{"format": "rubato-workload/1", "name": "still", "rate": 0, "tiers": {"a": {"ttft": 1}}}\n'
        '{"id": "x", "at": 1, "tier": "a", "prompt_tokens": 5, "output_tokens": 5}\n'
    )
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULTY)
    files = {"TRACE": trace, "BAD": str(bad), "STILL": str(still), "FAULTY": str(faulty)}
    assert main([files.get(word, word) for word in words] + QUIET) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
