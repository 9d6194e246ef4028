"""Workloads from a recorded trace: its arrival times and lengths, and what else it says of each request.

CSV, JSON lines or one JSON array, also gzipped; the layout is known by its fields:

| layout | arrival | prompt tokens | output tokens | besides |
|---|---|---|---|---|
| ours | at (s) | prompt_tokens | output_tokens | tier |
| Azure LLM inference | TIMESTAMP (date and time) | ContextTokens | GeneratedTokens | |
| seconds | t_s (s) | input_tokens | output_tokens | category (the tier), slo_ratio |
| Mooncake | timestamp (ms) | input_length | output_length | hash_ids (blocks of 512 tokens) |
| BurstGPT, with sessions or without | Timestamp (s) | Request tokens | Response tokens, 0 of a failed request | |
| Bailian | timestamp (s) | input_length | output_length | chat_id, parent_chat_id, hash_ids (blocks of 16 tokens) |
| aiperf's Mooncake | timestamp (ms, or none) | input_length, of the turn | output_length | session_id, delay (ms) |
| AdaServe emission | emission_time_ms | input_length | output_length | slo_ratio, prompt (the text) |

slo_ratio: 1.2 = TPOT of 1.2 times the unloaded time per token; -50 = 50 ms. Times count from the first request. Another
table is read by the names of its columns (`TraceOptions.columns`). What was left out or looks odd is in `Trace.notes`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rubato.core.did_you_mean import nearest
from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS, SLO
from rubato.workloads import trace_sessions
from rubato.workloads.arrivals import ArrivalProcess, Replay
from rubato.workloads.generate import Prefill, SLOAssignment
from rubato.workloads.prompts import Count, with_texts
from rubato.workloads.request_kinds import Kind, tiers_of
from rubato.workloads.trace_layouts import AIPERF, BAILIAN, EVENTS, Columns, Layout, layout_of, milliseconds, unit_doubt
from rubato.workloads.trace_rows import TraceError as TraceError
from rubato.workloads.trace_rows import read_rows
from rubato.workloads.trace_sessions import TraceRequest as TraceRequest
from rubato.workloads.workload import HASH_BLOCK_TOKENS, Arrival, Workload

NOTES = ("empty", "failed", "skipped", "times")  # of `Trace.notes`, in the order in which they are said
_KINDS, _ARRIVALS = 10, 12  # random streams, none of `generate.make`'s


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Which part of a trace file is read, and how.

    Args:
        start, seconds: the window, in seconds from the first request (None: to the end).
        count: at most so many requests are read.
        columns: names of the columns, where the layout is not known.
        time_scale: factor on the file's times.
        skip_malformed: whether rows that cannot be read are left out.

    Raises:
        ValueError: a number that cannot be.
    """

    start: float = 0.0
    seconds: float | None = None
    count: int | None = None
    columns: Columns | None = None
    time_scale: float = 1.0
    skip_malformed: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.start < math.inf:
            raise ValueError(f"--from {self.start:g}: give seconds, 0 or more")
        if self.seconds is not None and not 0.0 < self.seconds < math.inf:
            raise ValueError(f"--duration {self.seconds:g}: give seconds above 0")
        if self.count is not None and self.count < 1:
            raise ValueError(f"--count {self.count}: give 1 or more")
        if not 0.0 < self.time_scale < math.inf:
            raise ValueError(f"--time-scale {self.time_scale:g}: give a number above 0")


WHOLE = TraceOptions()  # every request, in one of our layouts


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival.

    Args:
        notes: by kind (`NOTES`), a sentence without a full stop on what was changed, left out or looks odd.
    """

    name: str
    offers: tuple[TraceRequest, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def times(self) -> Replay:
        """Its arrivals alone, for lengths of another source. Raises ValueError for fewer than two."""
        return Replay(tuple(offer.at for offer in self.offers))

    @property
    def has_slos(self) -> bool:
        """Whether it says what SLO some request has."""
        return any(o.slo or o.tpot is not None or o.tpot_slowdown is not None for o in self.offers)


# --------------------------------------------------------------------------- reading


def read(path: str | Path, how: TraceOptions = WHOLE) -> Trace:
    """The requests of a trace in order of arrival, the first at 0.

    Raises TraceError naming file, line and field, or for a window without requests; OSError when the file cannot be
    opened.
    """
    path = Path(path)
    offers: list[TraceRequest] = []
    skipped: list[str] = []
    failed = 0
    layout: Layout | None = None
    names: dict[tuple[int, ...], int] = {}
    for where, row in read_rows(path):
        if not isinstance(row, TraceError):
            layout = layout or layout_of(path, row, how.columns)
            if layout.has_failures and str(row.get(layout.output)).strip() == "0":
                failed += 1
                continue
        try:
            offers.append(_offer(f"{path}, {where}", row, layout, names))
        except TraceError as error:
            if not how.skip_malformed:
                raise
            skipped.append(str(error))
    if not offers or layout is None:
        raise TraceError(f"{path} holds no requests")
    if layout is BAILIAN:
        offers = trace_sessions.of_parents(offers, str(path))
    elif layout is AIPERF:
        offers = trace_sessions.of_sessions(offers)
    offers.sort(key=lambda offer: offer.at)
    doubt = unit_doubt(layout, [offer.at for offer in offers]) if how.time_scale == 1.0 else ""
    window = _window(path, offers, how)
    empty = sum(offer.output == 0 for offer in window)
    notes = {
        "empty": f"{empty} requests without output tokens were given one" if empty else "",
        "failed": f"{failed} failed requests ({layout.output} 0) are left out" if failed else "",
        "skipped": f"{len(skipped)} malformed rows left out; the first: {skipped[0]}" if skipped else "",
        "times": doubt,
    }
    window = [offer if offer.output else replace(offer, output=1) for offer in window]
    return Trace(path.name, tuple(window), {kind: note for kind, note in notes.items() if note})


def _window(path: Path, offers: Sequence[TraceRequest], how: TraceOptions) -> list[TraceRequest]:
    """The requests of the window asked for, times from its first; gaps between turns are scaled alike."""
    zero, scale = offers[0].at, how.time_scale
    scaled = [replace(offer, at=(offer.at - zero) * scale, gap=offer.gap * scale) for offer in offers]
    end = math.inf if how.seconds is None else how.start + how.seconds
    kept = [offer for offer in scaled if how.start <= offer.at < end][: how.count]
    if not kept:
        raise TraceError(f"{path} has no request from {how.start:g} to {end:g} s; its last is at {scaled[-1].at:g} s")
    return [replace(offer, at=offer.at - kept[0].at) for offer in kept]


def _offer(
    where: str, row: Mapping[str, Any] | TraceError, layout: Layout | None, names: dict[tuple[int, ...], int]
) -> TraceRequest:
    """Makes the request of one row, at the trace's own time.

    Args:
        names: ids given so far to blocks.

    Raises:
        TraceError: a field is wrong; the text names it.
    """
    if isinstance(row, TraceError):
        raise row
    assert layout is not None

    def value_of(name: str, convert: Callable[[Any], Any], expected: str, good: Callable[[Any], bool]) -> Any:
        value = row.get(name)
        try:
            converted = convert(value)
            if good(converted):
                return converted
        except (TypeError, ValueError):
            pass
        raise TraceError(f"{where}: {name} is {value!r}: expected {expected}")

    timed = layout.has_times or row.get(layout.at) is not None
    at = value_of(layout.at, layout.seconds, "a time", math.isfinite) if timed else 0.0
    prompt = value_of(layout.prompt, _whole, "a whole number of tokens, 1 or more", lambda n: n >= 1)
    output = value_of(layout.output, _whole, "a whole number of tokens, 0 or more", lambda n: n >= 0)
    tpot = slowdown = None
    if row.get("slo_ratio") not in (None, ""):
        expected = f"1.2 (x unloaded) or -50 (ms, from {MIN_SLO_MS:g} to {MAX_SLO_MS:g})"
        ratio = value_of("slo_ratio", float, expected, lambda x: 0.0 < x < math.inf or MIN_SLO_MS <= -x <= MAX_SLO_MS)
        tpot, slowdown = (None, ratio) if ratio > 0 else (-ratio / 1e3, None)
    blocks: tuple[int, ...] = ()
    if row.get("hash_ids"):
        count = -(-prompt // layout.block)
        expected = f"{count} whole numbers, one for each {layout.block} of {prompt} prompt tokens"
        blocks = value_of("hash_ids", _ids, expected, lambda ids: len(ids) == count)
        if layout.block != HASH_BLOCK_TOKENS:
            blocks = trace_sessions.coarser(blocks, layout.block, names)
    text = value_of("prompt", lambda t: t, "text", lambda t: isinstance(t, str)) if "prompt" in row else ""
    offer = TraceRequest(at, prompt, output, str(row.get(layout.tier) or ""), tpot, slowdown, blocks, text)
    if layout is EVENTS:
        return replace(offer, slo=row["slo"])
    if layout is BAILIAN:
        own, parent = (
            value_of(name, _whole, "a whole number", lambda n: n >= -1) for name in ("chat_id", "parent_chat_id")
        )
        return replace(offer, id=str(own), after="" if parent == -1 else str(parent))
    if layout is AIPERF:
        delay = (
            value_of("delay", milliseconds, "ms, 0 or more", lambda s: 0.0 <= s < math.inf) if row.get("delay") else 0.0
        )
        named = row.get("session_id") not in (None, "")
        return replace(offer, id=where, session=str(row["session_id"]) if named else where, gap=delay)
    return offer


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(_whole(one) for one in value)


# --------------------------------------------------------------------------- a workload of one


def make(
    name: str,
    trace: Trace,
    kinds: Sequence[Kind] = (),
    *,
    rate: float | None = None,
    arrivals: ArrivalProcess | None = None,
    seed: int = 0,
    count_tokens: Count | None = None,
    prefill: Prefill | None = None,
    unloaded: float | None = None,
    texts: bool = True,
) -> Workload:
    """Makes a workload of a trace's lengths at its own times, or those of `arrivals`; `rate` (requests/s) stretches
    them. Without `kinds` tiers and SLOs are the trace's own, and a request that is promised nothing is best effort.

    Args:
        kinds: tiers, SLOs and texts (their lengths do not count): a request whose tier the trace says gets a kind of
            that tier, another any, by their shares.
        unloaded: seconds per token of a lone request, which slowdowns of the trace multiply.

    Raises:
        ValueError: no requests, a tier that no kind has, or a slowdown without `unloaded`.
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
    notes = {"trace": trace.name, "arrivals": "trace" if arrivals is None else str(arrivals), **trace.notes}
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
            id, at, kind.tier, kind.app, offer.prompt, offer.output, _messages(offer), slo=slo, blocks=offer.blocks,
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
        slo = offer.slo or slo_of(tpot=slowdown or offer.tpot)
        tier = offer.tier or _called(offer)
        own = None if tiers.setdefault(tier, slo) == slo else slo
        return Arrival(
            id, at, tier, offer.tier, offer.prompt, offer.output, _messages(offer), slo=own, blocks=offer.blocks
        )  # fmt: skip

    return tiers, row


def _called(offer: TraceRequest) -> str:
    """A tier for what is promised, where the trace names none."""
    if offer.tpot_slowdown is not None:
        return f"tpot-{offer.tpot_slowdown:g}x"
    return "default" if offer.tpot is None else f"tpot-{1e3 * offer.tpot:g}ms"


def _messages(offer: TraceRequest) -> tuple[tuple[str, str], ...]:
    return (("user", offer.text),) if offer.text else ()
