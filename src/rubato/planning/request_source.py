"""Where the requests of a simulated run come from.

Everything here pickles, so that a run can happen in another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.measure.records import fingerprint
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Workload, read, scenarios, traces
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from rubato.workloads.resample import Stretch, bootstrapped, busiest, inside, multiplied, window
from rubato.workloads.traces import WHOLE, Trace, TraceOptions


def digest(path: str | Path) -> str:
    """Of a file's content."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


COUNT = 1000  # requests of a scenario or a mix, unless said otherwise


def count_of(count: int | None, duration: float | None) -> int | None:
    """How many requests, where that is said by neither of these: `COUNT`."""
    return COUNT if count is None and duration is None else count


class RequestSource(Protocol):
    """Makes a workload for each seed: the same traffic drawn anew. Rates are set by `Workload.rescaled`."""

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        """The whole workload, or the requests that arrive in a stretch, times from its beginning."""
        ...

    def busiest(self, seed: int, seconds: float) -> Stretch:
        """The stretch of this many seconds with the most tokens, prompt and output."""
        return busiest(self.make(seed), seconds)

    def describe(self) -> dict[str, Any]: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the file that it reads, what was left out or looks odd: sentences without a stop."""
        return ()


@dataclass(frozen=True)
class ScenarioSource(RequestSource):
    """A packaged scenario at a rate (requests/s), for `count` requests or `duration` seconds."""

    name: str
    hardware: Hardware
    rate: float = 1.0
    count: int | None = None
    duration: float | None = None

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = scenarios.make(
            self.name, self.rate, count=self.count, duration=self.duration, seed=seed, prefill=self.hardware.prefill
        )
        return window(made, stretch)

    def describe(self) -> dict[str, Any]:
        return {"scenario": self.name, "rate": self.rate, "count": self.count, "duration": self.duration}


@dataclass(frozen=True)
class MixSource(RequestSource):
    """Poisson arrivals of a mix of kinds."""

    kinds: tuple[Kind, ...]
    rate: float = 1.0
    count: int | None = None
    duration: float | None = None

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        return window(_mixed(self, seed), stretch)

    def describe(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=8)
def _mixed(mix: MixSource, seed: int) -> Workload:
    return make("mix", mix.kinds, mix.rate, duration=mix.duration, count=mix.count, seed=seed, texts=False)


@dataclass(frozen=True)
class FileSource(RequestSource):
    """Takes requests from a workload file.

    Args:
        drawn: whether seeds above 0 resample blocks of 60 s; else the times are the file's.
    """

    path: str
    drawn: bool = True

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = _filed(self.path)
        return window(bootstrapped(made, seed) if self.drawn and seed else made, stretch)

    def describe(self) -> dict[str, Any]:
        return {"path": Path(self.path).name, "content": digest(self.path), "drawn": self.drawn}


_filed = lru_cache(maxsize=8)(read)


@dataclass(frozen=True)
class WorkloadSource(RequestSource):
    """A workload as it is; seeds above 0 bootstrap blocks of 60 s of it, unless `drawn` is False."""

    workload: Workload
    drawn: bool = True

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        return window(bootstrapped(self.workload, seed) if self.drawn and seed else self.workload, stretch)

    def describe(self) -> dict[str, Any]:
        return {"workload": self.workload.name, "fingerprint": fingerprint(self.workload), "drawn": self.drawn}


@dataclass(frozen=True)
class TraceSource(RequestSource):
    """Takes requests from a recorded trace. A request's tier is the trace's, or drawn by the kinds' shares. A stretch
    is cut out, then multiplied; it begins on a full minute, so copies stay inside it.

    Args:
        kinds: whose SLOs the requests get; none: those that the trace states.
        factor: how many times as many requests as the trace has.
        how: which part of the file is taken.
        drawn: whether seeds above 0 resample blocks of 60 s; else the times are the file's.
        unloaded: seconds per token, of which a trace's own SLOs are multiples, where there are no kinds.
    """

    path: str
    kinds: tuple[Kind, ...]
    factor: float = 1.0
    how: TraceOptions = WHOLE
    drawn: bool = True
    unloaded: float | None = None

    @classmethod
    def of(
        cls, path: str, how: TraceOptions, kinds: Sequence[Kind] | None, usual: Sequence[Kind], model: LatencyModel,
        factor: float = 1.0, drawn: bool = True,
    ) -> TraceSource:  # fmt: skip
        """Makes a source with these kinds; without any, with the SLOs that the trace states, or else with the usual
        kinds. Raises ValueError and OSError for a trace that cannot be read."""
        trace = read_trace(path, how)
        if kinds is None and trace.has_slos:
            return cls(path, (), factor, how, drawn, lone_decode(trace, model)[0])
        return cls(path, tuple(usual if kinds is None else kinds), factor, how, drawn)

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        return _traced(self, seed, stretch)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return busiest(_traced(replace(self, factor=1.0, drawn=False), 0, None), seconds)

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"path": Path(self.path).name, "content": digest(self.path)}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(read_trace(self.path, self.how).notes.values())


@lru_cache(maxsize=8)
def _traced(trace: TraceSource, seed: int, stretch: Stretch | None) -> Workload:
    whole = read_trace(trace.path, trace.how)
    offers: Sequence[traces.TraceRequest] = whole.offers
    if stretch is not None:
        start, end = stretch
        last = max(offer.at for offer in offers)
        offers = [replace(offer, at=offer.at - start) for offer in offers if inside(offer.at, stretch, last)]
    name = Path(trace.path).name.partition(".")[0]
    length = None if stretch is None else stretch[1] - stretch[0]
    more = replace(whole, offers=tuple(multiplied(offers, trace.factor, seed, end=length)))
    made = traces.make(name, more, trace.kinds, seed=seed, unloaded=trace.unloaded, texts=False)
    if stretch is not None:
        made = replace(made, rate=len(made.arrivals) / (end - start), duration=end - start)
    return bootstrapped(made, seed) if trace.drawn and seed else made


read_trace = lru_cache(maxsize=2)(traces.read)


def lone_decode(trace: Trace, model: LatencyModel) -> tuple[float, int]:
    """Seconds of a step of one decode, what a trace's `slo_ratio` is a multiple of, and at which context: the mean."""
    context = round(sum(offer.prompt + offer.output / 2 for offer in trace.offers) / len(trace.offers))
    return model.step_time(Shape.decodes(1, context + 1)), context
