"""Measured steps from a CSV table, a row a step, in groups named by its column `tag` (all one group without it).

Two layouts, told apart by the header. A `Shape`'s own: tokens, seqs, kv, chunk_context, chunk_sq, chunks, chunk_kv,
seconds. Or a log of iterations: b decodes that read kv tokens, npre chunks of c tokens together, cp = Σ chunk·context,
c2 = Σ chunk², pmax = the longest context among them, time_ms.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from rubato.types import Sample, Shape

Row = Mapping[str, str]
SHAPES = ("tokens", "seqs", "kv", "chunk_context", "chunk_sq", "chunks", "chunk_kv", "seconds")
ITERATIONS = ("b", "kv", "npre", "c", "cp", "c2", "pmax", "time_ms")


def read(path: str | Path) -> dict[str, list[Sample]]:
    """tag -> its steps, in order. Raises ValueError naming file, line and what is wrong."""
    found: dict[str, list[Sample]] = {}
    with Path(path).open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        of = _layout(path, set(rows.fieldnames or ()))
        for row in rows:
            try:
                sample = of(row)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {rows.line_num}: not a step ({error})") from error
            found.setdefault(row.get("tag") or "", []).append(sample)
    if not found:
        raise ValueError(f"{path} holds no steps")
    return found


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
    return Sample(Shape(**{name: int(row[name]) for name in SHAPES[:-1]}), float(row["seconds"]))


def _iteration(row: Row) -> Sample:
    b, kv, npre, c, cp, c2, pmax = (int(row[name]) for name in ITERATIONS[:-1])
    chunk_kv = c + pmax if npre else 0  # only the one that began earlier has a context
    shape = Shape(b + c, b + npre, kv + chunk_kv, cp, c2, 0, npre, chunk_kv)
    return Sample(shape, float(row["time_ms"]) / 1e3)
