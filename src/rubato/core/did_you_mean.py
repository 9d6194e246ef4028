"""Suggests the known name that an unknown one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_ALIKE = 0.65  # by difflib: of three letters one may be another
MIN_PART = 3  # letters of a part that names are looked for by
MAX_SHOWN = 6


def nearest(word: str, known: Iterable[str], *, list_all: bool = True) -> str:
    """Returns the end of an error message about an unknown name.

    It suggests the known name spelt most alike, else the known names that contain the unknown one or that it contains;
    else it lists all known names.

    Args:
        word: the unknown name.
        known: the known names.
        list_all: list the known names where none is near; False: return "".
    """
    names = sorted(known)
    plain = {name.lstrip("-"): name for name in names}  # dashes, which all options have, make none alike
    part = word.lstrip("-")
    close = [plain[name] for name in difflib.get_close_matches(part, plain, n=1, cutoff=MIN_ALIKE)]
    if not close and len(part) >= MIN_PART:
        part = part.casefold()
        close = [name for bare, name in plain.items() if part in bare.casefold() or _is_in(bare.casefold(), part)]
    if close:
        more = f" or {len(close) - MAX_SHOWN} others" if len(close) > MAX_SHOWN else ""
        return f": did you mean {_either([repr(name) for name in close[:MAX_SHOWN]], bool(more))}{more}?"
    if not list_all:
        return ""
    return f": known are {', '.join(names)}" if names else ": there is none"


def _is_in(name: str, word: str) -> bool:
    return len(name) >= MIN_PART and name in word


def _either(names: list[str], more_follow: bool) -> str:
    if more_follow or len(names) == 1:
        return ", ".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"
