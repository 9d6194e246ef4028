"""The layouts of published traces: which field says what, and in which unit. A table of them is in `traces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rubato.core.did_you_mean import nearest
from rubato.workloads.trace_rows import TraceError
from rubato.workloads.workload import HASH_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a layout's fields, and how its times become seconds.

    Args:
        marks: fields that tell the layout from another with the same names.
        block: tokens that one of its `hash_ids` stands for.
        has_times: whether each request has a time.
        has_failures: whether a request without output tokens has failed.
    """

    at: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]
    tier: str = "tier"
    marks: frozenset[str] = frozenset()
    block: int = HASH_BLOCK_TOKENS
    has_times: bool = True
    has_failures: bool = False

    @property
    def fields(self) -> frozenset[str]:
        """That a row of this layout has."""
        return self.marks | {self.prompt, self.output} | ({self.at} if self.has_times else set())


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a trace that has none of the known layouts.

    Args:
        arrival: seconds, or date and time.
        tier: "": no column says it.
    """

    arrival: str
    prompt: str
    output: str
    tier: str = ""


def _date(text: Any) -> float:
    """As Azure writes it, "2023-11-16 18:17:03.9799600", UTC where no zone is given."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def milliseconds(value: Any) -> float:
    """Seconds of a number of ms."""
    return float(value) / 1e3


def _seconds_or_date(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return _date(value)


_LENGTHS = ("timestamp", "input_length", "output_length")
BAILIAN = Layout(*_LENGTHS, float, marks=frozenset({"chat_id", "parent_chat_id"}), block=16)
AIPERF = Layout(*_LENGTHS, milliseconds, marks=frozenset({"session_id"}), has_times=False)
MOONCAKE = Layout(*_LENGTHS, milliseconds)
EMISSION = Layout("emission_time_ms", "input_length", "output_length", milliseconds, tier="category")
EVENTS = Layout(
    "at", "prompt_tokens", "output_tokens", float, marks=frozenset({"kind"}), has_failures=True
)  # what `trace_rows` makes of an event log
LAYOUTS = (
    EVENTS,
    Layout("at", "prompt_tokens", "output_tokens", float),
    Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date),
    Layout("t_s", "input_tokens", "output_tokens", float, tier="category"),
    Layout("Timestamp", "Request tokens", "Response tokens", float, has_failures=True),  # BurstGPT, with sessions too
    BAILIAN,
    AIPERF,
    MOONCAKE,
    EMISSION,
)


def layout_of(path: Path, row: Mapping[str, Any], columns: Columns | None) -> Layout:
    """The layout of a trace, by the fields of its first row or the columns named. Raises TraceError."""
    if columns is not None:
        named = (columns.arrival, columns.prompt, columns.output, *([columns.tier] if columns.tier else []))
        for name in named:
            if name not in row:
                raise TraceError(f"{path} has no column {name!r}{nearest(name, map(str, row))}")
        return Layout(columns.arrival, columns.prompt, columns.output, _seconds_or_date, columns.tier)
    for layout in LAYOUTS:
        if layout.fields <= row.keys():
            return layout
    near = max(LAYOUTS[1:], key=lambda layout: len(layout.fields & row.keys()))
    lacking = ", ".join(sorted(near.fields - row.keys()))
    problem = f"{lacking} is missing" if near.fields & row.keys() else "a trace has others"
    raise TraceError(
        f"{path} has the fields {', '.join(map(str, row)):.100}: {problem} (docs/workloads.md); or name its columns: "
        "--columns arrival=NAME,prompt=NAME,output=NAME"
    )


MAX_USUAL_RATE = 50.0  # requests/s of a trace whose times are milliseconds; no published one comes near it
MIN_USUAL_RATE = 0.01  # of one whose times are seconds
EPOCH_S = (1e8, 1e11)  # seconds since 1970 of a log's times; more are milliseconds


def unit_doubt(layout: Layout, at: list[float]) -> str:
    """Returns why times look as if they were in another unit than they were read in, "" if they do not.

    Args:
        at: times, sorted, in seconds.
    """
    if at[-1] == at[0] or layout is EVENTS or layout.seconds is _date:
        return ""
    rate = (len(at) - 1) / (at[-1] - at[0])
    if layout.seconds is milliseconds:
        doubt = ""
        if layout is not EMISSION and any(abs(1e3 * one - round(1e3 * one)) > 1e-6 for one in at):
            doubt = "it has fractions"
        elif rate > MAX_USUAL_RATE:
            doubt = f"that is {rate:,.0f} requests/s"
        return doubt and f"{layout.at} is read as milliseconds, but {doubt}: if it is seconds, give --time-scale 1000"
    is_sparse = rate < MIN_USUAL_RATE and not EPOCH_S[0] < at[0] < EPOCH_S[1]
    if (is_sparse or at[0] > EPOCH_S[1]) and all(one.is_integer() for one in at):
        said = f"{layout.at} is read as seconds, but that is {rate:.2g} requests/s"
        return f"{said}: if it is milliseconds, give --time-scale 0.001"
    return ""
