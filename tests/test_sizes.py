"""Files of the package have at most 450 lines and functions 60; a longer function is named here with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "rubato"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
LONGER = {
    "replica/plan_check.py: _dispatch_problems": "one check after the other, in the order of their sentences",
}


def test_file_and_function_is_short_or_named_with_a_reason() -> None:
    files, functions = [], set()
    for file in sorted(FOLDER.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = str(file.relative_to(FOLDER))
        if text.count("\n") > MAX_FILE_LINES:
            files.append(name)
        functions |= {
            f"{name}: {node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        }
    assert files == []
    assert functions == LONGER.keys()
