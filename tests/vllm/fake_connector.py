"""A KV connector that has the KV of some prompts: for the scheduler's side, without any memory behind it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput


class FakeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Of requests whose `kv_transfer_params` say `remote`, that many tokens come from elsewhere: at once, or, with
    `steps`, while so many batches run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loading: dict[str, int] = {}  # batches until the KV is there
        self.loaded: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        there = min(params.get("remote", 0), request.num_prompt_tokens - 1) // self.block * self.block
        if request.request_id in self.loaded or there <= num_computed_tokens:
            return 0, False
        return there - num_computed_tokens, bool(params.get("steps"))

    @property
    def block(self) -> int:
        return int(self._vllm_config.cache_config.block_size)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        steps = (request.kv_transfer_params or {}).get("steps")
        if num_external_tokens and steps:
            self.loading[request.request_id] = steps
            self.loaded.add(request.request_id)

    def worker(self, output: Any) -> KVConnectorOutput:
        """What the workers' side tells after a batch."""
        for id in self.loading:
            self.loading[id] -= 1
        there = {id for id, steps in self.loading.items() if steps <= 0}
        for id in there:
            del self.loading[id]
        return KVConnectorOutput(finished_recving=there)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
