"""A step put together from measured kernels, the truth of simulations:

    T = host + host_per_seq·seqs + gemm[tokens] + lm_head[seqs] + decode[decodes, their KV]
        + max(decode[chunks, their KV], F + g·Σc + e·Σc² + d·Σc·k)

gemm holds matrix products, element-wise kernels and all-reduces of all layers; lm_head counts one row a sequence (a
chunk that does not end its prompt samples none: too much by microseconds). The last term is prefill attention. A
`Shape` has sums over its chunks, not the chunks, so a table by (chunk, context) can only be asked about one of them; F,
g, e, d are therefore fitted to that table when a model is made, and a sum over chunks is then exact whatever their mix,
with the launches, F, paid once. It reads the chunks' KV at least as fast as decodes read theirs.

How far that is from the tables of the packaged profiles, drafters aside (they have no host term and small kernels):
the four numbers, 0.6 % in the median and 2.7 % at p95 of a step that is one chunk; decode attention 0.1 and 2.1 % of a
decode step. It is interpolated in batch and total KV; where a table falls with either, isotonic regression evens it
out, batches weighted by their size, as far as host_per_seq does not make up for it. So T never falls when an entry is
added to a batch, or one in it grows, but for this: a decode that becomes a chunk of two beside another chunk needs the
decode kernel no more, and may save a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rubato.core.interfaces import Line
from rubato.core.plan import Sample, Shape
from rubato.latency.least_squares import isotonic, nnls
from rubato.latency.model_base import ModelBase
from rubato.latency.roofline_fit import Array, largest

MAX_DECODE_GEMM_TOKENS = 16  # up to here `decode_gemm` applies
MIN_PREFILL_GEMM_TOKENS = 1024  # from here on `prefill_gemm` applies
OCTAVES, MAX_OCTAVE = 24, 62  # KV totals up to 2^24 tokens; beyond, the last slope goes on
MICROSECOND_S = 1e-6
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Factors:
    """What the kernel tables are multiplied by, where an independent measurement disagreed.

    Args:
        decode_gemm: of matrix products of up to 16 tokens.
        prefill_gemm: of matrix products from 1024 tokens on.
        context_attention: of the attention of chunks with context.
    """

    decode_gemm: float = 1.0
    prefill_gemm: float = 1.0
    context_attention: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 < value < float("inf"):
                raise ValueError(f"factor {name} is {value!r}: give a positive, finite number")


@dataclass(frozen=True)
class Tables:
    """Kernel times in microseconds, for all layers, as a profile file holds them; None where nothing was measured.

    Args:
        tokens: times of gemm, elementwise and allreduce, by the tokens of a batch.
        lm_head: times by rows.
        decode: times of attention, by batch and mean KV.
        prefill: times of attention, by chunk and context.

    Raises:
        ValueError: tables that do not fit together.
    """

    tokens: Mapping[str, Sequence[float]] = field(repr=False)
    lm_head: Mapping[str, Sequence[float]] = field(repr=False)
    decode: Mapping[str, Any] = field(repr=False)
    prefill: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        for name, table, columns in (
            ("tokens", self.tokens, ("tokens", "gemm", "elementwise", "allreduce")),
            ("lm_head", self.lm_head, ("rows", "time")),
            ("decode", self.decode, ("batch", "kv", "time")),
            ("prefill", self.prefill, ("chunk", "context", "time")),
        ):
            if set(table) != set(columns):
                raise ValueError(f"table {name} has {sorted(table)}, wants {', '.join(columns)}")
            knots = table[columns[0]]
            rows = table[columns[-1]]
            if len(knots) < 2 or len(knots) != len(rows) or any(b <= a for a, b in pairwise(knots)):
                raise ValueError(
                    f"table {name}: {columns[0]} must rise, two or more, with one row of {columns[-1]} each"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        return self  # nothing changes it: the replicas of a simulation share one

    def gemm(self, factors: Factors) -> tuple[Array, Array]:
        """(tokens, seconds), never falling."""
        at = np.array(self.tokens["tokens"], dtype=np.float64)
        few, many = (
            (at <= MAX_DECODE_GEMM_TOKENS) * (factors.decode_gemm - 1.0),
            (at >= MIN_PREFILL_GEMM_TOKENS) * (factors.prefill_gemm - 1.0),
        )
        products = np.array(self.tokens["gemm"]) * (1.0 + few + many)
        whole = products + np.array(self.tokens["elementwise"]) + np.array(self.tokens["allreduce"])
        return at, isotonic(whole) * MICROSECOND_S

    def head(self) -> tuple[Array, Array]:
        """(rows, seconds), never falling."""
        rows = np.array(self.lm_head["rows"], dtype=np.float64)
        return rows, isotonic(np.array(self.lm_head["time"])) * MICROSECOND_S

    def attention(self, host_per_seq: float) -> tuple[Array, Array]:
        """Returns decode attention as (batches, seconds): `seconds[batch][i]` is for a KV total of `knots()[i]`. It
        never falls as the total grows, nor, once `host_per_seq` is added for each sequence, as the batch does."""
        total = knots()
        used: list[int] = []
        rows: list[Array] = []
        for batch, row in zip(self.decode["batch"], self.decode["time"], strict=True):
            pairs = [(k, t) for k, t in zip(self.decode["kv"], row, strict=True) if t is not None]
            if len(pairs) < 2:
                continue  # no line through it
            used.append(batch)
            x, y = np.array(pairs, dtype=np.float64).T
            beyond = np.maximum(total / batch - x[-1], 0.0) * ((y[-1] - y[-2]) / (x[-1] - x[-2]))
            rows.append(np.maximum.accumulate(np.interp(total / batch, x, y) + np.maximum(beyond, 0.0)))
        if len(used) < 2:
            raise ValueError("table decode needs two lengths measured at two batches or more")
        batches = np.array(used, dtype=np.float64)
        host = batches * host_per_seq / MICROSECOND_S
        columns = [isotonic(column + host, batches) - host for column in np.array(rows).T]
        return batches, np.array(columns).T * MICROSECOND_S

    def chunk_attention(self, factors: Factors) -> tuple[float, float, float, float]:
        """F, g, e, d: by non-negative least squares, errors relative to a step of this chunk alone."""
        at, step = self.gemm(factors)
        rows, times, weights = [], [], []
        for chunk, row in zip(self.prefill["chunk"], self.prefill["time"], strict=True):
            for context, time in zip(self.prefill["context"], row, strict=True):
                if time is not None:
                    rows.append((1.0, chunk, chunk * chunk, chunk * context))
                    times.append(time * MICROSECOND_S * (factors.context_attention if context else 1.0))
                    weights.append(1.0 / (times[-1] + float(np.interp(chunk, at, step))))
        x, y, w = np.array(rows), np.array(times), np.array(weights)
        size = np.sqrt((x * x).mean(axis=0))
        f, g, e, d = (nnls(x / size * w[:, None], y * w) / size).tolist()
        return f, g, e, d


def knots() -> Array:
    """KV totals between which decode attention is a straight line: four to an octave."""
    return np.array([2.0**o * (1.0 + q / 4.0) for o in range(2, OCTAVES) for q in range(4)] + [2.0**OCTAVES])


@dataclass(slots=True)
class Model(ModelBase):
    """A step takes the sum of its kernels' times, read from tables, and the host's.

    Args:
        host, host_per_seq: seconds of every step, and of each sequence in it, spent outside the device.
    """

    tables: Tables
    factors: Factors = Factors()
    host: float = 0.0
    host_per_seq: float = 0.0
    _by_tokens: list[float] = field(init=False, repr=False, compare=False)
    _by_seqs: list[float] = field(init=False, repr=False, compare=False)
    _chunk: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)
    _decode: _Decode = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("host", "host_per_seq"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"components {name} is {getattr(self, name)!r}: give a finite number of seconds, 0 or more"
                )
        self._chunk = self.tables.chunk_attention(self.factors)
        self._flatten()

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes."""
        return self.seconds_of(
            shape.tokens, shape.seqs, shape.kv, shape.chunk_context, shape.chunk_sq, shape.chunks, shape.chunk_kv
        )

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        tokens, seqs, kv = base.tokens, base.seqs + 1, base.kv + cached
        context, square, chunks, chunk_kv = base.chunk_context, base.chunk_sq, base.chunks + 1, base.chunk_kv + cached
        decodes = seqs - chunks
        beside = self._decode.time(decodes, kv - chunk_kv) if decodes else 0.0  # whatever the chunk
        f, g, e, d = self._chunk
        alone = self._decode.time

        def fits(c: int) -> bool:
            if c == 1:  # a decode
                time = self.seconds_of(tokens + 1, seqs, kv + 1, context, square, chunks - 1, chunk_kv - cached)
            else:  # `seconds_of`, operation by operation, of which one search asks ten
                time = self._fixed(tokens + c, seqs) + beside
                compute = f + g * (tokens + c - decodes) + e * (square + c * c) + d * (context + c * cached)
                read = alone(chunks, chunk_kv + c)
                time += compute if compute > read else read
            return time <= seconds

        return largest(fits, most, float(most))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fit host and host_per_seq to what steps took beyond their kernels, in relative error; the kernels' times are
        measured and stay. Raises ValueError on fewer than two sizes of batch, or steps that took no time."""
        if len({s.shape.seqs for s in samples}) < 2:
            raise ValueError("host and host_per_seq need steps of at least two batch sizes")
        if not all(0.0 < s.seconds < float("inf") for s in samples):
            raise ValueError("a sample took no time or for ever: every step needs a positive, finite number of seconds")
        w = 1.0 / np.array([s.seconds for s in samples])
        seqs = np.array([s.shape.seqs for s in samples])
        for _ in range(ROUNDS):  # how far decode attention is evened out depends on host_per_seq, by little
            per = self.host_per_seq
            kernels = Model(self.tables, self.factors, 0.0, per)
            rest = 1.0 - w * (np.array([kernels.step_time(s.shape) for s in samples]) - per * seqs)
            self.host, self.host_per_seq = nnls(np.stack([w, w * seqs], axis=1), rest).tolist()
            self._flatten()

    def update(self, sample: Sample) -> None:
        """Nothing: these tables say what a step takes, in simulations by definition. To learn from a live engine use a
        model that fits, such as `affine`."""

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        try:  # `_fixed`, without the call
            time = self._by_tokens[tokens] + self._by_seqs[seqs]
        except IndexError:
            time = self._fixed(tokens, seqs)
        decodes = seqs - chunks
        if decodes:
            time += self._decode.time(decodes, kv - chunk_kv)
        if chunk_sq:
            f, g, e, d = self._chunk
            compute = f + g * (tokens - decodes) + e * chunk_sq + d * chunk_context
            read = self._decode.time(chunks, chunk_kv)
            time += compute if compute > read else read
        return time

    def line(self, seqs: int, kv: int) -> Line:
        """A step of `seqs` decodes as a straight line in the KV tokens that they read together, from `kv` up to
        `until`."""
        y, slope, x, until = self._decode.piece(seqs, kv)
        return self._fixed(seqs, seqs), y, slope, x, until

    def _fixed(self, tokens: int, seqs: int) -> float:
        try:
            return self._by_tokens[tokens] + self._by_seqs[seqs]
        except IndexError:
            return _at(self._by_tokens, tokens) + _at(self._by_seqs, seqs)

    def _flatten(self) -> None:
        """Dense lists: an index costs less than any formula."""
        self._decode = _Decode(*self.tables.attention(self.host_per_seq))
        at, gemm = self.tables.gemm(self.factors)
        self._by_tokens = (np.interp(np.arange(at[-1] + 1), at, gemm) + self.host).tolist()
        rows, head = self.tables.head()
        seqs = np.arange(rows[-1] + 1)
        self._by_seqs = (np.interp(seqs, rows, head) + self.host_per_seq * seqs).tolist()


def _at(dense: list[float], index: int) -> float:
    """Beyond its end the list goes on as its last quarter does."""
    if index < len(dense):
        return dense[index]
    last, back = len(dense) - 1, len(dense) // 4
    return dense[last] + (index - last) * (dense[last] - dense[last - back]) / back


Piece = tuple[float, float, int, float]  # seconds at its first knot, seconds per token after it, both knots


class _Decode:
    """Decode attention by (batch, total KV): for each batch that is asked for, the line of every quarter octave."""

    __slots__ = ("_batches", "_rows", "_times")

    def __init__(self, batches: Array, times: Array) -> None:
        self._batches, self._times = batches, times
        self._rows: dict[int, list[Piece]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Decode, (self._batches, self._times)  # the same bytes whatever has been asked of it so far

    def __deepcopy__(self, memo: dict[int, Any]) -> _Decode:
        return self  # only ever grows what it remembers

    def time(self, batch: int, kv: int) -> float:
        if kv < 4:
            kv = 4
        octave = kv.bit_length() - 3
        start, slope, x, _ = (self._rows.get(batch) or self._row(batch))[4 * octave + (kv >> octave & 3)]
        return start + slope * (kv - x)

    def piece(self, batch: int, kv: int) -> Piece:
        """What `time` goes by here."""
        row = self._rows.get(batch) or self._row(batch)
        if kv < 4:
            return row[0][0], 0.0, 4, 4.0
        octave = kv.bit_length() - 3
        return row[4 * octave + (kv >> octave & 3)]

    def _row(self, batch: int) -> list[Piece]:
        """Remembered. The last line goes on for ever."""
        upper = int(np.clip(np.searchsorted(self._batches, batch), 1, len(self._batches) - 1))
        low, high = self._batches[upper - 1], self._batches[upper]
        part = (batch - low) / (high - low)
        seconds = self._times[upper - 1] + part * (self._times[upper] - self._times[upper - 1])
        x = knots()
        slopes = (np.diff(seconds) / np.diff(x)).tolist()
        until = [*x[1:-1].tolist(), float("inf")]
        row = list(zip(seconds[:-1].tolist(), slopes, x[:-1].astype(int).tolist(), until, strict=True))
        row += [row[-1]] * (4 * (MAX_OCTAVE - OCTAVES))
        self._rows[batch] = row
        return row
