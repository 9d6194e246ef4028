"""Pictures of runs: attainment by tier and policy with intervals, distributions of TTFT and TPOT.

Needs matplotlib (extra `plot`), imported only when a picture is made.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rubato.core.extras import extra
from rubato.core.request import SLO
from rubato.measure.records import BenchResult, Record, summarise

# Okabe and Ito's palette, told apart under the usual colour blindnesses; line styles tell them apart in grey too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7A7A7A")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
Measure = Callable[[Record], float | None]
MEASURES: tuple[tuple[str, str, Measure], ...] = (
    ("ttft", "TTFT (ms, from scheduled arrival)", lambda record: record.verdict.ttft),
    ("tpot", "mean TPOT (ms)", lambda record: record.verdict.tpot),
)


@dataclass(frozen=True)
class Ink:
    """Colours of text, rules and intervals. ground: "none" leaves what lies behind the picture."""

    text: str = "#222222"
    rule: str = "#999999"
    grid: str = "#E3E3E3"
    ground: str = "#FFFFFF"


LIGHT = Ink()
CLEAR = Ink(ground="none")  # on a light page
DARK = Ink(text="#E6E6E6", rule="#8A8A8A", grid="#3D3D3D", ground="none")  # on a dark page


def plot(path: str | Path, runs: Sequence[BenchResult], title: str | None = None) -> None:
    """Write a PNG, or an SVG where the name ends so: attainment, and distributions of TTFT and TPOT by tier.

    Runs of one label are rounds of one policy and pooled. In the distributions a refused or failed request counts as
    never: a curve's height at the SLO's line is the share of *offered* requests within it. Raises ValueError without
    runs or with mixed judges; ImportError (says what to install) without matplotlib.
    """
    policies, tiers, slos = _grouped(runs)
    figure = _figure((max(7.5, 3.7 * len(tiers)), 9.6), LIGHT)
    grid = figure.add_gridspec(3, len(tiers), height_ratios=(1.15, 1, 1))
    _attainment(figure.add_subplot(grid[0, :]), policies, tiers, LIGHT)
    for line, (name, label, measure) in enumerate(MEASURES, start=1):
        for column, tier in enumerate(tiers):
            axes = figure.add_subplot(grid[line, column])
            _distribution(axes, policies, tier, measure, getattr(slos[tier], name))
            axes.set_xlabel(label)
            axes.set_title(tier, fontsize=10)
            if column == 0:
                axes.set_ylabel("share of offered requests")
    figure.suptitle(title if title is not None else _title(runs), fontsize=12)
    _save(figure, path)


def plot_attainment(path: str | Path, runs: Sequence[BenchResult], ink: Ink = LIGHT) -> None:
    """Write the attainment of `plot` alone, without its title, as PNG or SVG. Raises as `plot` does."""
    policies, tiers, _ = _grouped(runs)
    figure = _figure((7.5, 2.9), ink)
    axes = figure.add_subplot()
    _attainment(axes, policies, tiers, ink)
    for key in axes.get_legend().get_lines():
        key.set_linestyle("-")  # no curves here that styles tell apart
    _save(figure, path)


def _figure(inches: tuple[float, float], ink: Ink) -> Any:
    with extra("plot", "a picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=inches, dpi=110, layout="constrained", facecolor=ink.ground)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: str | Path) -> None:
    import matplotlib

    svg = str(path).endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "rubato"}):  # the same picture is the same file
        figure.savefig(path, format="svg" if svg else "png", metadata={"Date": None} if svg else None)


def _grouped(runs: Sequence[BenchResult]) -> tuple[dict[str, list[BenchResult]], list[str], dict[str, SLO]]:
    """Runs by label, the tiers that were offered, and every tier's SLO. Raises ValueError."""
    if not runs or len({run.slo_rule for run in runs}) != 1:
        raise ValueError("give one or more runs, all judged by one rule")
    policies: dict[str, list[BenchResult]] = {}
    for run in runs:
        policies.setdefault(run.label, []).append(run)
    slos = {tier: slo for run in runs for tier, slo in run.workload.tiers.items()}
    offered = {record.tier for run in runs for record in run.records}
    tiers = [tier for tier in slos if tier in offered]
    return policies, tiers, slos


def _title(runs: Sequence[BenchResult]) -> str:
    load = runs[0].workload
    invalid = sum(not run.valid for run in runs)
    warning = f"  -  {invalid} INVALID run(s)" if invalid else ""
    return (
        f"{load.name}: {len(load.arrivals)} requests at {load.rate:g}/s, judged by the {runs[0].slo_rule} rule{warning}"
    )


def _attainment(axes: Any, policies: dict[str, list[BenchResult]], tiers: Sequence[str], ink: Ink) -> None:
    from matplotlib.lines import Line2D

    keys: list[Line2D] = []
    groups = [*tiers, "all"]
    width = 0.8 / len(policies)
    for index, (label, runs) in enumerate(policies.items()):
        rows = {row.tier: row for row in summarise(runs)}
        shown = [(place, rows[tier]) for place, tier in enumerate(groups) if tier in rows]
        at = np.array([place for place, _ in shown]) + (index - (len(policies) - 1) / 2) * width
        heights = np.array([100 * row.attainment for _, row in shown])
        low = heights - [100 * row.attainment_low for _, row in shown]
        high = np.array([100 * row.attainment_high for _, row in shown]) - heights
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(at, heights, width * 0.92, color=colour)
        style: Any = STYLES[index % len(STYLES)]
        keys.append(Line2D([], [], color=colour, linestyle=style, linewidth=3.0, label=label))
        spread = np.maximum(np.array([low, high]), 0.0)
        axes.errorbar(at, heights, yerr=spread, fmt="none", ecolor=ink.text, elinewidth=1.2, capsize=3)
        for x, height, up, (_, row) in zip(at, heights, high, shown, strict=True):
            text = f"{height:.0f}\n{row.met}/{row.offered}"
            axes.text(
                x,
                height + max(up, 0.0) + 1.5,
                text,
                ha="center",
                va="bottom",
                fontsize=8,
                linespacing=1.1,
                color=ink.text,
            )
    axes.axhline(90, color=ink.rule, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(0, 122)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("SLO attainment (%, of offered)", color=ink.text)
    axes.set_title("Attainment with 95 % intervals; line at 90 %", fontsize=10, color=ink.text)
    axes.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=3.2, labelcolor=ink.text
    )
    axes.tick_params(colors=ink.text)
    axes.set_facecolor(ink.ground)
    axes.spines[["bottom", "left"]].set_color(ink.text)
    _clean(axes, ink)


def _distribution(
    axes: Any, policies: dict[str, list[BenchResult]], tier: str, measure: Measure, slo: float | None
) -> None:
    """Empirical distribution of one measure, in ms, over the offered requests of a tier."""
    curves: list[tuple[int, np.ndarray, int]] = []
    for index, runs in enumerate(policies.values()):
        records = [record for run in runs for record in run.records if record.tier == tier]
        values = [measure(record) for record in records]
        known = np.sort(np.array([1000.0 * value for value in values if value is not None]))
        curves.append((index, known, len(records)))
    every = np.concatenate([known for _, known, _ in curves])
    marks = [1000.0 * slo] if slo is not None else []
    positive = np.concatenate([every[every > 0], marks])
    if positive.size:
        _scale(axes, float(positive.min()), float(positive.max()))
    for index, known, offered in curves:
        if not known.size or not offered:
            continue
        right = axes.get_xlim()[1]
        x = np.concatenate([[known[0]], known, [max(right, known[-1])]])
        y = np.concatenate([[0.0], np.arange(1, len(known) + 1) / offered, [len(known) / offered]])
        style: Any = STYLES[index % len(STYLES)]
        axes.step(x, y, where="post", color=COLOURS[index % len(COLOURS)], linestyle=style, linewidth=1.8)
    if slo is not None:
        axes.axvline(1000.0 * slo, color="#222222", linewidth=1.0)
        left = axes.transAxes.inverted().transform(axes.transData.transform((1000.0 * slo, 0.0)))[0] > 0.75
        axes.annotate(
            f"SLO {1000.0 * slo:.4g}", (1000.0 * slo, 0.03), xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, 0), ha="right" if left else "left", textcoords="offset points", fontsize=8,
            color="#222222",
        )  # fmt: skip
    axes.set_ylim(0, 1.03)
    _clean(axes)


def _scale(axes: Any, low: float, high: float) -> None:
    """Linear where one decade holds everything, else logarithmic with plain numbers."""
    if high / low <= 10:
        axes.set_xlim(0, high * 1.08)
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlim(low * 0.8, high * 1.3)
    few = high / low <= 100
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _clean(axes: Any, ink: Ink = LIGHT) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=ink.grid, linewidth=0.7)
    axes.set_axisbelow(True)


def picture(path: str | Path, draw: Callable[[Any], None], title: str) -> None:
    """A PNG, or an SVG where the name ends so, with one pair of axes. Raises ImportError without matplotlib."""
    figure = _figure((7.5, 4.6), LIGHT)
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(textwrap.fill(title, 100), fontsize=10)  # what is wider than the picture would be cut off
    _save(figure, path)
