"""Defines a request as offered: its SLOs, stages and sampling, and its progress when it moves between replicas.

All are frozen; times are in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

# --------------------------------------------------------------------------- what a client asks for

# Bounds of an SLO's times, in seconds and in milliseconds. A shorter time vanishes in a wall clock's rounding. A longer
# one times a number of tokens or batches could reach infinity, whose differences are NaN.
MIN_SLO_S, MAX_SLO_S = 1e-6, 1e6
MIN_SLO_MS, MAX_SLO_MS = 1e-3, 1e9
SLO_TIMES = ("ttft", "tpot", "e2e", "max_pause")  # fields of an SLO


@dataclass(frozen=True, slots=True)
class SLO:
    """The SLO of one stage of a request, in seconds from `MIN_SLO_S` to `MAX_SLO_S`; None = no bound, all None = best
    effort.

    Args:
        ttft: from the stage's start to its first output token.
        tpot: per output token after the first.
        e2e: from the request's arrival to the last token.
        max_pause: between two consecutive tokens, under the deadline rule; only beside a TPOT.

    Raises:
        ValueError: for a time out of these bounds.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    max_pause: float | None = None

    def __post_init__(self) -> None:
        for name in SLO_TIMES:
            value = getattr(self, name)
            if value is not None and not MIN_SLO_S <= value <= MAX_SLO_S:
                raise ValueError(f"slo.{name} is {value!r} s: give {MIN_SLO_S:g} to {MAX_SLO_S:g} seconds, or none")

    @classmethod
    def from_ms(
        cls, ttft: float | None, tpot: float | None, e2e: float | None = None, max_pause: float | None = None
    ) -> SLO:
        """Makes an SLO from milliseconds, in which clients and operators write it."""
        return cls(*(None if ms is None else ms / 1e3 for ms in (ttft, tpot, e2e, max_pause)))

    @property
    def best_effort(self) -> bool:
        return self.ttft is None and self.tpot is None and self.e2e is None

    @property
    def bounds(self) -> dict[str, float]:
        """Returns the bounds that are not None, by name, in seconds."""
        return {name: value for name in SLO_TIMES if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Stage:
    """A prefill of `prompt` tokens (0 in a decode-only stage) and then a decode, with their own SLO.

    Args:
        prompt: tokens.
        slo: of this stage.
        ends: "eos" (end of text, a stop string or max_tokens), or a literal such as "</think>" after which the next
            stage begins.
        token_ids: of the prompt, where an engine needs them; simulations leave them empty.
        tool: the prompt is a tool's result; the stage begins when the tool returns (`Cluster.resume`), not when the
            stage before it is done.
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
    """How output tokens are sampled and when they end.

    Args:
        max_tokens: of output.
        temperature: 0 = greedy.
        top_p: samples from the likeliest tokens whose probabilities sum to this.
        top_k: samples from this many of the likeliest tokens; 0 = off.
        min_p: excludes tokens less likely than this share of the likeliest; 0 = off.
        presence_penalty: as OpenAI's, over output tokens; 0 = off.
        frequency_penalty: as OpenAI's, over output tokens; 0 = off.
        repetition_penalty: as Hugging Face's, over prompt and output; 1 = off.
        seed: of the draws.
        stop: literal strings that end the output.
        stop_ids: token ids that end the output as eos does.
        ignore_eos: continue to max_tokens past eos (vLLM's field: fixed lengths for benchmarks).
        logprobs: report each sampled token's log probability and this many of the likeliest tokens'; 0: only the
            sampled token's; None: none.
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


PREFIX_BLOCK_TOKENS = 64  # per key of `Request.prefix`

OnDecline = Literal["best_effort", "refuse"]
Outcome = Literal["completed", "refused", "failed", "cancelled"]
# Why a request missed. infeasible: its replica would have missed its SLO with no other request (`find_infeasible`). not
# reported: its server does not report causes. gateway: its engine was in time, the gateway was not.
Cause = Literal[
    "queue", "prefill interference", "decode interference", "preemption", "transfer", "infeasible", "refused", "failed",
    "client", "not reported", "gateway",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's progress on earlier replicas, which moves with it. Times are of the router's clock.

    Args:
        starts: when each stage so far began.
        times: of each stage, when its output tokens came out.
        token_ids: of all output so far, in order (empty in simulation).
        demoted: it was served as best effort.
        delays: seconds by cause (`Verdict`).
    """

    starts: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    token_ids: tuple[int, ...] = ()
    demoted: bool = False
    delays: Mapping[Cause, float] = field(default_factory=dict)


HandoffReason = Literal["prefilled", "declined", "offloaded", "recalled", "failed"]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Why a replica gave up a request, which continues on another.

    Args:
        source: id of the replica that gave it up.
        reason: the scheduler's ("prefilled", "declined", "offloaded"), "recalled" by the router, or "failed" where a
            server failed.
        at: time of the handoff.
        cached: tokens whose KV moves, too; `source` holds it until then. 0: the request is prefilled again.
        hops: handoffs of the request so far, with this one.
        failures: how many of its hops a failed server caused.
    """

    source: str
    reason: HandoffReason
    at: float
    cached: int = 0
    hops: int = 1
    failures: int = 0

    @classmethod
    def after(cls, before: Handoff | None, source: str, reason: HandoffReason, at: float, cached: int = 0) -> Handoff:
        """Makes the next handoff of a request whose last one was `before` (None: it had none)."""
        hops, failures = (before.hops, before.failures) if before is not None else (0, 0)
        return cls(source, reason, at, cached, hops + 1, failures + (reason == "failed"))


@dataclass(frozen=True, slots=True)
class Request:
    """One request as offered.

    Args:
        arrival: in the clock's seconds.
        on_decline: what the client wants when its SLO cannot be met: late service as best effort, or a refusal at once.
        group: requests of one group have the same prompt, go to the same replica and share the prompt's KV (the choices
            of `n` > 1).
        progress: of a request that began on another replica.
        handoff: why the last replica gave it up; it has left its group.
        prefix: for routers, a key for each `PREFIX_BLOCK_TOKENS` tokens of its prompt, which covers all tokens up to
            their end: prompts that begin alike have keys that begin alike. Empty: derived from token ids, where known.
        session: a client's name for requests that continue each other (`x-session-id`).
        losses: replicas that were lost while they ran it, perhaps because of it.
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
    prefix: tuple[int, ...] = ()
    session: str = ""
    losses: int = 0

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].prompt < 1:
            raise ValueError(f"request {self.id!r} has no prompt: its first stage needs at least one token")
        if self.stages[0].tool:
            raise ValueError(f"request {self.id!r} begins with a tool: it is offered when that has returned")
        if self.sampling.max_tokens < 1:
            raise ValueError(f"request {self.id!r} has max_tokens {self.sampling.max_tokens}: give 1 or more")

    @property
    def prompt(self) -> int:
        """Returns the prompt tokens of all stages."""
        stages = self.stages
        return stages[0].prompt if len(stages) == 1 else sum([stage.prompt for stage in stages])

    @property
    def uses_tools(self) -> bool:
        """Returns whether any stage waits for a tool."""
        return len(self.stages) > 1 and any(stage.tool for stage in self.stages)

    @property
    def best_effort(self) -> bool:
        for stage in self.stages:  # noqa: SIM110  `all` takes twice as long, for every request in every step
            if not stage.slo.best_effort:
                return False
        return True


MAX_END_CHARS = 64  # of `Stage.ends` that `without_texts` keeps


def without_texts(request: Request) -> Request:
    """Returns the request without what may take megabytes: prompts and their keys, stop strings and progress."""
    sampling = request.sampling
    if sampling.stop or sampling.stop_ids:
        sampling = replace(sampling, stop=(), stop_ids=())
    stages = request.stages
    if [stage for stage in stages if stage.token_ids or len(stage.ends) > MAX_END_CHARS]:
        stages = tuple(replace(stage, token_ids=(), ends=stage.ends[:MAX_END_CHARS]) for stage in stages)
    if stages is request.stages and sampling is request.sampling and request.progress is None and not request.prefix:
        return request
    return replace(request, stages=stages, sampling=sampling, progress=None, prefix=())


NOTHING: Mapping[str, Any] = MappingProxyType({})

# Reasons of refusals: metrics count the part before a colon, the rest is about one request.
SATURATED = "rejected-saturated"  # too many requests wait
LATE = "rejected-slo-late"  # the SLO cannot be met beside the present requests
INFEASIBLE = "rejected-slo-infeasible"  # the SLO cannot be met even alone: a retry would fail, too
SHUTTING_DOWN = "rejected-shutting-down"
NO_REPLICA = "rejected-no-replica"  # every replica that could serve it is lost, and may come back
NO_REPLICA_TIMEOUT_S = 60.0  # how long held requests wait where no replica is left
