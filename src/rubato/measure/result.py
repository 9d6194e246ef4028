"""What a question to Rubato gives back, shown alike whatever was asked: as a table, a pandas frame, a picture, HTML.

`Runs` (simulate, bench), `SweepResult`, `CapacityResult`, `BoundResult` and `FleetPlan` are Results.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rubato.core.extras import extra
from rubato.measure.confidence import Estimate
from rubato.measure.pictures import Picture
from rubato.measure.tables import Table

TABLE_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
CELL_STYLE = "padding:.25em .7em;text-align:left;border-bottom:1px solid #8884"


class Result(ABC):
    """The answer to one question. In a notebook it shows its answer and tables; `plot()` shows its picture."""

    title: str  # of a report, of a few words

    @property
    @abstractmethod
    def answer(self) -> str:
        """What was found, in one sentence."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """What was found, in cells of text."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """What was found, in numbers: a row for each of the smallest things found, its columns by name. Shares in
        [0, 1], times in seconds; `_low` and `_high` are the ends of 95 % intervals."""

    @abstractmethod
    def picture(self) -> Picture:
        """What was found, drawn."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything that was asked and found, ready for JSON."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What was asked, and of what."""

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences on what the intervals tell, and what they do not."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to doubt the numbers, and how they came about; without a stop."""
        return ()

    def table(self) -> str:
        """The tables and findings as text (Markdown)."""
        return "\n\n".join([*(table.markdown() for table in self.tables()), *_together(self.findings)])

    def frame(self) -> Any:
        """`rows()` as a pandas DataFrame. Raises ImportError, saying what to install, without pandas."""
        with extra("notebook", "a frame"):
            import pandas
        return pandas.DataFrame(self.rows())

    def plot(self, file: str | Path | None = None) -> Picture:
        """The picture, also written to `file` (.png or .svg) if one is named. Raises ImportError, saying what to
        install, without matplotlib."""
        picture = self.picture()
        if file is None:
            picture.figure()  # fails here rather than where a notebook shows it
        else:
            picture.save(file)
        return picture

    def _repr_html_(self) -> str:
        """For notebooks."""
        notes = [f"Note: {note}." for note in self.notes]
        words = "".join(f"<p>{html.escape(text)}</p>" for text in [*_together(self.findings), *notes])
        return f"<p><b>{html.escape(self.answer)}</b></p>{''.join(map(html_table, self.tables()))}{words}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answer}>"


def html_table(table: Table, styled: bool = True) -> str:
    """Returns a table as HTML.

    Args:
        styled: whether its style is in it, for a page that has none.
    """
    style, cell = (f' style="{TABLE_STYLE}"', f' style="{CELL_STYLE}"') if styled else ("", "")
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    head = "".join(f'<th scope="col"{cell}>{html.escape(text)}</th>' for text in table.head)
    rows = "".join(f"<tr>{''.join(f'<td{cell}>{html.escape(text)}</td>' for text in row)}</tr>" for row in table.rows)
    return f"<table{style}>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def with_interval(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Columns of a row: the number and the ends of its interval."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def told_apart(
    differences: Mapping[str, Estimate], first: str, verb: str, shown: Mapping[str, str], middle: float = 0.0
) -> str:
    """A sentence: which of several hold more than `first`, which less, and which are not told apart.

    Args:
        differences: by name, what each has more than `first`, paired by seed; or its ratio to it.
        first: the name that they are compared with.
        verb: what they do, such as "attains".
        shown: by name, how the difference is written.
        middle: the value of no difference: 0, of a ratio 1.
    """
    parts = []
    for name, one in differences.items():
        if one.low <= middle <= one.high:
            parts.append(f"{name} and {first} are not told apart ({shown[name]}): more seeds")
        else:
            parts.append(f"{name} {verb} {'more' if one.low > middle else 'less'} than {first} ({shown[name]})")
    return "; ".join(parts)


def _together(sentences: Sequence[str]) -> list[str]:
    return ["\n".join(sentences)] if sentences else []
