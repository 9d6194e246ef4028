"""What the tests would miss: small changes of the code, one at a time, each under tests that run the changed function.

    python tools/mutants.py SEED

30: a comparison turned, an operator exchanged, a number one higher, a returned condition negated, a statement left out.
They are drawn by a hash of the seed, the function's qualified name, the kind and its number in the function: one that
moves to another file keeps its mutants. In a copy of the tree, a first run notes which tests reach which function; a
mutant then runs under at most 300 of these, those first that reach few, until one fails. This module is also pytest's
plug-in for that.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ("core/**/*.py", "replica/**/*.py", "frontdoor/**/*.py", "fleet/relay*.py")
FOLDERS = ("core", "doors", "fleet", "planning", "policies", "serving", "simulation")
SLOW = ("serving/board", "fleet/test_ray_host.py", "fleet/test_ray_servers.py")
TURNED = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
TURNED |= {new: old for old, new in TURNED.items()}
EXCHANGED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
KINDS = ("compare", "arithmetic", "constant", "return", "statement")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Mutant = tuple[str, str, int, int, str]  # function, kind, number of the kind in it, line, file


def reached(function: str) -> None:
    if test := os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]:
        write(function, test)


@cache
def write(*words: str) -> None:
    with Path(os.environ["REACHED"]).open("a") as file:
        print(*words, sep="\t", file=file)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        write("failed", report.nodeid)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if "CHOSEN" in os.environ:
        chosen = Path(os.environ["CHOSEN"]).read_text().split("\n")
        items[:] = [item for item in items if item.nodeid in chosen]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for node in ast.iter_child_nodes(tree):
        name = prefix + node.name if isinstance(node, Function | ast.ClassDef) else ""
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if name else prefix)


def nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All below, without functions inside the function, which have names of their own."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield node
            yield from nodes(ast.iter_child_nodes(node))


def change_of(node: ast.AST) -> tuple[str, dict[str, Any]]:
    """Which kind of change it allows, and what is set on it by that."""
    match node:
        case ast.Compare(ops=[op, *more]) if type(op) in TURNED:
            return "compare", {"ops": [TURNED[type(op)](), *more]}
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in EXCHANGED:
            return "arithmetic", {"op": EXCHANGED[type(op)]()}
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return "constant", {"value": value + 1}
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp() as value):
            return "return", {"value": ast.UnaryOp(ast.Not(), value)}
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "statement", {"__class__": ast.Pass}
    return "", {}


def sites(file: str) -> Iterator[tuple[Mutant, ast.AST, ast.AST]]:
    tree = ast.parse((ROOT / file).read_text())
    for name, function in functions(tree):
        numbers: Counter[str] = Counter()
        for node in list(nodes(function.body)):
            if kind := change_of(node)[0]:
                yield (name, kind, numbers[kind], node.lineno, file), node, tree  # type: ignore[attr-defined]
                numbers[kind] += 1


def mutated(mutant: Mutant) -> str:
    node, tree = next((node, tree) for other, node, tree in sites(mutant[-1]) if other == mutant)
    for name, value in change_of(node)[1].items():
        setattr(node, name, value)
    return ast.unparse(tree)


def noting(file: str, names: set[str]) -> str:
    tree = ast.parse((ROOT / file).read_text())
    for name, function in functions(tree):
        if name in names:
            call = ast.parse(f"__import__('tools.mutants', fromlist='-').reached({name!r})").body
            function.body[ast.get_docstring(function) is not None : 0] = call
    return ast.unparse(tree)


def pytest(copy: Path, *arguments: str, **environment: str) -> int:
    paths = os.pathsep.join(str(copy / folder) for folder in ("src", "packages/rubato-torch/src", "."))
    seconds = "240" if "CHOSEN" in environment else "0"  # none
    command = ["timeout", seconds, sys.executable, "-m", "pytest", "-m", "not full", "-p", "tools.mutants", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "REACHED": str(copy / "reached"), **environment}
    return subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    files = sorted(str(path.relative_to(ROOT)) for part in SOURCES for path in (ROOT / "src/rubato").glob(part))
    found = [mutant for file in files for mutant, *_ in sites(file)]
    found.sort(key=lambda mutant: hashlib.sha256(f"{sys.argv[1]} {mutant[:3]}".encode()).digest())
    mutants = [one for kind in KINDS for one in [m for m in found if m[1] == kind][:6]]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        for *_, file in mutants:
            (copy / file).write_text(noting(file, {mutant[0] for mutant in mutants}))
        pytest(copy, "-n2", *(f"tests/{name}" for name in FOLDERS), *(f"--ignore=tests/{path}" for path in SLOW))
        for *_, file in mutants:
            shutil.copy(ROOT / file, copy / file)
        lines = {(*line.split("\t"),): None for line in sorted((copy / "reached").read_text().splitlines())}
        breadth = Counter(test for _, test in lines)
        for mutant in mutants:
            function, *_, line, file = mutant
            reach = [test for name, test in lines if name == function and ("failed", test) not in lines]
            tests = sorted(reach, key=lambda test: (breadth[test], test))[:300]
            (copy / "chosen").write_text("\n".join(tests))
            (copy / file).write_text(mutated(mutant))
            where = {test.partition("::")[0] for test in tests}
            code = pytest(copy, "-x", "-n0", *where, CHOSEN=str(copy / "chosen")) if tests else 0
            shutil.copy(ROOT / file, copy / file)
            result = {0: f"SURVIVES {len(tests)} tests", 1: "caught"}.get(code, f"pytest ended with {code}")
            print(f"{file}:{line}", *mutant[:3], result, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
