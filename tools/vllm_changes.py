"""What the plug-in uses of vLLM and another release has otherwise: `python tools/vllm_changes.py 0.33.0 0.34.0`.

Every name that the plug-in, its middleware or their tests import, or read of an object, is looked up in the older
release, in the files of the scheduler, its KV manager, its requests and its metrics. Printed are those that are gone,
modules from which is imported too, and functions whose parameters differ.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from vllm_release import ROOT, unpacked

USERS = ("src/rubato/engines/vllm", "src/rubato/vllm.py", "src/rubato/serving", "tests/vllm")
FILES = (
    "v1/metrics",
    "v1/core",
    "v1/request.py",
    "v1/outputs.py",
    "v1/engine/__init__.py",
    "v1/kv_cache_interface.py",
    "config",
)


def python_files(root: Path, places: tuple[str, ...]) -> Iterator[Path]:
    for place in places:
        path = root / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def used() -> tuple[set[str], set[str]]:
    """Attributes, imported names, and methods that the plug-in overrides; and vLLM's modules that it imports from."""
    names: set[str] = set()
    modules: set[str] = set()
    for path in python_files(ROOT, USERS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
                names.update(alias.name for alias in node.names)
                modules.add(node.module)
    return {name for name in names if not name.startswith("__")}, modules


def has(release: Path, module: str) -> bool:
    path = release.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def defined(release: Path) -> dict[str, set[str]]:
    """What a release defines: each name, by "file: name" with its parameters where it is a function."""
    found: dict[str, set[str]] = {}
    for path in python_files(release / "vllm", FILES):
        where = path.relative_to(release / "vllm")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, set()).add(f"{where}: {node.name}({ast.unparse(node.args)})")
            elif isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(f"{where}: {node.name}")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    name = getattr(target, "attr", getattr(target, "id", None))
                    if name:
                        found.setdefault(name, set()).add(f"{where}: {name}")
    return found


def changes(older: str, newer: str) -> list[str]:
    """A line for each module and name that is gone, and each function that takes other parameters in the newer."""
    old, new = unpacked(older), unpacked(newer)
    (names, modules), before, after = used(), defined(old), defined(new)
    lines = [f"gone      module {m}" for m in sorted(modules) if has(old, m) and not has(new, m)]
    for name in sorted(names & before.keys()):
        if name not in after:
            lines.append(f"gone      {'; '.join(sorted(before[name]))}")
            continue
        was, now = (sorted(w for w in found[name] if "(" in w) for found in (before, after))
        for line in was:
            same_file = [other for other in now if other.partition("(")[0] == line.partition("(")[0]]
            if line not in now and same_file:
                lines.append(f"changed   {line}\n       to {'; '.join(same_file)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older")
    parser.add_argument("newer")
    args = parser.parse_args()
    lines = changes(args.older, args.newer)
    print(f"vLLM {args.older} to {args.newer}, of what the plug-in uses: {len(lines)} names changed", *lines, sep="\n")


if __name__ == "__main__":
    main()
