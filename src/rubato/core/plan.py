"""What a replica can take, a plan for one step, the batch made of it, and what an engine returns.

Frozen; times in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rubato.core.request import NOTHING, HandoffReason

Recall = Literal["waiting", "best_effort"]  # which work a router takes back from a replica (`Dispatch.recall`)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens of KV take, `block_size` tokens to a block."""
    return -(-tokens // block_size)


# --------------------------------------------------------------------------- what a step is made of

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Role:
    """What a replica is for, as a Router or an Autoscaler assigns it and both policies read it.

    tier: the one it serves ("" = any). group: of replicas that work together. kind: a policy's own word, such as lp,
    hp, best_effort or pending.
    """

    phase: Phase = "both"
    tier: str = ""
    group: str = ""
    kind: str = ""


ANY = Role()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can take. All are hard: `plan_check.check` refuses a plan beyond them."""

    max_num_seqs: int  # sequences in one batch
    max_num_batched_tokens: int  # tokens in one batch
    max_model_len: int  # prompt + output of one sequence (the model's context)
    kv_blocks: int  # blocks of KV memory
    block_size: int  # tokens a block holds
    max_running: int | None = None  # sequences that hold KV, in a batch or not (None: as many as there is KV for)

    def blocks(self, tokens: int) -> int:
        """KV blocks that so many tokens of one sequence take."""
        return blocks_for(tokens, self.block_size)


class Shape(NamedTuple):
    """The features of a batch that its step time depends on; adding up two shapes' features joins two batches.

    Each entry runs `c` tokens on top of `k` tokens already cached.
    tokens = Σ c;  seqs = entries;  kv = Σ (k + c), KV tokens read;  spec_steps = draft steps. Over the chunks alone,
    entries with c > 1:  chunks = how many;  chunk_context = Σ c·k and chunk_sq = Σ c² (prefill attention);  chunk_kv =
    Σ (k + c). So seqs - chunks are decodes, which read kv - chunk_kv. A log from before `chunks` and `chunk_kv` were
    kept has 0 in both.

    draft_tokens: tokens that the drafter runs in its steps after the first, Σ (depth - 1)·width over the sequences that
    draft (`later_draft_tokens`); its first step runs what the batch has brought. 0 with several steps: not said, as in
    logs from before it was kept.
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

    def plus(self, tokens: int, cached: int) -> Shape:
        """This batch with one more entry of `tokens` tokens on top of `cached`."""
        all_, seqs, kv, context, square, spec, chunks, chunk_kv, drafts = self
        more = cached + tokens
        if tokens <= 1:
            return Shape(all_ + tokens, seqs + 1, kv + more, context, square, spec, chunks, chunk_kv, drafts)
        return Shape(
            all_ + tokens, seqs + 1, kv + more, context + tokens * cached, square + tokens * tokens, spec, chunks + 1,
            chunk_kv + more, drafts,
        )  # fmt: skip

    def with_entries(self, entries: Iterable[tuple[int, int]], drafts: Iterable[tuple[int, int]] = ()) -> Shape:
        """This batch with these entries, of (tokens, tokens already cached) each, and with trees of these (depth,
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
        """This batch without one entry that `plus` gave it."""
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
    """One measured step: what ran and the seconds it took; of these, those of the drafter, where the engine says so."""

    shape: Shape
    seconds: float
    drafting: float = 0.0


@dataclass(frozen=True)
class Tree:
    """Candidate tokens after a sequence's last: node i follows node parents[i] < i (-1: the last token itself);
    paths[i]: probability that it and all before it are right, never rising on a path. A chain is a tree of one leaf."""

    parents: tuple[int, ...]
    paths: tuple[float, ...]

    @cached_property
    def depths(self) -> Sequence[int]:
        """Of each node: 1 for those that follow the last token itself."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def layers(self) -> Sequence[float]:
        """By depth, 1 first: the chance that one of the nodes there is right, the sum of their `paths`."""
        layers = [0.0] * max(self.depths, default=0)
        for depth, path in zip(self.depths, self.paths, strict=True):
            layers[depth - 1] += path
        return layers


def later_draft_tokens(draft: tuple[int, int]) -> int:
    """Tokens that the drafter runs after its first step for a tree of this (depth, width): each later step expands the
    nodes of the layer before, of which there are `width` (AdaServe, section 4.3)."""
    depth, width = draft
    return (depth - 1) * width


class Work(NamedTuple):
    """Run `tokens` of a sequence's pending tokens in this step (1 for a decode, more for a chunk of prefill).

    Of a sequence that samples: verify, the nodes of its candidate tree (`SeqView.draft`) to run along, parents with
    their children; draft, (depth, width) of the tree to draft at the end of the step, for the next plan to see.
    """

    seq: str
    tokens: int
    verify: tuple[int, ...] = ()
    draft: tuple[int, int] | None = None


class Plan(NamedTuple):
    """One step, decided by a Scheduler. Applied in this order: drop, handoff, preempt, demote, promote, work.

    drop: seq -> reason, refuses a request for good: only one that asked for `on_decline="refuse"`, or, as SATURATED,
    one that has not begun.
    handoff: seq -> why the router is to place it on another replica. A handed-off request's KV stays here until it has
    been sent; "prefilled" is for a running one whose prompt is in KV. Needs "handoff", with KV "kv_transfer".
    without_kv: of those handed off, those that give up KV here and now: they are prefilled again where they go on.
    preempt: gives back a running sequence's KV; its tokens are kept, it waits, and resumes by one prefill of them all.
    demote / promote: to best effort and back. wake_at: ask again at this time even if nothing happens.

    decode_all: one token of every running sequence that has one pending and stays, beside `work`, which then names none
    of them. repeat_steps: the plan of each of so many further steps would be this one again, its work cut to what is
    pending by then (a sequence whose prefill completes joins the decodes); unless something arrives, is cancelled or
    lacks KV, or a prompt or a stage ends while a request waits or prefills. A simulator may run these steps without
    asking.
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
    """One sequence's part of a batch: run tokens [start, start + count) of it, KV in `blocks` (in order of position;
    not to be changed, and the same while the batch runs).

    sample: the last pending token is among them, so a new token comes out. verify: nodes of the sequence's candidate
    tree, the last of `count`; their KV follows that of the pending tokens, in this order, while the step runs. After
    the step the engine has moved the accepted path's KV (`Emitted.accepted`) to the front, without gaps behind that of
    the pending tokens; what comes after is garbage, whose blocks are given back. draft: as in `Work`.
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
    """What an engine runs in one step."""

    entries: tuple[Entry, ...] = ()

    @cached_property
    def shape(self) -> Shape:
        drafts = [e.draft for e in self.entries if e.draft is not None]
        return NO_BATCH.with_entries([(e.count, e.start) for e in self.entries], drafts)


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A chosen token's natural log probability under the model (before temperature, cuts and penalties), and those of
    the likeliest tokens, descending: (id, logprob) pairs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Emitted(NamedTuple):
    """What one sequence got out of a step: `tokens` new tokens, their ids where there is a model, and the text that is
    final by now (never half a character, never the beginning of a stop string).

    finish: "stop" (eos, stop id or stop string) | "length"; stage_done: this stage's `ends` literal has been produced.
    logprobs: one a token, where the request asked for them. tried: drafted tokens put to the test, the accepted and the
    one (with its siblings) that was wrong. draft: the candidates for what comes next, where the batch asked for them.
    accepted: nodes of the tree that were right and whose tokens came out, a path from the root on among those verified;
    the last token is the target's own, so `tokens` are always one more.
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
    """Per sequence that sampled, what came out. `seconds`: the engine's own measure of the step, in its clock;
    `drafting`: those of them that the drafter took (0: none, or not told)."""

    emitted: Mapping[str, Emitted]
    seconds: float
    drafting: float = 0.0


@dataclass(frozen=True, slots=True)
class KV:
    """The KV of `tokens` tokens on its way between engines, in the host's memory.

    shape: what both engines must agree in, e.g. (layers, kv_heads, head_dim); data: raw bytes in the order the
    engines' `form` names (empty in simulation, where `size` alone counts). size: bytes on the wire.
    """

    tokens: int
    form: str
    shape: tuple[int, ...]
    data: bytes
    size: int
