"""The code of the native kernels: attention over paged KV, RMS norm, and the gate of the MLP.

KV is kept in units of 16 tokens, each unit of each KV head contiguous: its keys as (head_dim/2, 16, 2), so that one
vector holds two dimensions of 16 tokens, then its values as (8, head_dim, 2), so that one holds two tokens in 16
dimensions. Both are what the bfloat16 dot product takes; sums, softmax and rotation are float32.
"""

from __future__ import annotations

from operator import add
from typing import Generic, NamedTuple, TypeVar

from rubato_torch.cpu import llvm_jit
from rubato_torch.cpu.llvm_jit import Code, Value, Variable
from rubato_torch.model_config import Config

UNIT = 16  # tokens
STEP = 4 * UNIT  # keys that are scored together
SPAN = 256  # keys between two updates of the softmax
ROWS = 6  # queries scored together in prefill: 6 x 4 sums fill the vector registers
LOG2E = 1.4426950408889634
LOWEST = -1e30  # a masked score; finite, so that differences are numbers


# --------------------------------------------------------------------------- row by row


def norm(code: Code, hidden: int, eps: float) -> None:
    x, weight, out, rows = code.arguments(4)
    parts = range(0, hidden, llvm_jit.LANES)
    first, last = code.share(rows)
    with code.loop(first, last) as row:
        at = row * (2 * hidden)
        sums = [code.floats(0.0)] * 4
        for i, d in enumerate(parts):
            value = code.widen(code.load(x + at + 2 * d, llvm_jit.VH))
            sums[i % 4] = code.fma(value, value, sums[i % 4])
        total = code.reduce(sums[0] + sums[1] + (sums[2] + sums[3]), add)
        scale = code.floats(1.0) / code.call("llvm.sqrt.v16f32", llvm_jit.VF, total / float(hidden) + eps)
        for d in parts:
            value = code.widen(code.load(x + at + 2 * d, llvm_jit.VH)) * scale
            value = value * code.widen(code.load(weight + 2 * d, llvm_jit.VH))
            code.store(code.narrow(value), out + at + 2 * d)


def gate(code: Code, width: int) -> None:
    x, out, rows = code.arguments(3)
    first, last = code.share(rows)
    with code.loop(first, last) as row, code.loop(0, 2 * width, 2 * llvm_jit.LANES) as d:
        at = row * (4 * width) + d
        gate = code.widen(code.load(x + at + 0, llvm_jit.VH))
        up = code.widen(code.load(x + at + 2 * width, llvm_jit.VH))
        silu = gate / (code.exp2(code.smallest(gate * -LOG2E, code.floats(126.0))) + 1.0)
        code.store(code.narrow(silu * up), out + row * (2 * width) + d)


# --------------------------------------------------------------------------- attention


class Scratch:
    """Byte offsets in a thread's scratch memory: for `rows` queries at most. Factors (`Code.store_factors`) have room
    for float32."""

    def __init__(self, dim: int, rows: int) -> None:
        self.query = 0
        self.mixed = self.query + rows * dim * 4  # float32 (rows, dim)
        self.top = self.mixed + rows * dim * 4  # float32 (rows, 16): the largest score so far, in every lane
        self.sum = self.top + rows * 64  # float32 (rows, 16): sums of weights, one in each lane
        self.scores = self.sum + rows * 64  # float32 (ROWS, SPAN)
        self.weights = self.scores + ROWS * SPAN * 4  # factors (ROWS, SPAN)
        self.size = -(-(self.weights + ROWS * SPAN * 4) // 4096) * 4096 + 256


T = TypeVar("T")


class Arguments(NamedTuple, Generic[T]):
    """What the attention kernel is given: tensors (to the kernel their addresses) and numbers."""

    qkv: T
    out: T
    kv: T
    rows: T
    positions: T
    slots: T
    ends: T
    tasks: T
    decodes: T
    total: T
    counters: T
    scratch: T
    angles: T
    units: T
    window: T
    norm: T


def attention(code: Code, c: Config, layout: Scratch, few: int) -> None:
    a = Arguments(*code.arguments(len(Arguments._fields)))
    number, _ = code.thread()
    scratch = a.scratch + number * layout.size
    first, last = code.share(a.rows)
    with code.loop(first, last) as row:
        _rotate_and_write(code, c, a, row)
    code.barrier()
    for i, (begin, end, size) in enumerate(((code.whole(0), a.decodes, few), (a.decodes, a.total, ROWS))):
        with code.tasks(a.counters + 8 * i, (end - begin) * c.kv_heads) as task:
            at = a.tasks + (begin + task // c.kv_heads) * 32
            tile = _Tile(code, c, layout, size, scratch, a, at, task % c.kv_heads)
            tile.fill()
            tile.run()
            tile.write()


def _rotate_and_write(code: Code, c: Config, a: Arguments[Value], row: Value) -> None:
    """Norm (where the model does) and rotate a row's queries in place; the same with its keys, and write them and its
    values to KV. Behind an entry's last token the rest of the unit's values becomes 0: its weights are 0 there, but 0
    times what lay there may not be."""
    position, slot, end = (code.load(x + row * 8, llvm_jit.I64) for x in (a.positions, a.slots, a.ends))
    dim, half = c.head_dim, c.head_dim // 2
    base = a.qkv + row * ((c.heads + 2 * c.kv_heads) * dim * 2)
    angle = a.angles + position * (dim * 4)
    turns = [
        (code.load(angle + 4 * d, llvm_jit.VF), code.load(angle + 4 * (half + d), llvm_jit.VF))
        for d in range(0, half, llvm_jit.LANES)
    ]

    def rotated(head: Value) -> list[tuple[int, Value]]:
        found = []
        parts = _normed(code, c, base, a.norm, head)
        for i, (cos, sin) in enumerate(turns):
            d = i * llvm_jit.LANES
            x, y = parts[i], parts[len(turns) + i]
            found.append((d, code.narrow(x * cos - y * sin)))
            found.append((half + d, code.narrow(y * cos + x * sin)))
        return found

    with code.loop(0, c.heads) as head:
        at = base + head * (dim * 2)
        for d, x in rotated(head):
            code.store(x, at + 2 * d)
    unit, offset = slot // UNIT, slot % UNIT
    with code.loop(0, c.kv_heads) as head:
        keys = a.kv + (unit * c.kv_heads + head) * (4 * UNIT * dim)
        pairs = llvm_jit.pairs_of
        for d, x in rotated(head + c.heads):
            x = code.cast(x, pairs)
            for i in range(llvm_jit.LANES // 2):
                code.store(code.lane(x, i), keys + (d // 2 + i) * (4 * UNIT) + offset * 4)
        values = keys + 2 * UNIT * dim
        at = base + (head + c.heads + c.kv_heads) * (dim * 2)
        to = values + offset // 2 * (4 * dim) + offset % 2 * 2
        for d in range(0, dim, llvm_jit.LANES):
            x = code.load(at + 2 * d, llvm_jit.VH)
            for i in range(llvm_jit.LANES):
                code.store(code.lane(x, i), to + 4 * (d + i))
        with code.when(end.equals(1)), code.loop(offset + 1, UNIT) as behind:
            to = values + behind // 2 * (4 * dim) + behind % 2 * 2
            for d in range(dim):
                code.store(code.short(0), to + 4 * d)


def _normed(code: Code, c: Config, row: Value, norm: Value, head: Value) -> list[Value]:
    """A query or key head of a row in float32, normed where the model does that."""
    at, weight = row + head * (c.head_dim * 2), norm + head * (c.head_dim * 2)
    places = range(0, c.head_dim, llvm_jit.LANES)
    parts = [code.widen(code.load(at + 2 * d, llvm_jit.VH)) for d in places]
    if not c.qk_norm:
        return parts
    squares = parts[0] * parts[0]
    for x in parts[1:]:
        squares = code.fma(x, x, squares)
    total = code.reduce(squares, add)
    scale = code.floats(1.0) / code.call("llvm.sqrt.v16f32", llvm_jit.VF, total / float(c.head_dim) + c.norm_eps)
    weights = [code.widen(code.load(weight + 2 * d, llvm_jit.VH)) for d in places]
    return [x * scale * w for x, w in zip(parts, weights, strict=True)]


class _Tile:
    """Writes the code for one task: `tokens` rows of one sequence, and the query heads that share one KV head. A query
    is (token, head of the group); `size` of them are scored together."""

    def __init__(
        self,
        code: Code,
        c: Config,
        layout: Scratch,
        size: int,
        scratch: Value,
        a: Arguments[Value],
        task: Value,
        head: Value,
    ) -> None:
        """scratch: this thread's. task: the address of the task."""
        self.code, self.c, self.size = code, c, size
        self.queries_at, self.mixed_at = scratch + layout.query, scratch + layout.mixed
        self.tops_at, self.sums_at = scratch + layout.top, scratch + layout.sum
        self.scores_at, self.weights_at = scratch + layout.scores, scratch + layout.weights
        self.row, self.tokens, self.start, first = (code.load(task + 8 * i, llvm_jit.I64) for i in range(4))
        self.table, self.qkv, self.out = a.units + first * 8, a.qkv, a.out
        self.window = a.window if any(c.windows) else None  # without any the code knows of none
        self.group = c.heads // c.kv_heads
        self.head = head
        self.stride = c.kv_heads * 4 * UNIT * c.head_dim  # bytes of a unit, all heads
        self.kv = a.kv + head * (4 * UNIT * c.head_dim)
        self.queries = self.tokens * self.group
        self.rounded = (self.queries + (size - 1)) // size * size

    def fill(self) -> None:
        """The queries, contiguous; the states of their softmaxes empty."""
        code, c, dim = self.code, self.c, self.c.head_dim
        with code.loop(0, self.tokens) as token:
            at = self.qkv + ((self.row + token) * (c.heads + 2 * c.kv_heads) + self.head * self.group) * (dim * 2)
            to = self.queries_at + token * (self.group * dim * code.factor_bytes)
            for d in range(0, self.group * dim, llvm_jit.LANES):
                code.store_factors(code.widen(code.load(at + 2 * d, llvm_jit.VH)), to + code.factor_bytes * d)
        with code.loop(0, self.rounded) as query:
            code.store(code.floats(LOWEST), self.tops_at + query * 64)
            code.store(code.floats(0.0), self.sums_at + query * 64)
            for d in range(0, dim, llvm_jit.LANES):
                code.store(code.floats(0.0), self.mixed_at + query * (4 * dim) + 4 * d)

    def run(self) -> None:
        code = self.code
        length = self.start + self.tokens
        with code.loop(self.begin(), length, SPAN) as first, code.loop(0, self.rounded, self.size) as query:
            beyond = self.position(query + (self.size - 1)) + 1  # keys that the last of these queries sees
            stop = code.smallest(first + SPAN, (beyond + (STEP - 1)) // STEP * STEP)
            with code.when(first < stop):
                with code.loop(first, stop, STEP) as key:
                    self.score(query, key, key - first)
                    with code.when(self.partly_hidden(query, key)):
                        self.mask(query, key, key - first)
                shrink = self.soften(query, stop - first)
                self.mix(query, first, stop - first, shrink)

    def begin(self) -> Value:
        """The span of the first key that the first token sees. A later query may see nothing of it, and then mixes what
        it should not: its own key, which comes last, shrinks all that to 0."""
        if self.window is None:
            return self.code.whole(0)
        first = self.code.largest(self.start + 1 - self.window, self.code.whole(0))
        return first // SPAN * SPAN

    def partly_hidden(self, query: Value, key: Value) -> Value:
        """Whether one of the queries does not see one of the STEP keys."""
        ahead = self.position(query) < key + (STEP - 1)
        if self.window is None:
            return ahead
        return ahead | (key < self.position(query + (self.size - 1)) + 1 - self.window)

    def position(self, query: Value) -> Value:
        return self.start + self.code.smallest(query // self.group, self.tokens - 1)

    def unit(self, key: Value) -> Value:
        return self.kv + self.code.load(self.table + key // UNIT * 8, llvm_jit.I64) * self.stride

    def score(self, query: Value, key: Value, to: Value) -> None:
        """Scores of `size` queries and STEP keys, in units of the softmax to base 2."""
        code, dim = self.code, self.c.head_dim
        row = dim * code.factor_bytes
        at = self.queries_at + query * row
        scale = LOG2E / dim**0.5
        for unit in range(0, STEP // UNIT, code.wide):
            keys = [self.unit(key + (unit + i) * UNIT) for i in range(code.wide)]
            sums = [[Variable(code, code.floats(0.0)) for _ in keys] for _ in range(self.size)]
            with code.loop(0, dim // 2) as pair:
                columns = [code.load(k + pair * (4 * UNIT), llvm_jit.VI) for k in keys]
                for r in range(self.size):
                    q = code.pair(at + pair * (2 * code.factor_bytes) + r * row)
                    for total, column in zip(sums[r], columns, strict=True):
                        total.set(code.dots(total.get(), q, column))
            for r in range(self.size):
                for i, total in enumerate(sums[r]):
                    place = self.scores_at + to * 4 + (r * SPAN + (unit + i) * UNIT) * 4
                    code.store(total.get() * scale, place)

    def mask(self, query: Value, key: Value, to: Value) -> None:
        code = self.code
        for r in range(self.size):
            seen = code.splat(self.position(query + r) - key)
            # clamped, as it becomes 32 bits: without a window in this layer it is far below any lane
            if self.window is not None:
                below = self.position(query + r) + 1 - self.window - key
                behind = code.splat(code.largest(below, code.whole(-1)))
            for i in range(STEP // UNIT):
                place = self.scores_at + to * 4 + (r * SPAN + i * UNIT) * 4
                lane = code.lanes() + i * UNIT
                hidden = lane > seen
                if self.window is not None:
                    hidden = hidden | (lane < behind)
                code.store(code.select(hidden, code.floats(LOWEST), code.load(place, llvm_jit.VF)), place)

    def soften(self, query: Value, count: Value) -> list[Value]:
        """Scores to weights. Returns by how much to scale what was mixed before, for each query."""
        code = self.code
        found = []
        for r in range(self.size):
            scores = self.scores_at + r * SPAN * 4
            weights = self.weights_at + r * SPAN * code.factor_bytes
            top_at = self.tops_at + (query + r) * 64
            sum_at = self.sums_at + (query + r) * 64
            before = code.load(top_at, llvm_jit.VF)
            tops = [Variable(code, before) for _ in range(4)]
            with code.loop(0, count, STEP) as key:
                for i, top in enumerate(tops):
                    top.set(code.largest(top.get(), code.load(scores + key * 4 + i * UNIT * 4, llvm_jit.VF)))
            most = code.largest(code.largest(tops[0].get(), tops[1].get()), code.largest(tops[2].get(), tops[3].get()))
            most = code.reduce(most, code.largest)
            shrink = code.exp2(before - most)
            sums = [
                Variable(code, code.load(sum_at, llvm_jit.VF) * shrink if i == 0 else code.floats(0.0))
                for i in range(4)
            ]
            with code.loop(0, count, STEP) as key:
                for i, total in enumerate(sums):
                    weight = code.exp2(code.load(scores + key * 4 + i * UNIT * 4, llvm_jit.VF) - most)
                    total.set(total.get() + weight)
                    code.store_factors(weight, weights + (key + i * UNIT) * code.factor_bytes)
            code.store(most, top_at)
            code.store(sums[0].get() + sums[1].get() + (sums[2].get() + sums[3].get()), sum_at)
            found.append(shrink)
        return found

    def mix(self, query: Value, first: Value, count: Value, shrink: list[Value]) -> None:
        """Add the weighted values of `count` keys from `first`."""
        code, dim = self.code, self.c.head_dim
        lanes = code.wide * llvm_jit.LANES
        for part in range(0, dim, lanes):
            places = range(part, min(part + lanes, dim), llvm_jit.LANES)
            at = self.mixed_at + query * (dim * 4)
            sums = [
                [Variable(code, code.load(at + (r * dim + d) * 4, llvm_jit.VF) * shrink[r]) for d in places]
                for r in range(self.size)
            ]
            with code.loop(0, count, UNIT) as key:
                values = self.unit(first + key) + 2 * UNIT * dim
                weights = self.weights_at + key * code.factor_bytes
                with code.loop(0, UNIT // 2) as pair:
                    rows = [code.load(values + pair * (4 * dim) + 4 * d, llvm_jit.VI) for d in places]
                    for r in range(self.size):
                        weight = code.pair(weights + (pair * 2 + r * SPAN) * code.factor_bytes)
                        for total, row in zip(sums[r], rows, strict=True):
                            total.set(code.dots(total.get(), weight, row))
            for r in range(self.size):
                for total, d in zip(sums[r], places, strict=True):
                    code.store(total.get(), at + (r * dim + d) * 4)

    def write(self) -> None:
        code, c, dim = self.code, self.c, self.c.head_dim
        with code.loop(0, self.queries) as query:
            total = code.reduce(code.load(self.sums_at + query * 64, llvm_jit.VF), add)
            row, head = self.row + query // self.group, self.head * self.group + query % self.group
            at = self.mixed_at + query * (dim * 4)
            to = self.out + (row * c.heads + head) * (dim * 2)
            for d in range(0, dim, llvm_jit.LANES):
                code.store(code.narrow(code.load(at + 4 * d, llvm_jit.VF) / total), to + 2 * d)
