"""The public names: what `rubato` exports is there, is explained, and is all that the manual and the examples use."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rubato
from rubato import events, extend, workloads
from tests.docs.pages import PAGES, blocks

ROOT = Path(__file__).parents[1]
OF_POLICIES = re.compile(r"rubato\.policies\.\w+")  # a packaged policy is public by its page


def imported(text: str) -> list[tuple[str, str]]:
    """(module, name) of each import of Rubato's; nothing for a text that is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = [
        (node.module or "", a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names
    ]
    found += [(alias.name, "") for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "rubato"]


PUBLIC = {"rubato": rubato, "rubato.events": events, "rubato.extend": extend, "rubato.workloads": workloads}
SUBMODULES = {("rubato.workloads", "scenarios")}


def is_public(module: str, name: str) -> bool:
    if (module, name) in SUBMODULES or OF_POLICIES.fullmatch(module):
        return True
    return module in PUBLIC and name in ("", *PUBLIC[module].__all__)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in PUBLIC for name in PUBLIC[module].__all__])
def test_a_public_name_is_there_and_explained(module: str, name: str) -> None:
    assert (getattr(PUBLIC[module], name).__doc__ or "").strip(), f"{name} has no docstring"
    assert module != "rubato" or name in dir(rubato)


def test_the_page_calls_a_function_as_it_can_be_called() -> None:
    """A call that is written from a heading of the page, its arguments in order, has to run."""
    page = (ROOT / "docs" / "api.md").read_text()
    for function in (rubato.simulate, rubato.sweep, rubato.capacity, rubato.plan, rubato.bound):
        own = inspect.signature(function).parameters.values()
        listed = page.split(f"```python\n{function.__name__}(\n")[1].split("\n)")[0].splitlines()
        by_place = [line.split(":")[0].strip() for line in listed[: listed.index("    *,")]]
        assert by_place == [each.name for each in own if each.kind is not each.KEYWORD_ONLY]


def test_few_names_are_at_the_top() -> None:
    assert len(rubato.__all__) <= 30


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Schedular'"):
        rubato.Schedular  # noqa: B018


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_public_names_only(page: str) -> None:
    assert [use for block in blocks(page) for use in imported(block) if not is_public(*use)] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_use_public_names_only(example: Path) -> None:
    assert [use for use in imported(example.read_text(encoding="utf-8")) if not is_public(*use)] == []


def test_importing_rubato_takes_no_heavy_library() -> None:
    heavy = "{'scipy', 'pydantic', 'aiohttp', 'fastapi', 'torch', 'ray', 'matplotlib', 'pandas', 'numba', 'vllm'}"
    program = f"import sys, rubato; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
