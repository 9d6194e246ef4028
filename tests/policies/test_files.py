"""A policy in a file of anyone's, beyond what tests/core/test_registry.py asks of all that is chosen by name."""

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


def test_its_router_comes_along(file: Path) -> None:
    assert type(router_for(str(file), "auto")).__module__ == "rubato.policies.round_robin"
    assert type(router_for(str(file), "minimal")).__module__ == "rubato.policies.minimal"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
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


def test_settings_of_the_router_are_not_the_policys(file: Path) -> None:
    for name, settings, option in (
        (str(file), {"prefix_affinity": True}, f"{file}@auto:prefix_affinity=True"),
        ("sa", {"temperature": 0.5}, "sa@sa:temperature=0.5"),
    ):
        with pytest.raises(PolicyError, match=f"is a setting of the router: write {option}$"):
            load(name, settings)
    with pytest.raises(PolicyError, match="did you mean 'prefix_affinity'"):
        load_router(str(file), {"prefix_afinity": True})


def test_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policy", "nowhere.py", "--duration", "1"]) == 2
    assert "there is no policy file 'nowhere.py'" in capsys.readouterr().err
