"""Requests, plans, batches and events: frozen values, times in seconds, lengths in tokens.

Three groups: what a client asks for (`SLO`, `Stage`, `Sampling`, `Request`), what a policy decides and an engine
does (`Work`, `Plan`, `Batch`, `StepResult`), and what happened (`Event` and its kinds, `Verdict`). Every metric and
every log line is a fold over the events; nothing else is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as happened
else:

    def happened(*, frozen: bool, slots: bool) -> Any:
        """For mypy `dataclass`. Making a frozen one takes four times as long, and a simulation makes little else."""
        return dataclass(slots=slots, unsafe_hash=frozen)


# --------------------------------------------------------------------------- what a client asks for


@dataclass(frozen=True, slots=True)
class SLO:
    """What one stage of a request is promised, in seconds; None = not promised, all None = best effort.

    ttft: first output token within this of the stage's start. tpot: seconds per output token after the first.
    e2e: last token within this of the request's arrival.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"slo.{name} is {value!r} s: give a positive, finite number of seconds, or none")

    @property
    def best_effort(self) -> bool:
        return self.ttft is None and self.tpot is None and self.e2e is None


@dataclass(frozen=True, slots=True)
class Stage:
    """A prefill of `prompt` tokens (0 in a decode-only stage) and then a decode, with SLOs of their own.

    ends: "eos" (end of text, a stop string or max_tokens) or a literal such as "</think>" after which the next stage
    begins. `token_ids` are the prompt's ids where an engine needs them; simulation leaves them empty. tool: the prompt
    is what a tool returns, and the stage begins when it has (`Cluster.resume`), not when the one before it is done.
    """

    prompt: int
    slo: SLO = SLO()
    ends: str = "eos"
    token_ids: tuple[int, ...] = ()
    tool: bool = False

    def __post_init__(self) -> None:
        if self.prompt < 0:
            raise ValueError(f"stage.prompt is {self.prompt}: give the number of prompt tokens, 0 or more")
        if self.token_ids and len(self.token_ids) != self.prompt:
            raise ValueError(f"stage.prompt says {self.prompt} tokens but token_ids holds {len(self.token_ids)}")
        if self.tool and not self.prompt:
            raise ValueError("stage.prompt is 0 after a tool: what it returns has at least one token")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen and when they end. temperature 0 = greedy; top_k 0 = off; stop = literal strings.

    min_p: tokens less likely than this share of the likeliest are left out (0 = off). Penalties as OpenAI (presence,
    frequency; over output tokens; 0 = off) and Hugging Face (repetition; over prompt and output; 1 = off) define them.
    stop_ids: token ids that end the output as eos does. ignore_eos: go on to max_tokens whatever the model says
    (vLLM's field: fixed lengths for benchmarks). logprobs: how many of the likeliest tokens to report beside each
    chosen one's log probability (0: the chosen one's alone; None: none).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


OnDecline = Literal["best_effort", "refuse"]
Outcome = Literal["completed", "refused", "failed", "cancelled"]
Cause = Literal[
    "queue", "prefill interference", "decode interference", "preemption", "transfer", "refused", "failed", "client"
]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request had received where it was served before: it moves with the request to another replica.

    starts: when each stage so far began; times: when each of its output tokens came out; token_ids: of all output so
    far, in order (empty in simulation). demoted: it was served as best effort. lost: seconds by cause (`Verdict`).
    Times are in the clock of who places it.
    """

    starts: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    token_ids: tuple[int, ...] = ()
    demoted: bool = False
    lost: Mapping[Cause, float] = field(default_factory=dict)


HandoffReason = Literal["prefilled", "declined", "offloaded", "recalled"]
Recall = Literal["waiting", "best_effort"]  # which work a router takes back from a replica (`Dispatch.recall`)


@dataclass(frozen=True, slots=True)
class Handoff:
    """Why a replica gave up a request that is to go on at another, at time `at`.

    reason: the scheduler's ("prefilled", "declined", "offloaded"), or "recalled" by the router. cached: tokens whose KV
    goes along, held by `source` until it has left; 0: the request alone moves, and is prefilled again. hops: how often
    it has been handed off so far, this time included.
    """

    source: str
    reason: HandoffReason
    at: float
    cached: int = 0
    hops: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request as offered. `arrival` is in the clock's seconds; on_decline: what a client wants when its SLO
    cannot be met: to be served late as best effort, or to be refused at once.

    group: requests that name the same one have the same prompt, go to the same replica and share the prompt's KV (the
    choices of `n` > 1). progress: of a request that began on another replica. handoff: of one that the replica it was
    on gave up; it has left its group.
    """

    id: str
    stages: tuple[Stage, ...]
    arrival: float
    tier: str = "default"
    tenant: str = "default"
    app: str = ""
    sampling: Sampling = Sampling()
    on_decline: OnDecline = "best_effort"
    group: str = ""
    progress: Progress | None = None
    handoff: Handoff | None = None

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].prompt < 1:
            raise ValueError(f"request {self.id!r} has no prompt: its first stage needs at least one token")
        if self.stages[0].tool:
            raise ValueError(f"request {self.id!r} begins with a tool: it is offered when that has returned")
        if self.sampling.max_tokens < 1:
            raise ValueError(f"request {self.id!r} has max_tokens {self.sampling.max_tokens}: give 1 or more")

    @property
    def prompt(self) -> int:
        """Prompt tokens, of all stages."""
        stages = self.stages
        return stages[0].prompt if len(stages) == 1 else sum([stage.prompt for stage in stages])

    @property
    def tools(self) -> bool:
        """Whether it is to wait for one."""
        return len(self.stages) > 1 and any(stage.tool for stage in self.stages)

    @property
    def best_effort(self) -> bool:
        for stage in self.stages:  # noqa: SIM110  `all` takes twice as long, for every request in every step
            if not stage.slo.best_effort:
                return False
        return True


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

    max_seqs: int  # sequences in one batch
    max_tokens: int  # tokens in one batch
    max_length: int  # prompt + output of one sequence (the model's context)
    kv_blocks: int  # blocks of KV memory
    block: int  # tokens a block holds
    max_running: int | None = None  # sequences that hold KV, in a batch or not (None: as many as there is KV for)

    def blocks(self, tokens: int) -> int:
        """KV blocks that so many tokens of one sequence take."""
        return -(-tokens // self.block)


# Shape, Work, Plan, Entry and Emitted are made in every step, most for every sequence: as named tuples, which take a
# third of the time that frozen dataclasses do.

NOTHING: Mapping[str, Any] = MappingProxyType({})
SATURATED = "rejected-saturated"  # the reason of a refusal because too many wait; over HTTP a 429 with Retry-After


class Shape(NamedTuple):
    """The features of a batch that its step time depends on; adding up two shapes' features joins two batches.

    Each entry runs `c` tokens on top of `k` tokens already cached.
    tokens = Σ c;  seqs = entries;  kv = Σ (k + c), KV tokens read;  spec_steps = draft steps. Over the chunks alone,
    entries with c > 1:  chunks = how many;  chunk_context = Σ c·k and chunk_sq = Σ c² (prefill attention);  chunk_kv =
    Σ (k + c). So seqs - chunks are decodes, which read kv - chunk_kv. A log from before `chunks` and `chunk_kv` were
    kept has 0 in both.
    """

    tokens: int = 0
    seqs: int = 0
    kv: int = 0
    chunk_context: int = 0
    chunk_sq: int = 0
    spec_steps: int = 0
    chunks: int = 0
    chunk_kv: int = 0

    def plus(self, tokens: int, cached: int) -> Shape:
        """This batch with one more entry of `tokens` tokens on top of `cached`."""
        all_, seqs, kv, context, square, spec, chunks, chunk_kv = self
        more = cached + tokens
        if tokens <= 1:
            return Shape(all_ + tokens, seqs + 1, kv + more, context, square, spec, chunks, chunk_kv)
        return Shape(
            all_ + tokens, seqs + 1, kv + more, context + tokens * cached, square + tokens * tokens, spec, chunks + 1,
            chunk_kv + more,
        )  # fmt: skip

    def minus(self, tokens: int, cached: int) -> Shape:
        """This batch without one entry that `plus` gave it."""
        all_, seqs, kv, context, square, spec, chunks, chunk_kv = self
        less = cached + tokens
        if tokens <= 1:
            return Shape(all_ - tokens, seqs - 1, kv - less, context, square, spec, chunks, chunk_kv)
        return Shape(
            all_ - tokens, seqs - 1, kv - less, context - tokens * cached, square - tokens * tokens, spec, chunks - 1,
            chunk_kv - less,
        )  # fmt: skip


NO_BATCH = Shape()


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step: what ran and the seconds it took."""

    shape: Shape
    seconds: float


@dataclass(frozen=True, slots=True)
class Tree:
    """Candidate tokens after a sequence's last: node i follows node parents[i] < i (-1: the last token itself), and all
    up to it is right with probability paths[i], which never rises along a path. A chain is a tree of one leaf."""

    parents: tuple[int, ...]
    paths: tuple[float, ...]


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
    handoff: seq -> why the router is to place it on another replica. What it holds of KV goes along and stays here
    until it has left; "prefilled" is for a running one whose prompt is in KV. Needs "handoff", with KV "kv_transfer".
    without_kv: of those handed off, who give up their KV here and now: they are prefilled again where they go on.
    preempt: gives back a running sequence's KV; its tokens are kept, it waits, and resumes by one prefill of them all.
    demote / promote: to best effort and back. wake_at: ask again at this time even if nothing happens.

    decode: one token of every running sequence that has one pending and stays, beside `work`, which then names none of
    them. steady: the plan of each of so many further steps would be this one again, its work cut to what is pending by
    then (whose prompt is through decodes with the rest); unless something arrives, is cancelled or lacks KV, or a
    prompt or a stage ends while somebody waits or prefills. Whoever simulates may carry these steps out without asking.
    """

    work: tuple[Work, ...] = ()
    preempt: tuple[str, ...] = ()
    demote: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    drop: Mapping[str, str] = NOTHING
    wake_at: float | None = None
    decode: bool = False
    steady: int = 0
    handoff: Mapping[str, HandoffReason] = NOTHING
    without_kv: frozenset[str] = frozenset()


class Entry(NamedTuple):
    """One sequence's part of a batch: run tokens [start, start + count) of it, KV in `blocks` (in order of position).

    sample: the last pending token is among them, so a new token comes out. verify: nodes of the sequence's candidate
    tree, the last of `count`; their KV follows that of the pending tokens, in this order. draft: as in `Work`.
    """

    seq: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple's method
    blocks: tuple[int, ...]
    sample: bool
    verify: tuple[int, ...] = ()
    draft: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """spec_steps: steps that the drafter runs at the end, the deepest of the drafts asked for."""

    entries: tuple[Entry, ...] = ()
    spec_steps: int = 0

    @property
    def shape(self) -> Shape:
        tokens = kv = context = square = chunks = chunk_kv = 0
        for e in self.entries:
            tokens += e.count
            kv += e.start + e.count
            if e.count > 1:
                context += e.count * e.start
                square += e.count * e.count
                chunks += 1
                chunk_kv += e.start + e.count
        return Shape(tokens, len(self.entries), kv, context, square, self.spec_steps, chunks, chunk_kv)


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
    logprobs: one a token, where the request asked for them. More than one token only after verification: all but one
    were drafted and accepted. tried: drafted tokens put to the test, the accepted and the one (with its siblings) that
    was wrong. draft: the candidates for what comes next, where the batch asked for them.
    """

    tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stage_done: bool = False
    logprobs: tuple[Logprob, ...] = ()
    tried: int = 0
    draft: Tree | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per sequence that sampled, what came out. `seconds`: the engine's own measure of the step, in its clock."""

    emitted: Mapping[str, Emitted]
    seconds: float


# --------------------------------------------------------------------------- what happened


@happened(frozen=True, slots=True)
class Verdict:
    """The judgement of one finished request (`slo.judge`). Measured times in seconds, None where there is none.

    met: every stage met every SLO it carries (True for a completed best-effort request). cause: of a miss, where it was
    worked out; else None.
    ttft is measured from arrival; tpot is the mean over the tokens after the first, of each prompt where there are
    several; e2e leaves out the time that tools took.
    margin: seconds to spare at the tightest token (negative: late by that much), None without an SLO.
    """

    met: bool
    rule: str
    cause: Cause | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    margin: float | None = None


@happened(frozen=True, slots=True)
class Event:
    """Something happened to request `id` at time `at`."""

    at: float
    id: str


@happened(frozen=True, slots=True)
class Offered(Event):
    request: Request


@happened(frozen=True, slots=True)
class Placed(Event):
    replica: str


@happened(frozen=True, slots=True)
class Started(Event):
    """The first work of this sequence since it waited. `resumed`: after a preemption, or on another replica than
    before. cached: tokens whose KV was there already (prefix cache, or its group's prompt)."""

    resumed: bool = False
    cached: int = 0


@happened(frozen=True, slots=True)
class Tokens(Event):
    """Output tokens came out. stage_done: the last of `stage`; the next stage began with it, or begins when its tool
    has returned. tried: drafted tokens that were put to the test, of which all but one of `tokens` were right."""

    tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    stage: int = 0
    logprobs: tuple[Logprob, ...] = ()
    stage_done: bool = False
    tried: int = 0


@happened(frozen=True, slots=True)
class Preempted(Event):
    pass


@happened(frozen=True, slots=True)
class Returned(Event):
    """A tool has returned: the stage that waited for it begins, and the request waits to run."""


@happened(frozen=True, slots=True)
class HandedOff(Event):
    """A replica gave up this request: `request.handoff` says which, why and with how much KV, `request.progress` what
    it had received. It is held again until a router places it."""

    request: Request


@happened(frozen=True, slots=True)
class Transferred(Event):
    """The KV of `tokens` tokens, `size` bytes, has come to `replica` from `source`; the request runs on there."""

    replica: str
    source: str
    tokens: int
    size: int


@happened(frozen=True, slots=True)
class Lost(Event):
    """The replica that served this request is gone; the request is held again, with what it had received."""

    replica: str


@happened(frozen=True, slots=True)
class Demoted(Event):
    pass


@happened(frozen=True, slots=True)
class Promoted(Event):
    pass


@happened(frozen=True, slots=True)
class Finished(Event):
    """The one last event of every request, whatever became of it.

    reason: "stop" | "length" for completed; the reject reason, the error or the client's act otherwise.
    best_effort: the tier actually served was best effort when it ended. output: tokens out in all.
    """

    outcome: Outcome
    reason: str
    verdict: Verdict
    output: int = 0
    best_effort: bool = False


@happened(frozen=True, slots=True)
class Stepped(Event):
    """A replica (`id`) planned and ran a batch of `shape` in `seconds`."""

    shape: Shape
    seconds: float
