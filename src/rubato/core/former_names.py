"""Settings by the names that they had in the last release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def by_present_names(settings: Mapping[str, Any], former: Mapping[str, str], where: str = "") -> dict[str, Any]:
    """The settings by their names now, with a warning for each old one. former: old name -> new, "" of one without
    effect. where: how messages begin. Raises ValueError for a setting that is given by both."""
    now: dict[str, Any] = {}
    for key, value in settings.items():
        name = former.get(key, key)
        if name != key:
            says = f"is now {name}; the old name" if name else "has no effect any more; it"
            warnings.warn(f"{where}setting {key} {says} goes with the next release", FutureWarning, 2)
        if name in now:
            raise ValueError(f"{where}setting {name} is given twice, by its old and its new name")
        if name:
            now[name] = value
    return now
