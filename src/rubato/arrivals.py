"""Workloads from a recorded trace: arrival times and lengths from a file, texts of our own of those lengths.

CSV or JSON lines, also gzipped; the layout is known by its fields:

| layout | arrival | prompt tokens | output tokens | tier |
|---|---|---|---|---|
| ours | at (s) | prompt_tokens | output_tokens | tier |
| Azure LLM inference | TIMESTAMP (date and time) | ContextTokens | GeneratedTokens | |
| seconds | t_s (s) | input_tokens | output_tokens | category |
| Mooncake | timestamp (ms) | input_length | output_length | |

The tier may be left out. Times count from the first request. A request without output tokens is given one.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rubato import prompts
from rubato.policies import nearest
from rubato.workload import Arrival, Count, Kind, Workload, fresh_text, json_object, tiers_of

_KINDS, _TEXTS, _ARRIVALS = range(10, 13)  # one random stream for each purpose, none of `workload.make`'s


class TraceError(ValueError):
    """A trace file that cannot be used; names file, line and field."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One line of a trace. at: seconds since the first; prompt, output: tokens; tier "" = not said."""

    at: float
    prompt: int
    output: int
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of a layout's fields, and seconds from its time."""

    at: str
    prompt: str
    output: str
    tier: str
    seconds: Callable[[Any], float]


def _date(text: str) -> float:
    """As Azure writes it, "2023-11-16 18:17:03.9799600", UTC where no zone is given."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


LAYOUTS = (
    Layout("at", "prompt_tokens", "output_tokens", "tier", float),
    Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", "tier", _date),
    Layout("t_s", "input_tokens", "output_tokens", "category", float),
    Layout("timestamp", "input_length", "output_length", "tier", lambda ms: float(ms) / 1e3),
)


def read(path: str | Path, *, seconds: float | None = None, count: int | None = None) -> list[Offer]:
    """The requests of a trace in order of arrival: all, or those of its first `seconds`, or its first `count`.

    Raises TraceError naming file, line and field, OSError when the file cannot be opened.
    """
    offers: list[tuple[float, Offer]] = []
    layout: Layout | None = None
    for number, row in _rows(Path(path)):
        layout = layout or _layout(path, row)
        try:
            at = layout.seconds(row[layout.at])
            prompt, output = int(row[layout.prompt]), int(row[layout.output])
            if prompt < 1 or output < 0:
                raise ValueError(f"{prompt} prompt and {output} output tokens: give 1 or more, and 0 or more")
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        offers.append((at, Offer(0.0, prompt, max(1, output), str(row.get(layout.tier) or ""))))
    if not offers:
        raise TraceError(f"{path} holds no requests")
    offers.sort(key=lambda one: one[0])
    first = offers[0][0]
    kept = [
        Offer(at - first, o.prompt, o.output, o.tier) for at, o in offers if seconds is None or at - first < seconds
    ]
    return kept[:count]


def make(
    name: str,
    offers: Sequence[Offer],
    kinds: Sequence[Kind],
    *,
    rate: float | None = None,
    poisson: bool = False,
    seed: int = 0,
    count_tokens: Count | None = None,
) -> Workload:
    """A workload with a trace's lengths, and its arrivals: rescaled to `rate` requests/s by one factor, or `poisson` at
    that rate. Kinds give tiers, SLOs and texts (their lengths do not count): a request whose tier the trace says has a
    kind of that tier, another any, by their shares. Raises ValueError for a tier that no kind has.
    """
    tiers = tiers_of(kinds)
    draw = np.random.default_rng([seed, _KINDS])
    arrivals: list[Arrival] = []
    seen: set[str] = set()
    times = _poisson(len(offers), seed) if poisson else [offer.at for offer in offers]
    for index, (offer, at) in enumerate(zip(offers, times, strict=True)):
        if offer.tier and offer.tier not in tiers:
            raise ValueError(f"the trace has tier {offer.tier!r}, which no kind is of{nearest(offer.tier, tiers)}")
        able = [kind for kind in kinds if offer.tier in ("", kind.tier)]
        shares = np.cumsum([kind.share for kind in able])
        kind = able[int(np.searchsorted(shares / shares[-1], draw.random(), side="right"))]
        text = fresh_text(kind.app, offer.prompt, np.random.default_rng([seed, _TEXTS, index]), seen)
        tokens = count_tokens(text) if count_tokens is not None else prompts.estimate(text)
        arrivals.append(Arrival(f"{name}-{index}", at, kind.tier, kind.app, tokens, offer.output, (("user", text),)))
    length = arrivals[-1].at
    own = (len(arrivals) - 1) / length if length > 0 else float(len(arrivals))
    notes = {"arrivals": "poisson" if poisson else "trace"}
    made = Workload(name, seed, own, length, tiers, tuple(arrivals), count_tokens is not None, notes)
    return made if rate is None else made.rescaled(rate)


def _poisson(count: int, seed: int) -> list[float]:
    """Times of a mean gap of 1 s, from 0."""
    gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(size=count)
    return [float(t) for t in np.cumsum(gaps) - gaps[0]]


def _layout(path: str | Path, row: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if {layout.at, layout.prompt, layout.output} <= row.keys():
            return layout
    wanted = "; ".join(f"{one.at}, {one.prompt}, {one.output}" for one in LAYOUTS)
    raise TraceError(f"{path} has the fields {', '.join(map(str, row))}: expected one of {wanted}")


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields of each request."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        first = file.peek(1).lstrip()[:1] if isinstance(file, io.BufferedReader | gzip.GzipFile) else b""
        if first != b"{":
            reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            for row in reader:
                yield reader.line_num, row
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, json_object(path, number, line, TraceError)
