"""One request between cluster and client: its events on one side, the HTTP answer on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rubato.cluster import Cluster
from rubato.server import sse
from rubato.server.errors import ApiError, from_finished
from rubato.server.verdict import served_tier
from rubato.types import Event, Finished, Tokens


class Live:
    """Collects what a request's events bring until the handler takes it. Called on the event loop with each event.

    every_token: wake the handler at each token, not only at the end.
    """

    __slots__ = ("_every_token", "_texts", "_waiter", "end", "gone", "output")

    def __init__(self, every_token: bool) -> None:
        self.output = 0
        self.end: Finished | None = None
        self.gone = False  # the client is: there is nobody to answer
        self._texts: list[str] = []
        self._waiter: asyncio.Future[None] | None = None
        self._every_token = every_token

    def __call__(self, event: Event) -> None:
        if type(event) is Tokens:
            self._texts.append(event.text)
            self.output += event.tokens
            if self._every_token:
                self._wake()
        elif type(event) is Finished:
            self.end = event
            self._wake()

    async def ready(self) -> None:
        """Return when there is something to take, or the end."""
        if self.end is None and not (self._every_token and self._texts):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> str | None:
        """All text since the last call, as one piece; None when no token came."""
        if not self._texts:
            return None
        text = "".join(self._texts)
        self._texts.clear()
        return text

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer(Response):
    """Offers a request when sent, and answers with what becomes of it.

    The status line waits for the first token or the end, so that a refusal is a real 429 also when streaming. A client
    that goes away takes its request with it at once.
    """

    def __init__(self, cluster: Cluster, form: sse.Format, chunks: sse.Chunks | None) -> None:
        self._cluster = cluster
        self._form = form
        self._chunks = chunks
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._form.request
        live = Live(every_token=self._chunks is not None)
        self._cluster.offer(request, live)

        def gone() -> None:
            live.gone = True
            if live.end is None:
                self._cluster.cancel(request.id)

        watcher = asyncio.create_task(_watch(receive, gone))
        try:
            await live.ready()
            if live.gone:
                return
            if live.end is not None and live.end.outcome != "completed":
                await self._refuse(live.end)(scope, receive, send)
            elif self._chunks is None:
                await self._whole(live, scope, receive, send)
            else:
                await self._stream(live, self._chunks, send)
        finally:
            watcher.cancel()
            gone()

    def _refuse(self, end: Finished) -> Response:
        return from_finished(end, self._cluster.retry_after()).response()

    async def _whole(self, live: Live, scope: Scope, receive: Receive, send: Send) -> None:
        assert live.end is not None, "a whole answer is woken at its end only"
        body = sse.whole(self._form, live.take() or "", live.end)
        headers = {"x-rubato-tier": served_tier(self._form.request, live.end), "x-request-id": live.end.id}
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    async def _stream(self, live: Live, chunks: sse.Chunks, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
            (b"x-request-id", self._form.request.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece = chunks.begin()
        while True:
            end, text = live.end, live.take()
            if text is not None:
                piece += chunks.tokens(text, live.output)
            if end is not None:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = b""
            await live.ready()
        if end.outcome == "completed":
            piece += chunks.end(end)
        else:  # no [DONE]: what came is not an answer
            piece += b"data: " + self._error(end).body() + b"\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _error(self, end: Finished) -> ApiError:
        return from_finished(end, self._cluster.retry_after())


async def _watch(receive: Receive, gone: Callable[[], None]) -> None:
    """Call `gone` in the same turn of the loop in which the client's departure becomes known."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()
