"""Imports point downwards, time is read in one place, heavy libraries stay in their own modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "rubato"
# A module may import from its own line and those above.
LAYERS = [
    ["types", "stoptext"],
    ["interfaces", "clock", "cores"],
    ["kv", "slo", "lengths", "fairness", "listeners"],
    ["check", "seq", "latency", "speculation", "packing"],
    ["blame"],
    ["replica", "policies", "metrics", "trace", "engines"],
    ["worker"],
    ["cluster"],
    ["fleet", "lean"],
    ["profiles"],
    ["config", "server", "workloads", "prompts", "prompt_parts", "intervals", "goodput"],
    ["configured"],
    ["results", "records", "serve", "answer", "target", "steptable"],
    ["fit", "profile"],
    ["bench", "compare", "plot", "simulate", "serverprocess", "cells", "resample"],
    ["setting"],
    ["alone", "little", "sweep"],
    ["capacity", "plot_sweep", "fleetplan", "fidelity"],
    ["sizing", "experiments"],
    ["papers"],
    ["demo", "commands"],
    ["cli"],
]
ENGINE = dict.fromkeys(["torch", "safetensors", "tokenizers", "gguf", "jinja2"], "engines/torch")
COMPILED = "policies/slos_serve/programme.py"
HEAVY: dict[str, str | tuple[str, ...]] = {
    **ENGINE,
    "numba": COMPILED,
    "llvmlite": ("engines/torch", COMPILED),
    "vllm": "engines/vllm",
    "ray": "fleet",
    "fastapi": "server",
    "starlette": "server",
    "matplotlib": "plot",
    "aiconfigurator_core": "profiles",
}
FILES = sorted(SRC.rglob("*.py"))


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            found += [f"rubato.{a.name}" for a in node.names] if module == "rubato" else [module]
    return found


def layer(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(SRC)) for f in FILES])
def test_layers(file: Path) -> None:
    own = file.relative_to(SRC).with_suffix("").parts[0]
    if own == "__init__":
        return
    for name in imports(ast.parse(file.read_text())):
        parts = name.split(".")
        if parts[0] == "rubato" and len(parts) > 1 and parts[1] != own:
            assert layer(parts[1]) <= layer(own), f"{own} imports {name}, which is above it"
        if parts[0] in HEAVY:
            where = str(file.relative_to(SRC))
            allowed = HEAVY[parts[0]]
            able = (allowed,) if isinstance(allowed, str) else allowed
            assert where.startswith((*able, "serve.py")), f"{where} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(SRC)) for f in FILES])
def test_only_the_clock_reads_time_and_nothing_draws_from_global_randomness(file: Path) -> None:
    own = str(file.relative_to(SRC))
    tree = ast.parse(file.read_text())
    names = imports(tree)
    if own not in ("clock.py", "demo.py", "serverprocess.py"):  # the last two time the tour and a child's start
        assert "time" not in names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"{own}: random.{node.attr}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "random":
            assert node.attr in ("default_rng", "Generator", "SeedSequence"), f"{own}: np.random.{node.attr}"
