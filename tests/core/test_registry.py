"""What is chosen by name is built alike: packaged, from a file or a dotted module; errors say what would be right."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from rubato import policies
from rubato.config.build import autoscaler_of, engine_of, latency_of, lengths_of
from rubato.config.schema import Config, ConfigError, load
from rubato.core.clock import VirtualClock
from rubato.core.registry import construct, name_of

Floats = tuple[float, ...]
HEAD = "from dataclasses import dataclass\n"
PART_OF_DATACLASS = "\n@dataclass\nclass {own}(Base):\n    margin: float = 0.5\n"


@dataclass(frozen=True)
class Kind:
    """One part of a configuration. own: class of a user's module. typo: of the packaged name `packaged`."""

    part: str
    word: str
    own: str
    packaged: str
    typo: str
    base: str
    build: Callable[[Config], Any]
    body: str = PART_OF_DATACLASS

    @property
    def source(self) -> str:
        return f"{HEAD}{self.base}{self.body.format(own=self.own)}"

    def of(self, name: str, **settings: object) -> Any:
        return self.build(load({"engine": "simulated", self.part: {"name": name, **settings}}))


KINDS = [
    Kind(
        "policy", "policy", "Scheduler", "edf", "edff", "from rubato.policies.vllm import Scheduler as Base",
        lambda config: policies.load(config.policy.name, config.policy.settings),
    ),
    Kind(
        "router", "router", "Router", "least_loaded", "least_laoded",
        "from rubato.policies.round_robin import Router as Base",
        lambda config: policies.router_for("edf", config.router.name, config.router.settings),
    ),
    Kind(
        "engine", "engine", "Engine", "simulated", "simulatd", "from rubato.engines.simulated import Engine as Base",
        lambda config: engine_of(config, VirtualClock(), 0),
        "\nclass {own}(Base):\n    def __init__(self, latency, limits, clock, margin: float = 0.5):\n"
        "        super().__init__(latency, limits, clock)\n        self.margin = margin\n",
    ),
    Kind(
        "latency", "latency model", "Model", "affine", "afine", "from rubato.latency.affine import Model as Base",
        latency_of,
    ),
    Kind(
        "lengths", "length predictor", "Lengths", "running_mean", "running_men",
        "from rubato.core.length_prediction import RunningMean as Base", lengths_of,
        "\nclass {own}(Base):\n    def __init__(self, margin: float = 0.5):\n        super().__init__()\n"
        "        self.margin = margin\n",
    ),
    Kind(
        "autoscale", "autoscaler", "Autoscaler", "attainment", "atainment",
        "from rubato.fleet.autoscalers import AttainmentAutoscaler as Base", autoscaler_of,
    ),
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.part)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mine.py"


@every_kind
def test_a_packaged_one_is_built_by_its_name(kind: Kind) -> None:
    assert type(kind.of(kind.packaged)).__module__.startswith("rubato.")


@every_kind
@pytest.mark.parametrize("how", ["file", "dotted"])
def test_ones_own_file_and_module_take_settings(
    kind: Kind, how: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(kind.source)
    package = file.parent / f"package_of_{kind.part}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(kind.source)
    name = str(file) if how == "file" else f"{package.name}.mine"
    built = kind.of(name, margin=0.75)
    assert (type(built).__name__, built.margin, kind.of(name).margin) == (kind.own, 0.75, 0.5)
    if how == "file":
        assert type(kind.of("mine.py")) is type(kind.of("./mine.py")) is type(built), "it is read once"
        assert name_of(type(built).__module__) == str(file)


@every_kind
def test_an_unknown_name_is_an_error_that_says_what_would_do(kind: Kind) -> None:
    own = rf"\(one of your own is a FILE.py or a dotted module with a class {kind.own}\)"
    with pytest.raises(
        ConfigError, match=f"^unknown {kind.word} '{kind.typo}': did you mean '{kind.packaged}'. {own}$"
    ):
        kind.of(kind.typo)


@every_kind
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"margim": 1.0}, "has no setting 'margim': did you mean 'margin'?"),
        ({"margin": "much"}, "setting margin is 'much'; give a number, like 0.5"),
        ({"margin": True}, "setting margin is True; give a number, like 0.5"),
        ({"margin": None}, "setting margin is None; give a number, like 0.5"),
        ({"margin": nan}, "setting margin is nan: give finite numbers only"),
        ({"margin": -inf}, "setting margin is -inf: give finite numbers only"),
        ({"margin": 10**400}, "00: give finite numbers only"),
        ({"margin": "1e999"}, "setting margin is inf: give finite numbers only"),
    ],
)
def test_a_wrong_setting_is_named(kind: Kind, setting: dict[str, object], says: str, file: Path) -> None:
    file.write_text(kind.source)
    with pytest.raises(ConfigError) as error:
        kind.of("mine.py", **setting)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{kind.word} 'mine.py'")


def test_a_default_that_is_no_scalar_leaves_the_type_to_the_class() -> None:
    def build(
        classes: object = {}, steps: int | str = 4, pair: tuple[float, ...] = (), rates: tuple[float, ...] = (1.0,)
    ) -> Any:
        return classes, steps, pair, rates

    for settings in ({"classes": True}, {"steps": "auto"}, {"pair": [1, 2.5]}):
        assert construct("it", build, settings)
    assert construct("it", build, {"rates": ["1e-5", 1]})[3] == [1e-5, 1], "PyYAML reads 1e-5 as text"
    with pytest.raises(ConfigError, match=r"it: setting classes is .*: give finite numbers only"):
        construct("it", build, {"classes": {"a": [1, nan]}})
    with pytest.raises(ConfigError, match="it: setting pair is 1; give a list"):
        construct("it", build, {"pair": 1})


@every_kind
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "file 'mine.py' cannot be imported: ZeroDivisionError: division by zero"),
        ("def plan(:", "file 'mine.py' cannot be imported: SyntaxError"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("x = 1", "'mine.py' has no {own}; it defines none"),
        ("class Drafter: pass", "'mine.py' has no {own}; it defines Drafter"),
        (f"{HEAD}@dataclass\nclass {{own}}: pass", "'mine.py': {own} lacks "),
    ],
)
def test_a_file_that_has_none_says_why_and_is_read_again(kind: Kind, text: str, says: str, file: Path) -> None:
    file.write_text(text.format(own=kind.own))
    with pytest.raises(ConfigError) as error:
        kind.of("mine.py")
    assert says.format(own=kind.own) in str(error.value)
    if "cannot be imported" in says:
        file.write_text(kind.source)
        assert kind.of("mine.py").margin == 0.5


@every_kind
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py", "there is no {word} file 'nowhere.py'"),
        ("folder.py", "there is no {word} file 'folder.py'"),
        (
            "no.such.module",
            "{word} module 'no.such.module' cannot be imported: ModuleNotFoundError: No module named 'no'",
        ),
        ("rubato.core.clock", "{word} 'rubato.core.clock' has no {own}; it defines none"),
    ],
)
def test_a_place_without_one_is_named(kind: Kind, name: str, says: str, file: Path) -> None:
    (file.parent / "folder.py").mkdir()
    with pytest.raises(ConfigError) as error:
        kind.of(name)
    assert str(error.value).startswith(says.format(word=kind.word, own=kind.own))


def test_what_a_file_defines_reaches_another_process(file: Path) -> None:
    kind = next(kind for kind in KINDS if kind.part == "latency")
    file.write_text(kind.source)
    data = pickle.dumps(kind.of("mine.py", margin=0.25))
    code = f"import pickle, rubato; print(pickle.loads({data!r}).margin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0.25\n"
