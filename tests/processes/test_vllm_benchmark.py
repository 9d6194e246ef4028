"""`benchmarks/vllm_plugin.py` from its first line to its record, beside stub servers: what runs where a GPU is lent."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """What is given as --python: an interpreter with vLLM, as far as the benchmark can tell."""
    found = tmp_path / "python"
    found.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stub_vllm.py")} "$@"\n')
    found.chmod(0o755)
    return found


def run(out: Path, python: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["--python", str(python), "--out", str(out), "--json", str(out / "record.json"), *more]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "vllm_plugin.py"), *words], capture_output=True, text=True
    )


@pytest.mark.full
def test_the_benchmark_runs_to_its_record_and_goes_on_from_its_files(tmp_path: Path, python: Path) -> None:
    """60 requests/s to each of four servers, of which two are stock with a setting tried."""
    asked = [
        "--gpu", "--flags=--seed=7", "--seconds=1", "--rate=60", "--factors=1", "--seeds=2", "--paired-seeds=0",
        "--budgets=128,256", "--queued-requests=", "--queued-tokens=", "--no-priority", "--policy=edf",
        "--longest-output=4", "--longest-prompt=64",
    ]  # fmt: skip
    done = run(tmp_path, python, *asked)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = sorted(file.name for file in tmp_path.glob("*@*.json"))
    assert len(cells) == 7, cells  # of the second seed without the budget that met fewer
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["machine"]["versions"][0] == "vllm 0.0.stub"
    assert record["machine"]["gpu"]
    for name, cell in record["values"]["cells"]["1 of it"].items():
        assert cell["offered, by seed"] == [60] * len(cell["offered, by seed"])
        assert cell["failed or refused"] == 0, name
        assert "client's lag p99, seconds" in cell
    flags = (tmp_path / "edf.log").read_text()
    for flag in ("--gpu-memory-utilization=0.225", "--seed=7"):
        assert flag in flags
    for flag in ("--enforce-eager", "--dtype"):
        assert flag not in flags
    again = run(tmp_path, python, *asked)
    assert "0 of them to measure; 1 servers" in again.stderr, again.stderr[-2000:]
    assert (again.returncode, again.stdout) == (0, done.stdout)
    other = run(tmp_path, python, *asked, "--longest-output=5")
    assert other.returncode == 1
    assert "is of other settings: give another --out" in other.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--python=/nowhere"], "give the interpreter of an environment with vLLM"),
        (["--python=/"], "give the interpreter of an environment with vLLM"),
        (["--factors=1,x"], "could not convert string to float: 'x'"),
        (["--factors="], "numbers are given as 1,1.3"),
        (["--budgets=128,many"], "invalid literal for int"),
        (["--clients=0"], "--clients 0: give a number above 0"),
        (["--rate=-2"], "--rate -2.0: give a number above 0"),
        (["--seconds=0"], "--seconds 0.0: give a number above 0"),
        (["--trace=/nowhere.json"], "--trace /nowhere.json: no such file"),
        (["--policy=edv"], "edf"),
    ],
)
def test_bad_arguments_end_with_a_sentence(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["vllm_plugin.py", *words])
    with pytest.raises(SystemExit, match="2"):
        import_module("vllm_plugin").options()
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_an_interpreter_without_vllm_is_named_with_what_it_said(tmp_path: Path, python: Path) -> None:
    python.write_text("#!/bin/sh\necho no vLLM here >&2\nexit 1\n")
    broken = run(tmp_path, python, "--rate", "1")
    assert broken.returncode == 1
    assert "vLLM did not start:\nno vLLM here" in broken.stderr
