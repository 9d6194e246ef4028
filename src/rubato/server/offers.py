"""From a parsed body to what is offered to the cluster, and to the answer that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal
from uuid import uuid4

from rubato.server import schemas, slo_input, sse
from rubato.server.errors import ApiError
from rubato.server.live import Answer, Intake
from rubato.server.slo_input import Tier
from rubato.types import Request


def answer(
    body: schemas.ChatCompletion | schemas.TextCompletion,
    prompt: tuple[int, ...],
    headers: Mapping[str, str],
    *,
    arrival: float,
    tenant: str,
    tier: Tier,
    cluster: Intake,
    spell: Callable[[int], bytes],
    most_tokens: int,
    most_choices: int,
    created_offset: float,
) -> Answer:
    """What answers a body whose prompt is `prompt`; it offers the request when it is sent.

    spell: a token id's bytes. most_tokens: prompt + output of a request. most_choices: `n` at most. created_offset:
    Unix time - clock time.
    Raises ApiError 400 that names what cannot be had.
    """
    chat = isinstance(body, schemas.ChatCompletion)
    where = "messages" if chat else "prompt"
    if body.choices > most_choices:
        message = f"n: {body.choices} choices asked for; this server gives at most {most_choices}."
        raise ApiError(400, message, param="n", code="invalid_value")
    id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
    offer = Request(
        id=id,
        stages=slo_input.stages(prompt, headers, body.slo, tier),
        arrival=arrival,
        tier=tier.name,
        tenant=tenant,
        sampling=body.sampling(_room(most_tokens, len(prompt), body, where)),
        on_decline=(body.slo and body.slo.on_decline) or tier.on_decline,
    )
    kind: Literal["chat", "text"] = "chat" if chat else "text"
    form = sse.Format(id, kind, _choices(offer, body.choices), body.model, int(created_offset + arrival), spell)
    chunks = None
    if body.stream:
        options = body.stream_options or schemas.StreamOptions()
        chunks = sse.Chunks(
            form, include_usage=bool(options.include_usage), every_usage=bool(options.continuous_usage_stats)
        )
    return Answer(cluster, form, chunks)


def _choices(offer: Request, n: int) -> tuple[Request, ...]:
    """One request a choice; together they are a group, which shares the prompt's KV. A seed counts up from the first
    choice's, else they would all be the same."""
    if n == 1:
        return (offer,)
    seed = offer.sampling.seed
    return tuple(
        replace(
            offer,
            id=f"{offer.id}-{index}",
            group=offer.id,
            sampling=offer.sampling if seed is None else replace(offer.sampling, seed=seed + index),
        )
        for index in range(n)
    )


def _room(most: int, prompt: int, body: schemas.ChatCompletion | schemas.TextCompletion, where: str) -> int:
    """The output tokens a request gets. Raises ApiError 400 when prompt and output are beyond the model's context."""
    name, wanted = body.limit
    if prompt == 0:
        raise ApiError(400, f"{where}: there is no token in it.", param=where, code="invalid_value")
    if prompt >= most:
        raise _too_long(most, f"{prompt} of {where}, which leaves no room for output", where)
    if wanted is not None and prompt + wanted > most:
        if name in body.model_fields_set:
            raise _too_long(most, f"{prompt} of {where} and {wanted} of output ({name})", name)
        wanted = None  # it is a default, and there is less room
    return wanted or most - prompt


def _too_long(most: int, asked: str, param: str) -> ApiError:
    message = f"This model's context is {most} tokens; you asked for {asked}."
    return ApiError(400, message, param=param, code="context_length_exceeded")
