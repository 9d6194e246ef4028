"""The command as a user types it, in process: what is printed, written and returned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rubato import results, trace
from rubato.cli import main
from rubato.simulate import Setup, simulate
from rubato.types import Limits
from rubato.workload import read
from tests.doubles import Linear

FAST = ["--set", "latency.kind=affine", "--set", "latency.b=[0.01, 0.01]", "--set", "latency.k=[0.0004, 0.0004]"]


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    path = tmp_path / "mix.jsonl"
    assert main(["workload", str(path), "--rate", "2", "--duration", "20", "--seed", "3", "--chat", "500,60"]) == 0
    return path


def simulated(mix: Path, capsysbinary: pytest.CaptureFixture[bytes], *words: str) -> dict[str, object]:
    capsysbinary.readouterr()
    assert main(["simulate", "--workload", str(mix), *FAST, "--json", "-", *words]) == 0
    return json.loads(capsysbinary.readouterr().out)  # type: ignore[no-any-return]


def test_workload_then_simulate(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    made = read(mix)
    assert made.tiers["chat"].tpot == 0.06
    data = simulated(mix, capsysbinary, "--policy", "edf")
    (run,) = data["runs"]  # type: ignore[misc]
    assert run["policy"] == "edf"
    assert sum(row["offered"] for row in run["tiers"] if row["tier"] != "all") == len(made.arrivals)
    assert run["settings"]["simulated"] is True


def test_the_same_words_give_the_same_numbers(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    words = (
        "--policy",
        "sarathi",
        "--set",
        "budget=64",
        "--noise",
        "0.2",
        "--replicas",
        "2",
        "--router",
        "round_robin",
    )
    assert simulated(mix, capsysbinary, *words) == simulated(mix, capsysbinary, *words)


def test_a_higher_rate_attains_no_more(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def attained(rate: str) -> float:
        (run,) = simulated(mix, capsysbinary, "--policy", "vllm", "--rate", rate)["runs"]  # type: ignore[misc]
        return float(next(row["attainment"] for row in run["tiers"] if row["tier"] == "all"))

    rates = [attained(rate) for rate in ("0.5", "8", "40")]
    assert rates[0] == 1.0
    assert rates[0] >= rates[1] > rates[2]


@pytest.mark.parametrize("words", [["--set", "latency=roofline"], ["--set", "lengths=oracle"], ["--set", "judge=mean"]])
def test_simulation_obeys_the_configuration(
    mix: Path, words: list[str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    capsysbinary.readouterr()
    assert main(["simulate", "--workload", str(mix), "--json", "-", *words]) == 0
    (run,) = json.loads(capsysbinary.readouterr().out)["runs"]
    assert run["judge"] == ("mean" if "judge=mean" in words else "deadline")


def test_simulate_on_the_steps_of_a_log(mix: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """A latency model fitted to a log whose steps took 10 ms + 1 ms a token predicts a lone request's TTFT."""
    made = read(mix)
    limits = Limits(64, 2048, 8192, 4096, 16)
    with trace.TraceWriter(tmp_path / "log") as log:
        for policy, settings in (("sarathi", {"budget": 96}), ("vllm", {})):
            for event in simulate(list(made.requests()), {}, Setup(Linear, limits, policy, settings=settings)):
                log(event)
    records = tmp_path / "records.jsonl"
    words = ["--workload", str(mix), "--steps", str(tmp_path / "log"), "--policy", "vllm", "--records", str(records)]
    assert main(["simulate", *words, "--rate", "0.01"]) == 0
    first = json.loads(records.read_text().splitlines()[0])
    assert first["verdict"]["ttft"] == pytest.approx(0.01 + 0.001 * made.arrivals[0].prompt_tokens, rel=0.1)


def test_records_agree_with_the_table(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, out = tmp_path / "r.jsonl", tmp_path / "out.json"
    words = ["--workload", str(mix), *FAST, "--rate", "12", "--records", str(records), "--json", str(out)]
    assert main(["simulate", *words]) == 0
    met = sum(json.loads(line)["verdict"]["met"] for line in records.read_text().splitlines())
    (rows,) = [run["tiers"] for run in json.loads(out.read_text())["runs"]]
    assert met == next(row["met"] for row in rows if row["tier"] == "all")
    assert "attained [95 %]" in capsys.readouterr().out
    assert json.loads(out.read_text())["format"] == results.FORMAT


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    for name in ("edf", "vllm", "sarathi", "prefill_first", "round_robin", "least_loaded"):
        assert f"{name}  (" in text
    assert "--set budget=2048" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--policy", "efd"], "did you mean 'edf'"),
        (["simulate", "--set", "saftey=1"], "did you mean 'safety'"),
        (["simulate", "--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["simulate", "--rate", "0"], "give a positive number"),
        (["simulate", "--steps", "nowhere"], "nowhere"),
        (["simulate", "--set", "lengths=nope"], "known are oracle, running_mean"),
        (["simulate", "--set", "engine.bloc=5"], "did you mean 'block'"),
        (["simulate", "--policy", "idle.policy"], "policy 'idle.policy'"),
        (["serve", "--set", "engine.kind=tourch"], "did you mean 'torch'"),
        (["bench", "http://127.0.0.1:9", "--no-progress"], "http://127.0.0.1:9"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "policy.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from rubato.types import Plan\n"
        "@dataclass\n"
        "class Scheduler:\n"
        "    needs: ClassVar[frozenset[str]] = frozenset()\n"
        "    def observe(self, events): ...\n"
        "    def plan(self, view): return Plan()\n"
    )
    monkeypatch.chdir(tmp_path)  # where a user's own policies are found
    monkeypatch.setattr("sys.path", sys.path[:])
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_policy_of_ones_own(mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one dataclass: shortest prompt first."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "shortest.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from rubato.policies._packing import Packing, admit_in_order, run_in_order\n"
        "SOURCE = 'mine'\n"
        "@dataclass\n"
        "class Scheduler:\n"
        "    needs: ClassVar[frozenset[str]] = frozenset({'chunked'})\n"
        "    budget: int = 512\n"
        "    def observe(self, events): ...\n"
        "    def plan(self, view):\n"
        "        packing = Packing(view, self.budget)\n"
        "        run_in_order(packing, view.running)\n"
        "        admit_in_order(packing, sorted(view.waiting, key=lambda s: s.pending))\n"
        "        return packing.plan()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out.json"
    words = ["--workload", str(mix), *FAST, "--policy", "mine.shortest", "--set", "budget=256", "--json", str(out)]
    assert main(["simulate", *words]) == 0
    assert json.loads(out.read_text())["runs"][0]["settings"]["settings"] == {"budget": 256}
