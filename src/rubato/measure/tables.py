"""Tables as text, and the words in which shares, differences and times stand in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.measure.confidence import Estimate


@dataclass(frozen=True)
class Table:
    """A table whose cells are text.

    Args:
        caption: what the table shows, "" where that is plain.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def markdown(self) -> str:
        above = f"{self.caption}:\n\n" if self.caption else ""
        return above + markdown([self.head, *self.rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that a terminal reads it too; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table for a terminal, by lines. The first row is its head; the first `left` columns are aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points_of(estimate: Estimate) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * estimate.value:+.1f} {estimate.interval(lambda end: f'{100 * end:+.1f}')}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def number(estimate: Estimate, unit: str = "") -> str:
    """To three digits, with its interval."""
    return f"{estimate.value:.3g}{unit} {estimate.interval(lambda end: f'{end:.3g}')}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
