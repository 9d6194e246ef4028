"""The policy of docs/policies.md: short, run as the page says, held to what every policy is held to."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rubato import policies
from rubato.cli.main import main
from rubato.core import infeasible, interfaces
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Plan, Shape, Work
from rubato.engines.simulated import Engine
from rubato.policy_kit import batch_builder, refusals
from rubato.policy_kit.batch_builder import BatchBuilder
from tests.docs.pages import PAGES, commands, fenced
from tests.doubles import Seq, request, shown, view
from tests.policies import test_properties as properties

PAGE = "policies.md"
SEEN, SAID = (PAGES[PAGE].split(f"## What it {what}\n")[1].split("\n## ")[0] for what in ("sees", "says"))
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
    compared = commands(PAGE)[:-2]
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
        properties.test_every_request_ends_once_and_is_served_or_refused,
        properties.test_work_is_bounded,
        properties.test_same_seed_same_events,
        properties.test_a_policy_does_not_change_what_it_sees,
        properties.test_rebuildable_mid_run,
        properties.test_no_starvation_under_a_steady_stream_of_tighter_requests,
    ],
)
def test_it_keeps_what_every_policy_keeps(example: Path, holds: object) -> None:
    holds(policy=str(example))  # type: ignore[operator]


@pytest.mark.parametrize(("table", "shown"), [("view", View), ("seq", SeqView)])
def test_what_it_sees_is_there(table: str, shown: type) -> None:
    rows = SEEN.split(f"| `{table}.` | |")[1].split("\n\n")[0]
    named = [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")]
    assert len(named) > 7
    assert not [name for name in named if not hasattr(shown, name)]


def test_latency_models_are_asked_as_stated() -> None:
    calls = re.findall(r"`(step_time|largest_chunk)\(([^)]*)\)`", SEEN)
    assert len(calls) == 2
    for name, given in calls:
        assert len(inspect.signature(getattr(interfaces.LatencyModel, name)).parameters) == 1 + len(given.split(", "))


def test_what_it_says_is_understood() -> None:
    words = set(re.findall(r"`(?:Plan\.)?([a-z_]+)`", SAID))
    assert words == set(Plan._fields) - {"work", "handoff", "without_kv"}
    assert "`Plan(work=(Work(id, tokens), ...))`" in SAID
    assert Work._fields[:2] == ("seq", "tokens")


def test_needs_are_those_that_are_matched() -> None:
    entry = PAGES[PAGE].split("- **`needs`**")[1].split("- **")[0]
    assert set(re.findall(r"`(\w+)`", entry)) == Engine.supports | OPTIONAL


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "my_router.py"
    path.write_text(fenced(PAGE, "python")[2])
    return path


def test_the_pages_router_is_run_by_its_command(router: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(router.parent)
    made, words = commands(PAGE)[-2:]
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


def test_a_router_is_asked_as_stated() -> None:
    assert "`place(held, fleet, now) -> Dispatch`" in PAGES[PAGE]
    assert list(inspect.signature(interfaces.Router.place).parameters) == ["self", "held", "fleet", "now"]
    (shortest,) = re.findall(r"`policies/(\w+)\.py` is the shortest", PAGES[PAGE])
    files = {name: Path(inspect.getfile(type(policies.load_router(name)))) for name in properties.ROUTERS}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    assert shortest == min(lines, key=lambda name: lines[name])


def table(head: str) -> tuple[set[str], dict[str, list[str]]]:
    """Of a table of the reference: the names, and of those written with brackets, the arguments."""
    rows = PAGES[PAGE].split("## Reference\n")[1].split(f"| `{head}` | |\n|---|---|\n")[1].split("\n\n")[0]
    found = re.findall(r"`(\w+)(?:\(([^)]*)\))?`", " ".join(row.split("|")[1] for row in rows.strip().splitlines()))
    return {name for name, _ in found}, {name: given.split(", ") for name, given in found if given}


@pytest.mark.parametrize("shown", [View, SeqView, Shape, Plan, Dispatch, BatchBuilder])
def test_the_reference_has_every_public_attribute(shown: type) -> None:
    names, arguments = table(shown.__name__)
    own = set(vars(BatchBuilder(view([], []))) if shown is BatchBuilder else ())
    own |= set(dir(shown)) - (set(dir(tuple)) if issubclass(shown, tuple) else set())
    assert names == {name for name in own if not name.startswith("_")}
    for name, given in arguments.items():
        assert list(inspect.signature(getattr(shown, name)).parameters)[1:] == given


@pytest.mark.parametrize("module", [batch_builder, refusals, infeasible])
def test_the_reference_has_every_function_of_the_kit(module: ModuleType) -> None:
    names, arguments = table(module.__name__)
    functions = {name for name, one in vars(module).items() if inspect.isfunction(one) and name[0] != "_"}
    assert names == {name for name in functions if getattr(module, name).__module__ == module.__name__}
    for name, given in arguments.items():
        assert list(inspect.signature(getattr(module, name)).parameters) == given


def test_the_reference_says_what_is_asked_of_a_shape() -> None:
    """The expressions of its sentence, evaluated."""
    here = view([], [Seq(request(), length=11, cached=10)])
    assert here.decodes.plus(512, 0) == Shape().plus(1, 10).plus(512, 0)
    calls = re.findall(r"`(\w+)\(([^)]*)\)`", PAGES[PAGE].split("| `latency` | ")[2].split("\n")[0])
    assert [name for name, _ in calls] == ["step_time", "largest_chunk", "knee"]
    for name, given in calls:
        assert list(inspect.signature(getattr(interfaces.LatencyModel, name)).parameters)[1:] == given.split(", ")
    assert f"`Work({', '.join(Work._fields)})`" in PAGES[PAGE]
