"""From an API request that goes to some server of a fleet to the requests that its router places.

A body is read no further than that takes: what it promises, the size of its prompt, how much output it may ask for.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from rubato.core.request import Request, Sampling
from rubato.engines.vllm.sequence import PREFIX
from rubato.frontdoor import body_fields, choices
from rubato.frontdoor.errors import ApiError, invalid
from rubato.frontdoor.prompt_length import PromptSize, text_of, token_ids
from rubato.frontdoor.slo_fields import Tiers, grant
from rubato.serving import intake
from rubato.serving.relayed_call import CHAT, TEXT

RESPONSES = "/v1/responses"
GENERATE = (CHAT, TEXT, RESPONSES, "/v1/messages")
PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", "/v1/messages": "chatcmpl-", RESPONSES: "resp_"}  # of vLLM's ids
UNSTATED = {TEXT: 16}  # output tokens by default; of the others as many as the model can
LONGEST_ID = 128  # characters of a client's X-Request-Id

ELSEWHERE = ("kv_transfer_params", "ec_transfer_params")  # fields that make a server connect to another one


@dataclass(frozen=True, slots=True)
class Asked:
    """What an API request asks for: `n` choices of each prompt, a request each.

    fields: of its body, without those that a server takes from its gateway alone; raw: the same, as bytes. size: bytes
    of the prompt's text, 0 where it is token ids. clamped: where less is promised than it states.
    """

    requests: tuple[Request, ...]
    n: int
    fields: dict[str, Any]
    raw: bytes
    size: int
    clamped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class From:
    """Where an API request came: its path, its headers, and the time, in seconds of the cluster's clock."""

    path: str
    headers: Mapping[str, str]
    arrival: float


def asked(
    http: From, raw: bytes, id: str, *, tiers: Tiers, tenant: str, longest: int, sizes: PromptSize, by_link: bool
) -> Asked:
    """tiers: of its tenant. longest: tokens of prompt and output together. by_link: servers are told what is promised
    by their links. Raises ApiError 400 for a body, a header or a number of choices that cannot be."""
    fields = body_fields.parsed(raw)
    if fields is None:
        raise ApiError(400, "The body is no JSON object.", code="invalid_json")
    body_fields.check_headers(http.headers)
    for name in ELSEWHERE:
        if fields.get(name) is not None:
            raise invalid(name, "leave it out: where KV is, the fleet says, and no client.")
    xargs = fields.get("vllm_xargs")
    theirs = {k: v for k, v in xargs.items() if k.startswith(PREFIX)} if isinstance(xargs, dict) else {}
    stated = body_fields.stated(fields, theirs)
    granted = grant(tiers, http.headers, stated.service_tier, stated.slo)
    left_out = [name for name in body_fields.OURS if name in fields and by_link]
    if theirs or left_out:  # a server takes them from its gateway alone
        fields = {name: value for name, value in fields.items() if name not in left_out}
        if isinstance(xargs, dict):
            fields["vllm_xargs"] = {k: v for k, v in xargs.items() if k not in theirs}
        raw = body_fields.written(fields)
    ids, text = token_ids(fields), b""
    if not ids:
        text = text_of(fields)
    prompts, n = body_fields.prompts(fields), max(1, body_fields.whole(fields.get("n")))
    if n > 128 or prompts * n > 1024:
        raise invalid("n", f"{prompts} prompts with n = {n} ask for {prompts * n} choices; at most 1024 are given.")
    length = len(ids) or sizes.tokens(len(text))
    most = body_fields.most_tokens({**fields, "n": 1, "prompt": ""}, UNSTATED.get(http.path, longest))
    request = Request(
        id,
        tuple([replace(stage, prompt=max(1, length // prompts), token_ids=()) for stage in granted.stages((0,))]),
        http.arrival,
        tier=granted.tier,
        tenant=tenant,
        sampling=Sampling(
            max_tokens=min(max(1, most), max(1, longest - length)), ignore_eos=bool(fields.get("ignore_eos"))
        ),
        on_decline=granted.on_decline,
        session=intake.session(http.headers),
        prefix=sizes.prefix(text),
    )
    if ids:
        request = replace(request, stages=(replace(request.stages[0], prompt=len(ids), token_ids=ids),))
    requests = choices.spread([request], prompts * n)
    return Asked(requests, n, fields, raw, len(text), granted.clamped)


def new_id(path: str, wished: str, taken: Container[str]) -> str:
    """A request's id: as its client names it, where that is a name and no other has it."""
    prefix = PREFIXES[path]
    fit = 0 < len(wished) <= LONGEST_ID and wished.isascii() and wished.replace("_", "").isalnum()
    id = f"{prefix}{wished}"
    if fit and id not in taken and f"{id}-0" not in taken:
        return id
    return f"{prefix}{uuid4().hex}"


def answer_of(requests: tuple[Request, ...]) -> str:
    """The id that the server gives its response."""
    id = requests[0].id
    return id if len(requests) == 1 else id.rpartition("-")[0]
