"""An engine that takes the time a latency model says and emits as many tokens as a table of true lengths says.

On the virtual clock it is the simulator; on the wall clock it stands in for a model in tests and dry runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, log
from typing import Any

from rubato.core.clock import COMPLETION, Clock
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import KV, NO_BATCH, Batch, Emitted, Entry, FinishReason, Limits, Logprob, Shape, StepResult, Tree
from rubato.core.registry import construct
from rubato.core.request import Request
from rubato.core.stop_strings import StopText
from rubato.engines.simulated import step_noise
from rubato.engines.simulated.acceptance import Acceptance, AcceptanceProcess, Draft
from rubato.latency import profiles
from rubato.latency.with_drafter import without_drafts

WORDS = ("so ", "la ", "ti ", "do ", "re ", "mi ", "fa ", "sol ")
VOCAB_SIZE = 256  # output token n, counted from 1, has the id n modulo this


class ByteText:
    """A tokenizer for a model that is not there: a token is one byte of UTF-8."""

    max_token_bytes = 1

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode("\n".join(f"{m['role']}: {m['content']}" for m in messages) + "\nassistant: ")

    def bytes_of_token(self, id: int) -> bytes:
        """Returns the engine's word for an output token, which is no byte as in a prompt."""
        return WORDS[id % len(WORDS)].encode()


@dataclass(frozen=True, slots=True)
class KVLink:
    """Says how KV gets to a simulated replica. Transfers do not slow each other.

    Args:
        kv_bytes: bytes of KV of a token.
        bandwidth: bytes/s.
        latency: seconds from sending until the first byte comes.
    """

    kv_bytes: int = 0
    bandwidth: float = inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_bytes < 0 or not self.bandwidth > 0.0 or not 0.0 <= self.latency < inf:
            raise ValueError(
                f"link of {self.kv_bytes} bytes/token, {self.bandwidth} bytes/s, {self.latency} s latency: give 0 or "
                "more, above 0, and 0 or more"
            )

    def seconds(self, size: int) -> float:
        """Returns the seconds from sending `size` bytes until they have come."""
        return self.latency + size / self.bandwidth


FREE_LINK = KVLink()


@dataclass(frozen=True)
class Drafter:
    """Drafts for a simulated engine.

    Args:
        latency: predicts a step of the drafter over all sequences that draft; None: the engine's own latency model has
            the time of draft steps in it (`Shape.spec_steps`), or drafting is free.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    latency: LatencyModel | None = None


def drafter(name: str | None, **acceptance: Any) -> Drafter:
    """Returns a drafter with the profile of a small model.

    Args:
        name: of the profile; None: drafting costs nothing.
        acceptance: settings of `Acceptance`, such as alpha=0.8.

    Raises:
        ValueError: the profile is unknown, or a setting invalid.
    """
    label = "drafter" if name is None else f"drafter {name!r}"
    return Drafter(
        construct(label, Acceptance, acceptance, requests={}), None if name is None else profiles.load(name).model()
    )


@dataclass(slots=True)
class _Progress:
    request: Request
    stage: int = 0
    output: int = 0  # of this stage
    total: int = 0
    process: AcceptanceProcess | None = None
    draft: Draft | None = None
    drafted: int = 0  # tokens in the drafter's KV
    stop: StopText | None = None  # where the request has stop strings


class Engine:
    """Runs no model: `latency` gives each step's time, times a factor of `noise` (`step_noise`).

    A request ends at its max_tokens, stop ids or stop strings, which are looked for in the engine's words, one per
    token, the same for all requests.

    Args:
        lengths: output tokens of each stage by request id (the truth, hidden from policies); other requests run to
            their max_tokens.
        noise: of step times (`step_noise`).
        seed: of the noise, which has a random stream of its own.
        link: cost of moving KV to this engine.
        drafter: drafts tokens; None: the engine does not speculate.
        start_seconds: for loading weights.
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
        noise: float | str = 0.0,
        seed: int = 0,
        link: KVLink = FREE_LINK,
        drafter: Drafter | None = None,
        start_seconds: float = 0.0,
    ) -> None:
        self._factors = step_noise.factors(noise, seed)
        self._start_seconds = start_seconds
        self._latency = latency
        self._limits = limits
        self._clock = clock
        self._lengths = lengths or {}
        self._link = link
        self._drafter = drafter
        if drafter is not None:
            self.supports = self.supports | {"draft", "tree"}
        self._seqs: dict[str, _Progress] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    async def start(self) -> None:
        self._seqs.clear()
        if self._start_seconds:
            await self._clock.sleep_until(self._clock.now() + self._start_seconds, COMPLETION)

    def add(self, request: Request) -> None:
        seq = self._seqs[request.id] = _Progress(request)
        if request.progress is not None:
            times = request.progress.times
            seq.stage, seq.output, seq.total = len(times) - 1, len(times[-1]), sum(map(len, times))
        if request.sampling.stop:
            seq.stop = StopText(request.sampling.stop)
            for number in range(1, seq.total + 1):  # its client has had these
                seq.stop.add(WORDS[number % len(WORDS)])

    def place(self, request: Request, stage: int, output: int, total: int) -> None:
        """Sets where a sequence of a coming batch stands.

        Args:
            stage: of the request.
            output: tokens of this stage that are out.
            total: tokens of all stages that are out.
        """
        seq = self._seqs.get(request.id)
        if seq is None:
            self.add(request)
            seq = self._seqs[request.id]
        seq.stage, seq.output, seq.total = stage, output, total

    async def execute(self, batch: Batch) -> StepResult:
        """Runs a batch. Raises ValueError for tree nodes to verify that were not drafted here."""
        result = self.run(batch)
        await self._clock.sleep_until(self._clock.now() + result.seconds, COMPLETION)
        return result

    def run(self, batch: Batch) -> StepResult:
        """Returns what the batch brings, and the seconds that it takes. Raises as `execute`."""
        shape = batch.shape
        if self._drafter is not None and self._drafter.latency is not None:
            shape = without_drafts(shape)
        seconds = self._latency.step_time(shape)
        emitted: dict[str, Emitted] = {}
        first: list[tuple[int, int]] = []  # the drafter's first step: tokens that it has not seen, prompts among them
        later_steps: dict[tuple[int, int], list[int]] = {}  # later ones: tokens of each sequence, by depth and width
        for entry in batch.entries:
            seq = self._seqs[entry.seq]
            if entry.start + 1 < seq.drafted:  # it was preempted: the drafter begins afresh, too
                seq.drafted = entry.start
            if not entry.sample:
                continue
            out = emitted[entry.seq] = self._emit(seq, entry)
            if out.draft is not None and seq.draft is not None:
                length = entry.start + entry.count - len(entry.verify) + out.tokens
                first.append((length - seq.drafted, seq.drafted))
                seq.drafted = length
                later_steps.setdefault((seq.draft.depth, seq.draft.width), []).append(length)
        if first and self._drafter is not None and self._drafter.latency is not None:
            seconds += _drafting_seconds(self._drafter.latency, first, later_steps)
        if self._factors is not None:
            seconds *= next(self._factors)
        return StepResult(emitted, seconds)

    def forget(self, seqs: Iterable[str]) -> None:
        for id in seqs:
            self._seqs.pop(id, None)

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        size = self._link.kv_bytes
        return KV(tokens, "simulated", (size,), b"", tokens * size)

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        size = self._link.kv_bytes
        if (kv.form, kv.shape) != ("simulated", (size,)) or kv.tokens > len(blocks) * self._limits.block_size:
            raise ValueError(
                f"KV of {kv.tokens} tokens, {kv.form} {kv.shape}, into {len(blocks)} blocks of "
                f"{self._limits.block_size}: this engine takes simulated ({size},), no more tokens than the blocks hold"
            )
        await self._clock.sleep_until(self._clock.now() + self._link.seconds(kv.size), COMPLETION)

    async def close(self) -> None:
        self._seqs.clear()

    def _emit(self, seq: _Progress, entry: Entry) -> Emitted:
        """Returns what the step brings to a sequence: the verified tokens that are right, one more, and a new draft if
        asked for."""
        request = seq.request
        sampling, lengths = request.sampling, self._lengths.get(request.id)
        accepted, tried = self._accept(seq, entry, lengths) if entry.verify else ((), 0)
        tokens, stage_done = len(accepted) + 1, False
        finish: FinishReason | None = None
        text, ids = _text_and_ids((seq.total + 1) % VOCAB_SIZE, tokens)
        logprobs: tuple[Logprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple([lp for id in ids for lp in _logprobs(id, sampling.logprobs)])
        if sampling.stop or sampling.stop_ids:
            out = Emitted(tokens, text, ids, logprobs=logprobs, tried=tried, accepted=accepted)
            tokens, text, ids, finish, _, logprobs, tried, _, accepted = _cut_at_stop(seq, out)
        seq.output += tokens
        seq.total += tokens
        if finish is None:
            finish, stage_done = _end_stage(seq, lengths)
        if finish is not None and seq.stop is not None:
            text += seq.stop.flush()
        tree = None
        # after the last token of a stage with a prompt the model goes on from another
        if entry.draft is not None and finish is None and not (stage_done and request.stages[seq.stage].prompt):
            tree = self._draft(seq, *entry.draft)
        return Emitted(tokens, text, ids, finish, stage_done, logprobs, tried, tree, accepted)

    def _accept(self, seq: _Progress, entry: Entry, lengths: Sequence[int] | None) -> tuple[tuple[int, ...], int]:
        """Returns the verified nodes that were right, cut at the end of the stage or request, and how many were
        tried."""
        draft, seq.draft = seq.draft, None
        if seq.process is None or draft is None:
            raise ValueError(f"nodes {entry.verify} of sequence {entry.seq!r} are to be verified, and none is there")
        tokens_left = seq.request.sampling.max_tokens - seq.total
        if lengths is not None:
            tokens_left = min(tokens_left, lengths[seq.stage] - seq.output)
        accepted, tried = seq.process.accept(seq.total, draft, entry.verify)
        return (accepted, tried) if len(accepted) < tokens_left else (accepted[: tokens_left - 1], tokens_left - 1)

    def _draft(self, seq: _Progress, depth: int, width: int) -> Tree | None:
        """Drafts what comes next, as far as the request goes. Returns None if nothing comes next, or nothing drafts."""
        depth = min(depth, seq.request.sampling.max_tokens - seq.total - 1)
        if self._drafter is None or depth < 1:
            return None
        if seq.process is None:
            seq.process = self._drafter.acceptance.of(seq.request)
        seq.draft = seq.process.draft(seq.total, depth, width)
        return seq.draft.tree


def _drafting_seconds(
    latency: LatencyModel, first: Sequence[tuple[int, int]], later_steps: Mapping[tuple[int, int], Sequence[int]]
) -> float:
    """Returns the seconds that drafting takes.

    Args:
        latency: of the drafter.
        first: tokens, and tokens in the drafter's KV, of each sequence in the drafter's first step.
        later_steps: tokens of each sequence after that step, by depth and width.
    """
    seconds, later = latency.step_time(NO_BATCH.with_entries(first)), 0.0
    ends = {depth for depth, _ in later_steps}
    for step in range(1, max(ends)):
        if step == 1 or step in ends:  # else it is like the one before
            later = latency.step_time(_draft_step_shape(later_steps, step))
        seconds += later
    return seconds


def _draft_step_shape(later_steps: Mapping[tuple[int, int], Sequence[int]], step: int) -> Shape:
    """Returns the shape of the drafter's step number `step` (from 1), of sequences by depth and width, with their
    tokens. It is the sum of `Shape.plus` of each."""
    tokens = seq_count = kv_tokens = context = square = chunks = chunk_kv = 0
    for (depth, width), lengths in later_steps.items():
        if depth <= step:
            continue
        seqs, kv = len(lengths), sum(lengths)
        tokens += width * seqs
        seq_count += seqs
        kv_tokens += kv + width * seqs
        if width > 1:
            context += width * kv
            square += width * width * seqs
            chunks += seqs
            chunk_kv += kv + width * seqs
    return Shape(tokens, seq_count, kv_tokens, context, square, 0, chunks, chunk_kv)


def _cut_at_stop(seq: _Progress, out: Emitted) -> Emitted:
    """Returns `out` with the final part of its text, cut after the token that is one of the request's stop ids or that
    completes a stop string; the text has neither."""
    stop = seq.stop or StopText(())
    text, is_stopped, tokens = "", False, 0
    while tokens < out.tokens and not is_stopped:
        id = out.token_ids[tokens]
        tokens += 1
        if id in seq.request.sampling.stop_ids:
            is_stopped = True
        else:
            part, is_stopped = stop.add(WORDS[(seq.total + tokens) % len(WORDS)])
            text += part
    if tokens < out.tokens:
        ids, logprobs = out.token_ids[:tokens], out.logprobs[:tokens]
        accepted = out.accepted[: tokens - 1]
        out = out._replace(tokens=tokens, token_ids=ids, logprobs=logprobs, tried=len(accepted), accepted=accepted)
    return out._replace(text=text, finish="stop" if is_stopped else None)


def _end_stage(seq: _Progress, lengths: Sequence[int] | None) -> tuple[FinishReason | None, bool]:
    """Ends the request or its stage, if its tokens so far do. Returns why the request ends, and whether only the stage
    does."""
    if seq.total >= seq.request.sampling.max_tokens:
        return "length", False
    if lengths is None or seq.output < lengths[seq.stage]:
        return None, False
    if seq.stage + 1 == len(seq.request.stages):
        return "stop", False
    seq.stage += 1
    seq.output = 0
    return None, True


@lru_cache(4 * VOCAB_SIZE)
def _text_and_ids(first: int, tokens: int) -> tuple[str, tuple[int, ...]]:
    """Returns text and ids of `tokens` output tokens, the first with the id `first`."""
    ids = tuple([id % VOCAB_SIZE for id in range(first, first + tokens)])
    return "".join([WORDS[id % len(WORDS)] for id in ids]), ids


def _logprobs(token: int, count: int | None) -> tuple[Logprob, ...]:
    """Returns the log probabilities of a token, of a model for which all its words are equally likely."""
    if count is None:
        return ()
    each = -log(len(WORDS))
    return (Logprob(token, each, tuple((token + i, each) for i in range(min(count, len(WORDS))))),)
