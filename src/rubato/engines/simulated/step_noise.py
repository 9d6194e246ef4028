"""By what simulated steps take longer or shorter than the latency model says: factors, one a step, as `--noise` names
them.

Independent errors of a few percent are what a simulation is usually given, and what a policy that plans close to its
deadlines bears well. Errors of a real server come in runs: a machine is slow for a while, or pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from math import exp, isnan, nan, sqrt
from pathlib import Path

import numpy as np

from rubato.core.did_you_mean import nearest

Noise = float | str
"""A relative spread of independent factors, or text as `factors` takes it."""

RECORDINGS = Path(__file__).parent / "residuals"
FACTORS_PER_DRAW = 1024
# wander: the spread of the logarithm, its correlation from step to step, and pauses (one step in N, times as long).
SPREAD, CORRELATION, PAUSES = 0.15, 0.97, ((200, 3.0), (800, 8.0))
KINDS = ("iid", "replay", "wander", "fast")
NOISE_SYNTAX = "give iid:SPREAD, replay:RECORDING, wander, fast:TIMES, or several joined by +"
MAX_FACTOR = 1000.0  # of one kind of noise, so that a product of several is still a time

Draw = Callable[[np.random.Generator], Iterator[float]]


def check(noise: Noise) -> None:
    """Checks noise. Raises ValueError, or OSError for a recording that cannot be read, where `factors` would."""
    _parts(noise)


def factors(noise: Noise, seed: int) -> Iterator[float] | None:
    """Returns an endless iterator of factors, one for the time of each step; None if all are 1.

    The noise is a relative spread s (lognormal, independent, 1 on average), or parts joined by `+`, multiplied:

    - `iid:s`: the same;
    - `replay:RECORDING`: measured over predicted of a run's steps, in order, over and over, from a place that the seed
      sets: the name of a recording that ships (`recordings`), or a file as `rubato fit --residuals` writes it;
    - `wander`: errors that stay a while (the logarithm is autoregressive, 15 %, 0.97 from step to step), and pauses
      (one step in 200 takes 3 times as long, one in 800 takes 8 times);
    - `fast:f`: steps take f times what the model says: the model is of a machine that is f times as fast.

    Raises:
        ValueError: the text is of another form.
        OSError: a file cannot be read.
    """
    parts = _parts(noise)
    if not parts:
        return None
    rngs = [np.random.default_rng(seed if i == 0 else (seed, i)) for i in range(len(parts))]
    iterators = [part(rng) for part, rng in zip(parts, rngs, strict=True)]
    return iterators[0] if len(iterators) == 1 else _product(iterators)


def recordings() -> list[str]:
    """Returns the names of the recordings that ship."""
    return sorted(file.stem for file in RECORDINGS.glob("*.txt"))


def is_path(recording: str) -> bool:
    """Returns whether this is a path, and not the name of a recording that ships."""
    return "/" in recording or bool(Path(recording).suffix)


def read(recording: str) -> list[float]:
    """Returns the factors of a recording: the name of one that ships, or a file. Raises ValueError or OSError."""
    file = Path(recording)
    if not is_path(recording):
        if recording not in recordings():
            raise ValueError(
                f"no recording {recording!r} ships, nor is it a file with a suffix{nearest(recording, recordings())}"
            )
        file = RECORDINGS / f"{recording}.txt"
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: give one number above 0 a line") from error
    factors_read: list[float] = []
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        factor = _number(text)
        if not 0.0 < factor <= MAX_FACTOR:
            raise ValueError(f"{file}, line {number}: {text!r} is no factor: give one in (0, {MAX_FACTOR:g}] a line")
        factors_read.append(factor)
    if not factors_read:
        raise ValueError(f"{file} holds no factors: give one number a line, as `rubato fit --residuals` writes them")
    return factors_read


def _parts(noise: Noise) -> list[Draw]:
    if not isinstance(noise, str):
        return _iid(noise, str(noise))
    if not isnan(number := _number(noise)):  # alone, with whatever sign its exponent has
        return _iid(number, noise)
    return [draw for part in noise.split("+") for draw in _part(part.strip(), noise)]


def _part(part: str, noise: str) -> list[Draw]:
    kind, colon, value = part.partition(":")
    if not isnan(number := _number(part)):
        return _iid(number, noise)
    if kind == "wander" and not colon:
        return [_wander]
    if kind == "iid":
        return _iid(_number(value), noise)
    if kind == "fast":
        if not 0.0 < (times := _number(value)) <= MAX_FACTOR:
            raise ValueError(f"noise {noise!r}: fast:{value}: give a factor in (0, {MAX_FACTOR:g}], such as fast:1.3")
        return [lambda _: repeat(times)]
    if kind == "replay":
        return [partial(_replay, read(value))]
    raise ValueError(f"noise {noise!r}: {NOISE_SYNTAX}; {part!r} is none{nearest(kind, KINDS)}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def _iid(spread: float, noise_text: str) -> list[Draw]:
    if not 0.0 <= spread < 1.0:
        raise ValueError(
            f"noise {noise_text}: give a relative spread in [0, 1), or {NOISE_SYNTAX.removeprefix('give ')}"
        )
    return [partial(_independent, spread)] if spread else []


def _independent(spread: float, rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.lognormal(-(spread**2) / 2, spread, FACTORS_PER_DRAW).tolist()


def _replay(recording: list[float], rng: np.random.Generator) -> Iterator[float]:
    at = int(rng.integers(len(recording)))
    while True:
        yield from recording[at:]
        at = 0


def _wander(rng: np.random.Generator) -> Iterator[float]:
    fresh_spread = SPREAD * sqrt(1.0 - CORRELATION**2)
    error = SPREAD * float(rng.standard_normal())
    while True:
        for shock, chance in zip(
            rng.standard_normal(FACTORS_PER_DRAW).tolist(), rng.random(FACTORS_PER_DRAW).tolist(), strict=True
        ):
            error = CORRELATION * error + fresh_spread * shock
            factor, below = exp(error - SPREAD**2 / 2), 0.0
            for steps, times in PAUSES:
                if below <= chance < below + 1.0 / steps:
                    factor *= times
                below += 1.0 / steps
            yield factor


def _product(iterators: list[Iterator[float]]) -> Iterator[float]:
    for each in zip(*iterators, strict=False):
        product = 1.0
        for factor in each:
            product *= factor
        yield product
