"""Answers as bytes: a whole one, or server-sent events made from templates.

At 32 sequences every step makes 32 chunks, so a chunk is concatenated from parts that are encoded once per request;
only its text goes through a JSON encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from rubato.server.verdict import report, served_tier, usage
from rubato.types import Finished, Request

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Format:
    """Everything about one answer that its tokens do not change. `created` in Unix seconds."""

    kind: Literal["chat", "text"]
    request: Request
    model: str
    created: int

    @property
    def prompt(self) -> int:
        return sum(stage.prompt for stage in self.request.stages)


def whole(form: Format, text: str, end: Finished) -> bytes:
    """The answer of a request that did not stream."""
    if form.kind == "chat":
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        content = {"text": text}
    return orjson.dumps(
        {
            "id": form.request.id,
            "object": "chat.completion" if form.kind == "chat" else "text_completion",
            "created": form.created,
            "model": form.model,
            "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": end.reason}],
            "usage": usage(form.prompt, end.output),
            "service_tier": served_tier(form.request, end),
            "system_fingerprint": None,
            "rubato": report(form.request, end),
        }
    )


class Chunks:
    """The events of one streamed answer.

    include_usage: a last chunk with `usage` and no choice (OpenAI). every_usage: running counts in every chunk (vLLM's
    `continuous_usage_stats`), from which a client knows how many tokens a chunk brought.
    """

    __slots__ = ("_after", "_before", "_every_usage", "_form", "_head", "_include_usage", "_role")

    def __init__(self, form: Format, *, include_usage: bool = False, every_usage: bool = False) -> None:
        chat = form.kind == "chat"
        name = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": form.request.id, "object": name, "created": form.created, "model": form.model}
        self._head = b"data: " + orjson.dumps(head)[:-1]
        first = b',"choices":[{"index":0,'
        self._before = self._head + first + (b'"delta":{"content":' if chat else b'"text":')
        self._after = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]'
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        self._role = self._head + first + role if chat else b""
        self._form = form
        self._include_usage = include_usage
        self._every_usage = every_usage

    def begin(self) -> bytes:
        """What comes before the first token: the role, in a chat."""
        return self._role + self._tail(0) if self._role else b""

    def tokens(self, text: str, output: int) -> bytes:
        """A chunk of new text, which may be empty (half a character); `output` tokens are out by now in all."""
        return self._before + orjson.dumps(text) + self._after + self._tail(output)

    def end(self, end: Finished) -> bytes:
        """The finish reason, the usage if asked for, and on whichever is last the tier served and the verdict."""
        request = self._form.request
        empty = b'"delta":{}' if self._form.kind == "chat" else b'"text":""'
        choice = b',"choices":[{"index":0,' + empty + b',"logprobs":null,"finish_reason":%b}]'
        finish = self._head + choice % orjson.dumps(end.reason)
        verdict = {"service_tier": served_tier(request, end), "rubato": report(request, end)}
        about = b"," + orjson.dumps(verdict)[1:-1]
        if not self._include_usage:
            return finish + about + self._tail(end.output) + DONE
        counts = orjson.dumps(usage(self._form.prompt, end.output))
        last = self._head + b',"choices":[]' + about + b',"usage":' + counts + b"}\n\n"
        return finish + self._tail(end.output) + last + DONE

    def _tail(self, output: int) -> bytes:
        if self._every_usage:
            prompt = self._form.prompt
            counts = (prompt, output, prompt + output)
            return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts
        return b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
