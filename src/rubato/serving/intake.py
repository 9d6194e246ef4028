"""Makes requests for the cluster, and the response that waits for them, from a parsed body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from rubato.core.request import Request
from rubato.frontdoor import choices
from rubato.frontdoor.errors import invalid, no_room, too_long
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.slo_fields import GrantedSLO
from rubato.serving import schemas, sse
from rubato.serving.response import CompletionResponse


def requests(
    body: schemas.AnyCompletion,
    prompts: Sequence[tuple[int, ...]],
    granted: GrantedSLO,
    *,
    arrival: float,
    tenant: str,
    limits: Sequence[int],
    session: str = "",
) -> tuple[Request, ...]:
    """Make the requests of a body, one for each choice, with the granted SLO.

    Args:
        prompts: token ids of each prompt.
        arrival: seconds of the cluster's clock.
        limits: output tokens for each prompt (`output_limits`).
        session: as `Request.session`.
    """
    id = _new_id(body.kind)
    offers = [
        Request(
            id=id,
            stages=granted.stages(prompt),
            arrival=arrival,
            tier=granted.tier,
            tenant=tenant,
            sampling=body.sampling(limit),
            on_decline=granted.on_decline,
            session=session,
        )
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    return choices.spread_choices(offers, body.choices)


def _new_id(kind: schemas.Kind) -> str:
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid4().hex}"


def answer(
    body: schemas.AnyCompletion,
    requests: tuple[Request, ...],
    *,
    offers: Offers,
    token_bytes: Callable[[int], bytes],
    created: int,
) -> CompletionResponse:
    """The response to a body; it offers `requests` when it is sent.

    Args:
        token_bytes: bytes of a token id.
        created: Unix seconds.
    """
    id = choices.response_id(requests)
    form = sse.Format(id, body.kind, requests, body.model, created, token_bytes)
    chunks = None
    if body.stream:
        options = body.stream_options or schemas.StreamOptions()
        chunks = sse.Chunks(
            form, include_usage=bool(options.include_usage), every_usage=bool(options.continuous_usage_stats)
        )
    return CompletionResponse(offers, form, chunks)


def output_limits(body: schemas.AnyCompletion, prompts: Sequence[Sequence[int]], most: int) -> list[int]:
    """Output tokens for each prompt. most: prompt and output tokens of a request. Raises ApiError 400 that names the
    prompt which leaves no room."""
    return [_output_limit(most, len(prompt), body, body.where(at)) for at, prompt in enumerate(prompts)]


def _output_limit(most: int, prompt: int, body: schemas.AnyCompletion, where: str) -> int:
    """Output tokens of one request. Raises ApiError 400 where prompt and output exceed the model's context."""
    name, wanted = body.limit
    if prompt == 0:
        raise invalid(where, "there is no token in it.")
    if prompt >= most:
        raise no_room(most, str(prompt), where)
    if wanted is not None and prompt + wanted > most:
        if name in body.model_fields_set:
            raise too_long(most, f"{prompt} of {where} and {wanted} of output ({name})", name)
        wanted = None  # it is a default, and there is less room
    return wanted or most - prompt
