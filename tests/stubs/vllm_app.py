"""A stand-in of vLLM's API server behind the middleware, and of its engine's reports."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from rubato.core.events import Event, Finished, Offered, Tokens, Verdict
from rubato.core.request import Outcome, Request
from rubato.engines.vllm.sequence import request_of
from rubato.wire.messages import EngineState, Refused, RequestEvents, decode_for_api_server, encode, full_row


class Link:
    """What engines would have sent (a `Reader`)."""

    def __init__(self) -> None:
        self.sent: list[EngineState | RequestEvents] = []

    def messages(self) -> list[EngineState | RequestEvents]:
        sent, self.sent = self.sent, []
        return sent

    def tell(self, *events: Event, lost: int = 0, **tickets: str) -> None:
        said = RequestEvents(0, 0, [full_row(event) for event in events], tickets, lost)
        message = decode_for_api_server(encode(said))
        assert not isinstance(message, Refused)
        self.sent.append(message)


@dataclass
class VLLM:
    """A stand-in of vLLM's server. answer: the chunks of a stream, or one body. ends: what became of the request, told
    while it answers. early: events of /v1/responses, which come before the engine is asked. breaks: its stream ends
    with an exception, as that of /v1/responses does where the engine ends a request with an error."""

    link: Link
    answer: Any = None
    status: int = 200
    outcome: Outcome = "completed"
    reason: str = "length"
    verdict: Verdict = field(
        default_factory=lambda: Verdict(True, "deadline", ttft=0.1, tpot=0.02, e2e=0.3, margin=0.2)
    )
    best_effort: bool = False
    choices: int = 1
    late: float = 0.0  # seconds after which the end is told
    unheard: float = 0.0  # seconds after which the offer is told
    silent: bool = False
    went_in: list[dict[str, Any]] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    hold: asyncio.Event | None = None
    early: list[bytes] = field(default_factory=list)
    breaks: bool = False
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        body = json.loads(raw) if raw else {}
        self.went_in.append(body)
        self.scopes.append(scope)
        if body.get("temperature", 0) < 0:
            error = json.dumps({"error": {"message": "temperature must be 0 or more"}}).encode()
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": error, "more_body": False})
            return
        stream = isinstance(self.answer, list)
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        start = {"type": "http.response.start", "status": self.status}
        start["headers"] = [(b"content-type", kind), *self.headers]
        if self.early:
            await send(start)
        for part in self.early:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not self.silent and "vllm_xargs" in body:
            self._serve(body["vllm_xargs"], int(body.get("n") or 1))
        if self.hold is not None:
            await self.hold.wait()
        if self.breaks:
            raise RuntimeError("Caught handled exception, but response already started.")
        if not self.early:
            await send(start)
        parts = self.answer if stream else [json.dumps(self.answer or {"id": "x", "choices": []}).encode()]
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _serve(self, xargs: dict[str, Any], n: int = 1) -> None:
        """As an engine does, told by what came in."""
        choices = max(n, self.choices)
        params = SimpleNamespace(extra_args=xargs, temperature=0.0, stop=None, ignore_eos=False)
        for choice in range(choices):
            prefix = f"{choice}_" if choices > 1 else ""
            own = SimpleNamespace(
                sampling_params=params,
                request_id=f"{prefix}chatcmpl-abc-0123abcd",
                num_prompt_tokens=10,
                max_tokens=4,
                arrival_time=0.0,
            )
            request, ticket = request_of(own, 0.0)
            self.requests.append(request)
            offer = partial(self.link.tell, Offered(0.0, request.id, request), **{request.id: ticket})
            if self.unheard:
                asyncio.get_running_loop().call_later(self.unheard, offer)
            else:
                offer()
            end = Finished(0.5, request.id, self.outcome, self.reason, self.verdict, 4, self.best_effort)
            events = [Tokens(0.1, request.id, 4), end] if self.outcome == "completed" else [end]
            if self.late:
                asyncio.get_running_loop().call_later(self.late, self.link.tell, *events)
            else:
                self.link.tell(*events)
