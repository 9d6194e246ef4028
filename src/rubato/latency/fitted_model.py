"""What all models fitted to whole steps have in common: settings, fitting, learning online, and their JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar, Self

import numpy as np

from rubato.core.plan import Sample, Shape
from rubato.latency.model_base import ModelBase
from rubato.latency.online import Online
from rubato.latency.roofline_fit import Array, Coefficients, largest


@dataclass(slots=True)
class FittedModel(ModelBase):
    """The base of models that are linear in `features` of a step, or in the larger of two planes of them.
    A subclass is a dataclass whose fields are its settings. It defines `step_time`, `features`, `_check`, `_solve` and
    the class variables; one whose coefficients follow the machine also defines `_refit` and `_take`. The settings do
    not hold the machine's speed of the moment, `online.factor`, which `step_time` multiplies by.
    The class variables: KIND, its name in configurations and files; TITLE, the same in a sentence, with its article;
    SETTINGS, names of the settings, as stored; GUESSED, those whose defaults are a guess; MIN_SAMPLES, steps that a fit
    needs; COLUMNS, how many of the features belong to the planes (they come first).

    Args:
        window: the number of steps that `update` remembers.
    """

    KIND: ClassVar[str]
    TITLE: ClassVar[str]
    SETTINGS: ClassVar[tuple[str, ...]]
    GUESSED: ClassVar[tuple[str, ...]]
    MIN_SAMPLES: ClassVar[int]
    COLUMNS: ClassVar[int] = 1
    window: int = field(default=512, compare=False, kw_only=True)
    online: Online = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        self.online = Online(self.COLUMNS, self.window)
        self._flatten()

    def features(self, shape: Shape) -> tuple[float, ...]:
        """What the coefficients are multiplied by: of the planes, then the shared ones."""
        raise NotImplementedError

    @property
    def spread(self) -> float:
        """`Online.spread`."""
        return self.online.spread

    def idle(self, seconds: float) -> None:
        """`Online.idle`."""
        if self.online.idle(seconds):
            self._flatten()

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        return largest(lambda c: self.step_time(base.plus(c, cached)) <= seconds, most, float(most))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fit from scratch, in relative error; what was learnt online is forgotten. Raises ValueError when the samples
        are too few or cannot determine the model, or when one took no time."""
        if len(samples) < self.MIN_SAMPLES:
            raise ValueError(
                f"{len(samples)} samples cannot determine {self.TITLE}: measure at least {self.MIN_SAMPLES} steps"
            )
        rows = [self._row(sample) for sample in samples]
        table = np.array(rows, dtype=np.float64)
        if not ((table[:, -1] > 0.0) & (table[:, -1] < np.inf)).all():
            raise ValueError("a sample took no time or for ever: every step needs a positive, finite number of seconds")
        self._solve(table, samples)
        self.online = Online(self.COLUMNS, self.window)
        for sample, row in zip(samples, rows, strict=True):
            self.online.window.add(sample.shape, row)
        self._flatten()

    def update(self, sample: Sample) -> None:
        """Learn from one more step (`online`): the speed at once, the coefficients, where they are learnt, every so
        many steps. Raises ValueError on an empty step or one that took no time."""
        if sample.shape.tokens < 1:
            raise ValueError("a sample has no tokens: only steps that ran something can be learnt from")
        raw = self.step_time(sample.shape) / self.online.factor
        if self.online.observe(sample.shape, self._row(sample), raw) and (refitted := self._refit()) is not None:
            self._take(refitted)
        self._flatten()

    def to_dict(self) -> dict[str, object]:
        """For JSON. The factor of the moment and the window are not in it."""
        return {"model": self.KIND, **{name: _plain(getattr(self, name)) for name in self.SETTINGS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. Raises ValueError, naming the keys, for anything else."""
        if set(data) != {"model", *cls.SETTINGS} or data["model"] != cls.KIND:
            raise ValueError(
                f"not {cls.TITLE}: has {sorted(data)}, wants model = {cls.KIND} and {', '.join(cls.SETTINGS)}"
            )
        return cls(**{name: data[name] for name in cls.SETTINGS})

    # ----------------------------------------------------------------- what a subclass defines

    def _check(self) -> None:
        """Raise ValueError on settings that cannot be."""
        raise NotImplementedError

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """Set the coefficients from rows of features and seconds. Raises ValueError, and sets none, when the rows do
        not determine them."""
        raise NotImplementedError

    def _refit(self) -> Coefficients | None:
        """Coefficients for the window that `Online.refit` finds better. By default they stay as they are."""
        return None

    def _take(self, fitted: Coefficients) -> None:
        """Set these coefficients."""

    def _flatten(self) -> None:
        """Recompute any cached products of coefficients and factor."""

    def _row(self, sample: Sample) -> tuple[float, ...]:
        return (*self.features(sample.shape), sample.seconds)

    def _check_numbers(self, names: Sequence[str], count: int = 0, unit: str = " of seconds") -> None:
        """Make each of these settings a tuple of `count` floats, or a float without a count. Raises ValueError, naming
        it, where it is something else, negative or not finite."""
        expected = f"{count} finite numbers{unit}" if count else f"a finite number{unit}"
        for name in names:
            given = getattr(self, name)
            values = numbers(f"{self.KIND} {name}", given if count else [given])
            if len(values) != (count or 1) or not all(0.0 <= value < math.inf for value in values):
                raise ValueError(f"{self.KIND} {name} is {given!r}: give {expected}, 0 or more")
            setattr(self, name, values if count else values[0])


def numbers(name: str, values: object) -> tuple[float, ...]:
    """A setting as it comes from a configuration. Raises ValueError that names it where it is no list of numbers."""
    try:
        if isinstance(values, str):
            raise TypeError("it is a word")
        return tuple(float(value) for value in values)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {values!r}: give numbers ({error})") from error


def _plain(setting: Any) -> Any:
    """As JSON has it."""
    if is_dataclass(setting) and not isinstance(setting, type):
        return asdict(setting)
    return [_plain(part) for part in setting] if isinstance(setting, tuple) else setting
