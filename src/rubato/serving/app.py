"""The ASGI app of our own server: OpenAI's endpoints over a `Cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rubato.core.interfaces import View
from rubato.fleet.cluster import Cluster
from rubato.frontdoor.admission import ApiRequest
from rubato.frontdoor.errors import ApiError, invalid, no_room
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.slo_fields import Tiers
from rubato.frontdoor.tenants import Tenants
from rubato.serving import intake, openapi, schemas
from rubato.serving.app_state import AppState, WithHeaders, add_door, add_operations, models_page
from rubato.serving.board_pages import add_board

MESSAGE = 32  # characters that a message counts for besides its own: what the chat template does with it
LONG_TEXT = 4096  # bytes; tokenizing more than this would hold up the loop, and all streams, by milliseconds
TOKENIZING = 2  # long texts at a time: each takes a core for as long as a second


class Text(Protocol):
    """A model's tokenizer. longest: bytes of UTF-8 that one token stands for at most."""

    @property
    def longest(self) -> int: ...
    def encode(self, text: str) -> Sequence[int]: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The messages through the model's chat template, ready for an answer. Raises ValueError if it cannot."""
        ...

    def spell(self, id: int) -> bytes:
        """The bytes that a token id stands for, a special token's name included (for logprobs)."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What is served. policy: its scheduler's name. most_tokens: prompt + output that a request may have.
    max_choices: prompts times `n` that one answer may have. tenants: by default keys are not asked for. fair: whether
    the cluster shares itself out between tenants. created_offset: Unix time - clock time. log_lines_dropped: how many
    so far."""

    cluster: Cluster
    text: Text
    model: str
    most_tokens: int
    max_choices: int = 16
    aliases: tuple[str, ...] = ()
    tenants: Tenants = field(default_factory=lambda: Tenants((), Tiers()))
    fair: bool = False
    max_body_bytes: int = 4 << 20
    created_offset: float = 0.0
    log_lines_dropped: Callable[[], int] = int
    policy: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *(alias for alias in self.aliases if alias != self.model))

    @property
    def max_model_len(self) -> int:
        return self.most_tokens

    def views(self) -> list[View]:
        return [host.view() for host in self.cluster.hosts.values()]

    def counted(self) -> tuple[str, ...]:
        return ()  # every replica tells of itself

    def urls(self) -> Mapping[str, str]:
        return {}  # replicas are no servers


class _State(AppState):
    """With what turns texts into prompts."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.service: Service = service
        self.created = int(service.created_offset + service.cluster.clock.now())
        self._tokenizing = asyncio.Semaphore(TOKENIZING)

    async def token_ids(self, body: schemas.AnyCompletion) -> list[tuple[int, ...]]:
        """Of each prompt. Raises ApiError 400 for what does not fit, or the model cannot read."""
        text = self.service.text
        if isinstance(body, schemas.ChatCompletion):
            dialogue = body.dialogue()
            size = sum(len(message["content"].encode()) for message in dialogue)
            self._check_text(size, "messages")
            long = size + MESSAGE * len(dialogue) > LONG_TEXT
            return [await self._encode(text.chat, dialogue, long, "messages")]
        prompts = body.prompts(self.service.most_tokens)
        sizes = [len(prompt.encode()) if isinstance(prompt, str) else 0 for prompt in prompts]
        for at, size in enumerate(sizes):
            self._check_text(size, body.where(at))
        long = sum(sizes) > LONG_TEXT
        return [
            await self._encode(text.encode, prompt, long, body.where(at)) if isinstance(prompt, str) else prompt
            for at, prompt in enumerate(prompts)
        ]

    async def _encode(
        self, encode: Callable[[Any], Sequence[int]], content: Any, long: bool, param: str
    ) -> tuple[int, ...]:
        """Token ids, off the event loop where it takes long. Raises ApiError 400 for what the model cannot read."""
        try:
            if not long:
                return tuple(encode(content))
            async with self._tokenizing:
                return await asyncio.to_thread(lambda: tuple(encode(content)))
        except ValueError as error:
            raise invalid(param, str(error)) from error

    def _check_text(self, size: int, where: str) -> None:
        """Raises ApiError 400 for so many bytes of text that they cannot fit, before they are tokenized."""
        least = -(-size // self.service.text.longest)
        if least >= self.service.most_tokens:
            raise no_room(self.service.most_tokens, f"at least {least}", where)


def create_app(service: Service) -> FastAPI:
    """The app. The cluster is started and ended by the caller."""
    app = FastAPI(title="Rubato", summary="LLM serving to stated service-level objectives", redoc_url=None)
    state = _State(service)
    app.state.draining = False  # set when no request is taken any more: /health says so
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
        return models_page({"object": "list", "data": [_model(service, name, state.created) for name in service.names]})

    @app.get("/v1/models/{name:path}", responses=openapi.errors(400, 401, 404))
    async def model(http: Request, name: str) -> Response:
        """One of them."""
        state.door.identify(http.headers)
        _check_model(service, name)
        return models_page(_model(service, name, state.created))


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
    limits = intake.output_limits(body, prompts, service.most_tokens)
    asked = ApiRequest(http.scope["path"], http.headers, fields, arrival, [len(p) for p in prompts], has_stages=True)
    admitted = door.admit(asked, tenant)
    requests = intake.requests(
        body, prompts, admitted.granted, arrival=arrival, tenant=tenant.name, limits=limits, session=admitted.session
    )
    created = int(service.created_offset + arrival)
    offers = Offers(door, service.cluster, admitted, requests)
    reply = intake.answer(body, requests, offers=offers, spell=service.text.spell, created=created)
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
        "max_model_len": service.most_tokens,
    }
