"""A KV connector with NIXL's protocol, for the scheduler's side: KV that stays for another engine, and that comes."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.vllm.fake_connector import FakeConnector


class HandoverConnector(FakeConnector):
    """Of a request with `do_remote_prefill`, all of its prompt comes while `STEPS` steps run; it fails for ids in
    `fails`. With `do_remote_decode` it keeps its blocks at its end, until its id is in `read`."""

    STEPS: ClassVar[int] = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: set[str] = set()
        self.read: set[str] = set()
        self.fails: set[str] = set()
        self.told: list[str] = []  # whose sender may free its KV
        self._blocks: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            count = request.num_prompt_tokens - num_computed_tokens
            return count, count > 0
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self.told.append(request.request_id)
            if num_external_tokens:
                self.loading[request.request_id] = self.STEPS
                self._blocks[request.request_id] = blocks.get_block_ids()[0]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self.told.append(request.request_id)
        done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or not done:
            return False, None
        self.kept.add(request.request_id)
        return True, {"do_remote_prefill": True, "remote_block_ids": [list(block_ids)]}

    def worker(self, output: Any) -> KVConnectorOutput:
        made = super().worker(output)
        failed = {id for id in made.finished_recving if id in self.fails}
        sent, self.read = self.read & self.kept, self.read - self.kept
        self.kept -= sent
        blocks = {block for id in failed for block in self._blocks[id]}
        return KVConnectorOutput(
            finished_recving=made.finished_recving, finished_sending=sent, invalid_block_ids=blocks
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
