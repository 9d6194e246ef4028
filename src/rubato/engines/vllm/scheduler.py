"""The plug-in: vLLM's scheduler with the decisions taken out of it.

    vllm serve MODEL --no-async-scheduling --scheduler-cls rubato.engines.vllm.scheduler.RubatoScheduler \\
        --additional-config '{"rubato": {"policy": "edf"}}'

vLLM's `schedule` stays what it is: it allocates KV, builds the batch, keeps its queues. Three things that it reads are
set so that what it decides is the plan: its waiting queue holds only the requests that the plan starts, in the plan's
order; the last limit on a request's chunk (`_reserve_prefill_lookahead`) is the plan's number of tokens, 0 if it passes
over the request; and a prefix cache hit is the one that the plan was made on. Written for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan
from rubato.engines.vllm.bookkeeping import PolicyDriver, log, settings_of


class RubatoScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, steered by the policy that `--additional-config` names. `rubato` keeps the books.

    Raises ValueError at start for a configuration whose batches a policy could not decide, as one sentence a reason.
    """

    waiting: Any  # vLLM's queue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        problems = list(self._unsupported())
        if problems:
            raise ValueError(f"Rubato cannot schedule this vLLM: {'; '.join(problems)}")
        self._chunks: dict[str, int] = {}  # request id -> tokens, of the plan being carried out
        self._refused: list[tuple[int, EngineCoreOutput]] = []  # (client, its last word) not sent yet
        # The policy admits: it is shown also what vLLM would hold back.
        self.scheduler_reserve_full_isl = False
        self.kv_cache_manager.watermark_blocks = 0
        if not self.use_v2_model_runner:
            # Its batch has room for `max_num_seqs` sequences, and those that miss a step take none of it: as many
            # as there are KV blocks may be running, and `limits.max_num_seqs` bounds the batch.
            self.max_num_running_reqs = self.max_num_active_reqs = self._kv_blocks()
        self.rubato = PolicyDriver(settings_of(self.vllm_config.additional_config), self._limits())
        log.info("scheduling by policy %r, limits %s", self.rubato.name, self.rubato.limits)

    def _unsupported(self) -> Iterable[str]:
        config = self.scheduler_config
        if config.async_scheduling:
            yield "asynchronous scheduling is on: start with --no-async-scheduling"
        if self.vllm_config.max_concurrent_batches > 1:
            yield "several batches would be in flight: use no pipeline parallelism"
        if self.vllm_config.speculative_config is not None:
            yield "speculative decoding is on: plans do not say what to verify"
        if self.connector is not None or self.ec_connector is not None:
            yield "a KV or encoder connector is configured: its transfers are not in the view"
        if self.lora_config is not None:
            yield "LoRA is on: plans do not know max_loras"
        if self.max_num_encoder_input_tokens or self.is_encoder_decoder:
            yield "the model takes encoder inputs, whose budget is not in the view"
        if self.num_sampled_tokens_per_step == 0:
            yield "the model does not generate token by token"
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            yield "the model's KV is not one group of full attention, so blocks cannot be counted by tokens"
        if self.dcp_world_size * self.pcp_world_size > 1:
            yield "context parallelism is on: a block then holds other numbers of tokens"
        if self.parallel_config.data_parallel_size > 1:
            yield "data parallelism is on: run one engine a replica"
        if config.long_prefill_token_threshold:
            yield "long_prefill_token_threshold is set: the policy sizes chunks, leave it at 0"
        if not config.enable_chunked_prefill:
            yield "chunked prefill is off"
        if self.policy != SchedulingPolicy.FCFS:
            yield "scheduling_policy is priority: leave it at fcfs, our policy orders requests"

    def _kv_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1  # one is vLLM's null block

    def _limits(self) -> Limits:
        config = self.scheduler_config
        return Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=min(self.max_num_scheduled_tokens, config.max_num_batched_tokens),
            max_model_len=self.max_model_len,
            kv_blocks=self._kv_blocks(),
            block_size=self.block_size,
            # The V2 runner has a slot for each running sequence, in the batch or not.
            max_running=self.max_num_running_reqs if self.use_v2_model_runner else None,
        )

    # ----------------------------------------------------------------- coming and going

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if request.resumable:
            why = "rejected-invalid: streaming input sessions are not supported"
        else:
            why = self.rubato.offer(request, self.kv_cache_manager)
        if why:
            self._refuse(request, why)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            if finished_status == RequestStatus.FINISHED_ABORTED:
                self.rubato.aborted(request.request_id)
            else:
                self.rubato.end(request.request_id, "failed", str(request.get_finished_reason()))
        return ended

    def _refuse(self, request: Any, reason: str) -> None:
        """End a request with an error. vLLM makes that a 500 whatever the reason, which therefore goes to the log."""
        log.warning("request %.100s refused: %s", request.request_id, reason)  # the id may be a header of any length
        self.rubato.end(request.request_id, "refused", reason)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        last = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            stop_reason=reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        self._refused.append((request.client_index, last))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.rubato.preempted(request.request_id)

    # ----------------------------------------------------------------- one step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step by the policy's plan. (The arguments ask to throttle prefills between data parallel engines.)"""
        view = self.view()
        plan = self.rubato.decide(view)
        for id, reason in plan.drop.items():
            self._refuse(self.requests[id], reason)
        for id in plan.preempt:
            request = self.requests[id]
            self.running.remove(request)
            self._preempt_request(request, view.now)
        self.rubato.shift(plan)
        output = self._carry_out(plan)
        self.rubato.scheduled(view, plan, output)
        return output

    def view(self) -> View:
        """What can be scheduled now. A paused engine shows less; requests that wait for a grammar are not here yet."""
        waiting = [] if self.pause_state != PauseState.UNPAUSED else [r for r in self.waiting if self._ready(r)]
        running = [] if self.pause_state == PauseState.PAUSED_ALL else self.running
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return self.rubato.view([r.request_id for r in waiting], [r.request_id for r in running], free)

    def _ready(self, request: Any) -> bool:
        return self._handle_blocked_waiting_request(request) and not request.num_stale_output_tokens

    def _carry_out(self, plan: Plan) -> Any:
        """vLLM's own step, with nothing left for it to decide."""
        known = self.rubato.seqs
        starting = [self.requests[w.seq] for w in plan.work if known[w.seq].waiting]
        hits = [block for r in starting for block in known[r.request_id].look_up().blocks]
        aside = self.waiting
        self.waiting = create_request_queue(SchedulingPolicy.FCFS)
        if starting:
            aside.remove_requests(starting)
            for request in starting:
                self.waiting.add_request(request)
        self._chunks = {w.seq: w.tokens for w in plan.work}
        pool = self.kv_cache_manager.block_pool
        pool.touch(hits)  # else running requests, which come first, may take the memory of a hit that was planned on
        try:
            return super().schedule()
        finally:
            pool.free_blocks(reversed(hits))
            self._chunks = {}
            for request in reversed(list(self.waiting)):  # left or preempted by vLLM, against the plan
                aside.prepend_request(request)
            self.waiting = aside

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        return min(num_new_tokens, self._chunks.get(request.request_id, 0))

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        # Not looked up again: that would find blocks allocated in this very step, unknown to the plan.
        return (*self.rubato.seqs[request.request_id].look_up().found, False)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        now = self.rubato.clock()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.rubato.completed(scheduler_output, outputs, now, self.get_num_unfinished_requests())
        refused, self._refused = self._refused, []
        for client, last in refused:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        return outputs

    def shutdown(self) -> None:
        ours = self.rubato
        log.info(
            "%d steps scheduled, %d not as planned, %d in vLLM's own order because the policy failed",
            ours.steps, ours.deviations, ours.fallbacks,
        )  # fmt: skip
        super().shutdown()
