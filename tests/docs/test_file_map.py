"""The generated pages of docs/ say what the code says of itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def file_map() -> Any:
    return script("file_map")


def script(name: str) -> Any:
    """The module in docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_modules_say(file_map: Any) -> None:
    assert file_map.PAGE.read_text(encoding="utf-8") == file_map.page(), "run `make file-map`"


def test_the_page_of_public_names_is_what_they_say() -> None:
    api = script("api")
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "run `make api`"


def test_the_page_of_commands_is_what_their_parsers_say() -> None:
    reference = script("reference")
    page = (reference.DOCS / "commands.md").read_text(encoding="utf-8")
    assert page == reference.commands(), "run `make api`"


def test_the_page_of_settings_is_what_the_configuration_has() -> None:
    pytest.importorskip("torch")
    reference = script("reference")
    page = (reference.DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.configuration(), "run `make api`"


def test_the_page_of_metrics_is_what_is_exported() -> None:
    metrics = script("metrics")
    assert metrics.PAGE.read_text(encoding="utf-8") == metrics.page(), "run `make api`"


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("What it is. What else is to be said.", "What it is."),
        ("AdaServe over two\nlines (Fig. 5, §4.2).\n\nMore.", "AdaServe over two lines (Fig. 5, §4.2)."),
        ("Roofline (a paper):\n\n    T = k·x", "Roofline (a paper)."),
        ("Counting: t_M = M/m and the step takes\n\n    C2·t_M", "Counting."),
    ],
)
def test_the_first_sentence_is_taken(file_map: Any, tmp_path: Path, docstring: str, sentence: str) -> None:
    (tmp_path / "one.py").write_text(f'"""{docstring}"""\n', encoding="utf-8")
    assert file_map.about(tmp_path / "one.py") == sentence


def test_a_package_is_a_table_and_its_own_sentence(
    file_map: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_map, "ROOT", tmp_path)
    inner = tmp_path / "pkg" / "inner"
    inner.mkdir(parents=True)
    for file, text in {
        inner.parent / "__init__.py": "Outer.",
        inner / "__init__.py": "Inner.",
        inner / "a.py": "A|B.",
    }.items():
        file.write_text(f'"""{text}"""\n')
    rows = [
        "## `pkg`",
        "",
        "Outer.",
        "",
        "| module | |",
        "|---|---|",
        "| `inner/` | Inner. |",
        "| `inner/a.py` | A\\|B. |",
        "",
    ]
    assert file_map.section(tmp_path / "pkg") == "\n".join(rows)
    (inner / "b.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match=r"pkg/inner/b\.py has no docstring"):
        file_map.section(tmp_path / "pkg")
