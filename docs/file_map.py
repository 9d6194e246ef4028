"""Writes docs/file_map.md, a line for each module: its path and the first sentence of its docstring.

python docs/file_map.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "file_map.md"
# What is mapped: the packages in the first, and each of the others as one package, where there is such a folder.
PACKAGES = ROOT / "src" / "rubato"
BESIDE = (ROOT / "packages" / "rubato-torch" / "src" / "rubato_torch", ROOT / "experiments")
HEAD = """# File map

What each module is, in the first sentence of its docstring. `make file-map` writes this page.
[Design](design.md#where-things-are) says which package may import which.
"""


def page() -> str:
    """The page as the tree has it now. Raises ValueError for a module without a docstring."""
    folders = [folder for folder in sorted(PACKAGES.iterdir()) if (folder / "__init__.py").is_file()]
    folders += [folder for folder in BESIDE if (folder / "__init__.py").is_file()]
    return "\n".join([HEAD, *(section(folder) for folder in folders)])


def section(folder: Path) -> str:
    """A package: its own sentence, then a table of its modules, subpackages by their folder."""
    rows = []
    for file in sorted(folder.rglob("*.py"), key=place):
        if file.parent == folder and file.name == "__init__.py":
            continue
        inside = file.relative_to(folder).as_posix().removesuffix("__init__.py")
        rows.append(f"| `{inside}` | {about(file).replace('|', chr(92) + '|')} |")
    table = "\n".join(["| module | |", "|---|---|", *rows, ""]) if rows else ""
    title = folder.relative_to(ROOT).as_posix()
    return f"## `{title}`\n\n{about(folder / '__init__.py')}\n\n{table}"


def place(file: Path) -> tuple[str, ...]:
    """By name; a package right before what is in it."""
    return (*file.parent.parts, "" if file.name == "__init__.py" else file.name)


def about(file: Path) -> str:
    """The first sentence; of one that leads up to an equation, what stands before its colon."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring: say in a sentence what the module is")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]
    return sentence if sentence.endswith(".") else f"{sentence.split(': ')[0].rstrip(':')}."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")
