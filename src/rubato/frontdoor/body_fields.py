"""What a body sent to vLLM's API server states, and what it may cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from pydantic import ValidationError

from rubato.core.did_you_mean import nearest
from rubato.engines.vllm.sequence import KEYS, PREFIX, TIER
from rubato.frontdoor.errors import ApiError, invalid
from rubato.frontdoor.slo_body import LONGEST_NAME, Body, SLOBody, bad_request
from rubato.frontdoor.slo_fields import HEADERS

KNOWN_HEADERS = tuple(name for names in HEADERS.values() for name in names)
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
OURS = ("slo", "service_tier")  # fields of a body
MOST_NAMES = 64  # of a body, that are looked through for one of ours misspelt


class Stated(Body):
    """Of a body, what is ours."""

    slo: SLOBody | None = None
    service_tier: str | None = None


def parsed(raw: bytes) -> dict[str, Any] | None:
    """The object in a body, as vLLM's own parser reads it; None for anything else."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def written(body: Mapping[str, Any]) -> bytes:
    """A body that was parsed and changed, for a server: whatever JSON it held."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises ApiError 400 for a header that looks like an SLO and is none."""
    for name in headers:
        if name.startswith(("x-slo-", "x-llm-d-slo-")) and name not in KNOWN_HEADERS:
            raise invalid(name[:LONGEST_NAME], f"unknown header{nearest(name[:LONGEST_NAME], KNOWN_HEADERS)}")


def stated(body: Mapping[str, Any], theirs: Mapping[str, Any]) -> Stated:
    """What a body asks for. theirs: its keys in `vllm_xargs`, which say what its own fields do not. Raises ApiError
    400."""
    for key in theirs:
        if key not in KEYS:
            raise invalid(f"vllm_xargs.{key}"[:LONGEST_NAME], f"unknown key{nearest(key[:LONGEST_NAME], KEYS)}")
    for name in islice(body, MOST_NAMES):
        near = get_close_matches(name.lower(), OURS, 1, 0.8) if name not in OURS and len(name) < LONGEST_NAME else []
        if near:
            message = f"{name}: unknown parameter; did you mean {near[0]}?"
            raise ApiError(400, message, param=name, code="unknown_parameter")
    said = body.get("slo")
    slo = {key.removeprefix(PREFIX): _number(value) for key, value in theirs.items() if key != TIER}
    tier = body.get("service_tier") or theirs.get(TIER)
    try:
        whole = {**slo, **said} if isinstance(said, dict) else said or slo or None
        ours = Stated.model_validate({"slo": whole, "service_tier": tier})
    except ValidationError as error:
        raise bad_request(error, shown=True) from None
    if ours.slo is not None and ours.slo.stages is not None:
        raise ApiError(400, "slo.stages: inside vLLM a request has one stage.", param="slo.stages")
    return ours


def _number(value: Any) -> Any:
    """Of a key of `vllm_xargs`, which may be written as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def prompts(body: Mapping[str, Any]) -> int:
    """Prompts of a body: several in a list of them."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return len(prompt) if several and isinstance(prompt, list) else 1


def most_tokens(body: Mapping[str, Any], unstated: int) -> int:
    """Output tokens that a body may ask for: the largest of its limits, whichever vLLM then takes. unstated: where it
    states none."""
    stated = [value for name in LIMITS if (value := body.get(name)) is not None]
    most = max(map(whole, stated), default=unstated)
    return most * max(1, whole(body.get("n"))) * prompts(body)


def whole(value: Any) -> int:
    """A number as leniently as vLLM reads it; 0 for anything else."""
    try:
        return max(0, min(int(float(value)), 1 << 31))
    except (TypeError, ValueError, OverflowError):
        return 0
