"""One API request on its way through the gateway: the body goes to a server as it came, and the response comes back so.

What is added: ids by which the server's reports name it, the tier served and the verdict in the last chunk or in the
whole response. A response that broke off is gone on with from what has come, where OpenAI's API can say that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.types import Send

from rubato.core.events import Event, Finished
from rubato.core.request import Progress, Request
from rubato.fleet.call import CannotContinueError, name_of_try
from rubato.fleet.sse_relay import END, is_usage, may_be_last
from rubato.fleet.upstream import Headers
from rubato.frontdoor import headers as header_fields
from rubato.frontdoor import verdict
from rubato.frontdoor.body_fields import LIMITS, BodyFields
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.paths import CHAT, TEXT
from rubato.serving.sse import forbid_buffering

MOST_KEPT = 1 << 20  # bytes of a stream that are kept, to go on from
# Fields of a body with which an output cannot be cut in two.
INDIVISIBLE = (
    "tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "use_beam_search", "best_of",
    "return_token_ids", "continue_final_message", "kv_transfer_params",
)  # fmt: skip

NO_TEXT = ("reasoning", "reasoning_content", "tool_calls", "function_call")  # of a chunk, what is no text to go on from


def is_redirect(status: int) -> bool:
    """Whether a response sends its client to another address, the server's own as a rule (304 does not)."""
    return status in (301, 302, 303, 307, 308)


def redirected() -> ApiError:
    """What a client gets in the place of a redirect: where that leads is not for clients."""
    why = "The server answers with a redirect, which is not passed on."
    return ApiError(502, why, code="server_failed", kind="server_error")


class RelayedCall:
    """A `fleet.call.Call` for one HTTP request. requests: a choice each; headers: for the server; body: for the
    server. send: ASGI's. more: further headers of the response. counted: told how many tokens the prompt has, once that
    is known. with_usage: the client wants to see a stream's counts."""

    def __init__(
        self, path: str, target: str, answer: str, requests: tuple[Request, ...], choices: int, headers: Headers,
        body: BodyFields, send: Send, more: Callable[[], list[tuple[bytes, bytes]]], counted: Callable[[int], None],
        *, with_usage: bool,
    ) -> None:  # fmt: skip
        self.path, self.target = path, target
        self.tries = 0
        self._answer = answer
        self.ids = tuple([request.id for request in requests])
        self.choices = choices
        self.streams = body.flag("stream")
        self.begun = False
        self.streamed = 0
        self.over = False  # the client has had the whole response
        self.broken = ""  # why no more will come of it
        self.done = asyncio.Event()  # over, or broken
        self.failed: Finished | None = None  # the first end that is no completion
        self._headers, self._body, self._raw = headers, body, body.to_json()
        self._with_usage = with_usage
        self._requests = requests
        self._ends: dict[str, Finished] = {}
        self._send, self.more = send, more
        self.counted = counted
        self._kept: list[bytes] | None = [] if self.streams and len(requests) == 1 and path in (CHAT, TEXT) else None
        self._kept_bytes = 0
        self._again = False  # what comes is not of the first server
        self._received = 0  # tokens that came before the response broke off
        self._first: dict[str, Any] = {}  # the first chunk of a response that is gone on with

    @property
    def _short_id(self) -> str:
        """Of which vLLM makes the response's id."""
        return self._answer.partition("-")[2] or self._answer

    @property
    def answer(self) -> str:
        return name_of_try(self._answer, self.tries)

    # ----------------------------------------------------------------- events

    def hear(self, event: Event) -> None:
        """Of one of its requests."""
        if type(event) is Finished:
            self._ends[event.id] = event
            if event.outcome != "completed" and self.failed is None:
                self.failed = event
                self.done.set()

    # ----------------------------------------------------------------- towards the server

    def sent(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        headers = [*self._headers, ("x-request-id", name_of_try(self._short_id, self.tries))]
        if self.tries > 1 and self._body.json("request_id") == orjson.dumps(self._answer):
            return headers, self._body.with_fields(request_id=self.answer).to_json()
        if not self.begun:
            return headers, self._raw
        if len(self.ids) > 1:
            raise CannotContinueError("a response of several choices cannot be continued elsewhere")
        self._again = True
        received = 0 if progress is None else sum(map(len, progress.times))
        if progress is None or not received:
            self.so_far()
            return headers, self._raw
        told = ids or (progress.token_ids if len(progress.token_ids) == received else ())
        received = max(received, len(told))  # some chunk may have brought several tokens, and some text be fewer
        fields = self._continued(received, told, ids is None)
        self._received = received
        return headers, json.dumps(fields).encode()  # any text, lone surrogates too

    def _continued(self, received: int, ids: tuple[int, ...], unasked: bool) -> dict[str, Any]:
        """The body that asks for the rest. ids: of what was received, where they are known; unasked: they may still
        become known. Raises CannotContinueError."""
        if self._kept is None:
            raise CannotContinueError(f"a response of {self.path}, or one so long, cannot be continued elsewhere")
        fields = json.loads(self._raw)
        for name in INDIVISIBLE:
            if fields.get(name) not in (None, False, []):
                raise CannotContinueError(f"a response with {name} cannot be continued elsewhere")
        for name in LIMITS:
            if isinstance(limit := fields.get(name), int):
                if limit <= received:
                    raise CannotContinueError("all its tokens had come, and only its end had not")
                fields[name] = limit - received
        if isinstance(least := fields.get("min_tokens"), int):
            fields["min_tokens"] = max(0, least - received)
        text = self.so_far()
        if self.path == CHAT:
            messages = [*fields["messages"], {"role": "assistant", "content": text}]
            return {**fields, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        prompt = fields["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return {**fields, "prompt": prompt + text}
        if not ids and not unasked:
            raise CannotContinueError("its prompt is token ids, and those of its output are not known")
        return {**fields, "prompt": [*prompt, *ids]}

    def so_far(self) -> str:
        """The text that has come. Raises CannotContinueError for a stream in which something else came."""
        found: list[str] = []
        for chunk in b"".join(self._kept or ()).split(END):
            if not chunk.startswith(b"data: {"):
                continue
            fields = orjson.loads(chunk[6:])
            self._first = self._first or fields
            for choice in fields.get("choices", ()):
                said = choice.get("delta", choice)
                if any(said.get(name) for name in NO_TEXT):
                    raise CannotContinueError(
                        "a response in which the model reasons, or calls tools, stays where it is"
                    )
                found.append(said.get("content" if self.path == CHAT else "text") or "")
        return "".join(found)

    # ----------------------------------------------------------------- towards the client

    @property
    def _deaf(self) -> bool:
        """The client has been told another end: what a server still says of it is dropped."""
        return self.over or self.failed is not None

    async def begin(self, status: int, headers: Headers) -> None:
        if self._deaf:
            return
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": self._head(headers)})

    async def write(self, data: bytes) -> None:
        if self._deaf:
            return
        data = self._as_before(data) if self._again else self._named(data)
        if self._kept is not None:
            self._kept_bytes += len(data)
            if self._kept_bytes > MOST_KEPT:
                self._kept = None
            else:
                self._kept.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, rest: bytes) -> None:
        if self._deaf:
            return
        if not self._with_usage:
            rest = END.join([chunk for chunk in rest.split(END) if not is_usage(chunk)])
        rest = self._as_before(rest) if self._again else self._named(rest)
        if self.path in (CHAT, TEXT):
            rest = self._with_verdict(rest)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})
        self._finish()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        if self._deaf:
            return
        if is_redirect(status):
            status, headers, body = 502, [("content-type", "application/json")], redirected().body()
        body = self._named(body)
        if status == 200 and (about := self.verdict()):
            try:
                fields = orjson.loads(body)
                body = orjson.dumps({**fields, **about}) if isinstance(fields, dict) else body
            except ValueError:
                pass  # no JSON: it is the server's own affair
        self.begun = True
        head = [*self._head(headers), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._finish()

    def breaks(self, why: str) -> None:
        if not self.over:
            self.broken = self.broken or why
            self.done.set()

    def verdict(self) -> Mapping[str, Any]:
        """The tier served, and what was measured of its requests."""
        ends = [self._ends[id] for id in self.ids if id in self._ends]
        return verdict.verdict_fields(self._requests, ends if len(ends) == len(self.ids) else ())

    def _finish(self) -> None:
        self.over = True
        self.done.set()

    def _head(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        there = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in header_fields.returned(headers)]
        return [*forbid_buffering(there), (b"x-request-id", self._short_id.encode()), *self.more()]

    def _with_verdict(self, rest: bytes) -> bytes:
        """The last chunks, of which the last one with content gets what is added."""
        about = self.verdict()
        chunks = rest.split(END)
        for at in range(len(chunks) - 1, -1, -1):
            if about and may_be_last(chunks[at]) and chunks[at].startswith(b"data: {"):
                chunks[at] = b"data: " + orjson.dumps({**orjson.loads(chunks[at][6:]), **about})
                break
        return END.join(chunks)

    def _named(self, data: bytes) -> bytes:
        """Chunks, or a response, with the id that the client's was given at first."""
        return data if self.tries <= 1 else data.replace(self.answer.encode(), self._answer.encode())

    def _as_before(self, data: bytes) -> bytes:
        """Chunks of another response as if they were of the first: its id, no second role, the counts of both."""
        out = []
        for chunk in data.split(END):
            if not chunk.startswith(b"data: {"):
                out.append(chunk)
                continue
            fields = orjson.loads(chunk[6:])
            choices = fields.get("choices") or []
            if any(
                (choice.get("delta") or {}).get("role") and not choice["delta"].get("content") for choice in choices
            ):
                continue
            for name in ("id", "created", "model"):
                if name in self._first:
                    fields[name] = self._first[name]
            usage = fields.get("usage")
            if isinstance(usage, dict) and "prompt_tokens" in usage:
                usage["prompt_tokens"] -= self._received
                usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._received
            out.append(b"data: " + orjson.dumps(fields))
        return END.join(out)
