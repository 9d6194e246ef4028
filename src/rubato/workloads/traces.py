"""Workloads from a recorded trace: its arrival times and lengths, and what else it says of each request.

CSV, JSON lines or one JSON array, also gzipped; the layout is known by its fields:

| layout | arrival | prompt tokens | output tokens | besides |
|---|---|---|---|---|
| ours | at (s) | prompt_tokens | output_tokens | tier |
| Azure LLM inference | TIMESTAMP (date and time) | ContextTokens | GeneratedTokens | |
| seconds | t_s (s) | input_tokens | output_tokens | category (the tier), slo_ratio |
| Mooncake | timestamp (ms) | input_length | output_length | hash_ids (blocks of 512 tokens) |
| Bailian | timestamp (s) | input_length | output_length | chat_id, parent_chat_id, hash_ids (blocks of 16 tokens) |
| aiperf's Mooncake | timestamp (ms, or none) | input_length, of the turn | output_length | session_id, delay (ms) |
| AdaServe emission | emission_time_ms | input_length | output_length | slo_ratio, prompt (the text) |

slo_ratio: 1.2 = TPOT of 1.2 times the unloaded time per token; -50 = 50 ms. Times count from the first request. A
request without output tokens is given one, and the workload's notes say how many were.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rubato.core.did_you_mean import nearest
from rubato.core.json_lines import json_object
from rubato.core.request import LEAST_MS, MOST_MS, SLO
from rubato.workloads import trace_sessions
from rubato.workloads.arrivals import Process, Replay
from rubato.workloads.generate import Prefill, SLOAssignment
from rubato.workloads.prompts import Count, with_texts
from rubato.workloads.request_kinds import Kind, tiers_of
from rubato.workloads.trace_sessions import TraceRequest as TraceRequest
from rubato.workloads.workload import HASH_BLOCK, Arrival, Workload

_KINDS, _ARRIVALS = 10, 12  # random streams, none of `generate.make`'s


class TraceError(ValueError):
    """A trace file that cannot be used; names file, line and field."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival. skipped: what was wrong with each row left out; empty: requests without output
    tokens, which are given one."""

    name: str
    offers: tuple[TraceRequest, ...]
    skipped: tuple[str, ...] = ()
    empty: int = 0

    @property
    def times(self) -> Replay:
        """Its arrivals alone, for lengths of another source. Raises ValueError for fewer than two."""
        return Replay(tuple(offer.at for offer in self.offers))


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of a layout's fields, and seconds from its time. marks: fields that tell it from another with the same
    names. block: tokens that one of its `hash_ids` stands for. timed: each request has a time."""

    at: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]
    tier: str = "tier"
    marks: frozenset[str] = frozenset()
    block: int = HASH_BLOCK
    timed: bool = True

    @property
    def fields(self) -> frozenset[str]:
        """That a row of this layout has."""
        return self.marks | {self.prompt, self.output} | ({self.at} if self.timed else set())


def _date(text: Any) -> float:
    """As Azure writes it, "2023-11-16 18:17:03.9799600", UTC where no zone is given."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _ms(value: Any) -> float:
    return float(value) / 1e3


_LENGTHS = ("timestamp", "input_length", "output_length")
BAILIAN = Layout(*_LENGTHS, float, marks=frozenset({"chat_id", "parent_chat_id"}), block=16)
AIPERF = Layout(*_LENGTHS, _ms, marks=frozenset({"session_id"}), timed=False)
LAYOUTS = (
    Layout("at", "prompt_tokens", "output_tokens", float),
    Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date),
    Layout("t_s", "input_tokens", "output_tokens", float, tier="category"),
    BAILIAN,
    AIPERF,
    Layout(*_LENGTHS, _ms),
    Layout("emission_time_ms", "input_length", "output_length", _ms, tier="category"),
)

# --------------------------------------------------------------------------- reading


def read(path: str | Path, *, seconds: float | None = None, count: int | None = None, skip: bool = False) -> Trace:
    """The requests of a trace in order of arrival: all, or those of its first `seconds`, or its first `count`.

    skip: leave out malformed rows, which `Trace.skipped` lists. Raises TraceError naming file, line and field, OSError
    when the file cannot be opened.
    """
    path = Path(path)
    offers: list[TraceRequest] = []
    skipped: list[str] = []
    layout: Layout | None = None
    names: dict[tuple[int, ...], int] = {}
    for where, row in _rows(path):
        if not isinstance(row, TraceError):
            layout = layout or _layout(path, row)
        try:
            offers.append(_offer(f"{path}, {where}", row, layout, names))
        except TraceError as error:
            if not skip:
                raise
            skipped.append(str(error))
    if not offers:
        raise TraceError(f"{path} holds no requests")
    if layout is BAILIAN:
        offers = trace_sessions.of_parents(offers, str(path))
    elif layout is AIPERF:
        offers = trace_sessions.of_sessions(offers)
    offers.sort(key=lambda offer: offer.at)
    first = offers[0].at
    kept = [replace(o, at=o.at - first) for o in offers if seconds is None or o.at - first < seconds][:count]
    empty = sum(offer.output == 0 for offer in kept)
    kept = [offer if offer.output else replace(offer, output=1) for offer in kept]
    return Trace(path.name, tuple(kept), tuple(skipped), empty)


def _offer(
    where: str, row: Mapping[str, Any] | TraceError, layout: Layout | None, names: dict[tuple[int, ...], int]
) -> TraceRequest:
    """The request of one row, at the trace's own time. names: of blocks so far. Raises TraceError naming the field."""
    if isinstance(row, TraceError):
        raise row
    assert layout is not None

    def field(name: str, convert: Callable[[Any], Any], wanted: str, good: Callable[[Any], bool]) -> Any:
        value = row.get(name)
        try:
            converted = convert(value)
            if good(converted):
                return converted
        except (TypeError, ValueError):
            pass
        raise TraceError(f"{where}: {name} is {value!r}: expected {wanted}")

    timed = layout.timed or row.get(layout.at) is not None
    at = field(layout.at, layout.seconds, "a time", math.isfinite) if timed else 0.0
    prompt = field(layout.prompt, _whole, "a whole number of tokens, 1 or more", lambda n: n >= 1)
    output = field(layout.output, _whole, "a whole number of tokens, 0 or more", lambda n: n >= 0)
    tpot = slowdown = None
    if row.get("slo_ratio") not in (None, ""):
        wanted = f"1.2 (x unloaded) or -50 (ms, from {LEAST_MS:g} to {MOST_MS:g})"
        ratio = field("slo_ratio", float, wanted, lambda x: 0.0 < x < math.inf or LEAST_MS <= -x <= MOST_MS)
        tpot, slowdown = (None, ratio) if ratio > 0 else (-ratio / 1e3, None)
    blocks: tuple[int, ...] = ()
    if row.get("hash_ids"):
        count = -(-prompt // layout.block)
        wanted = f"{count} whole numbers, one for each {layout.block} of {prompt} prompt tokens"
        blocks = field("hash_ids", _ids, wanted, lambda ids: len(ids) == count)
        if layout.block != HASH_BLOCK:
            blocks = trace_sessions.coarser(blocks, layout.block, names)
    text = field("prompt", lambda t: t, "text", lambda t: isinstance(t, str)) if "prompt" in row else ""
    found = TraceRequest(at, prompt, output, str(row.get(layout.tier) or ""), tpot, slowdown, blocks, text)
    if layout is BAILIAN:
        own, parent = (
            field(name, _whole, "a whole number", lambda n: n >= -1) for name in ("chat_id", "parent_chat_id")
        )
        return replace(found, id=str(own), after="" if parent == -1 else str(parent))
    if layout is AIPERF:
        delay = field("delay", _ms, "ms, 0 or more", lambda s: 0.0 <= s < math.inf) if row.get("delay") else 0.0
        named = row.get("session_id") not in (None, "")
        return replace(found, id=where, session=str(row["session_id"]) if named else where, gap=delay)
    return found


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(_whole(one) for one in value)


def _layout(path: Path, row: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if layout.fields <= row.keys():
            return layout
    raise TraceError(f"{path} has the fields {', '.join(map(str, row))}: expected one of {fields_wanted()}")


def fields_wanted() -> str:
    """The fields that a row must have, by layout."""
    return "; ".join(
        ", ".join([*([one.at] if one.timed else []), one.prompt, one.output, *sorted(one.marks)]) for one in LAYOUTS
    )


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    """Where each request stands, and its fields, or what is wrong with a line that has none."""
    try:
        yield from _lines(path)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is no CSV, JSON lines or JSON array, plain or gzipped: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        first = file.peek(1).lstrip()[:1] if isinstance(file, io.BufferedReader | gzip.GzipFile) else b""
        if first == b"[":
            yield from _array(path, file.read())
        elif first == b"{":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield f"line {number}", json_object(path, number, line, TraceError)
                    except TraceError as error:
                        yield f"line {number}", error
        else:
            reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            for row in reader:
                where, header = f"line {reader.line_num}", len(reader.fieldnames or ())
                if more := row.get(None):  # where a DictReader puts what has no name
                    said = f"{header + len(more)} fields, but the header names {header}"
                    yield where, TraceError(f"{path}, {where}: {said}")
                else:
                    yield where, row


def _array(path: Path, content: bytes) -> Iterator[tuple[str, Mapping[str, Any] | TraceError]]:
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        where = f"entry {number}"
        if isinstance(value, dict):
            yield where, value
        else:
            yield where, TraceError(f"{path}, {where}: should be a JSON object, is {type(value).__name__}")


# --------------------------------------------------------------------------- a workload of one


def make(
    name: str,
    trace: Trace,
    kinds: Sequence[Kind] = (),
    *,
    rate: float | None = None,
    arrivals: Process | None = None,
    seed: int = 0,
    count_tokens: Count | None = None,
    prefill: Prefill | None = None,
    unloaded: float | None = None,
    texts: bool = True,
) -> Workload:
    """A workload of a trace's lengths at its own times, or those of `arrivals`; `rate` (requests/s) stretches them.

    kinds: tiers, SLOs and texts (their lengths do not count): a request whose tier the trace says gets a kind of that
    tier, another any, by their shares. Without kinds tiers and SLOs are the trace's own: `unloaded`, seconds per token
    of a lone request, is what slowdowns of the trace multiply; what it promises nothing is best effort. Raises
    ValueError for no requests, a tier that no kind has, or a slowdown without `unloaded`.
    """
    if not trace.offers:
        raise ValueError(f"trace {name!r} has no requests")
    if not texts and any(offer.text for offer in trace.offers):
        trace = replace(trace, offers=tuple(replace(offer, text="") for offer in trace.offers))
    times = [offer.at for offer in trace.offers]
    turns = any(offer.session for offer in trace.offers)
    if arrivals is not None and turns:
        raise ValueError(f"trace {name!r} has turns that go on from others: no other arrivals fit them")
    if arrivals is not None:
        drawn = arrivals.times(1.0, len(times), np.random.default_rng([seed, _ARRIVALS]))
        times = (drawn - drawn[0]).tolist()
    tiers, row = _by_kinds(trace, kinds, seed, prefill) if kinds else _by_trace(trace, unloaded)
    rows = [row(index, f"{name}-{index}", at) for index, at in enumerate(times)]
    if turns:
        rows = list(trace_sessions.linked(name, rows, trace.offers))
    length = times[-1]
    own = (len(rows) - 1) / length if length > 0 else float(len(rows))
    notes: dict[str, Any] = {"trace": trace.name, "arrivals": "trace" if arrivals is None else str(arrivals)}
    if trace.empty:
        notes["empty"] = f"{trace.empty} requests without output tokens were given one"
    if trace.skipped:
        notes["skipped"] = f"{len(trace.skipped)} malformed rows left out; the first: {trace.skipped[0]}"
    made = Workload(name, seed, own, length, tiers, tuple(rows), True, notes)
    if texts:
        made = with_texts(made, count_tokens)
    return made if rate is None else made.rescaled(rate)


Row = Callable[[int, str, float], Arrival]


def _by_kinds(trace: Trace, kinds: Sequence[Kind], seed: int, prefill: Prefill | None) -> tuple[dict[str, SLO], Row]:
    tiers = tiers_of(kinds)
    u = np.random.default_rng([seed, _KINDS]).random(len(trace.offers)).tolist()
    promises = SLOAssignment(prefill)
    able: dict[str, tuple[list[Kind], list[float]]] = {}
    for tier in {offer.tier for offer in trace.offers}:
        if tier and tier not in tiers:
            raise ValueError(f"the trace has tier {tier!r}, which no kind is of{nearest(tier, tiers)}")
        own = [kind for kind in kinds if tier in ("", kind.tier)]
        shares = np.cumsum([kind.share for kind in own])
        able[tier] = own, (shares / shares[-1]).tolist()

    def row(index: int, id: str, at: float) -> Arrival:
        offer = trace.offers[index]
        own, shares = able[offer.tier]
        kind = own[min(bisect_right(shares, u[index]), len(own) - 1)]
        slo = promises.slo(kind, offer.prompt) if kind.ttft_slowdown is not None else None
        return Arrival(
            id, at, kind.tier, kind.app, offer.prompt, offer.output, _said(offer), slo=slo, blocks=offer.blocks,
            tenant=kind.tenant,
        )  # fmt: skip

    return tiers, row


def _by_trace(trace: Trace, unloaded: float | None) -> tuple[dict[str, SLO], Row]:
    tiers: dict[str, SLO] = {}
    slo_of = cache(SLO)  # equal ones are one object
    if unloaded is None and any(offer.tpot_slowdown is not None for offer in trace.offers):
        raise ValueError("the trace's slo_ratio is a multiple of the unloaded time per token: say what that is (s)")

    def row(index: int, id: str, at: float) -> Arrival:
        offer = trace.offers[index]
        slowdown = None if offer.tpot_slowdown is None else offer.tpot_slowdown * (unloaded or 0.0)
        slo = slo_of(tpot=slowdown or offer.tpot)
        tier = offer.tier or _called(offer)
        own = None if tiers.setdefault(tier, slo) == slo else slo
        return Arrival(
            id, at, tier, offer.tier, offer.prompt, offer.output, _said(offer), slo=own, blocks=offer.blocks
        )  # fmt: skip

    return tiers, row


def _called(offer: TraceRequest) -> str:
    """A tier for what is promised, where the trace names none."""
    if offer.tpot_slowdown is not None:
        return f"tpot-{offer.tpot_slowdown:g}x"
    return "default" if offer.tpot is None else f"tpot-{1e3 * offer.tpot:g}ms"


def _said(offer: TraceRequest) -> tuple[tuple[str, str], ...]:
    return (("user", offer.text),) if offer.text else ()
