"""The first three naming rules of CONTRIBUTING: units of constants, one class for a name, no participle alone."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "rubato"
FILES = sorted(FOLDER.rglob("*.py"))
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
UNITS = {"seconds": "_S", "s": "_S", "bytes": "_BYTES", "tokens": "_TOKENS"}
BY_CONVENTION = {"Engine", "Model", "Router", "Scheduler"}  # by which a module of one's own is found
PARTICIPLES = set(
    re.findall(
        r"\w+",
        "asked begun done found given gone heard held kept known learnt left made meant moved owed placed promised "
        "said seen sent shown stated taken told wanted",
    )
)
MAX_PARTICIPLES = 47  # how many are left; fewer each time
MAX_LINES = 3  # that one may live


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def constants() -> Iterator[tuple[Path, str, ast.expr | None, str]]:
    """Each constant of a module: file, name, value and the comment behind it."""
    for file in FILES:
        lines = file.read_text(encoding="utf-8").splitlines()
        for node in tree(file).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id):
                    comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
                    yield file, target.id, node.value, comment


def test_constant_of_a_unit_ends_in_it_and_a_bound_begins_with_max_or_min() -> None:
    wrong = []
    for file, name, value, comment in constants():
        numbers = [node for node in ast.walk(value) if isinstance(node, ast.Constant)] if value is not None else []
        is_number = isinstance(value, ast.Constant | ast.BinOp) and all(type(n.value) in (int, float) for n in numbers)
        unit = UNITS.get(re.split(r"\W", comment)[0]) if is_number else None
        if (unit and not name.endswith(unit)) or re.search(
            r"(^|_)(MOST|LEAST|LONGEST|SHORTEST|LARGEST|FEW|SECONDS)(_|$)", name
        ):
            wrong.append(f"{file.relative_to(FOLDER)}: {name}  # {comment}")
    assert wrong == []


def test_public_class_shares_its_name_with_no_other() -> None:
    files = defaultdict(list)
    for file in FILES:
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in BY_CONVENTION:
                files[node.name].append(str(file.relative_to(FOLDER)))
    assert {name: own for name, own in files.items() if len(own) > 1} == {}


def participles(module: ast.AST) -> Iterator[str]:
    """Functions, fields and attributes with such a name, and local names that live longer than a few lines."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.strip("_") in PARTICIPLES:
                yield node.name
            lines = defaultdict(list)
            for own in ast.walk(node):
                if isinstance(own, ast.Name) and own.id in PARTICIPLES:
                    lines[own.id].append(own.lineno)
            yield from (name for name, own in lines.items() if max(own) - min(own) > MAX_LINES)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id.strip("_") in PARTICIPLES:
                yield node.target.id
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.strip("_") in PARTICIPLES
        ):
            yield node.attr


def test_participle_alone_names_little_that_lives_longer_than_three_lines() -> None:
    left = [name for file in FILES for name in participles(tree(file))]
    assert len(left) <= MAX_PARTICIPLES, sorted(left)


def test_rules_see_what_they_are_for() -> None:
    code = "def told():\n    held = 1\n\n\n\n    return held\n\n\ndef plan():\n    made = 2\n    return made\n"
    assert sorted(participles(ast.parse(code))) == ["held", "told"]
