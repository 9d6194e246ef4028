"""An engine that takes the time a latency model says and emits as many tokens as a table of true lengths says.

On the virtual clock it is the simulator; on the wall clock it stands in for a model in tests and dry runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from rubato.clock import COMPLETION, Clock
from rubato.interfaces import KV, LatencyModel
from rubato.types import Batch, Emitted, Limits, Logprob, Request, StepResult

WORDS = ("so ", "la ", "ti ", "do ", "re ", "mi ", "fa ", "sol ")


class ByteText:
    """A tokenizer for a model that is not there: a token is one byte of UTF-8."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode("\n".join(f"{m['role']}: {m['content']}" for m in messages) + "\nassistant: ")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i % 256 for i in ids).decode(errors="replace")

    def spell(self, id: int) -> bytes:
        """What an output token says: the engine's word, not a byte as in a prompt."""
        return WORDS[id % len(WORDS)].encode()


@dataclass(slots=True)
class _Progress:
    request: Request
    stage: int = 0
    output: int = 0  # of this stage
    total: int = 0


class Engine:
    """`latency` gives each step's time, times a lognormal factor of relative spread `noise` from its own stream.

    lengths: request id -> output tokens of each stage (the truth, hidden from policies); an id that is not there runs
    to its max_tokens. A request never goes beyond its max_tokens. kv_bytes: of one token's KV, what moving it costs.
    """

    supports = frozenset({"chunked", "preempt", "mixed", "kv_transfer"})
    model_name = "simulated"
    text = ByteText()

    def __init__(
        self,
        latency: LatencyModel,
        limits: Limits,
        clock: Clock,
        *,
        lengths: Mapping[str, Sequence[int]] | None = None,
        noise: float = 0.0,
        seed: int = 0,
        kv_bytes: int = 0,
    ) -> None:
        if not 0.0 <= noise < 1.0:
            raise ValueError(f"engine noise is {noise}: give a relative spread in [0, 1)")
        self._latency = latency
        self._limits = limits
        self._clock = clock
        self._lengths = lengths or {}
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._kv_bytes = kv_bytes
        self._seqs: dict[str, _Progress] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    async def start(self) -> None:
        self._seqs.clear()

    def add(self, request: Request) -> None:
        seq = self._seqs[request.id] = _Progress(request)
        if request.progress is not None:
            times = request.progress.times
            seq.stage, seq.output, seq.total = len(times) - 1, len(times[-1]), sum(map(len, times))

    async def execute(self, batch: Batch) -> StepResult:
        seconds = self._latency.step_time(batch.shape)
        if self._noise:
            seconds *= float(self._rng.lognormal(-(self._noise**2) / 2, self._noise))
        await self._clock.sleep_until(self._clock.now() + seconds, COMPLETION)
        return StepResult({e.seq: self._emit(self._seqs[e.seq]) for e in batch.entries if e.sample}, seconds)

    def forget(self, seqs: Iterable[str]) -> None:
        for id in seqs:
            self._seqs.pop(id, None)

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        return KV(tokens, "simulated", (self._kv_bytes,), b"", tokens * self._kv_bytes)

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        if (kv.form, kv.shape) != ("simulated", (self._kv_bytes,)) or kv.tokens > len(blocks) * self._limits.block:
            raise ValueError(
                f"KV of {kv.tokens} tokens, {kv.form} {kv.shape}, into {len(blocks)} blocks of {self._limits.block}: "
                f"this engine takes simulated ({self._kv_bytes},), no more tokens than the blocks hold"
            )

    async def close(self) -> None:
        self._seqs.clear()

    def _emit(self, seq: _Progress) -> Emitted:
        seq.output += 1
        seq.total += 1
        request = seq.request
        text = WORDS[seq.total % len(WORDS)]
        token = (seq.total % 256,)
        out = Emitted(1, text, token, logprobs=_logprobs(token[0], request.sampling.logprobs))
        lengths = self._lengths.get(request.id)
        if seq.total >= request.sampling.max_tokens:
            return replace(out, finish="length")
        if lengths is None or seq.output < lengths[seq.stage]:
            return out
        if seq.stage + 1 == len(request.stages):
            return replace(out, finish="stop")
        seq.stage += 1
        seq.output = 0
        return replace(out, stage_done=True)


def _logprobs(token: int, wanted: int | None) -> tuple[Logprob, ...]:
    """As of a model that finds each of its words as likely as the next."""
    if wanted is None:
        return ()
    each = -log(len(WORDS))
    return (Logprob(token, each, tuple((token + i, each) for i in range(min(wanted, len(WORDS))))),)
