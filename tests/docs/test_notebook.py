"""examples/compare.ipynb: its cells run one after the other, and it is kept without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_public_api import imported, is_public

NOTEBOOK = Path(__file__).parents[2] / "examples" / "compare.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run_cell(text: str, names: dict[str, Any]) -> Any:
    """Its last expression's value, as a notebook shows it."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.slow
def test_the_notebook_runs_and_each_cell_shows_something() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [value for text in CODE if (value := run_cell(text, names)) is not None]
    assert len(shown) == 9
    for value in shown:
        draw = getattr(value, "_repr_html_", None) or value._repr_svg_
        assert draw().startswith(("<", "\n<"))


def test_the_notebook_has_no_outputs_and_public_names_only() -> None:
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    assert [use for text in CODE for use in imported(text) if not is_public(*use)] == []
