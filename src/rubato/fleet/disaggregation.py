"""Prefill at one server and decode at another, by vLLM's protocol for that (`kv_transfer_params`, NIXL's connector)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rubato.core.plan import KV

KV_PARAMS_FIELD = "kv_transfer_params"
DISAGGREGATED_PATHS = ("/v1/chat/completions", "/v1/completions")  # their responses say where the KV is
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
# Fields of a body whose response needs the prompt where it is made, or several sequences.
UNSUPPORTED_FIELDS = ("prompt_logprobs", "echo", "use_beam_search", "best_of")
STREAM_ONLY_FIELDS = ("stream_options", "min_tokens")  # without meaning in a request of one token that does not stream
PREFILL_KV_PARAMS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class DisaggregationUnsupportedError(Exception):
    """A request that cannot be prefilled at one server and decoded at another; the message says why."""


def prefill_body(path: str, choices: int, body: bytes) -> bytes:
    """Returns the body by which a server prefills a prompt and keeps the KV. Raises DisaggregationUnsupportedError."""
    fields = json.loads(body)
    if path not in DISAGGREGATED_PATHS or choices > 1:
        what = "several choices" if path in DISAGGREGATED_PATHS else path
        raise DisaggregationUnsupportedError(
            f"{what}: a fleet that prefills and decodes apart serves one choice of {' and '.join(DISAGGREGATED_PATHS)}"
        )
    for name in UNSUPPORTED_FIELDS:
        value = fields.get(name)
        if value is not None and value is not False and (name, value) != ("best_of", 1):
            raise DisaggregationUnsupportedError(
                f"{name}: leave it out, since a fleet that prefills and decodes apart cannot serve it"
            )
    fields = {name: value for name, value in fields.items() if name not in STREAM_ONLY_FIELDS}
    limits = {name: 1 for name in LIMIT_FIELDS if name in fields} or {LIMIT_FIELDS[0]: 1}
    return json.dumps({**fields, **limits, "stream": False, KV_PARAMS_FIELD: PREFILL_KV_PARAMS}).encode()


def decode_body(body: bytes, kv: KV) -> bytes:
    """Returns the body by which a server decodes a prompt that another server has prefilled."""
    return json.dumps({**json.loads(body), KV_PARAMS_FIELD: json.loads(kv.data)}).encode()


def kv_params_of(body: bytes) -> Mapping[str, Any] | None:
    """Returns the KV parameters in a response; None if it has none."""
    try:
        params = json.loads(body).get(KV_PARAMS_FIELD)
    except (ValueError, AttributeError):
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None
