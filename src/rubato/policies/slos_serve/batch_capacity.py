"""Computes how many tokens a batch of given seconds holds (time2bs, §3.1.1), by a latency model that may see KV."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policies.slos_serve.demand import Demand, peak_kv


class BatchCapacity:
    """The capacity of batches with these requests: exact for a latency model that sees tokens only, else a lower bound.

    The bound assumes a batch with all decodes, which hold as much KV as they ever will (`PeakKV`); all else in it is
    one chunk on top of the longest context of a prompt, or of any request that may draft. If the decodes do not all
    fit, batches take them in turn: a batch then holds their share of the KV and the longest once more, since it is
    closed when the next decode does not fit; in a single batch (`beside`) they are the longest. The result is the
    smaller of two counts, of all decodes with a chunk and of a chunk alone: step times are convex, so what lies between
    fits too.

    Args:
        view: the replica
        seqs: the requests, and `demands` theirs
        margin: share by which steps take longer than the latency model says
        weight: what a token of a chunk counts
    """

    def __init__(
        self, view: View, seqs: Iterable[SeqView], demands: Sequence[Demand], margin: float, weight: float = 1.0
    ) -> None:
        limits, block = view.limits, view.limits.block_size
        self._model, self._slower, self._weight = view.latency, 1.0 + margin, weight
        self._max_tokens = limits.max_num_batched_tokens
        self._decodes = min(len(demands), limits.max_num_seqs, limits.max_num_batched_tokens)
        self._kv = min(peak_kv(demands, block).peak_with(), view.kv_total) * block
        ends = sorted((d.memory * block for d in demands), reverse=True)
        self._ends = list(accumulate(ends, initial=0))  # KV tokens at the end of the n longest, by n
        self._longest_prompt = max((s.length for s in seqs if s.pending > 1), default=0)
        self._longest = max((s.length for s in seqs), default=0)
        self._tokens_by_key: dict[tuple[float, int], int] = {}

    def seconds(self, tokens: int, steps: int = 0) -> float:
        """Returns the longest time of a batch of `tokens` with `steps` draft steps at its end."""
        decodes = min(tokens, self._decodes)
        shape = self._shape(decodes, steps)
        if tokens > decodes:
            shape = shape.plus(tokens - decodes, self._context_of_chunk(steps))
        return self._model.step_time(shape) * self._slower

    def tokens(self, seconds: float, steps: int = 0) -> int:
        """Returns the most tokens that surely end within `seconds`."""
        key = (seconds, steps)
        if key not in self._tokens_by_key:
            base = self._shape(self._decodes, steps)
            if self._model.step_time(base) * self._slower <= seconds:
                together = self._decodes + self._weight * self._chunk(seconds, base, self._max_tokens - self._decodes)
            else:
                fewer = range(1, self._decodes)
                together = bisect_right(fewer, seconds, key=lambda n: self.seconds(n, steps))
            if self._weight < 1.0 and together >= 1.0:
                together = min(together, self._weight * self._chunk(seconds, Shape(spec_steps=steps), self._max_tokens))
            self._tokens_by_key[key] = int(together)
        return self._tokens_by_key[key]

    def beside(self, seconds: float, decodes: int, steps: int = 0) -> float:
        """Returns `tokens` for a batch with at most `decodes` decodes; 0 if these do not fit."""
        decodes = min(decodes, self._decodes)
        base = self._shape(decodes, steps, min(self._kv, self._ends[decodes]))
        if decodes and self._model.step_time(base) * self._slower > seconds:
            return 0.0
        return decodes + self._weight * self._chunk(seconds, base, self._max_tokens - decodes)

    def _chunk(self, seconds: float, base: Shape, most: int) -> int:
        return self._model.largest_chunk(seconds / self._slower, base, self._context_of_chunk(base.spec_steps), most)

    def _context_of_chunk(self, steps: int) -> int:
        """Returns the context of the chunk that stands for all that a batch holds beside one token of each decode."""
        return self._longest if steps else self._longest_prompt

    def _shape(self, decodes: int, steps: int, kv: int | None = None) -> Shape:
        if kv is None:
            share = self._kv * decodes // self._decodes if self._decodes else 0
            kv = min(self._kv, self._ends[decodes], share + self._ends[min(1, decodes)])
        return Shape(decodes, decodes, max(kv, decodes), spec_steps=steps)
