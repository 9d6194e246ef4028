"""What a class's docstring says of each of its settings: `name (allowed): text`, a line each below `Args:`, or in a
sentence, `name: text. name, name: text.`"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = "\nArgs:\n"
ARGUMENT = re.compile(r"^    (\w+) \((.+?)\): (.*?)(?=^    \w+ \(|^\S|\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """A setting of a class. default: None also where it has none. text: "" where its docstring does not explain it."""

    name: str
    default: object
    text: str


def settings_of(kind: Any, defaults: Mapping[str, object]) -> tuple[Setting, ...]:
    """The settings of a class or a function, by their defaults, with the texts of its docstring or of the classes that
    it inherits from."""
    texts: dict[str, str] = {}
    for each in reversed(getattr(kind, "__mro__", (kind,))):
        texts |= setting_texts(each.__doc__, defaults)
    return tuple(Setting(name, default, texts.get(name, "")) for name, default in defaults.items())


def arguments_of(docstring: str | None) -> dict[str, tuple[str, str]]:
    """Of each line `name (allowed): text` below `Args:`, what is allowed and the text."""
    below = inspect.cleandoc(docstring or "").partition(ARGUMENTS)[2]
    return {name: (allowed, " ".join(text.split())) for name, allowed, text in ARGUMENT.findall(below)}


def setting_texts(docstring: str | None, settings: Collection[str]) -> dict[str, str]:
    """The text of each setting that the docstring explains; those explained together share theirs.

    It ends before the next setting, a paragraph or what the class raises.
    """
    if not docstring or not settings:
        return {}
    name = "|".join(map(re.escape, sorted(settings, key=len, reverse=True)))
    head = re.compile(rf"(?:^|(?<=[.;] ))((?:{name})(?:(?:,| and) (?:{name}))*): ")
    texts = {
        name: text + (f"; in {allowed}" if allowed[0] in "[(" else f" ({allowed})")
        for name, (allowed, text) in arguments_of(docstring).items()
        if name in settings
    }
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring).partition(ARGUMENTS)[0]):
        words = " ".join(paragraph.split()).split(" Raises ")[0]
        heads = list(head.finditer(words))
        for found, end in zip(heads, [*(each.start() for each in heads[1:]), len(words)], strict=False):
            text = words[found.end() : end].strip().rstrip(".;")
            texts |= dict.fromkeys(re.split(r", | and ", found[1]), text)
    return texts
