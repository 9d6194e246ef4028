"""Pictures that a notebook shows, a file keeps and a report embeds, in light or dark colours.

Needs matplotlib (extra `plot`), imported only when a picture is drawn.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rubato.core.extras import extra
from rubato.measure.confidence import Estimate

# Okabe and Ito's palette, told apart under the usual colour blindnesses; line styles tell them apart in grey too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7A7A7A")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
DASHED = (0, (4, 3))
WIDTH = 7.5  # inches


@dataclass(frozen=True)
class Ink:
    """The colours of text, rules and intervals.

    Args:
        ground: the background; "none" leaves what lies behind the picture.
    """

    text: str = "#222222"
    rule: str = "#999999"
    grid: str = "#E3E3E3"
    ground: str = "#FFFFFF"

    def settings(self) -> Any:
        """Of matplotlib, for axes that draw in these colours. In a page text stays text, which its reader can find."""
        texts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
        return dict.fromkeys(texts, self.text) | {
            "figure.facecolor": self.ground, "axes.facecolor": self.ground, "grid.color": self.grid,
            "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
            "axes.titlesize": 10, "svg.hashsalt": "rubato", "svg.fonttype": "none" if self is THEMED else "path",
        }  # fmt: skip


LIGHT = Ink()
CLEAR = Ink(ground="none")  # on a light page
DARK = Ink(text="#E6E6E6", rule="#8A8A8A", grid="#3D3D3D", ground="none")  # on a dark page
# Colours that nothing else has; `Picture.themed_svg` puts the page's own in their place.
THEMED = Ink(text="#2a2a2b", rule="#9a9a9b", grid="#e4e4e5", ground="none")


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing, made when it is shown or saved. A notebook shows it; `figure()` returns matplotlib's own figure, to go
    on drawing.

    Args:
        title: what it shows.
        draw: draws on the matplotlib figure that it is given.
        inches: width and height.
    """

    title: str
    draw: Callable[[Any, Ink], None]
    inches: tuple[float, float] = (WIDTH, 4.6)

    def figure(self, ink: Ink = LIGHT) -> Any:
        """A new matplotlib Figure. Raises ImportError (says what to install) without matplotlib."""
        with extra("plot", "a picture"):
            import matplotlib
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        with matplotlib.rc_context(ink.settings()):
            figure = Figure(figsize=self.inches, dpi=110, layout="constrained", facecolor=ink.ground)
            FigureCanvasAgg(figure)
            self.draw(figure, ink)
            if self.title:  # what is wider than the picture would be cut off
                figure.suptitle(textwrap.fill(self.title, int(12 * self.inches[0])), fontsize=11)
        return figure

    def save(self, path: str | Path, ink: Ink = LIGHT) -> None:
        """Write a PNG, or an SVG where the name ends so. Raises ImportError without matplotlib."""
        kind = "svg" if str(path).endswith(".svg") else "png"
        Path(path).write_bytes(_saved(self.figure(ink), ink, kind))

    def themed_svg(self) -> str:
        """For a page of HTML: an `<svg>` whose colours are the page's `--text`, `--rule`, `--grid` and `--first`."""
        untitled = Picture("", self.draw, self.inches)  # the page has the title
        svg = _saved(untitled.figure(THEMED), THEMED, "svg").decode()
        svg = svg[svg.index("<svg") :]
        for name in ("text", "rule", "grid"):
            svg = re.sub(getattr(THEMED, name), f"var(--{name})", svg, flags=re.IGNORECASE)
        svg = re.sub(COLOURS[0], "var(--first)", svg, flags=re.IGNORECASE)  # too dark for a dark page
        style = f'role="img" style="max-width:{120 * self.inches[0]:.0f}px"'
        return re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', rf"<svg {style} \1\2", svg, count=1)

    def __repr__(self) -> str:
        return f"<Picture: {self.title}>"

    def _repr_svg_(self) -> str:
        """For notebooks."""
        svg = _saved(self.figure(), LIGHT, "svg").decode()
        return svg[svg.index("<svg") :]


def _saved(figure: Any, ink: Ink, kind: str) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(ink.settings()):  # with its salt, the same picture is the same file
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def on_one_axes(title: str, draw: Callable[[Any], None], inches: tuple[float, float] = (WIDTH, 4.6)) -> Picture:
    """A picture that is drawn on a single pair of axes."""
    return Picture(title, lambda figure, ink: draw(figure.add_subplot()), inches)


# --------------------------------------------------------------------------- parts of several pictures


def lines_with_intervals(
    axes: Any, lines: Mapping[str, Sequence[Estimate]], at: Sequence[float], target: float, ink: Ink
) -> None:
    """Shares in percent over `at`, which ascends, a line each, with a rule at `target`. Lines stand a little beside
    each other, so that their intervals can be told apart; of one seed there is none."""
    beside = 0.012 * (at[-1] - at[0])
    for index, (label, values) in enumerate(lines.items()):
        places = [x + beside * (index - (len(lines) - 1) / 2) for x in at]
        middle = [100 * one.value for one in values]
        ends = [(one.low, one.high) if isfinite(one.high) else (one.value, one.value) for one in values]
        spread = [[max(0.0, m - 100 * low) for m, (low, _) in zip(middle, ends, strict=True)]]
        spread.append([max(0.0, 100 * high - m) for m, (_, high) in zip(middle, ends, strict=True)])
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
        axes.errorbar(
            places, middle, yerr=spread, color=colour, linestyle=style, marker="o", markersize=4, capsize=3,
            elinewidth=1.1, label=label,
        )  # fmt: skip
    axes.axhline(target, color=ink.rule, linewidth=0.8, linestyle=DASHED, zorder=0)
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_ylim(0, 104)
    axes.grid(axis="y", linewidth=0.7)


def bars_with_intervals(axes: Any, bars: Sequence[tuple[str, Estimate, str, str]], ink: Ink) -> None:
    """A bar a row from the top down: its name, its length with the interval, the text at its end, its colour. An
    interval without bounds, of one seed, is not drawn."""
    ends = []
    for place, (_, estimate, text, colour) in enumerate(bars):
        axes.barh(place, estimate.value, 0.62, color=colour)
        ends.append(estimate.value)
        if isfinite(estimate.high) and estimate.low < estimate.high:
            low = max(0.0, estimate.low)
            spread = [[max(0.0, estimate.value - low)], [max(0.0, estimate.high - estimate.value)]]
            axes.errorbar(estimate.value, place, xerr=spread, fmt="none", ecolor=ink.text, elinewidth=1.2, capsize=3)
            ends[-1] = max(estimate.value, estimate.high)
        axes.annotate(text, (ends[-1], place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_xlim(0, 1.5 * max(ends, default=0.0) or 1.0)  # the texts are within
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_ylim(max(1, len(bars)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.7)
