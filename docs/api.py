"""Writes docs/api.md: what the public names are, from their signatures and docstrings.

python docs/api.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import rubato

PAGE = Path(__file__).resolve().parent / "api.md"
HEAD = """# Public names

`from rubato import ...`: what a policy, a router or a latency model of one's own is written with, and what makes
workloads and simulates them. Everything else may change between releases. `make api` writes this page from the
docstrings. Lengths are in tokens, times in seconds.
"""
GROUPS = {
    "Policies": ("Scheduler", "Router", "Autoscaler", "load", "load_router", "PolicyError"),
    "What a policy sees": ("View", "SeqView", "Shape", "Limits", "LatencyModel", "LengthPredictor", "Role"),
    "What a policy says": (
        "Plan", "Work", "Tree", "Dispatch", "Scaling", "BatchBuilder", "run_in_order", "admit_in_order", "decode_first",
    ),
    "Requests": ("Request", "Stage", "SLO", "Sampling"),
    "Events": (
        "Event", "Offered", "Placed", "Started", "Tokens", "Preempted", "ToolCallFinished", "HandedOff",
        "Transferred", "Lost",
        "Demoted", "Promoted", "Finished", "Assigned", "Joined", "Draining", "Left", "Stepped",
    ),
    "Engines and step times": ("Engine", "Sample", "BilinearModel", "profiles"),
    "Workloads": ("Kind", "FollowUp", "MixChange", "fixed", "log_normal", "make_workload", "scenarios"),
    "Simulation": ("simulate", "RunSpec", "Hardware", "packaged_hardware", "PolicyChoice"),
}  # fmt: skip


def page() -> str:
    """The page as the package has it now. Raises ValueError for a public name that stands in no group."""
    if missing := set(rubato.__all__) - {name for names in GROUPS.values() for name in names}:
        raise ValueError(f"{', '.join(sorted(missing))}: name the group of each in docs/api.py")
    return "\n".join([HEAD, *(line for title, names in GROUPS.items() for line in group(title, names))])


def group(title: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    for name in names:
        found = getattr(rubato, name)
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
    parameters = [str(each) for each in inspect.signature(found).parameters.values() if each.name != "self"]
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
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(found.__doc__ or "").split("\n\n")]
    return " ".join(paragraphs) if joined else "\n\n".join(paragraphs)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("docs/api.md: written")
