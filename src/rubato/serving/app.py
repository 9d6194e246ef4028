"""The ASGI app of our own server: OpenAI's endpoints over a `Cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rubato.frontdoor.admission import ApiRequest
from rubato.frontdoor.errors import ApiError, invalid, no_room
from rubato.frontdoor.offers import Offers
from rubato.serving import intake, openapi, schemas
from rubato.serving.app_state import AppService, AppState, WithHeaders, add_door, add_operations, models_response
from rubato.serving.board_pages import add_board

MESSAGE_CHARACTERS = 32  # that the chat template adds to each message, about
LONG_TEXT_BYTES = 4096  # tokenizing more would hold up the event loop, and all streams, by milliseconds
MAX_TOKENIZING_TEXTS = 2  # long texts at a time; each takes a core for up to a second


class Tokenizer(Protocol):
    """A model's tokenizer."""

    @property
    def max_token_bytes(self) -> int:
        """Bytes of UTF-8 that one token stands for at most."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The token ids of the messages in the model's chat template. Raises ValueError for an invalid dialogue."""
        ...

    def bytes_of_token(self, id: int) -> bytes:
        """The bytes that a token id stands for; the name of a special token (for logprobs)."""
        ...


@dataclass(frozen=True, slots=True)
class Service(AppService):
    """Settings and objects of our own server.

    Args:
        text: the model's tokenizer.
        aliases: further names of the model.
    """

    text: Tokenizer
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *(alias for alias in self.aliases if alias != self.model))


class _State(AppState):
    """An app's state with the tokenization of prompts."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.service: Service = service
        self.created = int(service.created_offset + service.cluster.clock.now())
        self._tokenizing = asyncio.Semaphore(MAX_TOKENIZING_TEXTS)

    async def token_ids(self, body: schemas.AnyCompletion) -> list[tuple[int, ...]]:
        """The token ids of each prompt. Raises ApiError 400 for a prompt that is too long or cannot be tokenized."""
        text = self.service.text
        if isinstance(body, schemas.ChatCompletion):
            dialogue = body.dialogue()
            size = sum(len(message["content"].encode()) for message in dialogue)
            self._check_text(size, "messages")
            long = size + MESSAGE_CHARACTERS * len(dialogue) > LONG_TEXT_BYTES
            return [await self._encode(text.chat, dialogue, long, "messages")]
        prompts = body.prompts(self.service.max_model_len)
        sizes = [len(prompt.encode()) if isinstance(prompt, str) else 0 for prompt in prompts]
        for at, size in enumerate(sizes):
            self._check_text(size, body.where(at))
        long = sum(sizes) > LONG_TEXT_BYTES
        return [
            await self._encode(text.encode, prompt, long, body.where(at)) if isinstance(prompt, str) else prompt
            for at, prompt in enumerate(prompts)
        ]

    async def _encode(
        self, encode: Callable[[Any], Sequence[int]], content: Any, long: bool, param: str
    ) -> tuple[int, ...]:
        """The token ids of one text; a `long` one is tokenized in a thread. Raises ApiError 400 if it cannot be."""
        try:
            if not long:
                return tuple(encode(content))
            async with self._tokenizing:
                return await asyncio.to_thread(lambda: tuple(encode(content)))
        except ValueError as error:
            raise invalid(param, str(error)) from error

    def _check_text(self, size: int, where: str) -> None:
        """Raises ApiError 400, before tokenizing, for a text whose bytes cannot fit the model's context."""
        least = -(-size // self.service.text.max_token_bytes)
        if least >= self.service.max_model_len:
            raise no_room(self.service.max_model_len, f"at least {least}", where)


def create_app(service: Service) -> FastAPI:
    """Make the app; the caller starts and closes the cluster."""
    app = FastAPI(title="Rubato", summary="LLM serving to stated service-level objectives", redoc_url=None)
    state = _State(service)
    app.state.draining = False  # set once new requests are refused; /health reports it
    add_door(app, state.door)
    _add_completions(app, state)
    _add_models(app, state)
    add_operations(app, state)
    add_board(app, state)
    openapi.complete(app, keys=state.tenants.configured)
    return app


def _add_completions(app: FastAPI, state: _State) -> None:
    @app.post("/v1/chat/completions", **openapi.completion(schemas.ChatCompletion))
    async def chat(http: Request) -> Response:
        """OpenAI's chat completion; an SLO may be given as headers, as `slo` in the body, or by `service_tier`."""
        return await _complete(state, http, schemas.ChatCompletion)

    @app.post("/v1/completions", **openapi.completion(schemas.TextCompletion))
    async def completion(http: Request) -> Response:
        """OpenAI's text completion, of a string or of token ids, or of a list of one of them."""
        return await _complete(state, http, schemas.TextCompletion)


def _add_models(app: FastAPI, state: _State) -> None:
    service = state.service

    @app.get("/v1/models", responses=openapi.errors(401))
    async def models(http: Request) -> Response:
        """The names under which the model may be asked for."""
        state.door.identify(http.headers)
        return models_response(
            {"object": "list", "data": [_model(service, name, state.created) for name in service.names]}
        )

    @app.get("/v1/models/{name:path}", responses=openapi.errors(400, 401, 404))
    async def model(http: Request, name: str) -> Response:
        """One model."""
        state.door.identify(http.headers)
        _check_model(service, name)
        return models_response(_model(service, name, state.created))


# --------------------------------------------------------------------------- from HTTP to a request


async def _complete(state: _State, http: Request, schema: type[schemas.AnyCompletion]) -> Response:
    service, door = state.service, state.door
    arrival = state.arrival(http)
    tenant = state.enter(http)
    fields = await state.read(http)
    body = schemas.parse(schema, fields.raw)
    _check_model(service, body.model)
    http.state.model = body.model
    door.check_choices(tenant, body.count, body.choices)
    prompts = await state.token_ids(body)
    limits = intake.output_limits(body, prompts, service.max_model_len)
    asked = ApiRequest(http.scope["path"], http.headers, fields, arrival, [len(p) for p in prompts], has_stages=True)
    admitted = door.admit(asked, tenant)
    requests = intake.requests(
        body, prompts, admitted.granted, arrival=arrival, tenant=tenant.name, limits=limits, session=admitted.session
    )
    created = int(service.created_offset + arrival)
    offers = Offers(door, service.cluster, admitted, requests)
    reply = intake.answer(body, requests, offers=offers, token_bytes=service.text.bytes_of_token, created=created)
    return WithHeaders(reply, lambda: door.response_headers(admitted))


def _check_model(service: Service, name: str) -> None:
    if name not in service.names:
        known = ", ".join(service.names)
        message = f"The model {name[:256]!r} does not exist; this server serves {known}."
        raise ApiError(404, message, param="model", code="model_not_found")


# --------------------------------------------------------------------------- answers


def _model(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rubato",
        "root": service.model,
        "max_model_len": service.max_model_len,
    }
