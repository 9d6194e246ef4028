"""The commands of the pages, given in a folder with the files they speak of; those that take long, on less."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubato import policies
from rubato.cli.main import main
from rubato.core import event_log
from rubato.core.plan import Limits
from rubato.simulation.simulate import simulate_events
from rubato.workloads import read
from tests.docs.pages import PAGES, ROOT, blocks, commands, fenced
from tests.kit import Linear, run_spec
from tests.processes.conftest import Server, servers

# Added at the end, where the last word counts. A workload of less, one seed, cells one by one.
LESS = {
    "workload": "--rate 10 --duration 1.2",
    "bench": "--no-progress --allow-late",  # no test goes by the machine's speed
    "sweep": "--rates 2 --duration 5 --seeds 0 --workers 1 --no-progress",
    "capacity": "--count 300 --start 60 --seeds 0 --targets 0.99 --tolerance 0.5 --workers 1 --no-progress",
    "judge": "--seeds 0 --workers 1 --no-progress",
    "bound": "--count 20 --seeds 1 --tolerance 0.5 --workers 1 --no-progress",
    "plan": "--duration 8 --workers 1 --no-progress",
}
ELSEWHERE = {"serve", "gateway", "profile"}  # runs until it is stopped, measures: tests/processes, tests/profiles
NOT_HERE = {"--ray", "--server", "--arrivals"}  # want a cluster, a vLLM, and minutes of load for that

SHOWN = next(words for words in commands("capacity.md") if words[0] == "plan")  # with what it prints


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Under the manual's own policy."""
    policy = tmp_path_factory.mktemp("policy") / "my_policy.py"
    policy.write_text(fenced("policies.md", "python")[0])
    with servers(tmp_path_factory.mktemp("docs")) as start:
        yield start(
            policy=str(policy),
            served_model_name="SmolLM2-135M-Instruct",
            engine={"kind": "simulated", "max_model_len": 1024},
            latency={"kind": "affine", "k": [0.0, 0.0], "b": [0.001, 0.0]},
        )


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder: files that pages take as given."""
    monkeypatch.chdir(tmp_path)
    Path("replica.yaml").write_text(fenced("capacity.md", "yaml")[0])
    Path("mix.yaml").write_text(blocks("workloads.md", "tiers:")[0])
    Path("trace.csv").write_text("t_s,input_tokens,output_tokens\n" + "".join(f"{i},300,20\n" for i in range(20)))
    Path("slos.yaml").write_text(blocks("slos.md", "tiers:")[0])
    Path("my_policy.py").write_text(fenced("policies.md", "python")[0])
    Path("loads").mkdir()
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copy(ROOT / "tests" / "latency" / "serving_iterations.csv", "steps.csv")
    return tmp_path


def log_of_steps(workload: str) -> None:
    """As a server writes it, of batches with and without prefill."""
    with event_log.EventLogWriter(Path("events.jsonl")) as log:
        for policy, settings in (("sarathi", {"budget": 96}), ("vllm", {})):
            spec = run_spec(Linear(), Limits(64, 2048, 8192, 4096, 16), policy, settings=settings)
            for event in simulate_events(list(read(workload).requests()), {}, spec):
                log(event)


@pytest.mark.parametrize("page", ["README.md", "benchmarking.md", "capacity.md", "slos.md", "compare.md", "latency.md"])
@pytest.mark.slow
def test_commands_work(page: str, desk: Path, server: Server) -> None:
    pytest.importorskip("matplotlib")
    assert main(["workload", "-o", "first.jsonl", "--rate", "10", "--duration", "3"]) == 0
    log_of_steps("first.jsonl")
    assert main(["simulate", "--workload", "first.jsonl", "--json", "other.json"]) == 0
    stands_for = {"http://127.0.0.1:8000": server.url, "NAME": "llama-3.1-8b-a100"}
    for words in commands(page):
        if (words[0] in ELSEWHERE and "--list" not in words) or words == SHOWN or NOT_HERE & {*words}:
            continue
        given = [stands_for.get(word, word) for word in words]
        less = LESS.get(words[0], "")
        if "--count" in words:  # which bounds a run as --duration does
            less = less.replace("--duration 5", "--count 10").replace("--duration 8", "")
        assert main([*given, *([] if "--list" in words else less.split())]) == 0, words


@pytest.mark.slow
def test_the_plan_prints_what_the_page_shows(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOWN, "--no-progress"]) == 0
    shown = re.findall(r"^>(?: (.*))?$", PAGES["capacity.md"], re.MULTILINE)
    assert capsys.readouterr().out.split("\n") == [*shown, ""]


def test_an_infeasible_slo_is_answered_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGES["slos.md"]
    (said,) = re.findall(r"^> (.*)$", page, re.MULTILINE)
    (example,) = re.findall(r"^With .* the answer is an error:$", page, re.MULTILINE | re.DOTALL)
    words = [word for span in re.findall(r"`(--[^`]+)`", example) for word in span.split()]
    assert main(["plan", *words, "--no-progress"]) == 2
    assert said in capsys.readouterr().err


def test_the_clients_example_is_answered(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    example = fenced("http-api.md", "python")[0]
    exec(example.replace("http://127.0.0.1:8000", server.url), {})
    text, verdict = capsys.readouterr().out.splitlines()
    assert text
    assert "'met': True" in verdict


def test_the_readmes_policy_runs_beside_others_by_its_command(desk: Path) -> None:
    (words,) = [words for words in commands("README.md") if words[0] == "sweep"]
    file = words[words.index("--policy") + 1]
    less = " ".join(words).replace("--count 200 --seeds 0,1,2,3,4,5,6,7", "--count 30 --seeds 0").split()
    assert main([*less, "--json", "sweep.json", "--no-progress"]) == 0
    found = json.loads(Path("sweep.json").read_text())
    assert found["skipped"] == {}
    assert [point["policy"] for point in found["points"]] == [file, "vllm", "edf", "rubato"]


def test_the_readme_counts_policies_right() -> None:
    kinds = Counter(kind for _, kind, *_ in policies.describe())
    assert f"{kinds['scheduler']} schedulers and {kinds['router']} routers" in PAGES["README.md"]
