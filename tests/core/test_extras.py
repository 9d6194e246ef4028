"""A library that is missing ends in one sentence that says what to install, and the core runs without any extra."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.cli.main import main
from rubato.core.extras import MissingExtra, extra

OPTIONAL = (
    "fastapi", "gguf", "httptools", "jinja2", "llvmlite", "matplotlib", "numba", "prometheus_client", "ray",
    "rubato_torch", "safetensors", "scipy", "starlette", "tokenizers", "torch", "uvicorn",
)  # fmt: skip
AFFINE = ("--set", "latency={kind: affine, k: [0.0, 1e-4], b: [0.01, 0.0]}", "--set", "engine.kv_blocks=512")


def without(code: str, *, libraries: tuple[str, ...] = OPTIONAL, cwd: Path | None = None) -> tuple[str, str]:
    """Output and errors of a Python that lacks these."""
    head = f"import sys\nfor name in {libraries!r}: sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_sentence_names_the_outermost_extra() -> None:
    with pytest.raises(MissingExtra) as raised, extra("demo", "the demo"), extra("torch", "the engine"):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    said = "the demo needs more than is installed (No module named 'no_such_library'): pip install 'rubato-llm[demo]'"
    assert str(raised.value) == said


def test_commands_say_what_to_install(tmp_path: Path) -> None:
    commands = {
        "serve": ["serve", "bundled"],
        "demo": ["demo"],
        "torch": ["profile", "somewhere", "--name", "n", "--out", "n.json"],
        "plot": ["simulate", "--duration", "1", "--plot", "p.png"],
        "bound": ["bound", *AFFINE, "--count", "9", "--seeds", "1", "--workers", "1", "--no-progress"],
    }
    code = f"from rubato.cli.main import main\nfor words in {[*commands.values()]!r}: assert main(words) == 2, words"
    _, errors = without(code, cwd=tmp_path)
    assert re.findall(r": pip install '(.*)'$", errors, re.MULTILINE) == [f"rubato-llm[{name}]" for name in commands]


def test_a_simulation_needs_no_extra(tmp_path: Path) -> None:
    words = ["simulate", "--duration", "5", "--policy"]
    code = "from rubato.cli.main import main\nfor policy in ('edf', 'vllm', 'sarathi', 'polyserve'):"
    output, errors = without(f"{code}\n    assert main([*{words!r}, policy]) == 0, policy", cwd=tmp_path)
    assert output.count("attained [95 %]") == 4
    assert "pip install" not in errors


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("policy", ["slos_serve", "sa"])
def test_without_numba_it_plans_alike_and_says_so_once(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--policy", policy, "--duration", "5", "--replicas", "2", "--json", "-"]
    code = f"from rubato.cli.main import main\nassert main({words!r}) == 0"
    output, errors = without(code, cwd=tmp_path)
    warning = f"{policy} plans in plain Python"
    assert errors.count(warning) == 1
    assert "pip install 'rubato-llm[fast]'" in errors
    assert main(words) == 0
    compiled = capsys.readouterr()
    assert warning not in compiled.err
    assert output == compiled.out
