"""A policy in a file of anyone's: read once, and what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato.cli.main import main
from rubato.policies import PolicyError, load, load_router, router_for

GOOD = """
from dataclasses import dataclass
from rubato.policies.round_robin import Router
from rubato.policies.vllm import Scheduler as Vllm

@dataclass
class Scheduler(Vllm):
    margin: float = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_it_is_read_once_whatever_leads_to_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    scheduler = load(str(file), {"margin": 1, "budget": 8})
    assert (scheduler.margin, scheduler.budget) == (1, 8)  # type: ignore[attr-defined]
    assert type(load("mine.py")) is type(load("./mine.py")) is type(scheduler)


def test_its_router_comes_along(file: Path) -> None:
    assert type(router_for(str(file), "auto")).__module__ == "rubato.policies.round_robin"
    assert type(router_for(str(file), "minimal")).__module__ == "rubato.policies.minimal"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"margim": 1.0}, "no setting 'margim': did you mean 'margin'"),
        ({"margin": "much"}, "setting margin is 'much'; give a float, like 0.5"),
        ({"margin": True}, "setting margin is True; give a float"),
    ],
)
def test_a_wrong_setting_is_named(file: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load(str(file), settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "cannot be run: ZeroDivisionError: division by zero"),
        ("def plan(:", "cannot be run: SyntaxError"),
        ("import no_such_module", "cannot be run: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "has no Scheduler; it defines neither"),
        ("from rubato.policies.random import Router", "has no Scheduler; it defines Router"),
        ("class Scheduler: pass", "Scheduler is no dataclass"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Scheduler:\n    needs = frozenset()",
            "Scheduler lacks observe, plan; it must have needs, observe, plan",
        ),
        (
            "from rubato.policies.vllm import Scheduler\nScheduler = type('Scheduler', (Scheduler,), {'needs': None})",
            "Scheduler.needs is None: give a frozenset",
        ),
        (GOOD.replace(" = 0.5", ""), "non-default argument 'margin' follows default argument"),
    ],
)
def test_a_file_that_is_no_policy_says_why(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(PolicyError, match=says):
        load(str(file))
    assert main(["simulate", "--policy", str(file), "--duration", "1"]) == 2


def test_a_file_that_failed_is_read_again(file: Path) -> None:
    file.write_text("1 / 0")
    with pytest.raises(PolicyError):
        load(str(file))
    file.write_text(GOOD)
    assert load(str(file)).needs == {"chunked", "preempt", "mixed"}


@pytest.mark.parametrize("build", [load, load_router])
def test_no_such_file(tmp_path: Path, build: object, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nowhere.py", tmp_path / "folder.py"):
        (tmp_path / "folder.py").mkdir(exist_ok=True)
        with pytest.raises(PolicyError, match=r"there is no policy file '.*py'"):
            build(str(path))  # type: ignore[operator]
    assert main(["simulate", "--policy", "nowhere.py", "--duration", "1"]) == 2
    assert "there is no policy file 'nowhere.py'" in capsys.readouterr().err
