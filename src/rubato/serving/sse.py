"""Encodes responses: whole ones, or server-sent events made from templates.

With 32 sequences every step makes 32 chunks, so a chunk is concatenated from parts that are encoded once per request;
only its text and its log probabilities go through a JSON encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from rubato.core.events import Finished
from rubato.core.plan import Logprob
from rubato.core.request import Request
from rubato.frontdoor.choices import first_choices
from rubato.frontdoor.verdict import report, served_tier, usage
from rubato.serving import logprobs

DONE = b"data: [DONE]\n\n"
NO_BUFFERING_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))  # nginx would hold chunks back


def forbid_buffering(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a response, with NO_BUFFERING_HEADERS added to an event stream."""
    present = {name.lower(): value.lower() for name, value in headers}
    if not present.get(b"content-type", b"").startswith(b"text/event-stream"):
        return headers
    return [*headers, *[header for header in NO_BUFFERING_HEADERS if header[0] not in present]]


@dataclass(frozen=True, slots=True)
class Format:
    """Holds the parts of a response that do not depend on its tokens.

    Args:
        requests: one for each choice of each prompt; choices of a prompt differ in id, seed and output limit only.
        created: Unix seconds.
        token_bytes: bytes of a token id.
    """

    id: str
    kind: Literal["chat", "text"]
    requests: tuple[Request, ...]
    model: str
    created: int
    token_bytes: logprobs.TokenBytes

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def prompt(self) -> int:
        """Returns the prompt tokens; each prompt counts once for all of its choices."""
        return sum(self.requests[at].prompt for at in first_choices(self.requests))

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Holds the text of one choice, or its new part."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


def whole(form: Format, texts: Sequence[TextPiece], ends: Sequence[Finished], cached: int) -> bytes:
    """Returns the body of a response that does not stream.

    Args:
        form: the parts that do not depend on tokens.
        texts: the text of each choice.
        ends: the end of each choice.
        cached: prompt tokens found in the prefix cache.
    """
    choices = []
    for index, (one, end) in enumerate(zip(texts, ends, strict=True)):
        content: dict[str, Any] = {"text": one.text}
        if form.kind == "chat":
            content = {"message": {"role": "assistant", "content": one.text, "refusal": None}}
        choices.append({"index": index, **content, "logprobs": _logprobs(form, one), "finish_reason": end.reason})
    return orjson.dumps(
        {
            "id": form.id,
            "object": "chat.completion" if form.kind == "chat" else "text_completion",
            "created": form.created,
            "model": form.model,
            "choices": choices,
            "usage": usage(form.prompt, sum(end.output for end in ends), cached),
            "service_tier": served_tier(form.request, ends),
            "system_fingerprint": None,
            "rubato": report(form.request, ends),
        }
    )


def _logprobs(form: Format, piece: TextPiece) -> dict[str, Any] | None:
    if not form.wants_logprobs:
        return None
    if form.kind == "chat":
        return logprobs.chat(form.token_bytes, piece.logprobs)
    return logprobs.Offsets(form.token_bytes).add(piece.logprobs)


class Chunks:
    """Encodes the events of one streamed response.

    Args:
        include_usage: end with a chunk that has `usage` and no choice (OpenAI).
        every_usage: put the choice's token counts so far into every chunk (vLLM's `continuous_usage_stats`), so that a
            client knows how many tokens a chunk brings.
    """

    __slots__ = ("_after", "_before", "_every_usage", "_form", "_head", "_include_usage", "_offsets", "_role")

    def __init__(self, form: Format, *, include_usage: bool = False, every_usage: bool = False) -> None:
        chat = form.kind == "chat"
        name = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": form.id, "object": name, "created": form.created, "model": form.model}
        self._head = b"data: " + orjson.dumps(head)[:-1]
        heads = [self._head + b',"choices":[{"index":%d,' % index for index in range(len(form.requests))]
        self._before = [first + (b'"delta":{"content":' if chat else b'"text":') for first in heads]
        self._after = (b"}" if chat else b"") + b',"logprobs":'
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        self._role = [first + role for first in heads] if chat else []
        self._offsets = [] if chat else [logprobs.Offsets(form.token_bytes) for _ in heads]
        self._form = form
        self._include_usage = include_usage
        self._every_usage = every_usage

    def begin(self) -> bytes:
        """Returns the chunks before the first token: the roles, in a chat."""
        return b"".join(role + self._tail(index, 0) for index, role in enumerate(self._role))

    def tokens(self, index: int, new: TextPiece, output: int) -> bytes:
        """Returns the chunk of new tokens of choice `index`.

        Args:
            new: the new text, which may be empty (half a character).
            output: tokens of this choice so far.
        """
        likely = b"null"
        if self._form.wants_logprobs:
            found = new.logprobs
            likely = orjson.dumps(
                self._offsets[index].add(found) if self._offsets else logprobs.chat(self._form.token_bytes, found)
            )
        middle = self._before[index] + orjson.dumps(new.text) + self._after + likely
        return middle + b',"finish_reason":null}]' + self._tail(index, output)

    def end_choice(self, index: int, end: Finished) -> bytes:
        """Returns the finish reason of a choice while others go on."""
        return self._finish(index, end) + self._tail(index, end.output)

    def end(self, index: int, ends: Sequence[Finished], cached: int) -> bytes:
        """Returns the finish reason of the last choice to end, then the usage if asked for; the last chunk has the tier
        served and the verdict."""
        request, output = self._form.request, ends[index].output
        verdict = {"service_tier": served_tier(request, ends), "rubato": report(request, ends)}
        about = b"," + orjson.dumps(verdict)[1:-1]
        finish = self._finish(index, ends[index])
        if not self._include_usage:
            return finish + about + self._tail(index, output) + DONE
        counts = orjson.dumps(usage(self._form.prompt, sum(end.output for end in ends), cached))
        last = self._head + b',"choices":[]' + about + b',"usage":' + counts + b"}\n\n"
        return finish + self._tail(index, output) + last + DONE

    def _finish(self, index: int, end: Finished) -> bytes:
        empty = b'"delta":{}' if self._form.kind == "chat" else b'"text":""'
        choice = b',"choices":[{"index":%d,' % index + empty + b',"logprobs":null,"finish_reason":%b}]'
        return self._head + choice % orjson.dumps(end.reason)

    def _tail(self, index: int, output: int) -> bytes:
        if self._every_usage:
            prompt = self._form.requests[index].prompt
            counts = (prompt, output, prompt + output)
            return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts
        return b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
