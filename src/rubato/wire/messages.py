"""What vLLM's engine cores say, to gateways over the link and to API servers, as JSON, one text a ZeroMQ message.

A gateway (DEALER) says `Hello`, and the core (ROUTER) answers with what it is, a `Greeting`, and a `Snapshot` of all
requests there. From then on come numbered `Report`s: when a batch is done, and when the next one runs. A reader that
misses a number asks for another snapshot. Gateways send commands, of one message in order. Times are in the core's own
clock; a `Beat` answers a `Ping` and lets a gateway measure how far that is ahead of its own. Requests have the engine's
ids in reports; `OfferedRow` says which request of a gateway each one is. An API server says `Subscribe`, and hears of
its own requests (`RequestEvents`) and of how the engine stands (`EngineState`).

Messages are written by name, commands and rows, of which there are many, by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from rubato.core import events
from rubato.core.events import Event, Offered, Tokens
from rubato.core.plan import Limits, Phase, Role, Shape
from rubato.core.plan import Recall as RecallKind
from rubato.core.request import SLO, Handoff, HandoffReason, OnDecline, Progress, Request, without_texts

PROTOCOL = 3
HEARTBEAT_S = 1.0  # from one ping to the next

State = Literal["waiting", "running", "arriving", "leaving"]


class _Message(msgspec.Struct, frozen=True, tag_field="kind"):
    pass


class _Row(msgspec.Struct, frozen=True, array_like=True):
    pass


# --------------------------------------------------------------------------- from a gateway


class Hello(_Message, frozen=True, tag="hello"):
    """Introduces a gateway. Every version of the link can read it.

    Args:
        asked: the gateway's clock (s).
    """

    protocol: int = 0
    gateway: str = ""
    asked: float = 0.0


class Ping(_Message, frozen=True, tag="ping"):
    asked: float


class Resync(_Message, frozen=True, tag="resync"):
    """Asks for a snapshot: a report was missed."""


class Subscribe(_Message, frozen=True, tag="subscribe"):
    """Subscribes an API server to events of its own requests.

    Args:
        client: number of the API server.
        key: shared by the processes of one vLLM.
    """

    protocol: int
    client: int
    key: str


class Do(_Message, frozen=True, tag="do"):
    """Carries commands, each as `encode` writes it."""

    commands: tuple[msgspec.Raw, ...]


def do(*commands: Command) -> Do:
    return Do(tuple([msgspec.Raw(encode(command)) for command in commands]))


class Contract(NamedTuple):
    """Holds the terms of the requests of one answer, as a gateway announces them.

    Args:
        ids: of the gateway's requests, one for each choice of each prompt, in OpenAI's order.
        n: choices of a prompt.
        arrival: in the core's clock (s).
        handoff: of a request that another replica handed off.
        progress: its output there, which is part of the prompt here.
        demoted: it is served as best effort.
    """

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


class Expect(_Row, frozen=True, tag="expect"):
    """Announces the requests of one answer, before their body is sent."""

    answer: str
    contract: Contract


def expect(answer: str, ids: tuple[str, ...], n: int, request: Request) -> Expect:
    """Returns the announcement of an answer.

    Args:
        answer: id of the response.
        ids: of its requests.
        n: choices of a prompt.
        request: the first of its requests, with its times in the core's clock.
    """
    progress = request.progress and Progress(request.progress.starts, request.progress.times)
    slo, arrival = request.stages[0].slo, request.arrival
    who = (request.tier, request.tenant, request.on_decline)
    return Expect(answer, Contract(ids, n, slo, *who, arrival, request.handoff, progress))


class Assign(_Row, frozen=True, tag="assign"):
    phase: Phase
    tier: str
    group: str
    kind: str

    @property
    def role(self) -> Role:
        return Role(self.phase, self.tier, self.group, self.kind)


def assign(role: Role) -> Assign:
    return Assign(*astuple(role))


class Recall(_Row, frozen=True, tag="recall"):
    """Takes back the gateway's own requests of this kind."""

    kind: RecallKind


class Demote(_Row, frozen=True, tag="demote"):
    """Makes the requests of an answer best effort from now on, also those that have not come yet."""

    answer: str


Command: TypeAlias = Expect | Assign | Recall | Demote


# --------------------------------------------------------------------------- from a core


class CoreAbout(msgspec.Struct, frozen=True):
    """Describes an engine core.

    Args:
        latency: `affine.Model` as a dict.
        kv_lease: seconds that KV stays for another engine to read; None: the core has no KV connector.
    """

    policy: str
    supports: tuple[str, ...]
    limits: Limits
    latency: dict[str, Any]
    kv_lease: float | None
    model: str
    vllm: str
    rubato: str


class Greeting(_Message, frozen=True, tag="hello"):
    """Answers `Hello`.

    Args:
        asked: as in the hello.
        clock: the core's clock (s).
        unix: Unix time of its machine (s).
    """

    asked: float
    clock: float
    unix: float
    about: CoreAbout


class Refused(_Message, frozen=True, tag="refused"):
    why: str


class Unknown(_Message, frozen=True, tag="unknown"):
    """Tells a gateway to say hello first."""


class Beat(_Message, frozen=True, tag="beat"):
    asked: float
    clock: float
    unix: float


class TokensRow(_Row, frozen=True, tag="t"):
    """Reports new tokens of a request.

    Args:
        ids: of the tokens, or their number.
        tried: drafted tokens that were verified.
        right: drafted tokens that were accepted.
    """

    id: str
    ids: tuple[int, ...] | int
    tried: int = 0
    right: int = 0


class OfferedRow(_Row, frozen=True, tag="o"):
    """Reports a new request.

    Args:
        own: the gateway's id; empty if no gateway sent it.
    """

    at: float
    request: Request
    own: str


class HandOffRow(_Row, frozen=True, tag="h"):
    """Reports a request that its gateway is to place elsewhere.

    Args:
        cached: tokens whose KV stays until `SentRow`.
    """

    id: str
    reason: HandoffReason
    at: float
    cached: int


class SentRow(_Row, frozen=True, tag="s"):
    """Reports that the KV of a request has been read, or that its lease is over."""

    id: str


class EventRow(_Row, frozen=True, tag="e"):
    """Reports any other event, by the name of its class."""

    name: str
    event: Any


Row: TypeAlias = TokensRow | OfferedRow | HandOffRow | SentRow | EventRow


class Report(_Message, frozen=True, tag="report", omit_defaults=True):
    """Reports events and changes since the last report.

    Args:
        n: number of the report.
        at: when it was made (s).
        kv: free blocks.
        done: a completed batch, and its seconds.
        shape: of the batch that runs now.
        busy: its predicted end (s).
        tokens: of each request in it.
        held: KV tokens and blocks of each request for which they changed.
        hits: cached tokens of each waiting request for which they changed.
    """

    n: int
    at: float
    kv: int
    events: Sequence[Row] = ()
    done: tuple[Shape, float] | None = None
    shape: Shape | None = None
    busy: float = 0.0
    tokens: Mapping[str, int] = {}
    held: Mapping[str, tuple[int, int]] = {}
    hits: Mapping[str, int] = {}


class PresentRow(_Row, frozen=True):
    """Shows one request in a snapshot.

    Args:
        own: as in `OfferedRow`.
        times: of its output tokens here (s).
        ids: of its output tokens here.
    """

    request: Request
    own: str
    state: State
    started: bool
    demoted: bool
    cached: int
    blocks: int
    times: tuple[float, ...] = ()
    ids: tuple[int, ...] = ()


class Snapshot(_Message, frozen=True, tag="snapshot"):
    """Shows all requests after report number n, in order of arrival.

    Args:
        kv: free blocks.
        batches: those that run, as tokens of each request.
    """

    n: int
    at: float
    kv: int
    seqs: Sequence[PresentRow] = ()
    batches: Sequence[Mapping[str, int]] = ()


# --------------------------------------------------------------------------- from a core to vLLM's API servers


class RequestEvents(_Message, frozen=True, tag="events"):
    """Reports events of the requests of one API server.

    Args:
        n: number of the message to this API server.
        tickets: the API server's names of new requests, by id.
        lost: messages before this one that the reader did not get.
    """

    engine: int
    n: int
    events: Sequence[EventRow]
    tickets: Mapping[str, str]
    lost: int = 0

    def happened(self) -> list[Event]:
        """Returns the events of the rows.

        Raises:
            ValueError: a row is no event.
        """
        return [event_of(row, 0.0) for row in self.events]


class EngineState(_Message, frozen=True, tag="state"):
    """Reports the state of an engine. `n` and `lost` are as in `RequestEvents`."""

    engine: int
    n: int
    fields: Mapping[str, Any]
    lost: int = 0


ToCore: TypeAlias = Hello | Ping | Resync | Do | Subscribe
ToApiServer: TypeAlias = RequestEvents | EngineState | Refused
FromCore: TypeAlias = Greeting | Refused | Unknown | Beat | Report | Snapshot


# --------------------------------------------------------------------------- as bytes

MessageT = TypeVar("MessageT")
encode = msgspec.json.Encoder().encode
_to_core: msgspec.json.Decoder[ToCore] = msgspec.json.Decoder(ToCore)
_from_core: msgspec.json.Decoder[FromCore] = msgspec.json.Decoder(FromCore)
_to_api_server: msgspec.json.Decoder[ToApiServer] = msgspec.json.Decoder(ToApiServer)
_command: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)
}


def decode_to_core(raw: bytes) -> ToCore:
    """Reads a message to a core. Raises ValueError for other bytes."""
    return _decode(_to_core, raw)


def decode_from_core(raw: bytes) -> FromCore:
    """Reads a message from a core. Raises ValueError for other bytes."""
    return _decode(_from_core, raw)


def decode_for_api_server(raw: bytes) -> ToApiServer:
    """Reads a message to an API server. Raises ValueError for other bytes."""
    return _decode(_to_api_server, raw)


def decode_command(raw: msgspec.Raw) -> Command:
    """Reads a command. Raises ValueError for other bytes."""
    return _decode(_command, raw)


def _decode(decoder: msgspec.json.Decoder[MessageT], raw: bytes | msgspec.Raw) -> MessageT:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no message of the link ({error})") from error


def event_row(event: Event) -> Row:
    """Returns an event as a row of a report: a short row for tokens, which every step brings for every request."""
    if type(event) is Tokens:
        return TokensRow(event.id, event.token_ids or event.tokens, event.tried, event.tokens - 1 if event.tried else 0)
    return full_row(event)


def full_row(event: Event) -> EventRow:
    """Returns a row with all fields of an event."""
    return EventRow(type(event).__name__, event)


def offered_row(event: Offered, own: str) -> OfferedRow:
    return OfferedRow(event.at, without_texts(event.request), own)


def event_of(row: TokensRow | EventRow, at: float) -> Event:
    """Returns the event of a row of a report that was made at time `at` (s). Raises ValueError for a row that is no
    event."""
    if type(row) is TokensRow:
        tokens, ids = (row.ids, ()) if isinstance(row.ids, int) else (len(row.ids), row.ids)
        return Tokens(at, row.id, tokens, "", ids, tried=row.tried, accepted=tuple(range(row.right)))
    assert type(row) is EventRow
    try:
        return msgspec.convert(row.event, _KINDS[row.name])
    except (msgspec.ValidationError, KeyError) as error:
        raise ValueError(f"no event of the link ({error})") from error
