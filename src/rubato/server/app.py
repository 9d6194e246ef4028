"""The ASGI app: OpenAI's endpoints over a `Cluster`, `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rubato.cluster import Cluster
from rubato.interfaces import View
from rubato.server import schemas, slo_input, sse
from rubato.server.errors import ApiError
from rubato.server.live import Answer
from rubato.server.prometheus import Metrics
from rubato.server.slo_input import Tiers
from rubato.types import Request as Offer

_REFERENCE = "#/components/schemas/{model}"
LONG_TEXT = 16_384  # characters; tokenizing more than this would hold up the loop, and all streams, by milliseconds


class Text(Protocol):
    """A model's tokenizer."""

    def encode(self, text: str) -> Sequence[int]: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The messages through the model's chat template, ready for an answer. Raises ValueError if it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What is served. most_tokens: prompt + output that a request may have. created_offset: Unix time - clock time."""

    cluster: Cluster
    text: Text
    model: str
    most_tokens: int
    aliases: tuple[str, ...] = ()
    tiers: Tiers = field(default_factory=Tiers)
    max_body_bytes: int = 4 << 20
    created_offset: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *(alias for alias in self.aliases if alias != self.model))

    def views(self) -> list[View]:
        return [host.view() for host in self.cluster.hosts.values()]


def create_app(service: Service) -> FastAPI:
    """The app. The cluster is started and ended by the caller."""
    app = FastAPI(title="Rubato", summary="LLM serving to stated service-level objectives", redoc_url=None)
    app.state.draining = False  # set when no request is taken any more: /health says so
    metrics = Metrics(service.names[0], service.views, lambda: service.cluster.in_flight)
    service.cluster.listen(metrics)
    _add_error_shapes(app)

    @app.post("/v1/chat/completions", **_documented(schemas.ChatCompletion))
    async def chat(http: Request) -> Response:
        """OpenAI's chat completion; an SLO may be given as headers, as `slo` in the body, or by `service_tier`."""
        arrival = service.cluster.clock.now()
        body = schemas.parse(schemas.ChatCompletion, await _read(http, service.max_body_bytes))
        _check_model(service, body.model)
        dialogue = body.dialogue()
        long = sum(len(message["content"]) for message in dialogue) > LONG_TEXT
        prompt = await _encode(service.text.chat, dialogue, long, "messages")
        return _answer(service, http, arrival, body, prompt)

    @app.post("/v1/completions", **_documented(schemas.TextCompletion))
    async def completion(http: Request) -> Response:
        """OpenAI's text completion, of a string or of token ids."""
        arrival = service.cluster.clock.now()
        body = schemas.parse(schemas.TextCompletion, await _read(http, service.max_body_bytes))
        _check_model(service, body.model)
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = await _encode(service.text.encode, prompt, len(prompt) > LONG_TEXT, "prompt")
        return _answer(service, http, arrival, body, prompt)

    created = int(service.created_offset + service.cluster.clock.now())

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name, created) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(service, name)
        return _json(_model(service, name, created))

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken, else 503."""
        if service.cluster.dead.is_set():
            return _json({"status": "dead", "error": str(service.cluster.error)}, 503)
        return _json({"status": "draining"}, 503) if app.state.draining else _json({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _document_parts(app)
    return app


# --------------------------------------------------------------------------- from HTTP to a request


async def _read(http: Request, most: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is known to be longer than `most` bytes."""
    error = ApiError(413, f"The body is larger than {most} bytes.", code="request_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise error
    raw = bytearray()
    async for part in http.stream():
        raw += part
        if len(raw) > most:
            raise error
    return bytes(raw)


async def _encode(encode: Callable[[Any], Sequence[int]], content: Any, long: bool, param: str) -> tuple[int, ...]:
    """Token ids, off the event loop where it takes long. Raises ApiError 400 for what the model cannot read."""
    try:
        ids = await asyncio.to_thread(encode, content) if long else encode(content)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from error
    return tuple(ids)


def _check_model(service: Service, name: str) -> None:
    if name not in service.names:
        known = ", ".join(service.names)
        message = f"The model {name!r} does not exist; this server serves {known}."
        raise ApiError(404, message, param="model", code="model_not_found")


def _answer(
    service: Service,
    http: Request,
    arrival: float,
    body: schemas.ChatCompletion | schemas.TextCompletion,
    prompt: tuple[int, ...],
) -> Answer:
    chat = isinstance(body, schemas.ChatCompletion)
    where = "messages" if chat else "prompt"
    tier = service.tiers.resolve(body.service_tier)
    offer = Offer(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
        stages=slo_input.stages(prompt, http.headers, body.slo, tier),
        arrival=arrival,
        tier=tier.name,
        tenant=body.user or "default",
        sampling=body.sampling(_room(service.most_tokens, len(prompt), body.limit, where)),
        on_decline=(body.slo and body.slo.on_decline) or tier.on_decline,
    )
    form = sse.Format("chat" if chat else "text", offer, body.model, int(service.created_offset + arrival))
    chunks = None
    if body.stream:
        options = body.stream_options or schemas.StreamOptions()
        chunks = sse.Chunks(
            form, include_usage=bool(options.include_usage), every_usage=bool(options.continuous_usage_stats)
        )
    return Answer(service.cluster, form, chunks)


def _room(most: int, prompt: int, wanted: int | None, where: str) -> int:
    """The output tokens a request gets. Raises ApiError 400 when prompt and output are beyond the model's context."""
    if prompt == 0:
        raise ApiError(400, f"{where}: there is no token in it.", param=where, code="invalid_value")
    if prompt + (wanted or 1) > most:
        asked = f" and {wanted} of output" if wanted else ", which leaves no room for output"
        raise ApiError(
            400,
            f"This model's context is {most} tokens; you asked for {prompt} of {where}{asked}.",
            param=where,
            code="context_length_exceeded",
        )
    return wanted or most - prompt


# --------------------------------------------------------------------------- answers


def _model(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rubato",
        "root": service.model,
        "max_model_len": service.most_tokens,
    }


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _documented(schema: type[schemas.Completion]) -> dict[str, Any]:
    """Bodies are read by hand, for OpenAI's error shapes and speed; this puts them into /docs all the same."""
    of = schema.model_json_schema(ref_template=_REFERENCE)
    of.pop("$defs")
    body = {"required": True, "content": {"application/json": {"schema": of}}}
    return {"openapi_extra": {"requestBody": body}, "response_model": None}


def _document_parts(app: FastAPI) -> None:
    """Where `_documented` bodies refer to."""
    parts = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    for schema in (schemas.ChatCompletion, schemas.TextCompletion):
        parts.update(schema.model_json_schema(ref_template=_REFERENCE)["$defs"])


def _add_error_shapes(app: FastAPI) -> None:
    async def api_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{http.method} {http.url.path}"
        return ApiError(
            error.status_code, f"{where}: {error.detail}.", headers=tuple((error.headers or {}).items())
        ).response()

    async def invalid(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{param}: {first['msg']}.", param=param, code="invalid_value").response()

    async def gone(http: Request, error: Exception) -> Response:
        return ApiError(400, "The client went away before its body was read.").response()

    async def unexpected(http: Request, error: Exception) -> Response:
        return ApiError(500, f"Internal error: {type(error).__name__}.", kind="server_error").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)
