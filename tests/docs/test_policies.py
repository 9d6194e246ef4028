"""The policy of docs/policies.md: short, run as the page says, held to what every policy is held to."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubato import policies
from rubato.cli.main import main
from rubato.core.interfaces import Dispatch
from rubato.core.plan import Plan
from rubato.engines.simulated import Engine
from tests.docs.pages import PAGES, commands, fenced
from tests.kit import Seq, request, shown, view
from tests.policies import test_properties as properties

PAGE = "policies.md"
SAID = PAGES[PAGE].split("## What a plan may do\n")[1].split("\n## ")[0]
OPTIONAL = {"handoff", "draft", "tree"}  # needs that an engine does not have by itself


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "my_policy.py"
    path.write_text(fenced(PAGE, "python")[0])
    return path


def test_it_is_short(example: Path) -> None:
    assert len([line for line in example.read_text().splitlines() if line.strip()]) <= 25


def test_the_pages_commands_run_it(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    compared = commands(PAGE)[:4]
    (said, count) = re.findall(r"They attain (.*?) of (\d+) requests", PAGES[PAGE].replace("\n", " "))[0]
    shares, policies_run = [], []
    for words in compared:
        assert main([*words, "--json", "run.json"]) == 0
        (run,) = json.loads(Path("run.json").read_bytes())["runs"]
        policies_run.append(run["policy"])
        total = next(row for row in run["tiers"] if row["tier"] == "all")
        assert total["offered"] == int(count)
        shares.append(round(100 * total["attainment"]))
    assert policies_run == ["my_policy.py", "my_policy.py", "vllm", "edf"]
    assert shares == [int(share) for share in re.findall(r"(\d+) %", said)]


def test_it_is_simulated_from_python(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    names: dict[str, Any] = {}
    exec(fenced(PAGE, "python")[1], names)
    shares = re.findall(r"(\d+) %", PAGES[PAGE].split("They attain ")[1])
    attained = names["found"].attainment["all"].value
    assert f"{100 * attained:.0f}" == shares[1]


def test_it_works_wherever_a_policy_is_named(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an experiment with a setting; as a dotted module."""
    monkeypatch.chdir(example.parent)
    words = ["sweep", "--profile", "llama-3.1-8b-a100", "--rates", "2", "--seeds", "0", "--duration", "3", "--workers"]
    assert main([*words, "1", "--no-progress", "--policy", "my_policy.py:budget=256"]) == 0
    Path("my_package").mkdir()
    Path("my_package/my_policy.py").write_text(example.read_text())
    monkeypatch.syspath_prepend(str(example.parent))
    assert policies.load("my_package.my_policy", {"budget": 7}).budget == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "holds",
    [
        properties.test_a_run_serves_or_refuses_each_request_once_in_bounded_steps_and_is_the_same_again,
        properties.test_rebuildable_mid_run,
        properties.test_no_starvation_under_a_steady_stream_of_tighter_requests,
    ],
)
def test_it_keeps_what_every_policy_keeps(example: Path, holds: object) -> None:
    holds(policy=str(example))  # type: ignore[operator]


def test_what_it_says_is_understood() -> None:
    items = {
        name for item in re.findall(r"^- ((?:`\w+`(?:, )?)+):", SAID, re.MULTILINE) for name in re.findall(r"\w+", item)
    }
    assert items == set(Plan._fields) - {"without_kv", "decode_all", "repeat_steps"}
    assert set(re.findall(r"`Plan\.(\w+)`", SAID)) == {"decode_all", "repeat_steps"}


def test_needs_are_those_that_are_matched() -> None:
    (row,) = re.findall(r"^\| `needs` \| (.*) \|$", PAGES[PAGE], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == Engine.supports | OPTIONAL


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "my_router.py"
    path.write_text(fenced(PAGE, "python")[2])
    return path


def test_the_pages_router_is_run_by_its_command(router: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(router.parent)
    made, words = commands(PAGE)[4:6]
    assert main(made) == 0
    assert main([*words, "--json", "run.json"]) == 0
    (run,) = json.loads(Path("run.json").read_bytes())["runs"]
    assert (run["settings"]["router"], run["settings"]["replicas"]) == ("my_router.py", 2)
    assert set(run["requests"]["outcome"]) == {"completed"}


def test_the_pages_router_keeps_what_every_router_keeps(router: Path) -> None:
    properties.test_routers_place_everything(router=str(router))


def test_the_pages_router_takes_best_effort_back_for_a_promise(router: Path) -> None:
    """Two of best effort fill the replica and one is held; a promise takes both back, and who is late is demoted."""
    placing = policies.load_router(str(router), {"busy": 2})
    best, late = request("best"), request("late", ttft=1.0)
    full = replace(view([Seq(best)], [Seq(best)]), id="r0")
    assert placing.place(shown(best, late), [full], 2.0) == Dispatch({}, demote=["late"], recall={})
    new = shown(best, request("tight", ttft=1.0))
    assert placing.place(new, [full], 0.5) == Dispatch({"tight": "r0"}, demote=[], recall={"r0": "best_effort"})
