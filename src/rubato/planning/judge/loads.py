"""The loads of a folder: workload files and traces, each with its request kinds, hardware profile and bound of TTFTs.

A file of kinds beside a load, NAME.yaml beside NAME.csv.gz, says its tiers and SLOs. Without one a workload file has
those that it states, a trace those that its rows state (`slo_ratio`; an event log does), or else the usual kinds of
`rubato simulate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import orjson

from rubato.config import kinds_file
from rubato.core.request import SLO
from rubato.latency import profiles
from rubato.planning.request_source import FileSource, RequestSource, TraceSource, lone_decode, read_trace
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Workload, traces
from rubato.workloads.request_kinds import USUAL_SLOS, Kind, tiers_of, usual_kinds
from rubato.workloads.resample import Stretch, window
from rubato.workloads.traces import WHOLE, TraceOptions

WORKLOAD = "rubato-workload/"  # how the format of a workload file's header begins
PREFILLS = 10.0  # the bound of TTFTs where a load states none, in prefills of its longest prompt alone
KINDS = (".yaml", ".yml")
FORMATS = "docs/workloads.md has their formats"


@dataclass(frozen=True)
class LoadSource(RequestSource):
    """A recorded load.

    Args:
        tiers: SLOs in place of those that the file states.
        ttft: seconds, for requests that promise a TPOT and neither a TTFT nor an e2e; None: they stay as they are.
    """

    recorded: FileSource | TraceSource
    tiers: tuple[tuple[str, SLO], ...] = ()
    ttft: float | None = None

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = self.recorded.make(seed)
        made = made.with_slos(dict(self.tiers)) if self.tiers else made
        return window(made if self.ttft is None else with_ttft(made, self.ttft), stretch)

    def describe(self) -> dict[str, Any]:
        return {**self.recorded.describe(), "slos": {name: slo.bounds for name, slo in self.tiers}, "ttft": self.ttft}


@dataclass(frozen=True)
class JudgedLoad:
    """One file of requests and what it is offered to.

    Args:
        slos: whose SLOs the requests have.
        bound: the TTFT bound, in words.
        notes: sentences without a full stop.
    """

    file: Path
    kinds: Path | None
    machine: Hardware
    source: LoadSource
    slos: str
    bound: str
    notes: tuple[str, ...]

    @property
    def own(self) -> Workload:
        """As the file has it, with the bound."""
        return self.source.make(0)

    @property
    def recorded(self) -> bool:
        """Whether it is a trace, of which rates are multiples of its own."""
        return isinstance(self.source.recorded, TraceSource)


@dataclass(frozen=True)
class LoadOptions:
    """How the files of loads are read.

    Args:
        profile: a hardware profile; "": the workload's own.
        machine: returns the hardware of a profile, by its name.
        ttft: the bound in seconds; None: from the load.
        part: which part of a trace is taken.
    """

    profile: str
    machine: Callable[[str], Hardware]
    seeds: Sequence[int]
    ttft: float | None = None
    part: TraceOptions = WHOLE

    def __post_init__(self) -> None:
        if self.ttft is not None and not 0.0 < self.ttft < inf:
            raise ValueError(f"--ttft {self.ttft}: give seconds above 0")


def read(folder: str | Path, how: LoadOptions) -> list[JudgedLoad]:
    """Every load of a folder, by name; hidden files are no loads. Raises ValueError naming the file: no loads, one that
    is none, kinds beside no load, no profile, a tier without requests under some seed; OSError for what cannot be
    opened."""
    files = sorted(file for file in Path(folder).iterdir() if not file.name.startswith("."))
    kinds = {file.stem: file for file in files if file.suffix in KINDS}
    loads = [file for file in files if file.suffix not in KINDS]
    if not loads:
        raise ValueError(f"{folder} holds no loads: put workload files or traces there ({FORMATS})")
    if alone := sorted(kinds.keys() - {_stem(file) for file in loads}):
        raise ValueError(f"{kinds[alone[0]]} is beside no load: a file of kinds has the name of the load that it is of")
    return [_load(file, kinds.get(_stem(file)), how) for file in loads]


def _stem(file: Path) -> str:
    """NAME of NAME.csv, of NAME.jsonl.gz."""
    return Path(file.name.removesuffix(".gz")).stem


def _load(file: Path, kinds: Path | None, how: LoadOptions) -> JudgedLoad:
    if not file.is_file():
        raise ValueError(f"{file} is no file: give a folder of workload files and traces alone ({FORMATS})")
    if _is_workload(file):
        recorded, tiers, machine, slos, notes = _workload(file, kinds, how)
    else:
        recorded, tiers, machine, slos, notes = _trace(file, kinds, how)
    source = LoadSource(recorded, tiers)
    try:
        ttft, bound = _ttft(source.make(0), machine, how.ttft)
        source = replace(source, ttft=ttft)
        for seed in sorted({0, *how.seeds}):
            _check(source.make(seed), seed)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return JudgedLoad(file, kinds, machine, source, slos, bound, notes)


_Read = tuple[FileSource | TraceSource, tuple[tuple[str, SLO], ...], Hardware, str, tuple[str, ...]]


def _is_workload(file: Path) -> bool:
    """Whether it begins as workload files do; what else it is, is for the reader of traces to say."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        header = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return isinstance(header, dict) and str(header.get("format")).startswith(WORKLOAD)


def _workload(file: Path, kinds: Path | None, how: LoadOptions) -> _Read:
    source = FileSource(str(file))
    machine = _machine(file, how.profile or source.make(0).profile, how)
    if kinds is None:
        return source, (), machine, "its own SLOs", ()
    return source, tuple(tiers_of(_kinds(kinds)).items()), machine, f"SLOs of {kinds.name}", ()


def _trace(file: Path, kinds: Path | None, how: LoadOptions) -> _Read:
    try:
        trace = read_trace(str(file), how.part)
    except traces.TraceError as error:
        raise ValueError(f"{error}; it is no workload file either") from error
    machine = _machine(file, how.profile, how)
    notes = tuple(trace.notes.values())
    own = None if kinds is None else _kinds(kinds)
    source = TraceSource.of(str(file), how.part, own, usual_kinds(USUAL_SLOS), machine.model)
    if kinds is not None:
        return source, (), machine, f"SLOs of {kinds.name}", notes
    if source.kinds:
        return source, (), machine, "SLOs of the usual kinds of `rubato simulate --trace`", notes
    if any(offer.tpot_slowdown is not None for offer in trace.offers):
        alone, context = lone_decode(trace, machine.model)
        notes = (*notes, f"its slo_ratio is in steps of a decode alone at {context} tokens, {1e3 * alone:.3g} ms")
    return source, (), machine, "its own SLOs", notes


def _machine(file: Path, profile: str, how: LoadOptions) -> Hardware:
    if not profile:
        known = ", ".join(profiles.names())
        raise ValueError(f"{file} names no hardware profile: give --profile, a FILE.json or one of {known}")
    return how.machine(profile)


def _kinds(file: Path) -> list[Kind]:
    kinds = kinds_file.read(file)
    if any(kind.ttft_slowdown is not None for kind in kinds):
        raise ValueError(f"{file}: ttft_slowdown is for requests that are made: give each tier a ttft_ms")
    return kinds


def _check(load: Workload, seed: int) -> None:
    """Raises ValueError for a load that has no rate to change, or a tier that has no attainment."""
    under = f" under seed {seed}" if seed else ""
    if not load.duration > 0.0:
        raise ValueError(f"offers all at once{under}: it has no rate to change")
    if empty := sorted(load.tiers.keys() - {one.tier for one in load.arrivals}):
        raise ValueError(f"tier {empty[0]!r} has no requests{under}: offer more requests, or take the tier out")


# --------------------------------------------------------------------------- the bound of TTFTs


def _open_ended(slo: SLO) -> bool:
    """Whether a prompt may wait for any time: of a request that promises something."""
    return slo.tpot is not None and slo.ttft is None and slo.e2e is None


def unbounded(load: Workload) -> Counter[str]:
    """How many requests of each tier promise a TPOT, and nothing of when their prompts begin."""
    counts: Counter[str] = Counter()
    for one in load.arrivals:
        counts[one.tier] += any(part.prompt and _open_ended(part.slo) for part in load.parts(one))
    return +counts


def with_ttft(load: Workload, ttft: float) -> Workload:
    """The load, in which these requests have this TTFT (s). A stage without a prompt goes on from the one before."""

    def bounded(slo: SLO) -> SLO:
        return replace(slo, ttft=ttft) if _open_ended(slo) else slo

    arrivals = tuple(
        replace(
            one,
            slo=None if one.slo is None else bounded(one.slo),
            parts=tuple(replace(part, slo=bounded(part.slo)) if part.prompt else part for part in one.parts),
        )
        for one in load.arrivals
    )
    return replace(load, tiers={name: bounded(slo) for name, slo in load.tiers.items()}, arrivals=arrivals)


def _ttft(load: Workload, machine: Hardware, given: float | None) -> tuple[float | None, str]:
    """The bound (s, None where nothing needs one), and in words."""
    lacking = unbounded(load)
    if not lacking:
        return None, "no TTFT bound: no request states a TPOT alone"
    whose = ", ".join(f"{tier} ({count} requests)" for tier, count in lacking.items())
    if given is not None:
        ttft, why = given, "as given"
    elif stated := list(_stated_ttfts(load)):
        ttft, why = max(stated), "the loosest that is stated here"
    else:
        longest = max(part.prompt for one in load.arrivals for part in load.parts(one))
        ttft, why = PREFILLS * machine.prefill(longest), f"{PREFILLS:g} times the prefill of {longest} tokens alone"
    return ttft, f"TTFT bound of {ttft:.3g} s ({why}) for what states a TPOT alone: {whose}"


def _stated_ttfts(load: Workload) -> Iterator[float]:
    for one in load.arrivals:
        yield from (part.slo.ttft for part in load.parts(one) if part.slo.ttft is not None)
