"""KV that goes from one vLLM engine to another by a connector: what requests say of it (`kv_transfer_params`).

A prompt is prefilled by a request of one token with `do_remote_decode`: at its end its blocks stay where they are, and
its response says how to read them. A request with these words, `do_remote_prefill` among them, reads them when its
engine has allocated memory, and is scheduled once they have come. Meanwhile that engine renews the sender's lease of
the blocks, from when it has the request on; without a word they are free again when the lease ends.
"""

from __future__ import annotations

from typing import Any

CONNECTORS = frozenset({"NixlConnector", "NixlPullConnector"})  # that do this, and have been tried
DEFAULT_LEASE_S = 30.0  # `kv_lease_duration` of NIXL's connector, unless set


def lease_of(vllm_config: Any) -> float | None:
    """Returns the seconds that KV stays with its sender; None if this engine has no connector of this kind."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector not in CONNECTORS:
        return None
    return float(transfer.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_S))


# Without all of these vLLM keeps a request waiting for KV that nobody sends.
REQUIRED_KV_PARAMS = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")


def lacks_kv_source(vllm_request: Any) -> bool:
    """Returns whether a vLLM request says that its KV is elsewhere, but not where."""
    params = vllm_request.kv_transfer_params or {}
    return bool(params.get("do_remote_prefill")) and any(params.get(name) is None for name in REQUIRED_KV_PARAMS)


def is_prefill_only(vllm_request: Any) -> bool:
    """Returns whether a vLLM request ends after its prefill, for another engine."""
    return bool((vllm_request.kv_transfer_params or {}).get("do_remote_decode"))


def comes_with_kv(vllm_request: Any) -> bool:
    """Returns whether a vLLM request has its prompt's KV at another engine, and has not asked for it yet."""
    return bool((vllm_request.kv_transfer_params or {}).get("do_remote_prefill"))
