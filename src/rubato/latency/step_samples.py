"""Measured steps from a CSV table, a row a step, in groups named by its column `tag` (all one group without it).

Two layouts, told apart by the header. A `Shape`'s own: tokens, seqs, kv, chunk_context, chunk_sq, chunks, chunk_kv,
seconds. Or a log of iterations: b decodes that read kv tokens, npre chunks of c tokens together, cp = Σ chunk·context,
c2 = Σ chunk², pmax = the longest context among them, time_ms.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Set
from math import inf, nan
from pathlib import Path

from rubato.core.plan import Sample, Shape

Row = Mapping[str, str | None]  # None: a row that is too short
SHAPES = ("tokens", "seqs", "kv", "chunk_context", "chunk_sq", "chunks", "chunk_kv", "seconds")
ITERATIONS = ("b", "kv", "npre", "c", "cp", "c2", "pmax", "time_ms")


def read(path: str | Path) -> dict[str, list[Sample]]:
    """tag -> its steps, in order. Raises ValueError naming file, line and what is wrong."""
    by_tag: dict[str, list[Sample]] = {}
    with Path(path).open(newline="", encoding="utf-8") as lines:
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if not line.startswith("#")]
    rows = csv.DictReader(line for _, line in numbered)
    of = _layout(path, set(rows.fieldnames or ()))
    for row in rows:
        try:
            if more := row.get(None):  # where a DictReader puts what has no name
                names = len(rows.fieldnames or ())
                raise ValueError(f"{names + len(more)} fields, but the header names {names}")
            sample = of(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {numbered[rows.line_num - 1][0]}: {error}") from error
        by_tag.setdefault(row.get("tag") or "", []).append(sample)
    if not by_tag:
        raise ValueError(f"{path} holds no steps")
    return by_tag


def write(path: str | Path, groups: Mapping[str, list[Sample]]) -> None:
    """In the first layout."""
    with Path(path).open("w", newline="", encoding="utf-8") as lines:
        rows = csv.writer(lines)
        rows.writerow(("tag", *SHAPES))
        for tag, samples in groups.items():
            rows.writerows((tag, *(getattr(s.shape, name) for name in SHAPES[:-1]), s.seconds) for s in samples)


def _layout(path: str | Path, header: Set[str]) -> Callable[[Row], Sample]:
    if header >= set(SHAPES):
        return _shape
    if header >= set(ITERATIONS):
        return _iteration
    raise ValueError(
        f"{path}: its columns are {', '.join(sorted(header))}; wants {', '.join(SHAPES)}, or {', '.join(ITERATIONS)}"
    )


def _shape(row: Row) -> Sample:
    return Sample(Shape(**{name: _whole(row, name) for name in SHAPES[:-1]}), _time(row, "seconds"))


def _iteration(row: Row) -> Sample:
    b, kv, npre, c, cp, c2, pmax = (_whole(row, name) for name in ITERATIONS[:-1])
    chunk_kv = c + pmax if npre else 0  # only the one that began earlier has a context
    shape = Shape(b + c, b + npre, kv + chunk_kv, cp, c2, 0, npre, chunk_kv)
    return Sample(shape, _time(row, "time_ms") / 1e3)


def _whole(row: Row, name: str) -> int:
    return int(_number(row, name, int, "a whole number, 0 or more", lambda n: n >= 0))


def _time(row: Row, name: str) -> float:
    return _number(row, name, float, "a time above 0", lambda t: 0.0 < t < inf)


def _number(row: Row, name: str, of: Callable[[str], float], expected: str, good: Callable[[float], bool]) -> float:
    """The number in a column. Raises ValueError naming the column, what stands there and what should."""
    value = row[name]
    if value is None:
        raise ValueError(f"{name} is missing (a short row): expected {expected}")
    try:
        number = of(value)
    except ValueError:
        number = nan
    if not good(number):
        raise ValueError(f"{name} is {value!r}: expected {expected}")
    return number
