"""When requests arrive: Poisson, gamma, bursts, on/off, piecewise rates, a trace's times, all at once.

A process gives the first n arrival times at a mean rate. Fewer times are a prefix of more, so a longer run begins with
the shorter. Times are in seconds; on/off and changes of rate keep their own seconds whatever the rate, and
`Workload.rescaled` stretches them with everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rubato.workloads.lengths import Floats


class ArrivalProcess(Protocol):
    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        """The first n arrivals, ascending, in seconds; `rate` requests/s on average."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        return np.cumsum(rng.exponential(size=n)) / rate

    def __str__(self) -> str:
        return "poisson"


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps from a gamma distribution with this coefficient of variation: 1 = Poisson, more = burstier."""

    cv: float

    def __post_init__(self) -> None:
        if not 0.0 < self.cv < math.inf:
            raise ValueError(f"gamma arrivals with cv {self.cv}: give a positive number")

    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        return np.cumsum(rng.gamma(self.cv**-2, self.cv**2, size=n)) / rate

    def __str__(self) -> str:
        return f"gamma:cv={self.cv:g}"


@dataclass(frozen=True, slots=True)
class Bursts:
    """Poisson bursts of `size` requests on average at `peak` times the mean rate, and nothing between them; how long
    bursts and pauses last is exponential (an interrupted Poisson process). Stretched with the rate, as a trace is.

    Args:
        spread: coefficient of variation of the gamma from which the rate within bursts is drawn anew after every `hold`
            requests on average; 0: bursts are all alike.
        together: how many come at about the same moment, on average (geometric).
        apart: how far apart these are, as a share of the mean gap between requests.
    """

    peak: float
    size: float
    spread: float = 0.0
    hold: float = 50.0
    together: float = 1.0
    apart: float = 0.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.size < math.inf or not 1.0 < self.peak < math.inf:
            raise ValueError(f"bursts of {self.size} requests at {self.peak} times the rate: give 1 or more, above 1")
        if not 0.0 <= self.spread < math.inf or not 1.0 <= self.hold < math.inf:
            raise ValueError(
                f"bursts whose rate has a spread of {self.spread} and holds for {self.hold} requests: give 0 or more, "
                "and 1 or more"
            )
        if not 1.0 <= self.together <= self.size or not 0.0 <= self.apart * self.peak < 1.0:
            raise ValueError(
                f"bursts of which {self.together} requests come together, {self.apart} mean gaps apart: give from 1 to "
                "their size, and less than a gap within bursts"
            )

    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        within, between, levels, groups = rng.spawn(4)
        gaps = within.exponential(size=n)
        if self.together > 1.0:  # some come with the one before
            share, apart = 1.0 / self.together, self.apart * self.peak
            gaps *= np.where(groups.random(n) < share, (1.0 - (1.0 - share) * apart) / share, apart)
        busy = self._busy(np.cumsum(gaps), levels)
        length = self.size / self.peak
        lasts = between.exponential(size=(16, 2))
        while lasts[:, 0].sum() * length < busy[-1]:
            lasts = np.concatenate((lasts, between.exponential(size=lasts.shape)))
        ends = np.cumsum(lasts[:, 0]) * length
        pauses = np.concatenate(([0.0], np.cumsum(lasts[:, 1]) * length * (self.peak - 1.0)))
        times: Floats = (busy + pauses[np.searchsorted(ends, busy)]) / rate
        return times

    def _busy(self, unit: Floats, rng: np.random.Generator) -> Floats:
        """Arrivals of a Poisson process of rate 1 at the rates of bursts, in mean gaps, the time of pauses left out."""
        if self.spread == 0.0:
            return unit / self.peak
        states = np.zeros((0, 2))  # how long a rate holds, and the rate
        while (states[:, 0] * states[:, 1]).sum() <= unit[-1]:
            lasts, rates = rng.exponential(size=64), rng.gamma(self.spread**-2, self.spread**2, size=64)
            more = np.column_stack((lasts * self.hold / self.peak, rates * self.peak))
            states = np.concatenate((states, more))
        expected = np.concatenate(([0.0], np.cumsum(states[:, 0] * states[:, 1])))
        busy: Floats = np.interp(unit, expected, np.concatenate(([0.0], np.cumsum(states[:, 0]))))
        return busy

    def __str__(self) -> str:
        more = f",spread={self.spread:g},hold={self.hold:g}" if self.spread else ""
        more += f",together={self.together:g},apart={self.apart:g}" if self.together > 1.0 else ""
        return f"bursts:peak={self.peak:g},size={self.size:g}{more}"


@dataclass(frozen=True, slots=True)
class Piecewise:
    """Poisson arrivals whose rate changes: from each start (seconds, the first 0) on it is in proportion to its level.

    After `period` seconds it begins again; over a period the mean rate is the one asked for.
    """

    starts: tuple[float, ...]
    levels: tuple[float, ...]
    period: float

    def __post_init__(self) -> None:
        edges = (*self.starts, self.period)
        if len(self.starts) != len(self.levels) or edges[0] != 0.0 or not all(np.diff(edges) > 0):
            raise ValueError(f"piecewise arrivals from {self.starts} s, period {self.period} s: ascending, the first 0")
        if min(self.levels) < 0.0 or not 0.0 < sum(self.levels) < math.inf:
            raise ValueError(f"piecewise arrivals with levels {self.levels}: none negative, at least one positive")

    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        # A Poisson process of rate 1 is read off at the inverse of the cumulative rate.
        edges = np.array((*self.starts, self.period))
        expected = np.concatenate(([0.0], np.cumsum(np.diff(edges) * np.array(self.levels))))
        expected *= rate * self.period / expected[-1]
        periods, rest = np.divmod(np.cumsum(rng.exponential(size=n)), expected[-1])
        times: Floats = periods * self.period + np.interp(rest, expected, edges)
        return times

    def __str__(self) -> str:
        return "piecewise:" + ",".join(
            f"{start:g}={level:g}"
            for start, level in zip((*self.starts, self.period), (*self.levels, 0.0), strict=True)
        )


def on_off(on: float, off: float, quiet: float = 0.0) -> Piecewise:
    """Bursts: `on` seconds, then `off` seconds at `quiet` times the burst's rate."""
    return Piecewise((0.0, on), (1.0, quiet), on + off)


@dataclass(frozen=True, slots=True, repr=False)
class Replay:
    """A trace's times, stretched by one factor to the rate asked for; when they run out they begin again."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.seconds) < 2 or self.seconds[-1] <= self.seconds[0] or not all(np.diff(self.seconds) >= 0):
            raise ValueError("a replay needs at least two arrivals, ascending and not all at the same moment")

    @property
    def rate(self) -> float:
        """Requests/s of the trace itself."""
        return (len(self.seconds) - 1) / (self.seconds[-1] - self.seconds[0])

    def beginning_at(self, index: int) -> Replay:
        """The same arrivals from number `index` on, and then from the first."""
        own = np.array(self.seconds)
        again = own[:index] + (own[-1] - own[0]) + 1.0 / self.rate
        return Replay(tuple(np.concatenate((own[index:], again)).tolist()))

    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        own = np.array(self.seconds) - self.seconds[0]
        again, index = np.divmod(np.arange(n), len(own))
        times: Floats = (own[index] + again * (own[-1] + 1.0 / self.rate)) * (self.rate / rate)
        return times

    def __str__(self) -> str:
        return f"replay of {len(self.seconds)} arrivals"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All at the start, whatever the rate."""

    def times(self, rate: float, n: int, rng: np.random.Generator) -> Floats:
        return np.zeros(n)

    def __str__(self) -> str:
        return "at-once"


def parse(text: str) -> ArrivalProcess:
    """`poisson`, `at-once`, `gamma:cv=3`, `bursts:peak=6,size=130`, `on-off:on=10,off=50,quiet=0.1`,
    `piecewise:0=1,60=3,90=1,360=0` (from each second on that level; the last begins the pattern again). Raises
    ValueError saying what is wrong."""
    name, _, rest = text.partition(":")
    processes: dict[str, Callable[..., ArrivalProcess]] = {"poisson": Poisson, "at-once": AtOnce, "gamma": Gamma}
    processes |= {"bursts": Bursts, "on-off": on_off}
    try:
        pairs = [part.split("=") for part in rest.split(",")] if rest else []
        if name == "piecewise":
            starts, levels = zip(*((float(at), float(level)) for at, level in pairs), strict=True)
            return Piecewise(starts[:-1], levels[:-1], starts[-1])
        if name in processes:
            return processes[name](**{key: float(value) for key, value in pairs})
    except (TypeError, ValueError) as error:
        raise ValueError(f"arrivals {text!r}: {error}; {WORDS}") from error
    raise ValueError(f"arrivals {text!r}: {WORDS}")


WORDS = (
    "give poisson, gamma:cv=3, bursts:peak=6,size=130, on-off:on=10,off=50, piecewise:0=1,60=3,90=1,360=0 or at-once"
)


def offered(
    process: ArrivalProcess, rate: float, stream: Sequence[int], count: int | None, duration: float | None
) -> Floats:
    """Times of `count` requests, or of all within `duration` seconds. Raises ValueError unless exactly one is given."""
    if (duration is None) == (count is None):
        raise ValueError("give either duration (seconds) or count (requests)")
    if count is not None:
        if count < 1:
            raise ValueError(f"count is {count} requests: give 1 or more")
        return process.times(rate, count, np.random.default_rng(stream))
    assert duration is not None
    if not 0.0 < duration < math.inf:
        raise ValueError(f"duration is {duration} s: give a positive number")
    n = 16 + int(1.2 * rate * duration)
    while True:
        times = process.times(rate, n, np.random.default_rng(stream))
        if times[-1] >= duration:
            return times[times < duration]
        if times[-1] == times[0]:
            raise ValueError(f"arrivals {process} never reach {duration} s: give a count of requests instead")
        n *= 2
