"""Turns the events of a response's requests into HTTP for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rubato.core.events import Event, Finished, Started, Tokens
from rubato.core.plan import Logprob
from rubato.core.request import Request
from rubato.frontdoor.admission import Headers
from rubato.frontdoor.choices import first_choices
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.verdict import served_tier
from rubato.serving import sse
from rubato.serving.asgi_client import watch_departure


class ChoiceEvents:
    """Keeps the events of one choice that the handler has not taken yet."""

    __slots__ = ("_logprobs", "_texts", "cached", "end", "is_end_written", "output")

    def __init__(self) -> None:
        self.output = 0
        self.cached: int | None = None  # prompt tokens found in KV at the start
        self.end: Finished | None = None
        self.is_end_written = False  # to the client
        self._texts: list[str] = []
        self._logprobs: list[Logprob] = []

    def add(self, event: Tokens) -> None:
        self._texts.append(event.text)
        self._logprobs += event.logprobs
        self.output += event.tokens

    def take(self) -> sse.TextPiece | None:
        """Returns the text since the last call, as one piece; None if there is none."""
        if not self._texts:
            return None
        piece = sse.TextPiece("".join(self._texts), tuple(self._logprobs))
        self._texts.clear()
        self._logprobs.clear()
        return piece


class ResponseEvents:
    """Collects the events of a response's choices until the handler takes them; called on the event loop.

    Args:
        every_token: wake the handler at each token and at each choice's end, not only at the end of all.
    """

    __slots__ = ("_every_token", "_firsts", "_news", "_open_choices", "_parts", "failed", "has_client_left", "parts")

    def __init__(self, requests: Sequence[Request], every_token: bool) -> None:
        self.parts = [ChoiceEvents() for _ in requests]
        self.failed: Finished | None = None  # the first end other than completion, which ends the response
        self.has_client_left = False
        self._parts = {request.id: part for request, part in zip(requests, self.parts, strict=True)}
        self._firsts = first_choices(requests)
        self._open_choices = len(requests)
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
            self._open_choices -= 1
            if event.outcome != "completed" and self.failed is None:
                self.failed = event
            if self._every_token or self.is_over:
                self._news.set()

    @property
    def is_over(self) -> bool:
        """Returns whether all choices have ended, or one has failed."""
        return self._open_choices == 0 or self.failed is not None

    @property
    def ends(self) -> list[Finished]:
        return [part.end for part in self.parts if part.end is not None]

    @property
    def cached(self) -> int:
        """Returns the prompt tokens found in the prefix cache, summed over prompts. Only first choices count: the
        others of a prompt always find its KV."""
        return sum(self.parts[at].cached or 0 for at in self._firsts)

    async def wait_for_news(self) -> None:
        """Waits for an event since the last call, or for the end."""
        if not self.is_over:
            await self._news.wait()
        self._news.clear()


class CompletionResponse(Response):
    """Offers its requests, one for each choice, when sent, and answers with their outcome.

    The status line waits for the first token or the end, so that a refusal is a 429 also when streaming; if one choice
    is refused, all are. The requests are cancelled at once when the client leaves.

    Args:
        offers: the requests.
        form: of the response.
        chunks: encodes a streamed one.
        more_headers: further headers, asked for when the response begins.
    """

    def __init__(
        self, offers: Offers, form: sse.Format, chunks: sse.Chunks | None, more_headers: Callable[[], Headers] = list
    ) -> None:  # fmt: skip
        self._offers, self._form, self._chunks, self._more_headers = offers, form, chunks, more_headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = ResponseEvents(self._form.requests, every_token=self._chunks is not None)

        def leave() -> None:
            live.has_client_left = True
            self._offers.cancel()

        watcher = asyncio.create_task(watch_departure(receive, leave))
        try:
            await self._offers.offer_all(live)
            await live.wait_for_news()
            if live.has_client_left:
                return
            if live.failed is not None:
                self._offers.cancel()
                await self._error(live.failed).response(self._more_headers())(scope, receive, send)
            elif self._chunks is None:
                await self._whole(live, scope, receive, send)
            else:
                await self._stream(live, self._chunks, send)
        finally:
            watcher.cancel()
            leave()

    async def _whole(self, live: ResponseEvents, scope: Scope, receive: Receive, send: Send) -> None:
        texts = [part.take() or sse.TextPiece("") for part in live.parts]
        body = sse.whole(self._form, texts, live.ends, live.cached)
        headers = {"x-rubato-tier": served_tier(self._form.request, live.ends), "x-request-id": self._form.id}
        reply = Response(body, 200, headers, "application/json")
        reply.raw_headers += self._more_headers()
        await reply(scope, receive, send)

    async def _stream(self, live: ResponseEvents, chunks: sse.Chunks, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            *sse.NO_BUFFERING_HEADERS,
            (b"x-request-id", self._form.id.encode()),
            *self._more_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece = chunks.begin()
        while True:
            piece += self._new(live, chunks)
            if live.is_over:
                break
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = b""
            await live.wait_for_news()
        if live.failed is not None:  # no [DONE]: the answer is incomplete
            self._offers.cancel()
            piece += b"data: " + self._error(live.failed).body() + b"\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _new(self, live: ResponseEvents, chunks: sse.Chunks) -> bytes:
        """Returns the chunks of all events since the last call."""
        piece = b""
        for index, part in enumerate(live.parts):
            if (new := part.take()) is not None:
                piece += chunks.tokens(index, new, part.output)
            if part.end is not None and part.end.outcome == "completed" and not part.is_end_written:
                part.is_end_written = True
                last = all(other.is_end_written for other in live.parts)
                piece += chunks.end(index, live.ends, live.cached) if last else chunks.end_choice(index, part.end)
        return piece

    def _error(self, end: Finished) -> ApiError:
        return from_finished(end, self._offers.retry_after())
