"""The link between a vLLM engine core and its gateways: what is said, as JSON objects, one a ZeroMQ message.

A gateway (DEALER) says `hello`, and the core (ROUTER) answers with what it is and a `snapshot` of all requests there.
From then on come numbered reports: when a batch is done, and when the next one runs. A reader that misses a number asks
for another snapshot. Gateways send commands, of one message in order. Times are in the core's own clock;
`beat` answers `ping` and lets a gateway measure how far that is ahead of its own. Requests have the engine's ids in
reports; `Offered` says which request of a gateway each one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from rubato.core import event_log
from rubato.core.events import Event, Tokens
from rubato.core.plan import Recall, Role
from rubato.core.request import SLO, Handoff, OnDecline, Progress, Request

PROTOCOL = 2
HEARTBEAT = 1.0  # seconds from one ping to the next

Message = dict[str, Any]


def packed(message: Mapping[str, Any]) -> bytes:
    """One message as it is sent."""
    return orjson.dumps(message, default=_listed)


def _listed(value: Any) -> list[Any]:
    """A named tuple by position."""
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no place in a message")


def unpacked(raw: bytes) -> Message:
    """Raises ValueError for what is no message."""
    message = orjson.loads(raw)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message of the link is a JSON object with a kind")
    return message


# --------------------------------------------------------------------------- events


def event_row(event: Event) -> list[Any]:
    """An event as part of a report. Tokens, of which there are some in every step for every request, as few words."""
    if type(event) is Tokens:
        row = ["t", event.id, event.token_ids or event.tokens]
        return [*row, event.tried, event.tokens - 1] if event.tried else row
    return [type(event).__name__, event]


def event_of(row: list[Any], at: float) -> Event:
    """The event of a row of a report about time `at`. Raises ValueError for a row that is none."""
    kind, about, *rest = row
    if kind == "t":
        ids, *drafted = rest
        tokens, ids = (ids, ()) if isinstance(ids, int) else (len(ids), tuple(ids))
        tried, right = drafted or (0, 0)
        return Tokens(at, about, tokens, "", ids, tried=tried, accepted=tuple(range(right)))
    return event_log.event_of(kind, about)


# --------------------------------------------------------------------------- commands


class Contract(NamedTuple):
    """What a gateway promises of the requests of one answer (`expect`), keyed by the answer's id.

    ids: of the gateway's requests, one for each choice of each prompt, in OpenAI's order; n: choices of a prompt.
    arrival: in the core's clock. demoted: served as best effort. handoff, progress: of a request that another replica
    gave up, whose output so far is part of the prompt here."""

    ids: tuple[str, ...]
    n: int
    slo: SLO
    tier: str
    tenant: str
    on_decline: OnDecline
    arrival: float
    handoff: Handoff | None = None
    progress: Progress | None = None
    demoted: bool = False


def expect(answer: str, ids: tuple[str, ...], n: int, request: Request) -> list[Any]:
    """The command that tells of the requests of one answer, before their body is sent. request: the first of them, with
    its times in the core's clock."""
    had = request.progress
    progress = None if had is None else {"starts": had.starts, "times": had.times}
    return [
        "expect", answer,
        {
            "ids": ids, "n": n, "slo": request.stages[0].slo, "tier": request.tier, "tenant": request.tenant,
            "on_decline": request.on_decline, "arrival": request.arrival, "handoff": request.handoff,
            "progress": progress,
        },
    ]  # fmt: skip


def contract_of(fields: Mapping[str, Any]) -> Contract:
    """Raises ValueError, TypeError or KeyError for what is none."""
    handoff, progress = fields["handoff"], fields["progress"]
    known = {
        **fields,
        "ids": tuple(fields["ids"]),
        "slo": SLO(**fields["slo"]),
        "handoff": None if handoff is None else Handoff(**handoff),
        "progress": None
        if progress is None
        else Progress(tuple(progress["starts"]), tuple([tuple(times) for times in progress["times"]])),
    }
    return Contract(**known)


def assign(role: Role) -> list[Any]:
    return ["assign", role]


def role_of(fields: Mapping[str, Any]) -> Role:
    """Raises TypeError for what is none."""
    return Role(**fields)


def recall(kind: Recall) -> list[Any]:
    return ["recall", kind]


def demote(answer: str) -> list[Any]:
    """The requests of an answer are best effort from now on, those that have not come yet as well."""
    return ["demote", answer]
