"""A picture of a sweep: attainment by rate with its intervals.

Needs matplotlib (extra `plot`), imported only when a picture is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rubato.measure.confidence import ALL
from rubato.measure.plot import COLOURS, STYLES, picture
from rubato.planning.sweep import Point


def plot(path: str | Path, points: Sequence[Point]) -> None:
    """A PNG: attainment of all requests by rate, a line a policy. Raises ImportError without matplotlib."""
    policies = list(dict.fromkeys(point.policy for point in points))

    def draw(axes: Any) -> None:
        for index, policy in enumerate(policies):
            own = sorted((p for p in points if p.policy == policy), key=lambda p: p.rate)
            rates, all_ = [p.rate for p in own], [p.attainment[ALL] for p in own]
            colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
            axes.plot(rates, [100 * e.value for e in all_], color=colour, linestyle=style, marker="o", label=policy)
            axes.fill_between(
                rates, [100 * e.low for e in all_], [100 * e.high for e in all_], color=colour, alpha=0.15, linewidth=0
            )
        axes.axhline(90, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylim(0, 103)
        axes.set_xlabel("requests/s offered")
        axes.set_ylabel("SLO attainment (%, of offered)")
        axes.legend(frameon=False)

    picture(path, draw, "Attainment by rate with 95 % intervals; line at 90 %")
