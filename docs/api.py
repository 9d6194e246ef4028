"""Writes docs/api.md: what the public names are, from their signatures and docstrings.

python docs/api.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import rubato

PAGE = Path(__file__).resolve().parent / "api.md"
HEAD = """# Public names

Ask by `simulate`, `sweep`, `capacity`, `plan` and `bound`; write a policy with the rest. Everything else may change
between releases. `make api` writes this page from the docstrings. Lengths are in tokens, times in seconds.
"""
# module -> title -> names
GROUPS = {
    "rubato": {
        "Questions": ("simulate", "sweep", "capacity", "plan", "bound", "Result"),
        "Policies": ("Scheduler", "Router", "load_policy", "PolicyError"),
        "What a policy sees": ("View", "SeqView", "Request", "SLO"),
        "What a policy says": (
            "Plan", "Work", "Dispatch", "BatchBuilder", "run_in_order", "admit_in_order", "decode_first",
        ),
        "Loads and machines": ("Kind", "Hardware", "packaged_hardware", "profiles"),
    },
    "rubato.events": {"Events": tuple(rubato.events.__all__)},
    "rubato.workloads": {"Workloads": tuple(name for name in rubato.workloads.__all__ if name != "Kind")},
    "rubato.extend": {"Extending": tuple(rubato.extend.__all__)},
}  # fmt: skip
MODULES = {name.rpartition(".")[2] for name in GROUPS} - {"rubato"}  # which have a part of the page each


def page() -> str:
    """The page as the package has it now. Raises ValueError for a public name that stands in no group."""
    named = {name for names in GROUPS["rubato"].values() for name in names}
    if missing := set(rubato.__all__) - named - MODULES:
        raise ValueError(f"{', '.join(sorted(missing))}: name the group of each in docs/api.py")
    lines = [HEAD]
    for module, groups in GROUPS.items():
        for title, names in groups.items():
            lines += group(importlib.import_module(module), title, names)
    return "\n".join(lines)


def group(module: ModuleType, title: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    if module is not rubato:
        yield f"`from {module.__name__} import ...`. {text(module)}\n"
    for name in names:
        found = getattr(module, name)
        yield f"### {name}\n"
        if not inspect.ismodule(found):
            yield f"```python\n{head(name, found)}\n```\n"
        yield f"{text(found)}\n"
        yield from members(found)


def head(name: str, found: Any) -> str:
    """How it is called; a dataclass or a tuple by its fields."""
    if not inspect.isclass(found):
        return f"{name}{signature(found)}"
    if getattr(found, "_is_protocol", False) or issubclass(found, Exception):
        return f"class {name}"
    return f"{name}{signature(found)}"


def signature(found: Any) -> str:
    """One parameter a line where it is long; annotations as written."""
    own = [each for each in inspect.signature(found).parameters.values() if each.name != "self"]
    parameters = [str(each) for each in own]
    named = [at for at, each in enumerate(own) if each.kind is each.KEYWORD_ONLY]
    if named and not any(each.kind is each.VAR_POSITIONAL for each in own):
        parameters.insert(named[0], "*")
    parameters = [re.sub(r": '([^']*)'", r": \1", each) for each in parameters]
    parameters = [re.sub(r"<function (\w+) at \w+>", r"\1", each) for each in parameters]
    returned = inspect.signature(found).return_annotation
    gives = "" if inspect.isclass(found) or returned in (inspect.Signature.empty, None, "None") else f" -> {returned}"
    line = f"({', '.join(parameters)}){gives}"
    return line if len(line) < 80 else "(\n" + "".join(f"    {each},\n" for each in parameters) + f"){gives}"


def members(found: Any) -> Iterator[str]:
    """Methods and properties of a class: all of a Protocol's, else those that say what they do."""
    if not inspect.isclass(found) or issubclass(found, Exception):
        return
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    rows = []
    for name, member in vars(found).items():
        told = inspect.isfunction(member) or isinstance(member, property | cached_property | classmethod | staticmethod)
        says = (member.__doc__ or "").strip() or getattr(found, "_is_protocol", False)
        if name.startswith("_") or name in fields or not told or not says:
            continue
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        call = f"{name}{' '.join(signature(plain).split())}" if inspect.isfunction(plain) else name
        about = text(member, joined=True)
        rows.append(f"- `{call.replace('( ', '(').replace(', )', ')')}`{': ' if about else ''}{about}")
    if rows:
        yield "\n".join(rows) + "\n"


def text(found: Any, joined: bool = False) -> str:
    parts = inspect.cleandoc(found.__doc__ or "").split("\n\n")
    if joined:
        return " ".join(" ".join(part.split()) for part in parts)
    return "\n\n".join(listed(part) if part.startswith(SECTIONS) else " ".join(part.split()) for part in parts)


SECTIONS = ("Args:\n", "Returns:\n", "Raises:\n")


def listed(section: str) -> str:
    """A section of a docstring, an entry a line."""
    title, _, entries = section.partition(":\n")
    each = [" ".join(entry.split()) for entry in re.split(r"\n    (?=\S)", "\n" + entries)[1:]]
    named = [re.sub(r"^([\w, ]+): ", r"`\1`: ", entry) for entry in each]
    return f"{title}:\n\n" + "\n".join(f"- {entry}" for entry in named)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("docs/api.md: written")
