"""Stand-ins of vLLM's server that refuse what vLLM refuses, where those of tests/stubs take right requests alone."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rubato.frontdoor.body_fields import BOM
from rubato.frontdoor.paths import GENERATE
from tests.stubs.vllm_app import VLLM
from tests.stubs.vllm_server import MemoryReply, StubServer, memory

BY_SERVER = "x-stub"  # a header of each of their responses


class _Body(BaseModel):
    """What vLLM reads of a body, as leniently, so far as its stand-ins look at it."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    input: str | None = None
    request_id: str | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


def _as_vllm_reads(path: str, raw: bytes) -> bytes:
    """A body that the stand-ins can read: several prompts are choices of the first. Raises ValueError for one that
    vLLM refuses."""
    body = _Body.model_validate_json(raw.removeprefix(BOM))
    needed = body.prompt if path.endswith("/v1/completions") else body.input if "responses" in path else body.messages
    if not needed:
        raise ValueError("there is no prompt")
    if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
        body.n, body.prompt = (body.n or 1) * len(body.prompt), body.prompt[0]
    return body.model_dump_json(exclude_none=True).encode()


class StrictServer(StubServer):
    """Refuses what vLLM refuses, and shows that a response is its own."""

    async def open(self, method: str, path: str, headers: Any, body: bytes, **more: Any) -> MemoryReply:
        try:
            if method == "POST" and path.partition("?")[0] in GENERATE:
                body = _as_vllm_reads(path.partition("?")[0], body)
            reply = await super().open(method, path, headers, body, **more)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reply = memory(self.page(400, {"error": {"message": str(error)}}))
        reply.headers.append((BY_SERVER, "1"))
        return reply

    def _request(self, id: str, prompt: tuple[int, ...], most: int, contract: Any) -> Any:
        if not 0 < len(prompt) <= self.core.limits.max_model_len - most:
            raise ValueError("prompt and output are longer than the model's context")
        return super()._request(id, prompt, most, contract)


class StrictVLLM(VLLM):
    """The same, inside vLLM."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["path"] in GENERATE and scope["method"] == "POST":
            body = (await receive())["body"]
            try:
                body = _as_vllm_reads(scope["path"], body)
            except ValueError as error:
                head = [(b"content-type", b"application/json"), (BY_SERVER.encode(), b"1")]
                await send({"type": "http.response.start", "status": 400, "headers": head})
                return await send({"type": "http.response.body", "body": json.dumps({"error": str(error)}).encode()})

        async def whole() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (BY_SERVER.encode(), b"1")]
            await send(message)

        await super().__call__(scope, whole, marked)
        return None
