"""One response: events of its requests from the cluster in, HTTP to the client out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rubato.core.events import Event, Finished, Started, Tokens
from rubato.core.plan import Logprob
from rubato.core.request import Request
from rubato.frontdoor.choices import firsts
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.verdict import served_tier
from rubato.serving import sse


class ChoiceEvents:
    """What one choice's events have brought that was not taken yet."""

    __slots__ = ("_logprobs", "_texts", "cached", "end", "output", "told")

    def __init__(self) -> None:
        self.output = 0
        self.cached: int | None = None  # prompt tokens that were in KV when it began
        self.end: Finished | None = None
        self.told = False  # its end has been written
        self._texts: list[str] = []
        self._logprobs: list[Logprob] = []

    def add(self, event: Tokens) -> None:
        self._texts.append(event.text)
        self._logprobs += event.logprobs
        self.output += event.tokens

    def take(self) -> sse.TextPiece | None:
        """All since the last call, as one piece; None when no token came."""
        if not self._texts:
            return None
        said = sse.TextPiece("".join(self._texts), tuple(self._logprobs))
        self._texts.clear()
        self._logprobs.clear()
        return said


class ResponseEvents:
    """Collects what the events of an answer's choices bring until the handler takes it. Called on the event loop with
    each event.

    every_token: wake the handler at each token and at each choice's end, not only at the end of all.
    """

    __slots__ = ("_every_token", "_firsts", "_left", "_news", "_parts", "failed", "gone", "parts")

    def __init__(self, requests: Sequence[Request], every_token: bool) -> None:
        self.parts = [ChoiceEvents() for _ in requests]
        self.failed: Finished | None = None  # the first end that is no completion: there is no answer any more
        self.gone = False  # the client has left: nothing is sent
        self._parts = {request.id: part for request, part in zip(requests, self.parts, strict=True)}
        self._firsts = firsts(requests)
        self._left = len(requests)
        self._news = asyncio.Event()
        self._every_token = every_token

    def __call__(self, event: Event) -> None:
        part = self._parts[event.id]
        if type(event) is Tokens:
            part.add(event)
            if self._every_token:
                self._news.set()
        elif type(event) is Started:
            if part.cached is None:
                part.cached = 0 if event.resumed else event.cached
        elif type(event) is Finished:
            part.end = event
            self._left -= 1
            if event.outcome != "completed" and self.failed is None:
                self.failed = event
            if self._every_token or self.over:
                self._news.set()

    @property
    def over(self) -> bool:
        """All choices have ended, or one has failed."""
        return self._left == 0 or self.failed is not None

    @property
    def ends(self) -> list[Finished]:
        return [part.end for part in self.parts if part.end is not None]

    @property
    def cached(self) -> int:
        """Prompt tokens that the prefix cache held, summed over prompts, each counted when its first choice begins: the
        other choices find their prompt's KV anyway."""
        return sum(self.parts[at].cached or 0 for at in self._firsts)

    async def ready(self) -> None:
        """Return when there is something new since the last call, or it is over."""
        if not self.over:
            await self._news.wait()
        self._news.clear()


class CompletionResponse(Response):
    """Offers its requests, one a choice, when sent, and answers with what becomes of them.

    The status line waits for the first token or the end, so that a refusal is a real 429 also when streaming: if one
    choice is refused, all are. A client that goes away takes its requests with it at once.
    """

    def __init__(self, offers: Offers, form: sse.Format, chunks: sse.Chunks | None) -> None:
        self._offers = offers
        self._form = form
        self._chunks = chunks
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = ResponseEvents(self._form.requests, every_token=self._chunks is not None)

        def gone() -> None:
            live.gone = True
            self._offers.cancel()

        watcher = asyncio.create_task(_watch(receive, gone))
        try:
            await self._offers.send(live)
            await live.ready()
            if live.gone:
                return
            if live.failed is not None:
                self._offers.cancel()
                await self._error(live.failed).response()(scope, receive, send)
            elif self._chunks is None:
                await self._whole(live, scope, receive, send)
            else:
                await self._stream(live, self._chunks, send)
        finally:
            watcher.cancel()
            gone()

    async def _whole(self, live: ResponseEvents, scope: Scope, receive: Receive, send: Send) -> None:
        said = [part.take() or sse.TextPiece("") for part in live.parts]
        body = sse.whole(self._form, said, live.ends, live.cached)
        headers = {"x-rubato-tier": served_tier(self._form.request, live.ends), "x-request-id": self._form.id}
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    async def _stream(self, live: ResponseEvents, chunks: sse.Chunks, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            *sse.UNBUFFERED,
            (b"x-request-id", self._form.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece = chunks.begin()
        while True:
            piece += self._new(live, chunks)
            if live.over:
                break
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = b""
            await live.ready()
        if live.failed is not None:  # no [DONE]: what came is not an answer
            self._offers.cancel()
            piece += b"data: " + self._error(live.failed).body() + b"\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _new(self, live: ResponseEvents, chunks: sse.Chunks) -> bytes:
        """The chunks of what came since the last call."""
        piece = b""
        for index, part in enumerate(live.parts):
            if (said := part.take()) is not None:
                piece += chunks.tokens(index, said, part.output)
            if part.end is not None and part.end.outcome == "completed" and not part.told:
                part.told = True
                last = all(other.told for other in live.parts)
                piece += chunks.end(index, live.ends, live.cached) if last else chunks.end_choice(index, part.end)
        return piece

    def _error(self, end: Finished) -> ApiError:
        return from_finished(end, self._offers.retry_after())


async def _watch(receive: Receive, gone: Callable[[], None]) -> None:
    """Call `gone` in the same turn of the loop in which the client's departure becomes known."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()
