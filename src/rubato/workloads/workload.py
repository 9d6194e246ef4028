"""A workload: a named, seeded list of requests with their times, true lengths and SLOs.

The same workload drives a server (`rubato bench`), the simulator and the tests. Output lengths are true lengths: a
client sends them as max_tokens with ignore_eos and the simulated engine ends there, so every policy has the same work.
What a policy may not know (`truth`, `pauses`, `acceptances`) stays out of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, repeat
from typing import Any

from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.workloads.offering import Offering

HASH_BLOCK_TOKENS = 512  # tokens that one id of `Arrival.blocks` stands for, in Mooncake's traces


MIN_TIME_STEP_S = 1e-6  # seconds that must be told apart at a workload's end

NO_SLO = SLO()


@dataclass(frozen=True, slots=True)
class OfferedStage:
    """One stage of a request: `prompt` tokens of prefill (0: decode only), then `output` tokens.

    Args:
        ends: the literal after which the next stage begins, as in `Stage`.
        pause: seconds that a tool takes before this stage may begin; no SLO counts them.
    """

    prompt: int
    output: int
    slo: SLO = NO_SLO
    ends: str = "eos"
    pause: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.output < 1:
            raise ValueError(f"a stage has {self.prompt} prompt and {self.output} output tokens: give >= 0 and >= 1")
        if not 0.0 <= self.pause < math.inf:
            raise ValueError(f"a stage has a pause of {self.pause} s: give 0 or more")
        if self.pause and not self.prompt:
            raise ValueError(f"a stage waits {self.pause} s for a tool that returns nothing: give it a prompt")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Args:
        at: seconds from the start.
        messages: (role, content); none when only simulated.
        prompt_tokens: length of the text, with the model's chat template if that was counted in. Both lengths are sums
            over `parts` where a request has several stages.
        slo: of this request alone, instead of its tier's.
        blocks: ids of the prompt's blocks of 512 tokens (Mooncake's `hash_ids`): prompts whose ids begin alike begin
            alike.
        acceptance: the probability that a drafted token is accepted, where speculation is simulated.
        after: the request that this one goes on from, which stands before it: this one comes `gap` seconds after that
            one has ended, and at `at` at the earliest; never, if that one did not complete (`offering`).
        session: name of the session whose turn it is.
        session_e2e: of a session's first turn, seconds from its arrival within which the last turn is to end.
    """

    id: str
    at: float
    tier: str
    app: str
    prompt_tokens: int
    output_tokens: int
    messages: tuple[tuple[str, str], ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    slo: SLO | None = None
    parts: tuple[OfferedStage, ...] = ()
    blocks: tuple[int, ...] = ()
    tenant: str = "default"
    acceptance: float | None = None
    after: str = ""
    gap: float = 0.0
    session: str = ""
    session_e2e: float | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """True output tokens of each stage."""
        return tuple(part.output for part in self.parts) or (self.output_tokens,)


@dataclass(frozen=True)
class Workload:
    """A named list of arrivals, ascending in `at`, and the SLOs of the tiers they belong to.

    Args:
        rate: requests/s that it was made for.
        duration: seconds over which requests are offered.
        counted: prompt_tokens are exact or by a tokenizer (else by `prompts.estimate`).
        profile: the hardware profile it is meant for, "" = any.
        concurrency: of a closed loop, in which so many requests are in flight; `at` is then the earliest time of each.
    """

    name: str
    seed: int
    rate: float
    duration: float
    tiers: Mapping[str, SLO]
    arrivals: tuple[Arrival, ...]
    counted: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)
    profile: str = ""
    concurrency: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what makes no load: fewer than one in flight, a tier called "all", times too late to be
        exact, a turn of another session than the one it goes on from, a session's deadline over a request of stages."""
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: give 1 or more requests in flight, or none")
        if "all" in self.tiers:
            raise ValueError('a tier cannot be called "all": that is the name of the sum over tiers')
        _check_sessions(self.arrivals)
        if not math.ulp(self.duration) < MIN_TIME_STEP_S:
            raise ValueError(
                f"workload {self.name!r} lasts {self.duration:.3g} s at {self.rate:.3g} requests/s: times so late are "
                "not exact to a microsecond any more; give a higher rate"
            )

    # ----------------------------------------------------------------- the same requests, otherwise

    def rescaled(self, rate: float) -> Workload:
        """The same requests at `rate` requests/s: only the times change, all by the same factor; those that go on from
        another stay as far behind the first of these, for no rate changes how long tools take. Raises ValueError for
        requests that all come at once, or in a closed loop."""
        check_rate(rate)
        if self.concurrency is not None:
            raise ValueError(
                f"workload {self.name!r} is a closed loop of {self.concurrency} requests: their ends set its rate, "
                "there is none to scale"
            )
        if not self.duration > 0.0:
            raise ValueError(f"workload {self.name!r} offers all at once: it has no rate to scale")
        factor = self.rate / rate
        if self.follows:
            arrivals = _with_later_arrivals(self.arrivals, factor)
        else:
            arrivals = tuple(replace(a, at=a.at * factor) for a in self.arrivals)
        return replace(self, rate=rate, duration=self.duration * factor, arrivals=arrivals)

    def with_slos(self, tiers: Mapping[str, SLO]) -> Workload:
        """The same requests with other SLOs for the tiers named, even for requests that had SLOs of their own.

        Raises ValueError for a tier it does not have, or one whose requests have several stages.
        """
        for tier in tiers:
            if tier not in self.tiers:
                raise ValueError(f"workload {self.name!r} has no tier {tier!r}: it has {', '.join(self.tiers)}")
        staged = {a.tier for a in self.arrivals if a.parts} & tiers.keys()
        if staged:
            raise ValueError(f"requests of tier {min(staged)!r} have an SLO for each stage: use with_slo_scale")
        arrivals = self.arrivals
        if any(a.slo is not None for a in arrivals):
            arrivals = tuple(replace(a, slo=None) if a.tier in tiers else a for a in arrivals)
        return replace(self, tiers={**self.tiers, **tiers}, arrivals=arrivals)

    def with_slo_scale(self, factor: float, what: str = "") -> Workload:
        """Returns the same requests with all SLOs times `factor` (2: twice the time).

        Args:
            what: "ttft", "tpot" or "e2e" to scale that one alone.

        Raises:
            ValueError: a factor that is not positive.
        """
        if not 0.0 < factor < math.inf:
            raise ValueError(f"SLO scale is {factor}: give a positive number")

        def wider(slo: SLO) -> SLO:
            return replace(slo, **{name: factor * s for name, s in slo.bounds.items() if what in ("", name)})

        def changed(a: Arrival) -> Arrival:
            if a.session_e2e is not None and what in ("", "e2e"):
                a = replace(a, session_e2e=factor * a.session_e2e)
            if a.slo is None and not a.parts:
                return a
            parts = tuple(replace(part, slo=wider(part.slo)) for part in a.parts)
            return replace(a, slo=None if a.slo is None else wider(a.slo), parts=parts)

        tiers = {name: wider(slo) for name, slo in self.tiers.items()}
        return replace(self, tiers=tiers, arrivals=tuple(map(changed, self.arrivals)))

    # ----------------------------------------------------------------- as others take it

    def slo(self, arrival: Arrival) -> SLO:
        """What this request, or its first stage, is promised."""
        if arrival.parts:
            return arrival.parts[0].slo
        return self.tiers[arrival.tier] if arrival.slo is None else arrival.slo

    def parts(self, arrival: Arrival) -> tuple[OfferedStage, ...]:
        """Its stages, with what each is promised; of a request of one stage, that one."""
        return arrival.parts or (OfferedStage(arrival.prompt_tokens, arrival.output_tokens, self.slo(arrival)),)

    def requests(self, stated_max_tokens: int = 0) -> Iterator[Request]:
        """As the simulator and the judge take them, made one by one: arrival in seconds from the workload's start,
        token ids only where prompts have prefixes in common. Each asks for its true output of all stages, or for
        `stated_max_tokens` where that is more."""
        sampling_of = cache(Sampling)  # equal ones are one object: most of a request's memory otherwise
        for a in self.arrivals:
            most = max(a.output_tokens, stated_max_tokens)
            sampling = sampling_of(most, a.temperature, seed=a.seed, ignore_eos=True)
            yield Request(a.id, self._stages(a), a.at, a.tier, a.tenant, a.app, sampling, session=a.session)

    def _stages(self, a: Arrival) -> tuple[Stage, ...]:
        if not a.parts:
            return (Stage(a.prompt_tokens, self.slo(a), token_ids=_ids(a.blocks, a.prompt_tokens)),)
        first, *rest = a.parts
        ids = _ids(a.blocks, first.prompt)
        later = (Stage(p.prompt, p.slo, p.ends, tool=p.pause > 0.0) for p in rest)
        return (Stage(first.prompt, first.slo, first.ends, ids), *later)

    @property
    def paced_by_ends(self) -> bool:
        """Whether the time of some request follows from how others end."""
        return self.concurrency is not None or any(a.after or a.session_e2e is not None for a in self.arrivals)

    @property
    def follows(self) -> dict[str, tuple[str, float]]:
        """Request id -> the request that it goes on from, and the seconds between, of those that go on from one."""
        return {a.id: (a.after, a.gap) for a in self.arrivals if a.after}

    @property
    def session_e2es(self) -> dict[str, float]:
        """Session -> seconds from its first turn's arrival to its deadline, of those that have one."""
        return {a.session: a.session_e2e for a in self.arrivals if a.session_e2e is not None}

    def offering(self, stated_max_tokens: int = 0) -> Offering | None:
        """When each of `requests` comes in a run, where that follows from how others end; None: each at its `at`.
        Raises ValueError as `Offering` does."""
        if not self.paced_by_ends:
            return None
        return Offering(list(self.requests(stated_max_tokens)), self.follows, self.concurrency, self.session_e2es)

    def truth(self) -> dict[str, tuple[int, ...]]:
        """Request id -> output tokens of each stage: what the simulated engine knows and no policy does."""
        return {a.id: a.outputs for a in self.arrivals}

    def pauses(self) -> dict[str, tuple[float, ...]]:
        """Request id -> seconds that a tool takes before each stage, of the requests that wait for one at all."""
        waits = {a.id: tuple(part.pause for part in a.parts) for a in self.arrivals if a.parts}
        return {id: pauses for id, pauses in waits.items() if any(pauses)}

    def acceptances(self) -> dict[str, float]:
        """Request id -> probability that a drafted token is accepted, of the requests that say."""
        return {a.id: a.acceptance for a in self.arrivals if a.acceptance is not None}


def _check_sessions(arrivals: Sequence[Arrival]) -> None:
    """Raises ValueError for turns that a session's deadline would not reach."""
    timed = {a.session for a in arrivals if a.session_e2e is not None}
    if not timed:
        return
    sessions = {a.id: a.session for a in arrivals}
    for a in arrivals:
        before = sessions.get(a.after, a.session)
        if a.session != before and timed & {a.session, before}:
            raise ValueError(
                f"request {a.id!r} goes on from {a.after!r} of session {before!r}, and is of session {a.session!r}: "
                "turns of a session with a deadline have the session's name"
            )
        if a.parts and a.session in timed:
            raise ValueError(
                f"request {a.id!r} has several stages, and its session {a.session!r} a deadline, in which tools count: "
                "give the stages as turns, each after the one before"
            )


def _with_later_arrivals(arrivals: Sequence[Arrival], factor: float) -> tuple[Arrival, ...]:
    """Returns the arrivals with the times of those that follow none multiplied by `factor`; those that follow one stay
    as far behind it as they were."""
    later: dict[str, float] = {}  # by how much each is moved
    result: list[Arrival] = []
    for a in arrivals:
        later[a.id] = later[a.after] if a.after else a.at * factor - a.at
        result.append(replace(a, at=a.at + later[a.id]))
    return tuple(sorted(result, key=lambda a: a.at))


def _ids(blocks: tuple[int, ...], prompt: int) -> tuple[int, ...]:
    """Token ids for a simulation of the prefix cache: block `b` is 512 times the token `b`."""
    return tuple(chain.from_iterable(repeat(b, HASH_BLOCK_TOKENS) for b in blocks))[:prompt] if blocks else ()


def check_rate(rate: float) -> None:
    """Raises ValueError unless it is a positive, finite number of requests/s."""
    if not 0.0 < rate < math.inf:
        raise ValueError(f"rate is {rate} requests/s: give a positive number")
