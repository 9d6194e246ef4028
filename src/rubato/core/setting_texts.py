"""Reads the text of each setting from a class's docstring: `name: text` or `name (allowed): text`, a line each
below `Args:`, or `name: text. name, name: text.` within a paragraph."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = "\nArgs:\n"
ARGUMENT = re.compile(r"^    ([\w, ]+?)(?: \((.+?)\))?: (.*?)(?=^    \S|^\S|\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """A setting of a class.

    Args:
        name: of the setting.
        default: None also where it has none.
        text: what the docstring says of it; "" where that is nothing.
    """

    name: str
    default: object
    text: str


def settings_of(kind: Any, defaults: Mapping[str, object]) -> tuple[Setting, ...]:
    """Returns the settings of a class or a function, by their defaults, with texts from its docstring or those of its
    base classes."""
    texts: dict[str, str] = {}
    for each in reversed(getattr(kind, "__mro__", (kind,))):
        texts |= setting_texts(each.__doc__, defaults)
    return tuple(Setting(name, default, texts.get(name, "")) for name, default in defaults.items())


def arguments_of(docstring: str | None) -> dict[str, tuple[str, str]]:
    """Returns name -> (allowed, text) from the lines below `Args:`; "" where a line has none allowed."""
    below = inspect.cleandoc(docstring or "").partition(ARGUMENTS)[2]
    found = ARGUMENT.findall(re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0])
    return {name: (allowed, " ".join(text.split())) for names, allowed, text in found for name in names.split(", ")}


def setting_texts(docstring: str | None, settings: Collection[str]) -> dict[str, str]:
    """Returns the text of each setting that the docstring explains; settings explained together share a text.

    A text ends before the next setting, at the end of its paragraph, or before `Raises`.
    """
    if not docstring or not settings:
        return {}
    name = "|".join(map(re.escape, sorted(settings, key=len, reverse=True)))
    head = re.compile(rf"(?:^|(?<=[.;] ))((?:{name})(?:(?:,| and) (?:{name}))*): ")
    texts: dict[str, str] = {}
    for argument, (allowed, text) in arguments_of(docstring).items():
        bounds = f"; in {allowed}" if allowed.startswith(("[", "(")) else f" ({allowed})" if allowed else ""
        if argument in settings:
            texts[argument] = text.rstrip(".") + bounds
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring).partition(ARGUMENTS)[0]):
        words = " ".join(paragraph.split()).split(" Raises ")[0]
        heads = list(head.finditer(words))
        for match, end in zip(heads, [*(each.start() for each in heads[1:]), len(words)], strict=False):
            text = words[match.end() : end].strip().rstrip(".;")
            texts |= dict.fromkeys(re.split(r", | and ", match[1]), text)
    return texts
