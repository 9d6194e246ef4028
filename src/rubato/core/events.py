"""What happens to requests and replicas, in order: all that metrics, logs and clients know. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rubato.core.plan import Logprob, Role, Shape
from rubato.core.request import Cause, Outcome, Request

if TYPE_CHECKING:
    from dataclasses import dataclass as happened
else:

    def happened(*, frozen: bool, slots: bool) -> Any:
        """For mypy `dataclass`. Making a frozen one takes four times as long, and a simulation makes little else."""
        return dataclass(slots=slots, unsafe_hash=frozen)


# Reasons of refusals that waiting does not cure. A host says so; a policy may not (`replica.plan_check`).
CLIENT_ERRORS = ("rejected-invalid", "rejected-too-long", "rejected-exceeds-kv")


# --------------------------------------------------------------------------- what happened


@happened(frozen=True, slots=True)
class Verdict:
    """The judgement of one finished request (`slo.judge`). Measured times in seconds, None where there is none.

    met: every stage met every SLO it carries (True for a completed best-effort request). cause: of a miss, where it was
    worked out; else None.
    ttft is measured from arrival; tpot is the mean over the tokens after the first, of each prompt where there are
    several; e2e leaves out the time that tools took.
    margin: seconds to spare at the tightest token (negative: late by that much), None without an SLO.
    pause: the longest time between two consecutive tokens of one stage.
    unjudged: it asks for a TTFT or a TPOT that was not measured, and missed nothing that was: `met` is False, and it is
    no miss either.
    met_by_deadline, met_by_windows: `met` by these two rules, whichever judged; None where they were not asked.
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
    """why: the router's explanation, if it gave one (`Dispatch.why`). ttft: expected, in seconds from arrival, where
    the replica says so."""

    replica: str
    why: str = ""
    ttft: float | None = None


@happened(frozen=True, slots=True)
class Started(Event):
    """The first work of this sequence since it waited. `resumed`: after a preemption, or on another replica than
    before. cached: tokens whose KV was there already (prefix cache, or its group's prompt)."""

    resumed: bool = False
    cached: int = 0


@happened(frozen=True, slots=True)
class Tokens(Event):
    """Output tokens came out. stage_done: the last of `stage`; the next stage began with it, or begins when its tool
    has returned. tried: drafted tokens that were put to the test, of which all but one of `tokens` were right.
    accepted: which these were, nodes of the candidate tree (`Emitted`; none in logs from before it was kept).
    times: when each of them came, where several are told of at once; empty: all at `at`."""

    tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    stage: int = 0
    logprobs: tuple[Logprob, ...] = ()
    stage_done: bool = False
    tried: int = 0
    accepted: tuple[int, ...] = ()
    times: tuple[float, ...] = ()


@happened(frozen=True, slots=True)
class Preempted(Event):
    pass


@happened(frozen=True, slots=True)
class ToolCallFinished(Event):
    """A tool has returned: the stage that waited for it begins, and the request waits to run."""


@happened(frozen=True, slots=True)
class HandedOff(Event):
    """A replica gave up this request: `request.handoff` says which replica, why and with how much KV,
    `request.progress` what output it had received. It is held again until a router places it."""

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
    best_effort: the tier actually served was best effort when it ended. output: tokens out in all. prompt: its tokens
    as the server counted them, 0 where another choice brings them; None: as many as the request says.
    """

    outcome: Outcome
    reason: str
    verdict: Verdict
    output: int = 0
    best_effort: bool = False
    prompt: int | None = None

    @property
    def is_client_error(self) -> bool:
        """Whether the request itself is at fault, whatever the load: over HTTP a 400, and no missed SLO."""
        return self.outcome == "refused" and self.reason.startswith(CLIENT_ERRORS)


@happened(frozen=True, slots=True)
class Assigned(Event):
    """From now on a replica (`id`) is for something else."""

    role: Role


@happened(frozen=True, slots=True)
class Joined(Event):
    """A replica (`id`) that the Autoscaler asked for has started, which took `seconds`, and serves from now on."""

    seconds: float = 0.0


@happened(frozen=True, slots=True)
class Draining(Event):
    """A replica (`id`) takes nothing more from now on, and leaves once nothing is there."""


@happened(frozen=True, slots=True)
class Left(Event):
    """A replica (`id`) serves no more: it was drained, or is lost."""


@happened(frozen=True, slots=True)
class Stepped(Event):
    """A replica (`id`) planned and ran a batch of `shape` in `seconds`."""

    shape: Shape
    seconds: float


OF_REPLICAS = (Assigned, Joined, Draining, Left, Stepped)  # events whose id is a replica's, not a request's
