"""Prefill at one server and decode at another, by vLLM's protocol for that (`kv_transfer_params`, NIXL's connector)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rubato.core.plan import KV

FORM = "kv_transfer_params"
APART = ("/v1/chat/completions", "/v1/completions")  # whose responses say where the KV is
LIMITS = ("max_tokens", "max_completion_tokens")
# Fields of a body whose response needs the prompt where it is made, or several sequences.
WHOLE = ("prompt_logprobs", "echo", "use_beam_search", "best_of")
NOT_FOR_ONE = ("stream_options", "min_tokens")  # fields that have no sense with one token, and no stream
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class NotApartError(Exception):
    """A request that cannot be prefilled at one server and decoded at another; the message says why."""


def prefill_only(path: str, choices: int, body: bytes) -> bytes:
    """The body by which a server prefills a prompt and keeps the KV. Raises NotApartError."""
    fields = json.loads(body)
    if path not in APART or choices > 1:
        what = "several choices" if path in APART else path
        raise NotApartError(
            f"{what}: a fleet that prefills and decodes apart serves one choice of {' and '.join(APART)}"
        )
    for name in WHOLE:
        asked = fields.get(name)
        if asked is not None and asked is not False and (name, asked) != ("best_of", 1):
            raise NotApartError(f"{name}: leave it out, since a fleet that prefills and decodes apart cannot serve it")
    fields = {name: value for name, value in fields.items() if name not in NOT_FOR_ONE}
    limits = {name: 1 for name in LIMITS if name in fields} or {LIMITS[0]: 1}
    return json.dumps({**fields, **limits, "stream": False, FORM: ASKED}).encode()


def with_kv(body: bytes, kv: KV) -> bytes:
    """The body by which a server goes on with a prompt that another has prefilled."""
    return json.dumps({**json.loads(body), FORM: json.loads(kv.data)}).encode()


def where_kv_is(body: bytes) -> Mapping[str, Any] | None:
    """What a response says of that; None for one that says nothing."""
    try:
        found = json.loads(body).get(FORM)
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) and found.get("do_remote_prefill") else None
