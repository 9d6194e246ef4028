"""Pictures of runs: attainment by tier and policy with intervals, distributions of TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rubato.core.request import SLO
from rubato.measure.pictures import COLOURS, DASHED, STYLES, WIDTH, Ink, Picture
from rubato.measure.records import BenchResult, Record, summarise

Measure = Callable[[Record], float | None]
MEASURES: tuple[tuple[str, str, Measure], ...] = (
    ("ttft", "TTFT (ms, from scheduled arrival)", lambda record: record.verdict.ttft),
    ("tpot", "mean TPOT (ms)", lambda record: record.verdict.tpot),
)


def picture_of_runs(runs: Sequence[BenchResult], title: str | None = None) -> Picture:
    """Attainment, and distributions of TTFT and TPOT by tier.

    Runs of one label are rounds of one policy and pooled. In the distributions a refused or failed request counts as
    never: a curve's height at the SLO's line is the share of *offered* requests within it. Raises ValueError without
    runs or with mixed judges.
    """
    policies, tiers, slos = _grouped(runs)

    def draw(figure: Any, ink: Ink) -> None:
        grid = figure.add_gridspec(3, len(tiers), height_ratios=(1.15, 1, 1))
        _attainment(figure.add_subplot(grid[0, :]), policies, tiers, ink)
        for line, (name, label, measure) in enumerate(MEASURES, start=1):
            for column, tier in enumerate(tiers):
                axes = figure.add_subplot(grid[line, column])
                _distribution(axes, policies, tier, measure, getattr(slos[tier], name), ink)
                axes.set_xlabel(label)
                axes.set_title(tier)
                if column == 0:
                    axes.set_ylabel("share of offered requests")

    return Picture(title if title is not None else _title(runs), draw, (max(WIDTH, 3.7 * len(tiers)), 9.6))


def picture_of_attainment(runs: Sequence[BenchResult]) -> Picture:
    """The attainment of `picture_of_runs` alone, without its title. Raises as that does."""
    policies, tiers, _ = _grouped(runs)

    def draw(figure: Any, ink: Ink) -> None:
        axes = figure.add_subplot()
        _attainment(axes, policies, tiers, ink)
        for key in axes.get_legend().get_lines():
            key.set_linestyle("-")  # no curves here that styles tell apart

    return Picture("", draw, (WIDTH, 2.9))


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
        placed_rows = [(place, rows[tier]) for place, tier in enumerate(groups) if tier in rows]
        at = np.array([place for place, _ in placed_rows]) + (index - (len(policies) - 1) / 2) * width
        heights = np.array([100 * row.attainment for _, row in placed_rows])
        low = heights - [100 * row.attainment_low for _, row in placed_rows]
        high = np.array([100 * row.attainment_high for _, row in placed_rows]) - heights
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(at, heights, width * 0.92, color=colour)
        style: Any = STYLES[index % len(STYLES)]
        keys.append(Line2D([], [], color=colour, linestyle=style, linewidth=3.0, label=label))
        spread = np.maximum(np.array([low, high]), 0.0)
        axes.errorbar(at, heights, yerr=spread, fmt="none", ecolor=ink.text, elinewidth=1.2, capsize=3)
        for x, height, up, (_, row) in zip(at, heights, high, placed_rows, strict=True):
            text = f"{height:.0f}\n{row.met}/{row.offered}"
            axes.text(
                x,
                height + max(up, 0.0) + 1.5,
                text,
                ha="center",
                va="bottom",
                fontsize=8,
                linespacing=1.1,
            )
    axes.axhline(90, color=ink.rule, linewidth=0.8, linestyle=DASHED, zorder=0)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(0, 122)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("SLO attainment (%, of offered)")
    axes.set_title("Attainment with 95 % intervals; line at 90 %")
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.2)
    axes.grid(axis="y", linewidth=0.7)


def _distribution(
    axes: Any, policies: dict[str, list[BenchResult]], tier: str, measure: Measure, slo: float | None, ink: Ink
) -> None:
    """Empirical distribution of one measure, in ms, over the offered requests of a tier."""
    curves: list[tuple[int, np.ndarray, int]] = []
    for index, runs in enumerate(policies.values()):
        records = [record for run in runs for record in run.records if record.tier == tier]
        values = [measure(record) for record in records]
        sorted_ms = np.sort(np.array([1000.0 * value for value in values if value is not None]))
        curves.append((index, sorted_ms, len(records)))
    every = np.concatenate([sorted_ms for _, sorted_ms, _ in curves])
    marks = [1000.0 * slo] if slo is not None else []
    positive = np.concatenate([every[every > 0], marks])
    if positive.size:
        _scale(axes, float(positive.min()), float(positive.max()))
    for index, sorted_ms, offered in curves:
        if not sorted_ms.size or not offered:
            continue
        right = axes.get_xlim()[1]
        x = np.concatenate([[sorted_ms[0]], sorted_ms, [max(right, sorted_ms[-1])]])
        y = np.concatenate([[0.0], np.arange(1, len(sorted_ms) + 1) / offered, [len(sorted_ms) / offered]])
        style: Any = STYLES[index % len(STYLES)]
        axes.step(x, y, where="post", color=COLOURS[index % len(COLOURS)], linestyle=style, linewidth=1.8)
    if slo is not None:
        axes.axvline(1000.0 * slo, color=ink.text, linewidth=1.0)
        left = axes.transAxes.inverted().transform(axes.transData.transform((1000.0 * slo, 0.0)))[0] > 0.75
        axes.annotate(
            f"SLO {1000.0 * slo:.4g}", (1000.0 * slo, 0.03), xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, 0), ha="right" if left else "left", textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y", linewidth=0.7)


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
