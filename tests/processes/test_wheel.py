"""The distribution: a wheel is built and installed into an environment that knows nothing of the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, **more: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{words} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(source: Path, scratch: Path) -> Path:
    """The wheel of `source`, from a copy: setuptools builds in the tree and would add what an earlier build left."""
    shutil.copytree(source / "src", scratch / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        if (source / name).exists():
            shutil.copy(source / name, scratch)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch, scratch, cwd=scratch)
    (found,) = scratch.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("tree"))


@pytest.mark.slow
def test_everything_is_in_it_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = ROOT / "src"
    kinds = ("*.py", "py.typed", "profiles/data/*.json", "workloads/*.yaml", "board_page/*", "residuals/*.txt")
    wanted = {str(p.relative_to(source)) for kind in kinds for p in (source / "rubato").rglob(kind)}
    info = {name for name in names if ".dist-info/" in name}
    assert set(names) - info == wanted
    assert {Path(name).name for name in info} >= {"LICENSE", "NOTICE", "entry_points.txt", "METADATA"}


@pytest.mark.slow
def test_the_embedded_engine_is_a_wheel_of_its_own(tmp_path: Path) -> None:
    folder = ROOT / "packages" / "rubato-torch"
    names = zipfile.ZipFile(built(folder, tmp_path)).namelist()
    wanted = {str(p.relative_to(folder / "src")) for p in (folder / "src" / "rubato_torch").rglob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == wanted | {"rubato_torch/py.typed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"NUMBA_DISABLE_JIT": "1"}, pytest.param({}, marks=pytest.mark.full)], ids=["plain", "compiled"]
)
def test_the_command_runs_from_it(wheel: Path, tmp_path: Path, more: dict[str, str]) -> None:
    """Where `slos_serve` is compiled for the first time it takes many seconds."""
    env = tmp_path / "env"
    venv.create(env)
    python = env / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    # the dependencies, as they are installed here; a .pth file in there, as of an editable rubato, is not followed
    (next((env / "lib").glob("python3*")) / "site-packages" / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )
    where = run(python, "-c", "import rubato; print(rubato.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(env)
    assert "edf" in run(env / "bin" / "rubato", "policies", cwd=tmp_path, **more)
    workload = tmp_path / "load.jsonl"
    run(env / "bin" / "rubato", "workload", "-o", workload, "--rate", "2", "--duration", "3", cwd=tmp_path, **more)
    assert "attained" in run(env / "bin" / "rubato", "simulate", "--workload", workload, cwd=tmp_path, **more)
