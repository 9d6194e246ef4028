"""Compares what vLLM did in a step with the plan, and names the cause of each difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from rubato.engines.vllm.guards import guarded
from rubato.engines.vllm.policy_driver import PolicyDriver
from rubato.engines.vllm.sequence import Hit
from rubato.engines.vllm.step_parts import PlannedStep


class Deviations:
    """Counts deviations of one of vLLM's schedulers. `preempted_ids` has the requests that vLLM preempted in this step,
    against the plan."""

    def __init__(self, scheduler: Any, driver: PolicyDriver) -> None:
        self.preempted_ids: set[str] = set()
        self.guard = driver.guard
        self._scheduler, self._driver = scheduler, driver

    @guarded
    def compare(
        self, step: PlannedStep, scheduled_tokens: Mapping[str, int], started: Iterable[tuple[Any, Hit]]
    ) -> None:
        """Counts deviations from the plan by cause, each cause once a step."""
        scheduler, planned, causes, about = self._scheduler, step.chunks, set(), []
        if scheduled_tokens != planned:
            for id in planned.keys() | scheduled_tokens.keys():
                tokens, scheduled = planned.get(id, 0), scheduled_tokens.get(id, 0)
                if tokens != scheduled:
                    causes.add(self._cause(scheduler.requests[id], tokens, scheduled))
                    about.append(f"{id:.100} {tokens} tokens planned, {scheduled} scheduled")
        for request, hit in started:
            scheduled = scheduled_tokens.get(request.request_id, 0)
            if scheduled and request.num_computed_tokens - scheduled != hit.tokens:
                causes.add("prefix_cache" if scheduler.connector is None else "kv_connector")
                about.append(
                    f"{request.request_id:.100} found in KV: {request.num_computed_tokens - scheduled} tokens, the "
                    f"plan saw {hit.tokens}"
                )
        if len(causes) > 1:
            causes.discard("kv")  # vLLM passed over a request behind another one
        if causes:
            self.guard.record_deviation(causes, "; ".join(sorted(about)[:8]))

    def _cause(self, request: Any, planned: int, scheduled: int) -> str:
        """Returns why vLLM gave a request another number of tokens than planned: a word of docs/vllm.md's table."""
        scheduler, driver = self._scheduler, self._driver
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        if request.request_id not in driver.requests.seqs or request.request_id in driver.commands.hidden_ids:
            return "not_in_view"
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "kv_connector"
        if request.request_id in self.preempted_ids:
            return "kv"
        if not scheduler.scheduler_config.enable_chunked_prefill:
            return "chunked_prefill_off"
        if scheduler.need_mamba_block_aligned_split or scheduler.num_prefill_lookahead:
            return "chunk_boundary"
        if threshold and scheduled and scheduled < planned:
            return "long_prefill_token_threshold"
        if request.has_encoder_inputs:
            return "encoder"
        if not scheduled and request.lora_request is not None:
            return "lora"
        if scheduler.connector is not None and scheduled and scheduled < planned:
            return "kv_connector"
        if scheduler.parallel_config.data_parallel_size > 1 and not scheduled:
            return "data_parallel"
        return "kv" if not scheduled else "other"
