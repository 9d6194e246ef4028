"""From a parsed body to the requests offered to the cluster, and to the response that waits for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

from rubato.core.request import Request, Stage
from rubato.frontdoor import choices
from rubato.frontdoor.errors import invalid, no_room, too_long
from rubato.frontdoor.slo_fields import GrantedSLO, Tier
from rubato.serving import schemas, sse
from rubato.serving.response import CompletionResponse, RequestIntake

SESSION = "x-session-id"  # the header; vLLM reads it, too


def requests(
    body: schemas.AnyCompletion,
    prompts: Sequence[tuple[int, ...]],
    granted: GrantedSLO,
    *,
    arrival: float,
    tenant: str,
    most_tokens: int,
    session: str = "",
) -> tuple[Request, ...]:
    """What a body whose prompts are `prompts` asks for: a request a choice, each with the SLO that is granted.

    most_tokens: prompt + output of a request. session: as `Request.session`.
    Raises ApiError 400 that names what cannot be had.
    """
    id = _new_id(body.kind)
    offers = [
        Request(
            id=id,
            stages=granted.stages(prompt),
            arrival=arrival,
            tier=granted.tier,
            tenant=tenant,
            sampling=body.sampling(_room(most_tokens, len(prompt), body, body.where(at))),
            on_decline=granted.on_decline,
            session=session,
        )
        for at, prompt in enumerate(prompts)
    ]
    return choices.spread(offers, body.choices)


def session(headers: Mapping[str, str]) -> str:
    """The name of the client's session that a header states, "" without one. Raises ApiError 400 for what is no
    name."""
    name = headers.get(SESSION)
    if name is not None and not re.fullmatch(r"[!-~]{1,128}", name):
        raise invalid(SESSION, "give 1 to 128 visible ASCII characters without blanks.")
    return name or ""


def unread(kind: schemas.Kind, *, arrival: float, tenant: str, tier: Tier) -> Request:
    """What stands for an API request whose body is not read: one request, of the least prompt that there is."""
    stages = (Stage(1, tier.slo),)
    return Request(id=_new_id(kind), stages=stages, arrival=arrival, tier=tier.name, tenant=tenant)


def _new_id(kind: schemas.Kind) -> str:
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid4().hex}"


def answer(
    body: schemas.AnyCompletion,
    requests: tuple[Request, ...],
    *,
    cluster: RequestIntake,
    spell: Callable[[int], bytes],
    created: int,
) -> CompletionResponse:
    """What answers a body that asks for `requests`; it offers them when it is sent.

    spell: a token id's bytes. created: Unix seconds.
    """
    id = choices.answer_of(requests[0].id)
    form = sse.Format(id, body.kind, requests, body.model, created, spell)
    chunks = None
    if body.stream:
        options = body.stream_options or schemas.StreamOptions()
        chunks = sse.Chunks(
            form, include_usage=bool(options.include_usage), every_usage=bool(options.continuous_usage_stats)
        )
    return CompletionResponse(cluster, form, chunks)


def _room(most: int, prompt: int, body: schemas.AnyCompletion, where: str) -> int:
    """The output tokens a request gets. Raises ApiError 400 when prompt and output are beyond the model's context."""
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
