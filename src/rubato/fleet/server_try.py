"""One try of a trip at a server: the response is passed on in callbacks; no task wakes for a part of a stream.

The try reports tokens and ends to the replica, and adds the verdict at the end of the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import orjson

from rubato.core.clock import Clock
from rubato.core.plan import KV
from rubato.core.request import INFEASIBLE, Request
from rubato.fleet.disaggregation import DisaggregationUnsupportedError
from rubato.fleet.relay import Carrier, Trip
from rubato.fleet.resume import CHAT, TEXT, NotResumableError
from rubato.fleet.server_requests import ServerRequests
from rubato.fleet.token_path import TokenPath
from rubato.fleet.upstream import (
    MAX_ANSWER_BYTES,
    BrokenError,
    Headers,
    Reply,
    UnreachableError,
    UpstreamError,
    error_code,
    read_all,
)
from rubato.wire.folded_answer import FoldedAnswer
from rubato.wire.response_stream import DONE, ResponseStream, loads, usage_of

log = logging.getLogger(__name__)

# A redirect sends the client to another address, the server's own as a rule (304 does not).
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
JSON_HEADERS: Headers = [("content-type", "application/json")]
STREAM_HEADERS = ("content-type", "cache-control", "x-accel-buffering")  # which a folded stream does not have
REDIRECT_MESSAGE = "The server answers with a redirect, which is not passed on."
KEY_STATUSES = (401, 403)
KEY_REFUSED_MESSAGE = "The server refuses the gateway's own key, or what may be done with it."
CLOSE_S = 1.0  # from the last finish reason of a stream to the end of its bytes
MAX_EARLY_BYTES = 1 << 20  # held back of a stream before its first token


class Fault(Enum):
    """How a server failed at a request, which decides how often the request is retried elsewhere."""

    UNREACHABLE = "nobody answers there: the request was not sent"
    FULL = "it takes no more for now"
    UNAVAILABLE = "it says that it cannot serve for now"
    UNKNOWN = "it may be the request's own fault: one other server is asked"


FAULT_OF_STATUS = {429: Fault.FULL, 503: Fault.UNAVAILABLE}


class TryHost(Carrier, Protocol):
    """The replica at which a try runs (`server_replica.ServerReplica`)."""

    @property
    def clock(self) -> Clock: ...
    @property
    def requests(self) -> ServerRequests: ...
    @property
    def is_prefill_server(self) -> bool: ...
    async def wait_for_end_report(self, trip: Trip) -> None: ...
    async def check_health(self, trip: Trip) -> None: ...
    async def hand_over(self, trip: Trip, body: bytes) -> None: ...
    def fail(self, trip: Trip, why: str, fault: Fault) -> None: ...
    def end_try(self, trip: Trip) -> None: ...


class Try:
    """Runs one try of a trip at a replica."""

    def __init__(self, trip: Trip, replica: TryHost) -> None:
        self._trip, self._replica = trip, replica

    async def run(self, request: Request, kv: KV | None) -> None:
        """Runs the try. An error of the gateway ends it, too: nothing stays in flight."""
        trip, replica = self._trip, self._replica
        reply: Reply | None = None
        prefills = kv is None and replica.is_prefill_server
        try:
            reply = await trip.open(replica, request, kv, prefills=prefills)
            await self._pass_on(reply, prefills)
        except NotResumableError as error:
            replica.requests.end(trip, "failed", str(error))
        except DisaggregationUnsupportedError as error:
            replica.requests.end(trip, "refused", f"rejected-invalid: {error}")
        except UpstreamError as error:
            if isinstance(error, BrokenError | UnreachableError):
                await replica.check_health(trip)
            if reply is not None:
                reply.close()  # first: it may come back here
            what = "cannot be reached" if reply is None else "broke off"
            fault = Fault.UNREACHABLE if isinstance(error, UnreachableError) else Fault.UNKNOWN
            replica.fail(trip, f"replica {replica.id} {what}: {error}", fault)
        except Exception as error:
            log.exception("replica %s: a request could not be passed on", replica.id)
            replica.requests.end(trip, "failed", f"the gateway failed at it ({type(error).__name__})")
            trip.break_off(f"the gateway failed at it ({type(error).__name__})")
        finally:
            if reply is not None:
                reply.close()
            if trip.client.flow is reply:
                trip.client.flow = None
            replica.end_try(trip)

    async def _pass_on(self, reply: Reply, prefills: bool) -> None:
        trip, replica = self._trip, self._replica
        if reply.status != 200:
            await self._pass_error(reply.status, reply.headers, await read_all(reply))
            return
        if prefills:
            await replica.hand_over(trip, await read_all(reply))
            return
        if dict(reply.headers).get("content-type", "").lower().startswith("text/event-stream"):
            if trip.ask.streams or trip.ask.path not in (CHAT, TEXT):
                await self._stream(reply)
            else:
                await self._fold(reply)
            return
        raw = await read_all(reply)
        prompt, output = usage_of(raw)
        replica.requests.set_prompt_tokens(trip, prompt)
        if not replica.requests.is_linked:
            replica.requests.mark_started(trip, prompt)
            trip.untimed = min(output, replica.requests.max_output(trip))
        await self._end_completed()
        trip.answer_whole(200, reply.headers, raw)

    async def _pass_error(self, status: int, headers: Headers, raw: bytes) -> None:
        trip, replica = self._trip, self._replica
        if not replica.requests.is_linked and status == 429 and dict(headers).get("x-should-retry") == "false":
            # its SLO cannot be met there even alone: no fault of the server's
            trip.answer_whole(status, headers, raw)
            replica.requests.end(trip, "refused", f"{INFEASIBLE}: the server answered 429")
            return
        if (refusal := why_not_passed_on(replica.id, status, has_own_key=trip.ask.has_own_key)) is not None:
            self._end_as_502(*refusal)
            return
        if status < 500 and status != 429:
            trip.answer_whole(status, headers, raw)
            replica.requests.end(trip, "refused", f"rejected-invalid: the server answered {status}")
            return
        await replica.wait_for_end_report(trip)
        if not replica.requests.are_open(trip):  # what the server says is the echo of a refusal
            trip.break_off(f"replica {replica.id} answered {status}")
            return
        log.debug("replica %s answered %d: %.200r", replica.id, status, raw)  # it may quote the prompt
        why = f"replica {replica.id} answered {status}{error_code(raw)}"
        replica.fail(trip, why, FAULT_OF_STATUS.get(status, Fault.UNKNOWN))

    def _end_as_502(self, why: str, message: str) -> None:
        """Ends the trip as failed through no fault of its client, who gets only this message."""
        trip = self._trip
        self._end_without_answer(why)
        error = {"message": message, "type": "server_error", "param": None, "code": "server_failed"}
        trip.answer_whole(502, JSON_HEADERS, orjson.dumps({"error": error}))

    def _end_without_answer(self, why: str) -> None:
        """Ends the trip as failed, without an error for the client, who sees the failure otherwise."""
        trip, replica = self._trip, self._replica
        replica.requests.end(trip, "failed", why)
        trip.failed_end = None

    async def _stream(self, reply: Reply) -> None:
        trip, replica = self._trip, self._replica
        ask = trip.ask
        is_named = ask.path not in (CHAT, TEXT)
        reader = ResponseStream(len(trip.ids), is_named=is_named, with_usage=ask.with_usage)
        early: bytearray | None = bytearray()  # before its first token: an engine may still refuse

        def take(data: bytes, choices: Sequence[int]) -> None:
            nonlocal early
            if early is not None:
                early += data
                if not (choices or reader.has_queued or reader.has_ended or len(early) > MAX_EARLY_BYTES):
                    return
                data, early = bytes(early), None
                if not trip.has_begun:
                    trip.has_begun, trip.began_at = True, replica.clock.now()
                    trip.client.start(200, reply.headers)
                trip.client.flow = reply
            self._count(choices)
            if data:
                trip.write(data)
            # A later try's events are not passed as they are.
            if choices and trip.path is not None and trip.tries <= 1:
                trip.path.count, trip.path.writer = replica.requests.count_of(trip), trip.client.direct

        await self._pump(reply, reader, take)
        if reader.has_failed:  # which its client has seen
            await replica.wait_for_end_report(trip)
            self._end_without_answer("the server's response says that it failed")
        else:
            await self._end_completed()
        end = b"" if reader.has_ended or is_named else DONE
        trip.finish(reader.finish({} if is_named else trip.verdict(), end))

    async def _fold(self, reply: Reply) -> None:
        """Folds a stream into one answer: the gateway asked for a stream to see tokens as they come, though the client
        wants one answer, and gets it only when it is whole."""
        trip = self._trip
        reader = ResponseStream(len(trip.ids), max_event_bytes=MAX_ANSWER_BYTES)
        answer = FoldedAnswer(is_chat=trip.ask.path == CHAT)
        trip.streamed_before = 0

        def take(passed: bytes, choices: Sequence[int]) -> None:
            answer.add(passed)
            if answer.is_broken:
                raise UpstreamError("a chunk of the stream cannot be read")
            if answer.bytes > MAX_ANSWER_BYTES:
                raise UpstreamError(f"the server's answer is longer than {MAX_ANSWER_BYTES} bytes")
            self._count(choices)

        try:
            await self._pump(reply, reader, take)
        except UpstreamError:
            if reader.error is None:
                raise
            reply.close()  # first: it may come back here
            await self._pass_error(_status_of(reader.error), JSON_HEADERS, reader.error)
            return
        answer.add(reader.finish({}))
        if not answer.has_choices:
            raise UpstreamError("the stream brought no answer")
        await self._end_completed()
        headers = [header for header in reply.headers if header[0] not in STREAM_HEADERS]
        trip.answer_whole(200, [*headers, *JSON_HEADERS], answer.to_json())

    def _count(self, choices: Sequence[int]) -> None:
        """Counts a token of each of these choices."""
        trip, replica = self._trip, self._replica
        if choices:
            trip.streamed_before += len(choices)
            if not replica.requests.is_linked:
                replica.requests.count(trip, choices)

    async def _pump(self, reply: Reply, reader: ResponseStream, take: Callable[[bytes, Sequence[int]], None]) -> None:
        """Reads a stream to its end, and counts tokens that its chunks have not shown. Raises UpstreamError.

        Args:
            take: gets the bytes that may be passed on, and the choice of each token in them.
        """
        trip, replica = self._trip, self._replica
        task = asyncio.current_task()
        closing: list[asyncio.TimerHandle] = []  # closes the connection after the last finish reason

        def on_data(data: bytes) -> None:
            if not trip.is_current(task):
                return  # it has been taken back, and the connection is about to close
            passable, choices = reader.feed(data)
            if reader.error is not None:
                raise UpstreamError("an error in the stream")
            take(passable, choices)
            if reader.is_complete and not closing:  # the counts, and [DONE], come at once if they do
                closing.append(asyncio.get_running_loop().call_later(CLOSE_S, reply.close))

        trip.path = TokenPath(replica.requests, reader, on_data, trip.keeper())
        try:
            await reply.pump(trip.path.take)
        except UpstreamError:
            if reader.error is not None:
                await replica.wait_for_end_report(trip)
                log.debug("replica %s: an error in a stream: %.200r", replica.id, reader.error)  # it may quote a prompt
                raise UpstreamError(f"an error in the stream{error_code(reader.error)}") from None
            if not reader.is_complete:
                raise
        finally:
            for timer in closing:
                timer.cancel()
        if not reader.is_complete:
            raise UpstreamError("the stream ended before its last chunk")
        prompt, output = reader.usage
        replica.requests.set_prompt_tokens(trip, prompt)
        if not replica.requests.is_linked:  # a chunk may have brought several tokens
            missing = min(output, replica.requests.max_output(trip)) - trip.streamed
            replica.requests.count(trip, [at % len(trip.ids) for at in range(missing)])

    async def _end_completed(self) -> None:
        """Ends the requests whose ends the link has not reported: the response has ended."""
        trip, replica = self._trip, self._replica
        await replica.wait_for_end_report(trip)
        replica.requests.end(trip, "completed", "stop")


def why_not_passed_on(replica: str, status: int, *, has_own_key: bool) -> tuple[str, str] | None:
    """Returns why a server's answer is not passed on, and the message that the client gets instead; None: it is passed
    on.

    Args:
        has_own_key: the gateway's own key was in the request.
    """
    if status in REDIRECT_STATUSES:
        return f"replica {replica} answered {status}, a redirect", REDIRECT_MESSAGE
    if has_own_key and status in KEY_STATUSES:
        why = f"replica {replica} answered {status} to the gateway's own key"
        log.error("%s: see `key_env` of its server", why)
        return why, KEY_REFUSED_MESSAGE
    return None


def _status_of(error: bytes) -> int:
    """Returns the HTTP status of an error inside a stream: vLLM's `code`."""
    fields = loads(error)
    error_fields = fields.get("error") if isinstance(fields, dict) else None
    status = error_fields.get("code") if isinstance(error_fields, dict) else None
    return status if type(status) is int and 400 <= status < 600 else 500
