"""The same traffic drawn anew: more of a trace, blocks of time bootstrapped, the busiest stretch, a sample of it.

Requests that arrive close together belong together (a burst, an hour of the day), so it is blocks of arrival time that
are resampled, never single requests. Each purpose has a random stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from operator import attrgetter

import numpy as np

from rubato.workloads import Arrival, Workload
from rubato.workloads.traces import TraceRequest

Stretch = tuple[float, float]  # seconds from a workload's start: when it begins and ends
BLOCK_S = 60.0  # seconds
_COPIES, _BLOCKS = 20, 22  # one random stream for each purpose, none of a workload's own


def multiplied(
    offers: Sequence[TraceRequest], factor: float, seed: int = 0, end: float | None = None
) -> list[TraceRequest]:
    """Returns a trace with `factor` times the traffic and the same profile over time. Each minute holds that many
    copies of itself, each rotated within the minute by an offset of its own: copies at the same instants would
    multiply every burst. For a fraction, each request is copied with that chance. Factor 1 is the trace itself.

    Args:
        end: the end of the trace, in seconds (None: its last request); a last minute that is cut short is rotated
            within its own length.

    Raises:
        ValueError: a factor that is not positive and finite.
    """
    if not 0.0 < factor < inf:
        raise ValueError(f"scale is {factor}: give how many times the trace's traffic, a positive number")
    if factor == 1.0:
        return list(offers)
    if any(offer.session for offer in offers):
        raise ValueError(f"scale is {factor}, but the trace has turns that go on from others: give 1")
    draw = np.random.default_rng([seed, _COPIES])
    last = max((offer.at for offer in offers), default=0.0) if end is None else end
    copies: list[TraceRequest] = []
    for copy in range(ceil(factor)):
        offset = float(draw.uniform(0.0, BLOCK_S))
        chance = min(1.0, factor - copy)
        kept = draw.random(len(offers)) < chance
        for o, keep in zip(offers, kept.tolist(), strict=True):
            if keep:
                start = o.at - o.at % BLOCK_S
                length = min(BLOCK_S, last - start)
                at = start + (o.at - start + offset) % length if length > 0.0 else o.at
                # not `replace`, which takes three times as long: there can be millions
                fields = (o.prompt, o.output, o.tier, o.tpot, o.tpot_slowdown, o.blocks, o.text)
                copies.append(TraceRequest(at, *fields, slo=o.slo))
    return sorted(copies, key=attrgetter("at"))


def _check_free(load: Workload) -> None:
    """Raises ValueError for requests whose times follow from how others end: they cannot be cut apart or drawn anew."""
    if load.paced_by_ends:
        raise ValueError(
            f"workload {load.name!r} has requests that {_tied(load)}: no stretch of time can be cut out of it; seed 0 "
            "takes it as it is"
        )


def _tied(load: Workload) -> str:
    if load.concurrency is not None:
        return "are offered in a closed loop"
    return "go on from others" if load.follows else "share a session's deadline"


def bootstrapped(load: Workload, seed: int) -> Workload:
    """A workload of the same length, made of blocks of its time drawn with replacement from a ring (a moving-block
    bootstrap). Raises ValueError, as all here do, for requests whose times follow from how others end."""
    _check_free(load)
    if not load.duration > 0.0:
        raise ValueError(f"workload {load.name!r} offers all at once: there is no time to resample")
    block = min(BLOCK_S, load.duration)
    count = ceil(load.duration / block)
    starts = np.random.default_rng([seed, _BLOCKS]).uniform(0.0, load.duration, size=count)
    times = np.array([a.at for a in load.arrivals])
    if times[-1] > load.duration:
        raise ValueError(f"workload {load.name!r} lasts {load.duration:g} s and has a request at {times[-1]:g} s")
    ring = np.concatenate([times, times + load.duration])
    arrivals: list[Arrival] = []
    for index, start in enumerate(starts.tolist()):
        end = start + min(block, load.duration - index * block)
        for place in range(*np.searchsorted(ring, [start, end]).tolist()):
            one = load.arrivals[place % len(times)]
            at = index * block + float(ring[place]) - start
            arrivals.append(replace(one, id=f"{load.name}-{len(arrivals)}", at=at))
    if not arrivals:
        raise ValueError(f"workload {load.name!r}: the blocks drawn by seed {seed} hold no request")
    arrivals.sort(key=lambda one: one.at)
    rate = len(arrivals) / load.duration
    return replace(load, seed=seed, rate=rate, arrivals=tuple(arrivals), notes={**load.notes, "blocks": block})


def sampled(load: Workload, share: float) -> Workload:
    """The beginning of each block, a `share` of it, one after another: about as dense at about the same points. All of
    it, if nothing arrives then."""
    _check_free(load)
    block = min(BLOCK_S, load.duration)
    kept = block * share
    arrivals = [replace(a, at=a.at // block * kept + a.at % block) for a in load.arrivals if a.at % block < kept]
    length = load.duration // block * kept + min(load.duration % block, kept)
    if not arrivals:
        return load
    return replace(load, rate=len(arrivals) / length, duration=length, arrivals=tuple(arrivals))


def busiest(load: Workload, seconds: float) -> Stretch:
    """Begin and end of the stretch of `seconds` with the most tokens (prompt + output); it begins at a multiple of
    `BLOCK_S`. A shorter workload is its own stretch. Raises ValueError for one whose requests all arrive at once."""
    _check_free(load)
    if not load.duration > 0.0:
        raise ValueError(f"workload {load.name!r} offers all at once: there is no stretch of time to size a fleet on")
    if load.duration <= seconds:
        return 0.0, load.duration
    starts = np.arange(0.0, load.duration - seconds + BLOCK_S, BLOCK_S)
    times = np.array([a.at for a in load.arrivals])
    tokens = np.concatenate([[0], np.cumsum([a.prompt_tokens + a.output_tokens for a in load.arrivals])])
    work = tokens[np.searchsorted(times, starts + seconds)] - tokens[np.searchsorted(times, starts)]
    start = float(starts[int(np.argmax(work))])
    return start, start + seconds


def inside(at: float, stretch: Stretch, last: float) -> bool:
    """Whether an arrival is in the stretch: its end is excluded, but for the workload's last arrival."""
    return stretch[0] <= at < stretch[1] or at == stretch[1] == last


def window(load: Workload, stretch: Stretch | None) -> Workload:
    """The requests that arrive in a stretch, times from its beginning; None: all. Raises ValueError when none does."""
    if stretch is None:
        return load
    _check_free(load)
    start, end = stretch
    kept = tuple(replace(a, at=a.at - start) for a in load.arrivals if inside(a.at, stretch, load.duration))
    if not kept:
        raise ValueError(f"workload {load.name!r}: no request arrives from {start:g} to {end:g} s")
    return replace(load, rate=len(kept) / (end - start), duration=end - start, arrivals=kept)
