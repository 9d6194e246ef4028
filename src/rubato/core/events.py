"""Events of requests and replicas, in order, which feed metrics, logs and clients. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rubato.core.plan import Logprob, Role, Shape
from rubato.core.request import Cause, Outcome, Request

if TYPE_CHECKING:
    from dataclasses import dataclass as event_dataclass
else:

    def event_dataclass(*, frozen: bool, slots: bool) -> Any:
        """Replaces `dataclass(frozen=True)`, whose instances take four times as long to make."""
        return dataclass(slots=slots, unsafe_hash=frozen)


# Reasons of refusals that no wait cures. Hosts give them; policies may not (`replica.plan_check`).
CLIENT_ERRORS = ("rejected-invalid", "rejected-too-long", "rejected-exceeds-kv")


# --------------------------------------------------------------------------- what happened


@event_dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one finished request (`slo.judge`). Measured times are in seconds, None where there is none.

    Args:
        met: every stage met every SLO it carries; True for a completed best-effort request.
        slo_rule: the rule that judged, one of `SLO_RULES`.
        cause: why the request missed, where that is known.
        ttft: from arrival to the first token.
        tpot: mean time per token after the first of each prompt.
        e2e: from arrival to the last token, without the time that tools took.
        margin: time to spare at the tightest token (negative: late by that much); None without an SLO.
        pause: the longest time between two consecutive tokens of one stage.
        met_by_deadline: `met` under the deadline rule, whichever rule judges; None where not computed.
        met_by_windows: the same under the windowed rule.
        unjudged: its TTFT or TPOT was not measured, and no measured time missed an SLO: `met` is False, and it is no
            miss.
    """

    met: bool
    slo_rule: str
    cause: Cause | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    margin: float | None = None
    pause: float | None = None
    met_by_deadline: bool | None = None
    met_by_windows: bool | None = None
    unjudged: bool = False

    @property
    def missed(self) -> bool:
        return not (self.met or self.unjudged)


@event_dataclass(frozen=True, slots=True)
class Event:
    """Something happened to request `id` at time `at`."""

    at: float
    id: str


@event_dataclass(frozen=True, slots=True)
class Offered(Event):
    request: Request


@event_dataclass(frozen=True, slots=True)
class Placed(Event):
    """A router placed the request on a replica.

    Args:
        replica: id of the replica.
        why: the router's explanation (`Dispatch.why`), or empty.
        ttft: the expected TTFT, in seconds from arrival, where the replica predicts one.
    """

    replica: str
    why: str = ""
    ttft: float | None = None


@event_dataclass(frozen=True, slots=True)
class Started(Event):
    """A request began to run after it had waited.

    Args:
        resumed: it ran before, until a preemption or on another replica.
        cached: tokens that were in KV already (prefix cache, or its group's prompt).
    """

    resumed: bool = False
    cached: int = 0


@event_dataclass(frozen=True, slots=True)
class Tokens(Event):
    """Output tokens came out.

    Args:
        tokens: number of tokens.
        text: their text, as far as it is final.
        token_ids: empty where there is no model.
        stage: index of the stage they belong to.
        logprobs: one a token, where the request asked for them.
        stage_done: they end `stage`; the next stage began with the last of them, or begins when its tool returns.
        tried: drafted tokens that were verified; all but one of `tokens` were accepted ones.
        accepted: the accepted nodes of the candidate tree (`Emitted`; empty in logs older than this field).
        times: when each token came, where one event reports several; empty: all at `at`.
    """

    tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    stage: int = 0
    logprobs: tuple[Logprob, ...] = ()
    stage_done: bool = False
    tried: int = 0
    accepted: tuple[int, ...] = ()
    times: tuple[float, ...] = ()


@event_dataclass(frozen=True, slots=True)
class Preempted(Event):
    pass


@event_dataclass(frozen=True, slots=True)
class ToolCallFinished(Event):
    """A tool returned: the stage that waited for it begins, and the request waits to run."""


@event_dataclass(frozen=True, slots=True)
class HandedOff(Event):
    """A replica gave up this request, which is held again until a router places it.

    Args:
        request: its `handoff` has the replica, the reason and the tokens of KV that move, its `progress` the output so
            far.
    """

    request: Request


@event_dataclass(frozen=True, slots=True)
class Transferred(Event):
    """The KV of `tokens` tokens, `size` bytes, arrived at `replica` from `source`; the request runs on there."""

    replica: str
    source: str
    tokens: int
    size: int


@event_dataclass(frozen=True, slots=True)
class Lost(Event):
    """The replica that served this request is gone; the request is held again, with its output so far."""

    replica: str


@event_dataclass(frozen=True, slots=True)
class Demoted(Event):
    pass


@event_dataclass(frozen=True, slots=True)
class Promoted(Event):
    pass


@event_dataclass(frozen=True, slots=True)
class Finished(Event):
    """The last event of every request, whatever its outcome.

    Args:
        outcome: how it ended.
        reason: "stop" | "length" for completed; else the reason of the refusal, the error or the client's act.
        verdict: how its SLO was kept.
        output: output tokens of all stages.
        best_effort: the request was served as best effort when it ended.
        prompt: its prompt tokens as the server counted them, 0 where another choice of the same prompt counts them;
            None: as the request states.
    """

    outcome: Outcome
    reason: str
    verdict: Verdict
    output: int = 0
    best_effort: bool = False
    prompt: int | None = None

    @property
    def is_client_error(self) -> bool:
        """Returns whether the request itself is invalid, whatever the load: HTTP answers 400, and no SLO is missed."""
        return self.outcome == "refused" and self.reason.startswith(CLIENT_ERRORS)


@event_dataclass(frozen=True, slots=True)
class Assigned(Event):
    """A replica (`id`) has another role from now on."""

    role: Role


@event_dataclass(frozen=True, slots=True)
class Joined(Event):
    """A replica (`id`) that the Autoscaler added has started within `seconds`, and serves from now on."""

    seconds: float = 0.0


@event_dataclass(frozen=True, slots=True)
class Draining(Event):
    """A replica (`id`) takes no more requests from now on, and leaves once it has none."""


@event_dataclass(frozen=True, slots=True)
class Left(Event):
    """A replica (`id`) serves no more: it was drained or lost."""


@event_dataclass(frozen=True, slots=True)
class Stepped(Event):
    """A replica (`id`) planned and ran a batch of `shape` in `seconds`."""

    shape: Shape
    seconds: float


REPLICA_EVENTS = (Assigned, Joined, Draining, Left, Stepped)  # events whose id is a replica's, not a request's
