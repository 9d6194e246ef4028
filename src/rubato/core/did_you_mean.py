"""What an unknown name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: what was meant, or what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f": known are {', '.join(names)}" if names else ": there is none"
