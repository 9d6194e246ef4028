"""Defines a replica's limits, the plan of one step, its batch, and an engine's result.

All are frozen; times are in seconds, lengths in tokens. Most are named tuples, which are made three times as fast as
frozen dataclasses: each step makes many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rubato.core.request import NOTHING, HandoffReason

Recall = Literal["waiting", "best_effort"]  # which requests a router takes back from a replica (`Dispatch.recall`)


def blocks_for(tokens: int, block_size: int) -> int:
    """Returns the KV blocks that `tokens` tokens take, `block_size` tokens to a block."""
    return -(-tokens // block_size)


# --------------------------------------------------------------------------- parts of a step

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a replica, which a Router or an Autoscaler assigns and schedulers and routers read.

    Args:
        phase: of requests that it serves.
        tier: that it serves ("" = any).
        group: of replicas that work together.
        kind: a policy's own word, such as lp, hp, best_effort or pending.
    """

    phase: Phase = "both"
    tier: str = ""
    group: str = ""
    kind: str = ""


ANY = Role()


@dataclass(frozen=True, slots=True)
class Limits:
    """The hard limits of one engine: `plan_check.check` refuses a plan beyond them."""

    max_num_seqs: int  # sequences in one batch
    max_num_batched_tokens: int  # tokens in one batch
    max_model_len: int  # prompt + output of one sequence (the model's context)
    kv_blocks: int  # blocks of KV memory
    block_size: int  # tokens a block holds
    max_running: int | None = None  # sequences that hold KV, in a batch or not (None: as many as there is KV for)

    def blocks(self, tokens: int) -> int:
        """Returns the KV blocks that `tokens` tokens of one sequence take."""
        return blocks_for(tokens, self.block_size)


class Shape(NamedTuple):
    """The features of a batch that determine its step time; the sum of two shapes' features is that of both batches.

    Each entry of a batch runs c tokens on top of k tokens already cached. Entries with c > 1 are chunks, the other
    `seqs` - `chunks` are decodes, which read `kv` - `chunk_kv`. Logs older than `chunks` and `chunk_kv` have 0 in both.

    Args:
        tokens: Σ c.
        seqs: number of entries.
        kv: Σ (k + c), KV tokens read.
        chunk_context: Σ c·k over the chunks (prefill attention).
        chunk_sq: Σ c² over the chunks (prefill attention).
        spec_steps: draft steps.
        chunks: number of chunks.
        chunk_kv: Σ (k + c) over the chunks.
        draft_tokens: tokens that the drafter runs in its steps after the first, Σ (depth - 1)·width over the drafting
            sequences (`later_draft_tokens`); its first step runs the batch's new tokens. 0 with several steps: unknown,
            as in older logs.
    """

    tokens: int = 0
    seqs: int = 0
    kv: int = 0
    chunk_context: int = 0
    chunk_sq: int = 0
    spec_steps: int = 0
    chunks: int = 0
    chunk_kv: int = 0
    draft_tokens: int = 0

    @classmethod
    def decodes(cls, seqs: int, kv: int) -> Shape:
        """Makes a batch of `seqs` decodes, which read `kv` tokens of KV together, their new ones included."""
        return cls(seqs, seqs, kv)

    @classmethod
    def prefill(cls, tokens: int, cached: int = 0) -> Shape:
        """Makes a batch of one chunk: `tokens` tokens of a prompt, on top of `cached` in KV."""
        return NO_BATCH.plus(tokens, cached)

    def plus(self, tokens: int, cached: int) -> Shape:
        """Returns this batch with one more entry of `tokens` tokens on top of `cached`."""
        all_, seqs, kv, context, square, spec, chunks, chunk_kv, drafts = self
        more = cached + tokens
        if tokens <= 1:
            return Shape(all_ + tokens, seqs + 1, kv + more, context, square, spec, chunks, chunk_kv, drafts)
        return Shape(
            all_ + tokens, seqs + 1, kv + more, context + tokens * cached, square + tokens * tokens, spec, chunks + 1,
            chunk_kv + more, drafts,
        )  # fmt: skip

    def with_entries(self, entries: Iterable[tuple[int, int]], drafts: Iterable[tuple[int, int]] = ()) -> Shape:
        """Returns this batch with more entries, (tokens, tokens already cached) each, and with trees of these (depth,
        width) drafted at its end."""
        tokens, seqs, kv, context, square, steps, chunks, chunk_kv, draft_tokens = self
        for count, cached in entries:
            tokens += count
            seqs += 1
            kv += cached + count
            if count > 1:
                context += count * cached
                square += count * count
                chunks += 1
                chunk_kv += cached + count
        for draft in drafts:
            steps = max(steps, draft[0])
            draft_tokens += later_draft_tokens(draft)
        return Shape(tokens, seqs, kv, context, square, steps, chunks, chunk_kv, draft_tokens)

    def minus(self, tokens: int, cached: int) -> Shape:
        """Returns this batch without one entry that `plus` added."""
        all_, seqs, kv, context, square, spec, chunks, chunk_kv, drafts = self
        less = cached + tokens
        if tokens <= 1:
            return Shape(all_ - tokens, seqs - 1, kv - less, context, square, spec, chunks, chunk_kv, drafts)
        return Shape(
            all_ - tokens, seqs - 1, kv - less, context - tokens * cached, square - tokens * tokens, spec, chunks - 1,
            chunk_kv - less, drafts,
        )  # fmt: skip


NO_BATCH = Shape()


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step: its shape, its seconds, and the drafter's part of them (0 where the engine reports none)."""

    shape: Shape
    seconds: float
    drafting: float = 0.0


@dataclass(frozen=True)
class Tree:
    """Candidate tokens after a sequence's last. A chain is a tree of one leaf.

    Args:
        parents: node i follows node parents[i] < i; -1: the last token itself.
        paths: the probability that the node and all nodes before it on its path are accepted, never rising on a path.
    """

    parents: tuple[int, ...]
    paths: tuple[float, ...]

    @cached_property
    def depths(self) -> Sequence[int]:
        """Returns the depth of each node; nodes that follow the last token itself have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def layers(self) -> Sequence[float]:
        """Returns, by depth from 1 on, the probability that a node there is accepted: the sum of their `paths`."""
        layers = [0.0] * max(self.depths, default=0)
        for depth, path in zip(self.depths, self.paths, strict=True):
            layers[depth - 1] += path
        return layers


def later_draft_tokens(draft: tuple[int, int]) -> int:
    """Returns the tokens that the drafter runs after its first step for a tree of this (depth, width): each later step
    expands the `width` nodes of the layer before (AdaServe, section 4.3)."""
    depth, width = draft
    return (depth - 1) * width


class Work(NamedTuple):
    """One sequence's part of a plan.

    Args:
        seq: id of the sequence.
        tokens: pending tokens to run in this step: 1 for a decode, more for a chunk of prefill.
        verify: for a sequence that samples, the nodes of its candidate tree (`SeqView.draft`) to run, too, children
            with their parents.
        draft: for a sequence that samples, (depth, width) of the tree to draft at the end of the step, which the next
            plan sees.
    """

    seq: str
    tokens: int
    verify: tuple[int, ...] = ()
    draft: tuple[int, int] | None = None


class Plan(NamedTuple):
    """One step, decided by a Scheduler, and applied in this order: drop, handoff, preempt, demote, promote, work.

    Args:
        work: what each sequence runs.
        preempt: running sequences whose KV is freed; each keeps its tokens, waits, and resumes by one prefill of them
            all.
        demote: sequences that are served as best effort from now on.
        promote: demoted sequences that are served by their SLO again.
        drop: seq -> reason; refuses a request for good: only one that asked for `on_decline="refuse"`, or, as
            SATURATED, one that has not begun.
        wake_at: plan again at this time even if nothing happens.
        decode_all: one token of every running sequence that has one pending and stays; `work` then names none of them.
        repeat_steps: the next `repeat_steps` plans would be this one again, its work cut to the tokens still pending (a
            sequence whose prefill completes joins the decodes), unless a request arrives, is cancelled or lacks KV, or
            a prompt or a stage ends while a request waits or prefills. A simulator may run these steps without asking.
        handoff: seq -> why the router must place it on another replica. Its KV stays here until it has been sent;
            "prefilled" is for a running request whose prompt is in KV. Needs "handoff", with KV also "kv_transfer".
        without_kv: handed-off requests that give up their KV here and now; the next replica prefills them again.
    """

    work: tuple[Work, ...] = ()
    preempt: tuple[str, ...] = ()
    demote: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    drop: Mapping[str, str] = NOTHING
    wake_at: float | None = None
    decode_all: bool = False
    repeat_steps: int = 0
    handoff: Mapping[str, HandoffReason] = NOTHING
    without_kv: frozenset[str] = frozenset()


class Entry(NamedTuple):
    """One sequence's part of a batch: runs its tokens [start, start + count).

    While the step runs, the KV of the verified nodes follows that of the pending tokens, in the order of `verify`. By
    the end of the step the engine has moved the accepted path's KV (`Emitted.accepted`) right behind that of the
    pending tokens; KV after it is garbage, whose blocks the replica frees.

    Args:
        seq: id of the sequence.
        start: tokens in KV before.
        count: tokens to run, the nodes to verify included.
        blocks: KV blocks, in order of position; read-only, and the same while the batch runs.
        sample: its last pending token runs, so a new token comes out.
        verify: nodes of the sequence's candidate tree, the last of `count`.
        draft: as in `Work`.
    """

    seq: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple's method
    blocks: Sequence[int]
    sample: bool
    verify: tuple[int, ...] = ()
    draft: tuple[int, int] | None = None


@dataclass(frozen=True)
class Batch:
    """The entries that an engine runs in one step."""

    entries: tuple[Entry, ...] = ()

    @cached_property
    def shape(self) -> Shape:
        drafts = [e.draft for e in self.entries if e.draft is not None]
        return NO_BATCH.with_entries([(e.count, e.start) for e in self.entries], drafts)


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A sampled token's natural log probability under the model (before temperature, top-p, top-k and penalties), and
    the likeliest tokens as (id, logprob), descending."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Emitted(NamedTuple):
    """The output of one sequence in a step.

    Args:
        tokens: number of new tokens.
        text: what is final by now: whole characters, no beginning of a stop string.
        token_ids: of the new tokens, where there is a model.
        finish: "stop" (eos, stop id or stop string) | "length"; None: it continues.
        stage_done: this stage's `ends` literal came out.
        logprobs: one a token, where the request asked for them.
        tried: drafted tokens that were verified: the accepted ones and the rejected one with its siblings.
        draft: the candidates for the next tokens, where the batch asked for them.
        accepted: verified nodes whose tokens came out, a path from the root; the last token is the target's own, so
            `tokens` are always one more.
    """

    tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stage_done: bool = False
    logprobs: tuple[Logprob, ...] = ()
    tried: int = 0
    draft: Tree | None = None
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Args:
        emitted: the output of each sequence that sampled.
        seconds: of the step, by the engine's clock.
        drafting: the drafter's part of `seconds`; 0: none, or not reported.
    """

    emitted: Mapping[str, Emitted]
    seconds: float
    drafting: float = 0.0


@dataclass(frozen=True, slots=True)
class KV:
    """The KV of `tokens` tokens in transfer between engines, in the host's memory.

    Args:
        tokens: that it covers.
        form: the engines' name for the order of the bytes.
        shape: equal for both engines, e.g. (layers, kv_heads, head_dim).
        data: raw bytes (empty in simulation, where only `size` counts).
        size: bytes on the wire.
    """

    tokens: int
    form: str
    shape: tuple[int, ...]
    data: bytes
    size: int
