"""A request as it is offered: its SLOs, stages and sampling, and what it has received when it moves between replicas.

Frozen; times in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

# --------------------------------------------------------------------------- what a client asks for

# Seconds that an SLO may ask for, and the same in milliseconds, as clients and operators write them. Below the least a
# time vanishes in a wall clock's own rounding; with the most, products with numbers of tokens and of batches, which
# policies work with, stay far from infinity, where a difference of two of them would be no number at all.
LEAST, MOST = 1e-6, 1e6
LEAST_MS, MOST_MS = 1e-3, 1e9
TIMES = ("ttft", "tpot", "e2e", "max_pause")  # fields of an SLO


@dataclass(frozen=True, slots=True)
class SLO:
    """What one stage of a request asks for, in seconds from `LEAST` to `MOST`; None = no bound, all None = best effort.

    ttft: first output token within this of the stage's start. tpot: seconds per output token after the first.
    e2e: last token within this of the request's arrival. max_pause: each token after the first within this of the one
    before it, by the deadline rule; beside a TPOT only. Raises ValueError for a time beyond these.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    max_pause: float | None = None

    def __post_init__(self) -> None:
        for name in TIMES:
            value = getattr(self, name)
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(f"slo.{name} is {value!r} s: give {LEAST:g} to {MOST:g} seconds, or none")

    @classmethod
    def from_ms(
        cls, ttft: float | None, tpot: float | None, e2e: float | None = None, max_pause: float | None = None
    ) -> SLO:
        """As clients and operators write it, in milliseconds."""
        return cls(*(None if ms is None else ms / 1e3 for ms in (ttft, tpot, e2e, max_pause)))

    @property
    def best_effort(self) -> bool:
        return self.ttft is None and self.tpot is None and self.e2e is None

    @property
    def promised(self) -> dict[str, float]:
        """The times that are bounded, by name, in seconds."""
        return {name: value for name in TIMES if (value := getattr(self, name)) is not None}


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


PREFIX_BLOCK = 64  # tokens that one key of `Request.prefix` stands for

OnDecline = Literal["best_effort", "refuse"]
Outcome = Literal["completed", "refused", "failed", "cancelled"]
# Why a request missed. infeasible: its replica would have missed its SLO serving nothing else (`find_infeasible`). not
# reported: its server does not tell what it spent the time on. gateway: its engine was in time, the gateway too late.
Cause = Literal[
    "queue", "prefill interference", "decode interference", "preemption", "transfer", "infeasible", "refused", "failed",
    "client", "not reported", "gateway",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request had received where it was served before: it moves with the request to another replica.

    starts: when each stage so far began; times: when each of its output tokens came out; token_ids: of all output so
    far, in order (empty in simulation). demoted: it was served as best effort. delays: seconds by cause (`Verdict`).
    Times are by the clock of the router that places it.
    """

    starts: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    token_ids: tuple[int, ...] = ()
    demoted: bool = False
    delays: Mapping[Cause, float] = field(default_factory=dict)


HandoffReason = Literal["prefilled", "declined", "offloaded", "recalled", "failed"]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Why a replica gave up a request that is to go on at another, at time `at`.

    reason: the scheduler's ("prefilled", "declined", "offloaded"), "recalled" by the router, or "failed" where a server
    failed at it. cached: tokens whose KV goes along, held by `source` until it has left; 0: the request alone moves,
    and is prefilled again. hops: how often it has been handed off so far, this time included; failures: how many of
    these were because a server failed.
    """

    source: str
    reason: HandoffReason
    at: float
    cached: int = 0
    hops: int = 1
    failures: int = 0

    @classmethod
    def after(cls, before: Handoff | None, source: str, reason: HandoffReason, at: float, cached: int = 0) -> Handoff:
        """The next of a request that was handed off as `before` says, or (None) never."""
        hops, failures = (before.hops, before.failures) if before is not None else (0, 0)
        return cls(source, reason, at, cached, hops + 1, failures + (reason == "failed"))


@dataclass(frozen=True, slots=True)
class Request:
    """One request as offered. `arrival` is in the clock's seconds; on_decline: what a client wants when its SLO
    cannot be met: to be served late as best effort, or to be refused at once.

    group: requests that name the same one have the same prompt, go to the same replica and share the prompt's KV (the
    choices of `n` > 1). progress: of a request that began on another replica. handoff: of one that the replica it was
    on gave up; it has left its group.
    prefix: for routers, a key for each `PREFIX_BLOCK` tokens of its prompt that stands for all up to their end, so that
    prompts which begin alike have keys that begin alike; empty: worked out from token ids, where these are known.
    session: a client's name for requests that go on from each other (`x-session-id`).
    losses: replicas that were lost while they ran it, maybe by it.
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
        """Prompt tokens, of all stages."""
        stages = self.stages
        return stages[0].prompt if len(stages) == 1 else sum([stage.prompt for stage in stages])

    @property
    def uses_tools(self) -> bool:
        """Whether it is to wait for one."""
        return len(self.stages) > 1 and any(stage.tool for stage in self.stages)

    @property
    def best_effort(self) -> bool:
        for stage in self.stages:  # noqa: SIM110  `all` takes twice as long, for every request in every step
            if not stage.slo.best_effort:
                return False
        return True


LONGEST_END = 64  # characters of what ends a stage that are left by `without_texts`


def without_texts(request: Request) -> Request:
    """What may be remembered of a request when it is over: without its prompts and their keys, its stop strings and
    what it has received, of which there may be megabytes."""
    sampling = request.sampling
    if sampling.stop or sampling.stop_ids:
        sampling = replace(sampling, stop=(), stop_ids=())
    stages = request.stages
    if any(stage.token_ids or len(stage.ends) > LONGEST_END for stage in stages):
        stages = tuple(replace(stage, token_ids=(), ends=stage.ends[:LONGEST_END]) for stage in stages)
    if stages is request.stages and sampling is request.sampling and request.progress is None and not request.prefix:
        return request
    return replace(request, stages=stages, sampling=sampling, progress=None, prefix=())


# Shape, Work, Plan, Entry and Emitted are made in every step, most for every sequence: as named tuples, which take a
# third of the time that frozen dataclasses do.

NOTHING: Mapping[str, Any] = MappingProxyType({})

# Reasons of refusals: what comes before a colon is counted, the rest is about one request.
SATURATED = "rejected-saturated"  # too many wait
LATE = "rejected-slo-late"  # the SLO cannot be met beside the requests that are there
INFEASIBLE = "rejected-slo-infeasible"  # nor without them: to ask again is in vain
SHUTTING_DOWN = "rejected-shutting-down"
NO_REPLICA = "rejected-no-replica"  # while all that could serve it are lost, and may come back
ALONE_S = 60.0  # for which held requests wait for a replica where none is left
