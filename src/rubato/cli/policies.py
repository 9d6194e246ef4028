"""`rubato policies`: a line for each packaged policy, or the docstring, settings and source of one."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from typing import Any

import yaml

from rubato import policies
from rubato.config.json_schema import policy_settings
from rubato.core.interfaces import Router, Scheduler
from rubato.core.registry import Registry

EXAMPLES = (
    "",
    "rubato",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help="show all of one: a packaged policy, a file my_policy.py or a dotted module (default: a line for each)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    print(_lines() if args.name is None else _page(args.name))
    return 0


def _lines() -> str:
    """Returns each packaged policy: its name, what it decides, the first line of its docstring."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, kind, about, *_ in policies.describe():
        kinds.setdefault((name, about), []).append(kind)
    return "\n".join(
        f"{name:14} {own[0] if len(own) == 1 else 'both':9}  {about}" for (name, about), own in kinds.items()
    )


def _page(name: str) -> str:
    """Returns a policy's docstring, source, and parts with their settings. Raises PolicyError."""
    module = policies.module_of(name)
    text = [inspect.cleandoc(module.__doc__ or "No docstring."), f"Source: {getattr(module, 'SOURCE', 'not stated')}"]
    has_router = hasattr(module, "Router")
    has_scheduler = hasattr(module, "Scheduler") or not has_router  # of one with neither, `load` says what it lacks
    if has_scheduler:
        text.append(_part(policies.load(name), policies.SCHEDULERS, f"{name}:SETTING=VALUE"))
    if has_router:
        policy = name if has_scheduler else "POLICY"
        text.append(_part(policies.load_router(name), policies.ROUTERS, f"{policy}@{name}:SETTING=VALUE"))
    return "\n\n".join([*text, "Which policy for which load: docs/which-policy.md"])


def _part(part: Scheduler | Router, kind: Registry, option: str) -> str:
    cls: Any = type(part)
    lines = [f"{kind.attribute} (--policy {option}), needs of the engine: {', '.join(sorted(part.needs)) or 'nothing'}"]
    settings = policy_settings(cls, kind)
    for setting in settings:
        lines.append(f"    {setting.name}={_yaml_text(setting.default)}")
        lines += textwrap.wrap(setting.text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    stated = cls.__doc__ and not cls.__doc__.startswith(
        f"{cls.__name__}("
    )  # a dataclass without one gets its signature
    if stated and not all(setting.text for setting in settings):
        lines.append(textwrap.indent(inspect.cleandoc(cls.__doc__), "    "))
    return "\n".join(lines)


def _yaml_text(default: object) -> str:
    """Returns a default as `SETTING=VALUE` takes it, or as Python prints it where YAML has no such type."""
    try:
        return yaml.safe_dump(default, default_flow_style=True, width=10_000).split("\n")[0]
    except yaml.representer.RepresenterError:
        return repr(default)
