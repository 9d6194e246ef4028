"""One API request that a gateway passes on to a server: what goes there, and where what comes back goes."""

from __future__ import annotations

from typing import Protocol

import orjson

from rubato.core.request import Progress
from rubato.fleet.upstream import Headers


class CannotContinueError(Exception):
    """What was streamed so far cannot be gone on from elsewhere; the message says why."""


class Call(Protocol):
    """tries: how often it was sent to a server. answer: the id that the server gives its response, another for each
    try, so that what is left of one is not taken for the next. ids: of the requests that it makes, a choice of a prompt
    each; choices: of one prompt. target: its path with the query. begun: the client has had something of the response;
    streamed: so many tokens, of one that has a single choice."""

    tries: int
    ids: tuple[str, ...]
    choices: int
    path: str
    target: str
    streams: bool
    begun: bool
    streamed: int

    @property
    def answer(self) -> str: ...

    def sent(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        """Headers and body for a server. progress: what has come of it elsewhere, of a response that has begun; ids:
        its text in tokens, empty where no server says that; None: it will be asked. Raises CannotContinueError."""
        ...

    def so_far(self) -> str:
        """The text of a response that has begun. Raises CannotContinueError."""
        ...

    async def begin(self, status: int, headers: Headers) -> None:
        """The head of a stream."""
        ...

    async def write(self, data: bytes) -> None:
        """Whole chunks of it."""
        ...

    async def end(self, rest: bytes) -> None:
        """Its last chunks; what became of the requests is known."""
        ...

    def counted(self, prompt: int) -> None:
        """The prompt has so many tokens."""
        ...

    def breaks(self, why: str) -> None:
        """No more comes of it, though its requests have ended."""
        ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A response that does not stream, or an error that is the client's."""
        ...


def name_of_try(id: str, tries: int) -> str:
    """What a server's reports call a request, or name its response, of the so-manieth try."""
    return id if tries <= 1 else f"{id}-t{tries}"


NAMES = (("prompt", "input"), ("completion", "output"))  # OpenAI's, and those of responses and messages
CACHED = ("cache_creation_input_tokens", "cache_read_input_tokens")  # of a message's prompt, beside its `input_tokens`

Calls = dict[str, Call]  # by the id of each of its requests


def usage_of(body: bytes) -> tuple[int, int]:
    """Tokens of prompt and output that a response, or the event of one, counts; 0 where it does not."""
    try:
        found = orjson.loads(body)
        usage = found.get("usage") or (found.get("response") or {}).get("usage") or {}
        prompt, output = (usage.get(f"{a}_tokens") or usage.get(f"{b}_tokens") or 0 for a, b in NAMES)
        prompt += sum(usage.get(name) or 0 for name in CACHED)
        return max(0, int(prompt)), max(0, int(output))
    except (ValueError, TypeError, AttributeError):
        return 0, 0
