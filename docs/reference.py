"""Writes docs/commands.md from the parsers of the commands, and docs/configuration.md from settings and docstrings.

python docs/reference.py
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rubato.cli.main import VERBS, parser
from rubato.config.json_schema import choices, json_schema, of_signature
from rubato.config.parts import PARTS
from rubato.core.setting_texts import Setting

DOCS = Path(__file__).resolve().parent
COMMANDS_HEAD = """# Commands

The same text as `--help` of each.

- Options mean the same in every command. They cannot be abbreviated.
- A command that is told something impossible exits with status 2 and says why in one line.
- Where vLLM has a name for an option, it works here too.
- Your shell completes commands, options, policies, profiles and scenarios with the script of
  [rubato completion](#rubato-completion).
"""
CONFIGURATION_HEAD = """# Configuration

One YAML file configures a server, a gateway or a simulation:

```bash
rubato check rubato.yaml
rubato serve --config rubato.yaml --set policy.fairness=0.1
```

`--set KEY=VALUE` changes a key; dots lead into its settings.
Text is taken letter by letter, and `KEY=` sets null. Other values are YAML. Unknown keys are errors.

`rubato check` says what a configuration would run, and refuses what a start would refuse. It opens no port, asks no
server and loads no weights.

To complete and check keys as you type, write the schema beside your file and name it in the file's first line. Editors
with the YAML language server (VS Code, Neovim, Emacs) read it:

```bash
rubato check --schema > rubato.schema.json
```

```yaml
# yaml-language-server: $schema=rubato.schema.json
model: bundled
```

What is chosen by name (`policy`, `engine` and others) is a name, or a name with settings: `policy: edf`, or
`policy: {name: edf, fairness: 0.1}`; for `engine`, `latency`, `lengths`, `autoscale` and `fleet` the examples say
`kind` for `name`. Settings of policies: `rubato policies NAME`.
"""
KEY_COLUMNS = ("key", "type", "default", "what it does")
MAX_SHOWN = 1e6  # larger bounds only keep out nonsense
TITLES = {"options": "option", "positional arguments": "argument"}  # argparse's groups


def commands() -> str:
    """The page docs/commands.md."""
    parsers = parser().own_parsers()
    parts = [COMMANDS_HEAD]
    for verb, about in VERBS.items():
        own = parsers[verb]
        examples = importlib.import_module(f"rubato.cli.{verb}").EXAMPLES
        parts.append(f"## rubato {verb}\n\n{about[0].upper()}{about[1:]}.\n")
        lines = "\n".join(wrapped(f"rubato {verb} {words}".rstrip()) for words in examples)
        parts.append(f"```bash\n{lines}\n```\n")
        for group in own._action_groups:
            rows = [option(own, action) for action in group._group_actions if action.dest != "help"]
            if rows:
                title = str(group.title)
                parts.append(table((TITLES.get(title, title), "what it does"), rows))
    return "\n".join(parts)


def wrapped(command: str, width: int = 80) -> str:
    """A command on lines of at most this many columns, where its options allow it."""
    lines = [""]
    for word in re.split(r" (?=-)", command):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return " \\\n".join(lines)


def option(own: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    """A row of the table: how it is written, what it does."""
    formatter = own._get_formatter()
    value = f" {formatter._format_args(action, action.dest.upper())}" if action.nargs != 0 else ""
    written = [f"{name}{value}" for name in action.option_strings] or [str(action.metavar)]
    return ", ".join(f"`{each}`" for each in written), formatter._expand_help(action)


def configuration() -> str:
    """The page docs/configuration.md. Needs PyTorch, for the settings of its engine."""
    schema = json_schema()
    parts = [CONFIGURATION_HEAD, "## All keys\n", table(KEY_COLUMNS, keys(schema))]
    for part, cls in PARTS.items():
        own = schema["$defs"][cls.__name__]
        parts += [f"## {part}\n", f"{own['description']}\n", table(KEY_COLUMNS, keys(own))]
    known = choices()
    for title in ("engine", "latency", "lengths", "autoscale", "fleet"):
        parts.append(f"## Settings of {title}\n")
        for kind, settings in known[title].items():
            if own := torch_settings() if kind == "torch" else settings:
                rows = [(f"`{each.name}`", default_text(each.default), each.text) for each in own]
                parts += [f"### {title}: {kind}\n", table(("setting", "default", "what it does"), rows)]
    return "\n".join(parts)


def keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of a table of keys."""
    for name, field in schema["properties"].items():
        required = name in schema.get("required", ())
        default = "required" if required else default_text(field.get("default"))
        yield f"`{name}`", type_text(name, field), default, field["description"]


def torch_settings() -> tuple[Setting, ...]:
    from rubato_torch import Engine

    return tuple(setting for setting in of_signature(Engine) if setting.name != "model")


def default_text(default: object) -> str:
    if default == sys.executable:
        return "the one that runs Rubato"
    if isinstance(default, str):
        return f"`{default}`" if default else "empty"
    return f"`{json.dumps(default, ensure_ascii=False, default=_plain)}`"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else list(value)


def type_text(name: str, field: Mapping[str, Any]) -> str:
    """A JSON schema's type in words."""
    if any("required" in str(each) for each in field.get("anyOf", ())):
        return "name, or name with settings"
    if "anyOf" in field:
        *most, last = dict.fromkeys(type_text(name, each) for each in field["anyOf"])
        return f"{', '.join(most)} or {last}" if most else last
    if "$ref" in field:
        return f"[settings](#{name})"
    if "additionalProperties" in field:
        return f"[settings](#{name}) by name"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        return f"list of {type_text(name, field['items'])}"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}
    return f"{words.get(field['type'], field['type'])}{bounds(field)}"


def bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum", MAX_SHOWN)
    if low is not None and high < MAX_SHOWN:
        return f" {low:g} to {high:g}"
    above = field.get("exclusiveMinimum")
    return f" ≥ {low:g}" if low is not None else "" if above is None else f" > {above:g}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


PAGES = {"commands.md": commands, "configuration.md": configuration}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}: written")
