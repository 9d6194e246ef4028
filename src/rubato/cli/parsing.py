"""The parser of each verb: errors of one line that name the nearest word, and help that shows defaults and examples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from rubato.core.did_you_mean import nearest


def words_of_command(argv: Sequence[str] | None) -> list[str]:
    """Returns the words after the program's name."""
    return sys.argv[1:] if argv is None else list(argv)


def escape_percent(text: str) -> str:
    """Escapes `%` in a help text, since argparse formats it."""
    return text.replace("%", "%%")


class HelpFormatter(argparse.HelpFormatter):
    """Ends a help with the default where there is one and the text does not say it; examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if default in (None, False, "", argparse.SUPPRESS) or default == [] or "default" in text:
            return text
        shown = ",".join(f"{part:g}" for part in default) if isinstance(default, list) else str(default)
        return f"{text} (default: {escape_percent(shown)})".lstrip()


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations: a script must not change its meaning when an option is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Prints one line, instead of a usage as long as the screen before it. Exits with status 2."""
        stop = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {message}{stop} `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but reports an unknown option first: it explains the errors that follow from it."""
        for word in self._own(words_of_command(args)):
            name = word.partition("=")[0]
            if name not in self._option_string_actions:
                self.error(f"unknown option {name}{nearest(name, self.long_options, list_all=False)}")
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unexpected argument {left[0]!r}")
        return parsed, left

    def own_parsers(self) -> dict[str, Parser]:
        """Returns the parser of each verb."""
        (verbs,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return dict(verbs.choices)

    @property
    def long_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    def _own(self, words: Iterable[str]) -> Iterator[str]:
        """Yields the options among `words`; for the parser of verbs only those before the verb."""
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            if word.startswith("--") and " " not in word.partition("=")[0]:
                yield word

    def add_own_usage(self) -> None:
        """Sets a usage of one line with the required options and the positional arguments."""
        parts = [f"{self.prog} [options]"]
        for action in self._actions:
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if action.option_strings and action.required:
                parts.append(f"{action.option_strings[0]} {metavar}")
            elif not action.option_strings:
                optional = action.nargs in ("?", "*")
                parts.append(f"[{metavar}]" if optional else metavar)
        self.usage = escape_percent(" ".join(parts))
