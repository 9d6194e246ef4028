"""The ASGI app of our own server: OpenAI's endpoints over a `Cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from rubato.core.request import Request
from rubato.frontdoor.admission import AdmittedRequest, ApiRequest
from rubato.frontdoor.choices import response_id, spread_choices
from rubato.frontdoor.errors import ApiError, invalid, no_room, too_long
from rubato.frontdoor.headers import new_id
from rubato.frontdoor.offers import Offers
from rubato.serving import openapi, schemas, sse
from rubato.serving.app_state import AppService, AppState, add_door, add_operations, json_response
from rubato.serving.board_pages import add_board
from rubato.serving.response import CompletionResponse

MESSAGE_CHARACTERS = 32  # that the chat template adds to each message, about
LONG_TEXT_BYTES = 4096  # tokenizing more would hold up the event loop, and all streams, by milliseconds
MAX_TOKENIZING_TEXTS = 2  # long texts at a time; each takes a core for up to a second


class Tokenizer(Protocol):
    """Encodes prompts and decodes tokens as the model does."""

    @property
    def max_token_bytes(self) -> int:
        """Returns how many bytes of UTF-8 one token stands for at most."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Returns the token ids of messages in the model's chat template. Raises ValueError if it refuses them."""
        ...

    def bytes_of_token(self, id: int) -> bytes:
        """Returns the bytes that a token id stands for; for a special token its name (for logprobs)."""
        ...


@dataclass(frozen=True, slots=True)
class Service(AppService):
    """Holds the settings and objects of our own server.

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
    """Adds the tokenization of prompts to an app's state."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.service: Service = service
        self.created = int(service.created_offset + service.cluster.clock.now())
        self._tokenizing = asyncio.Semaphore(MAX_TOKENIZING_TEXTS)

    async def token_ids(self, body: schemas.AnyCompletion) -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt. Raises ApiError 400 where one is too long or cannot be tokenized."""
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
        """Returns the token ids of one text; a `long` one is tokenized in a thread. Raises ApiError 400."""
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
    """Makes the app; the caller starts and closes the cluster."""
    app = FastAPI(title="Rubato", summary="LLM serving to stated service-level objectives", redoc_url=None)
    state = _State(service)
    app.state.is_draining = False  # set once new requests are refused; /health reports it
    add_door(app, state.door)
    _add_completions(app, state)
    _add_models(app, state)
    add_operations(app, state)
    add_board(app, state)
    openapi.complete(app, keys=state.tenants.configured)
    return app


def _add_completions(app: FastAPI, state: _State) -> None:
    @app.post("/v1/chat/completions", **openapi.completion(schemas.ChatCompletion))
    async def chat(http: HttpRequest) -> Response:
        """OpenAI's chat completion; an SLO may be given as headers, as `slo` in the body, or by `service_tier`."""
        return await _complete(state, http, schemas.ChatCompletion)

    @app.post("/v1/completions", **openapi.completion(schemas.TextCompletion))
    async def completion(http: HttpRequest) -> Response:
        """OpenAI's text completion, of a string or of token ids, or of a list of one of them."""
        return await _complete(state, http, schemas.TextCompletion)


def _add_models(app: FastAPI, state: _State) -> None:
    service = state.service

    @app.get("/v1/models", responses=openapi.errors(401))
    async def models(http: HttpRequest) -> Response:
        """The names under which the model may be asked for."""
        state.door.identify(http.headers)
        return json_response(
            {"object": "list", "data": [_model(service, name, state.created) for name in service.names]}
        )

    @app.get("/v1/models/{name:path}", responses=openapi.errors(400, 401, 404))
    async def model(http: HttpRequest, name: str) -> Response:
        """One model."""
        state.door.identify(http.headers)
        _check_model(service, name)
        return json_response(_model(service, name, state.created))


# --------------------------------------------------------------------------- from HTTP to a request


async def _complete(state: _State, http: HttpRequest, schema: type[schemas.AnyCompletion]) -> Response:
    service, door = state.service, state.door
    arrival = state.arrival(http)
    tenant = state.enter(http)
    fields = await state.read(http)
    body = schemas.parse(schema, fields.raw)
    _check_model(service, body.model)
    http.state.model = body.model
    door.check_choices(tenant, body.count, body.choices)
    prompts = await state.token_ids(body)
    limits = [_output_limit(service.max_model_len, len(prompt), body, at) for at, prompt in enumerate(prompts)]
    asked = ApiRequest(http.scope["path"], http.headers, fields, arrival, [len(p) for p in prompts], has_stages=True)
    admitted = door.admit(asked, tenant)
    requests = _requests(body, prompts, limits, admitted, arrival)
    created = int(service.created_offset + arrival)
    form = sse.Format(response_id(requests), body.kind, requests, body.model, created, service.text.bytes_of_token)
    offers, chunks = Offers(door, service.cluster, admitted, requests), None
    if body.stream:
        options = body.stream_options or schemas.StreamOptions()
        usage = bool(options.include_usage), bool(options.continuous_usage_stats)
        chunks = sse.Chunks(form, include_usage=usage[0], every_usage=usage[1])
    # The requests are offered to the cluster when Starlette sends the response, so that a client that leaves cancels.
    return CompletionResponse(offers, form, chunks, lambda: door.response_headers(admitted))


def _requests(
    body: schemas.AnyCompletion, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], admitted: AdmittedRequest,
    arrival: float,
) -> tuple[Request, ...]:  # fmt: skip
    """Returns a request for each choice of a body, all choices of the first prompt first.

    Args:
        body: of the API request.
        prompts: token ids of each prompt.
        limits: output tokens of a choice, for each prompt.
        admitted: the API request as admitted.
        arrival: seconds of the cluster's clock.
    """
    id, granted = new_id(admitted.path, "", ()), admitted.granted
    offers = [
        Request(
            id, granted.stages(prompt), arrival, tier=granted.tier, tenant=admitted.tenant.name,
            sampling=body.sampling(limit), on_decline=granted.on_decline, session=admitted.session,
        )
        for prompt, limit in zip(prompts, limits, strict=True)
    ]  # fmt: skip
    return spread_choices(offers, body.choices)


def _output_limit(max_model_len: int, prompt: int, body: schemas.AnyCompletion, at: int) -> int:
    """Returns how many output tokens a choice of one prompt may have.

    Args:
        max_model_len: tokens of prompt and output of a request.
        prompt: tokens of the prompt.
        body: of the API request.
        at: number of the prompt in the body.

    Raises:
        ApiError: 400 where prompt and output exceed the model's context.
    """
    (name, limit), where = body.limit, body.where(at)
    if prompt == 0:
        raise invalid(where, "there is no token in it.")
    if prompt >= max_model_len:
        raise no_room(max_model_len, str(prompt), where)
    if limit is not None and prompt + limit > max_model_len:
        if name in body.model_fields_set:
            raise too_long(max_model_len, f"{prompt} of {where} and {limit} of output ({name})", name)
        limit = None  # it is a default, and there is less room
    return limit or max_model_len - prompt


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
