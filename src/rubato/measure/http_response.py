"""One request over HTTP as a client sees it: sent, refused, or followed token by token to the end of its stream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from rubato.core.types import Outcome

BROKEN = frozenset({"error", "abort", "cancelled"})  # finish reasons that are not a completion


@dataclass(slots=True)
class Answer:
    """What has come back for one request so far; times in seconds from the workload's start."""

    sent: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome = "failed"
    reason: str = ""
    status: int | None = None
    prompt_tokens: int | None = None
    total: int = 0  # tokens by the usage at the end of the stream
    counted: bool = False
    finish: str | None = None
    server: dict[str, Any] | None = None  # what a Rubato server says of the request: tier served, verdict
    fault: int | None = None  # errno of a failure to connect

    def count(self, now: float, total: int) -> None:
        if total > (self.tokens[-1] if self.tokens else 0):
            self.times.append(now)
            self.tokens.append(total)

    def spread(self) -> None:
        """With usage at the end only: so many tokens, the first in the first chunk, evenly over the other chunks."""
        chunks = len(self.tokens)
        if not self.counted and chunks and self.total >= chunks:
            rest = (self.total - 1) / max(1, chunks - 1)
            self.tokens = [1 + round(i * rest) for i in range(chunks - 1)] + [self.total]

    def refuse(self, reason: str) -> None:
        self.outcome, self.reason = "refused", reason

    def fail(self, reason: str) -> None:
        self.outcome, self.reason = "failed", reason


async def ask(
    session: aiohttp.ClientSession, url: str, body: bytes, answer: Answer, start: float, give_up: float
) -> None:
    """Send one request and read its stream to the end; whatever happens to it ends up in `answer`.

    start, give_up: seconds of the loop's clock, when the workload began and when to stop waiting.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(give_up):
            answer.sent = loop.time() - start
            async with session.post(url, data=body) as response:
                answer.status = response.status
                if response.status == 200:
                    await _read(response, answer, start)
                else:
                    _refused_or_failed(response, await response.read(), answer)
    except TimeoutError:
        answer.fail(f"timeout: no end {give_up - start:.1f} s after the start of the workload")
    except orjson.JSONDecodeError as error:
        answer.fail(f"the stream holds an event that is not JSON ({error})")
    except (aiohttp.ClientError, OSError) as error:
        answer.fault = getattr(error, "errno", None)
        answer.fail(f"connection: {told(error)}")


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refused_or_failed(response: aiohttp.ClientResponse, body: bytes, answer: Answer) -> None:
    message = ""
    code: Any = None
    with contextlib.suppress(orjson.JSONDecodeError):  # not every error page is JSON; its text serves as well
        page = orjson.loads(body)
        error = page.get("error", page) if isinstance(page, dict) else {}
        if isinstance(error, dict):
            message, code = str(error.get("message", "")), error.get("code")
    message = message or body[:200].decode("utf-8", "replace")
    if response.status == 429:
        answer.refuse(response.headers.get("x-rubato-reject-reason") or (str(code) if code else message))
    else:
        answer.fail(f"HTTP {response.status}: {message}")


async def _read(response: aiohttp.ClientResponse, answer: Answer, start: float) -> None:
    """Follow a stream of server-sent events. What arrives in one read has the same time."""
    loop = asyncio.get_running_loop()
    rest = b""
    async for data in response.content.iter_any():
        now = loop.time() - start
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    continue
                try:
                    if not _fold(answer, orjson.loads(payload), now):
                        return
                except (AttributeError, TypeError, LookupError) as error:
                    answer.fail(f"the stream holds an event of another shape than OpenAI's ({told(error)})")
                    return
    if answer.finish is None:
        answer.fail(
            f"the stream ended after {answer.tokens[-1] if answer.tokens else 0} tokens without a finish reason"
        )
    elif answer.finish in BROKEN:
        answer.fail(f"the server ended it: {answer.finish}")
    elif not answer.tokens:
        answer.fail("completed without a single token")
    else:
        answer.spread()
        answer.outcome = "completed"


def _fold(answer: Answer, chunk: dict[str, Any], now: float) -> bool:
    """Take in one chunk; False when it is an error, which ends the stream."""
    error = chunk.get("error")
    if error is not None:
        message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        answer.fail(f"error in the stream: {message}")
        return False
    choices = chunk.get("choices")
    usage = chunk.get("usage") or {}
    total = usage.get("completion_tokens")  # some servers send null until the end
    if choices:
        choice = choices[0]
        if choice.get("finish_reason"):
            answer.finish = choice["finish_reason"]
        if total is not None:
            answer.counted = True
            answer.count(now, total)
        elif _text(choice):
            answer.count(now, (answer.tokens[-1] if answer.tokens else 0) + 1)
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens")
    if total is not None:
        answer.total = total
    if chunk.get("rubato"):
        answer.server = chunk["rubato"]
    return True


def _text(choice: dict[str, Any]) -> str:
    """What a chunk says: of a chat, its reasoning too (two spellings are in use); of a completion."""
    delta = choice.get("delta") or {}
    said = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"), choice.get("text"))
    return "".join(part for part in said if isinstance(part, str))
