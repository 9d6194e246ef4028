"""What the pictures of figures have in common: named axes with a legend, and groups of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def name_axes(axes: Any, x: str, y: str, log: str = "", from_zero: bool = False) -> None:
    """Names both axes, makes those in `log` ("x", "y", "xy") logarithmic, and says what the lines are."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def bars(axes: Any, groups: Sequence[str], heights: Mapping[str, Sequence[float]], y: str) -> None:
    """A group of bars for each of `groups`, a bar in it for each name of `heights`."""
    width = 0.85 / len(heights)
    for place, (name, own) in enumerate(heights.items()):
        axes.bar(np.arange(len(groups)) + width * (place - (len(heights) - 1) / 2), own, width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=7)
    axes.set_ylim(top=1.25 * max(max(own) for own in heights.values()))  # room for the legend
    axes.set_ylabel(y)
    axes.legend(fontsize=7, ncols=3, loc="upper center")
