"""Computes how many tokens a batch of given seconds holds (time2bs, §3.1.1), by a latency model that may see KV."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policies.slos_serve.demand import Demand, peak_kv


class BatchCapacity:
    """Of batches with these requests; margin: steps take this share longer than the view's latency model says.

    A roofline sees tokens only, and this is its time2bs. For others it is a lower bound, of a batch with all decodes:
    they hold as much KV as they ever will (`PeakKV`), and what else is in the batch is one chunk on top of the longest
    context of a prompt, or of any that may draft. Where not all of them fit, batches hold some in turn: their share of
    the KV, and the longest once more, for a batch is left when the next one does not fit; in one batch alone
    (`beside`) they are the longest. weight: what a token of a chunk counts. The smaller of two counts: of a batch of
    all decodes and a chunk, and of a chunk alone; step times are convex, so what lies between fits too."""

    def __init__(
        self, view: View, seqs: Iterable[SeqView], demands: Sequence[Demand], margin: float, weight: float = 1.0
    ) -> None:
        limits, block = view.limits, view.limits.block_size
        self._model, self._slower, self._weight = view.latency, 1.0 + margin, weight
        self._most = limits.max_num_batched_tokens
        self._decodes = min(len(demands), limits.max_num_seqs, limits.max_num_batched_tokens)
        self._kv = min(peak_kv(demands, block).peak_with(), view.kv_total) * block
        ends = sorted((d.memory * block for d in demands), reverse=True)
        self._ends = list(accumulate(ends, initial=0))  # KV of the longest ones, by how many
        self._context = max((s.length for s in seqs if s.pending > 1), default=0)
        self._longest = max((s.length for s in seqs), default=0)
        self._tokens_by_key: dict[tuple[float, int], int] = {}

    def seconds(self, tokens: int, steps: int = 0) -> float:
        """Returns the longest time of a batch of `tokens` with `steps` draft steps at its end."""
        decodes = min(tokens, self._decodes)
        shape = self._shape(decodes, steps)
        if tokens > decodes:
            shape = shape.plus(tokens - decodes, self._above(steps))
        return self._model.step_time(shape) * self._slower

    def tokens(self, seconds: float, steps: int = 0) -> int:
        """Returns the most tokens that surely end within `seconds`."""
        key = (seconds, steps)
        if key not in self._tokens_by_key:
            base = self._shape(self._decodes, steps)
            if self._model.step_time(base) * self._slower <= seconds:
                together = self._decodes + self._weight * self._chunk(seconds, base, self._most - self._decodes)
            else:
                fewer = range(1, self._decodes)
                together = bisect_right(fewer, seconds, key=lambda n: self.seconds(n, steps))
            if self._weight < 1.0 and together >= 1.0:
                together = min(together, self._weight * self._chunk(seconds, Shape(spec_steps=steps), self._most))
            self._tokens_by_key[key] = int(together)
        return self._tokens_by_key[key]

    def beside(self, seconds: float, decodes: int, steps: int = 0) -> float:
        """Returns `tokens` for a batch with at most `decodes` decodes; 0 if these do not fit."""
        decodes = min(decodes, self._decodes)
        base = self._shape(decodes, steps, min(self._kv, self._ends[decodes]))
        if decodes and self._model.step_time(base) * self._slower > seconds:
            return 0.0
        return decodes + self._weight * self._chunk(seconds, base, self._most - decodes)

    def _chunk(self, seconds: float, base: Shape, most: int) -> int:
        return self._model.largest_chunk(seconds / self._slower, base, self._above(base.spec_steps), most)

    def _above(self, steps: int) -> int:
        """The context of a chunk that stands for all that a batch holds beside one token of each decode."""
        return self._longest if steps else self._context

    def _shape(self, decodes: int, steps: int, kv: int | None = None) -> Shape:
        if kv is None:
            share = self._kv * decodes // self._decodes if self._decodes else 0
            kv = min(self._kv, self._ends[decodes], share + self._ends[min(1, decodes)])
        return Shape(decodes, decodes, max(kv, decodes), spec_steps=steps)
