"""The plug-in: vLLM's schedulers with the decisions taken out of them (`rubato.vllm.Scheduler` chooses between them).

vLLM's `schedule` is not changed: it allocates KV, builds the batch, keeps its queues. Three of its inputs are set so
that its decision is the plan: its waiting queues hold only the requests that the plan starts, in the plan's
order; the last limit on a request's chunk (`_reserve_prefill_lookahead`) is the plan's number of tokens, 0 if it passes
over the request; and a prefix cache hit is the one that the plan was made on. What a View cannot say is left to vLLM's
own rule, and what it then does otherwise is counted by its cause. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rubato.core.plan import Limits
from rubato.core.request import NOTHING, HandoffReason
from rubato.engines.vllm.deviations import Deviations
from rubato.engines.vllm.drafts import DraftLength
from rubato.engines.vllm.guards import guarded, log
from rubato.engines.vllm.kv_transfer import lacks_kv_source, lease_of
from rubato.engines.vllm.kv_view import KVView
from rubato.engines.vllm.policy_driver import PolicyDriver
from rubato.engines.vllm.queues import Queues
from rubato.engines.vllm.sequence import Hit, VllmSeq
from rubato.engines.vllm.settings import Settings, settings_of
from rubato.engines.vllm.step_parts import PlannedStep, VllmView


class PolicyMixin(Scheduler if TYPE_CHECKING else object):  # type: ignore[misc]
    """Lets the policy that `--additional-config` names steer one of vLLM's schedulers. `rubato` is the `PolicyDriver`.

    Raises:
        ValueError: results would be wrong in this configuration; one sentence a reason.
    """

    waiting: Any  # vLLM's queues
    kv_holding_waiting: Any
    dynamic_sd_lookup: Any
    max_num_active_reqs: Any

    def __init__(
        self, *args: Any, settings: Settings | None = None, around: Mapping[str, Any] = NOTHING, **kwargs: Any
    ) -> None:
        """Makes vLLM's scheduler, and the policy that steers it.

        Args:
            settings: of the plug-in; None: those in vLLM's `additional_config`.
            around: further arguments of `PolicyDriver`.
        """
        super().__init__(*args, **kwargs)
        if problems := list(self._unsupported()):
            raise ValueError(f"Rubato cannot schedule this vLLM: {'; '.join(problems)}")
        config = self.scheduler_config
        self._step: PlannedStep | None = None  # that is carried out; None in vLLM's own order
        self._barred_ids: frozenset[str] = frozenset()  # in vLLM's own order: running, with no place in the batch
        self._depths: Mapping[str, int] | None = None  # tokens to draft, by the last step's plan; None: vLLM's own
        self._adapters: set[int] = set()  # LoRA adapters of the batch being made
        self._refusals: list[tuple[int, EngineCoreOutput]] = []  # (client, its last word) not sent yet
        self._draft_length = DraftLength(self.dynamic_sd_lookup, self.num_spec_tokens)
        if self.num_spec_tokens:
            self.dynamic_sd_lookup = self._draft_length
        self._kv = KVView(self)
        # The V2 runner has a slot for each running sequence, in the batch or not. The batch of the V1 runner has room
        # for `max_num_seqs`, and those that miss a step take none of it: as many as there are KV blocks may be running.
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=min(self.max_num_scheduled_tokens, self._input_tokens()),
            max_model_len=self.max_model_len,
            kv_blocks=self._kv.total,
            block_size=self.block_size,
            max_running=self.max_num_active_reqs if self.use_v2_model_runner else config.max_num_active_seqs,
        )
        self._is_plain = not (
            self.lora_config or self.num_prefill_lookahead or self.need_mamba_block_aligned_split
            or self.max_num_encoder_input_tokens or not config.enable_chunked_prefill
        )  # fmt: skip
        self._rules_of_vllm = Rules.of(self)
        if limits.max_running is None:
            self.max_num_running_reqs = self.max_num_active_reqs = self.kv_cache_manager.block_pool.num_gpu_blocks
        # The policy admits: it is shown also what vLLM would hold back.
        self._rules = Rules(False, 0, self.max_num_active_reqs, 1)
        self._rules.apply(self)
        settings = settings or settings_of(self.vllm_config.additional_config)
        lease = lease_of(self.vllm_config)
        self.rubato = PolicyDriver(settings, limits, self._kv, self.num_spec_tokens, kv_lease=lease, **around)
        self.guard = self.rubato.guard
        overlaps = self.vllm_config.max_concurrent_batches > 1
        self._queues = Queues(self, self.rubato, self._kv, overlaps=overlaps)
        self._deviations = Deviations(self, self.rubato)
        log.info("scheduling by policy %r, limits %s", self.rubato.name, self.rubato.limits)

    def _unsupported(self) -> Iterator[str]:
        if self.vllm_config.model_config.is_diffusion:
            yield "the model is a diffusion model, for which vLLM has a scheduler of its own"
        worker = str(self.vllm_config.parallel_config.worker_cls)
        if not worker.startswith("vllm.v1.worker."):
            yield (
                f"the worker is {worker}, of which Rubato does not know how many requests it can hold: use a worker of "
                "vLLM's own (--worker-cls auto), or leave --scheduler-cls out"
            )

    def _input_tokens(self) -> int:
        """Returns the token limit of any batch: some drafters take further places for each sequence."""
        config, speculative = self.scheduler_config, self.vllm_config.speculative_config
        most: int = config.max_num_batched_tokens
        places: int = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
        return max(most - places * int(config.max_num_seqs), most // (1 + places))

    # ----------------------------------------------------------------- coming and going

    def add_request(self, request: Any) -> None:
        self._apply_gateway_commands()
        id = request.request_id
        if self.rubato.requests.kv_lease is not None and lacks_kv_source(request):
            log.warning("request %.100s: its kv_transfer_params do not say where its KV is; it is prefilled here", id)
            request.kv_transfer_params = None
        goes_on = id in self.requests  # a further part of a streamed input
        super().add_request(request)
        if goes_on:
            return
        generates = request.sampling_params is not None and not request.resumable
        if generates and (why := self.rubato.requests.offer(request)):
            self._refuse(request, why)
        elif id not in self.rubato.requests.seqs:
            self._queues.unseen_ids.add(id)
            self.rubato.slack.invalidate()

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            if finished_status == RequestStatus.FINISHED_ABORTED:
                self.rubato.requests.aborted(request.request_id)
            else:
                self.rubato.requests.end(request.request_id, "failed", str(request.get_finished_reason()))
        self.rubato.report()
        return ended

    def _refuse(self, request: Any, reason: str) -> None:
        """Ends a request with an error. vLLM makes that a 500 whatever the reason."""
        self.rubato.requests.refuse(request.request_id, reason)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        last = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            stop_reason=reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        self._refusals.append((request.client_index, last))

    def _apply_gateway_commands(self) -> None:
        """Carries out gateways' commands."""
        for id, reason in self.rubato.commands.apply():
            self._hand_off(id, reason)

    def _hand_off(self, id: str, reason: HandoffReason) -> None:
        """Hands a request off. Its client gets nothing: the gateway closes the stream."""
        self.rubato.requests.hand_off(id, reason)
        self.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._step is not None:
            self._deviations.preempted_ids.add(request.request_id)
        self.rubato.requests.preempted(request.request_id)

    # ----------------------------------------------------------------- one step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedules one step by the policy's plan.

        Args:
            throttle_prefills: vLLM balances prefills between data parallel engines.
        """
        self._apply_gateway_commands()
        now = self.rubato.clock.now()
        self._adapters.clear()
        self._deviations.preempted_ids.clear()
        aside: bool | None = self.rubato.keep_default()
        step = None
        if not aside and not self.guard.has_given_up and (view := self.view()) is not None:
            aside = self.rubato.observe(view)  # None after a fault
            step = self._make_step(view) if aside is False else None
        starting = self._starting(step) if step is not None else None
        if step is None or starting is None:
            self.guard.fallbacks += not aside
            output = self._in_vllms_order(throttle_prefills)
        else:
            output = self._carry_out(step, starting, throttle_prefills)
        self.rubato.scheduled(now, output, self.requests, self._depths)
        return output

    @guarded
    def view(self) -> VllmView:
        """Returns the policy's view of the requests that can be scheduled now."""
        self.rubato.commands.hide_untracked(self.rubato.limits.max_num_seqs // 2)
        return self.rubato.view(self._queues.schedulable())

    def _make_step(self, view: VllmView) -> PlannedStep | None:
        """Returns the policy's plan, with its drops, hand-offs and preemptions carried out; None after a fault."""
        step: PlannedStep | None = self.rubato.plan(view)
        if step is None:
            return None
        for id, reason in step.plan.drop.items():
            self._refuse(self.requests[id], reason)
        for id, why in step.plan.handoff.items():
            self._hand_off(id, why)
        for id in step.plan.preempt:
            request = self.requests[id]
            if request.status != RequestStatus.RUNNING:  # its KV has come, and it has not started
                self._give_up_kv(request)
                continue
            self.running.remove(request)
            self._preempt_request(request, view.now, drop_stale_output=self.requires_kv_delivery)
        self.rubato.shift(step.plan)
        return step

    def _give_up_kv(self, request: Any) -> None:
        """Drops a request's KV: it waits again."""
        self.kv_holding_waiting.remove_requests([request])
        self._inflight_prefills.discard(request)
        self._free_request_blocks(request)
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)
        self.rubato.requests.preempted(request.request_id)

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)
        self.rubato.requests.kv_sent(request.request_id)

    @guarded
    def _starting(self, step: PlannedStep) -> list[tuple[Any, Hit]]:
        """Returns the requests that the plan starts, each with its cached prefix; first those whose prefix has come
        from another engine."""
        seqs = self.rubato.requests.seqs
        starting = [
            (self.requests[work.seq], self._current_hit(seq))
            for work in step.plan.work
            if (seq := seqs[work.seq]).waiting
        ]
        with_kv = [r for r in self._queues.kv_arrived if r.request_id in step.chunks and r.num_computed_tokens]
        return [*((r, Hit(r.num_computed_tokens, (), None)) for r in with_kv), *starting]

    def _carry_out(self, step: PlannedStep, starting: Sequence[tuple[Any, Hit]], throttle_prefills: bool) -> Any:
        """Runs vLLM's own step so that it carries the plan out."""
        hits = [block for _, hit in starting if hit.computed is not None for block in hit.blocks]
        self._step, self._depths = step, step.depths
        self._draft_length.planned = max(step.depths.values(), default=0)
        queues = self._queues.set_aside([request for request, _ in starting])
        pool = self.kv_cache_manager.block_pool
        pool.touch(hits)  # else running requests, which come first, may take the memory of a hit that was planned on
        try:
            output = super().schedule(throttle_prefills)
        finally:
            pool.free_blocks(reversed(hits))
            self._step = None
            self._queues.put_back(*queues)
        if not throttle_prefills:  # as vLLM has it, of the queues as they are
            self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        self._deviations.compare(step, output.num_scheduled_tokens, starting)
        return output

    def _current_hit(self, seq: VllmSeq) -> Hit:
        """Returns the cached prefix of a request, looked up again if others have taken a block of it."""
        hit = self._kv.look_up(seq)
        if any(block.block_hash != key for block, key in zip(hit.blocks, hit.keys, strict=False)):
            hit = self._kv.refresh_hit(seq)
        return hit

    def _in_vllms_order(self, throttle_prefills: bool) -> Any:
        """Runs a step as if there were no policy."""
        most = self.scheduler_config.max_num_seqs
        self._barred_ids = frozenset(r.request_id for r in self.running[most:])  # they were started under a policy
        self._depths = self._draft_length.planned = None
        self._rules_of_vllm.apply(self)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._rules.apply(self)
            self._barred_ids = frozenset()

    # ----------------------------------------------------------------- what vLLM asks on its way

    def _is_planned(self, id: str) -> bool:
        """Returns whether plans decide over a request, also by leaving it out."""
        return id in self.rubato.requests.seqs and id not in self.rubato.commands.unplanned_ids

    def _as_planned(self, request: Any, num_new_tokens: int) -> int:
        """Returns a request's chunk, cut to the plan: 0 if it is passed over."""
        id = request.request_id
        if self._step is None or not self._is_planned(id):
            return 0 if id in self._barred_ids else num_new_tokens
        planned: int = self._step.chunks.get(id, 0)
        if planned and not self.scheduler_config.enable_chunked_prefill and _prefills(request):
            return num_new_tokens
        return min(num_new_tokens, planned)

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: int, **kwargs: int) -> int:
        """Gives vLLM the planned chunk, unless that is too short: it ends chunks where the state of Mamba layers is to
        be kept."""
        cut, split = self._as_planned(request, num_new_tokens), super()._mamba_block_aligned_split
        aligned: int = split(request, cut, *args, **kwargs) if cut else 0
        return aligned or split(request, num_new_tokens, *args, **kwargs)

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: int, **kwargs: int
    ) -> tuple[Any, ...]:
        """Gives vLLM the planned chunk, unless nothing would be left of it: vLLM ends chunks before an input that is
        not encoded yet, or that must not be cut."""
        cut, encode = self._as_planned(request, num_new_tokens), super()._try_schedule_encoder_inputs
        inputs: tuple[Any, ...] = encode(request, num_computed_tokens, cut, *args, **kwargs)
        return inputs if inputs[1] or not cut else encode(request, num_computed_tokens, num_new_tokens, *args, **kwargs)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Returns the last limit on a chunk. With several modules of multi-token prediction it must not end just before
        the prompt does."""
        if self._is_plain and self._step is not None:  # nothing but the plan to ask, for each running request
            planned = self._step.chunks.get(request.request_id, 0)
            if planned or (
                request.request_id in self.rubato.requests.seqs
                and request.request_id not in self.rubato.commands.unplanned_ids
            ):
                return max(0, planned if planned < num_new_tokens else num_new_tokens)  # below 0: in flight
        cut, reserve = self._as_planned(request, num_new_tokens), super()._reserve_prefill_lookahead
        if not cut or not self._adapter_fits(request):
            return 0
        if cut == num_new_tokens or (
            _prefills(request) and (self.need_mamba_block_aligned_split or request.has_encoder_inputs)
        ):
            return int(reserve(request, num_computed_tokens, num_new_tokens))  # cut above, where it could be
        return int(reserve(request, num_computed_tokens, cut) or reserve(request, num_computed_tokens, num_new_tokens))

    def _adapter_fits(self, request: Any) -> bool:
        """Returns whether this batch has room for the request's LoRA adapter. vLLM checks only starting requests, since
        it never passes over a running one; more than `max_loras` adapters in a batch end the engine."""
        adapter = request.lora_request.lora_int_id if request.lora_request is not None else 0
        if not adapter or request.status != RequestStatus.RUNNING:
            return True
        if adapter not in self._adapters and len(self._adapters) >= self.lora_config.max_loras:
            return False
        self._adapters.add(adapter)
        return True

    def _get_local_prefix_cache_hit(self, request: Any, *most_tokens: int | None) -> Any:
        # Not looked up again: that would find blocks allocated in this very step, unknown to the plan.
        # most_tokens: from 0.33 on; given where an auxiliary output needs the end of a prompt to be run.
        seq = (
            self.rubato.requests.seqs.get(request.request_id) if self._step is not None and self._kv.is_exact else None
        )
        if seq is None or seq.hit is None or seq.hit.computed is None or most_tokens not in ((), (None,)):
            return super()._get_local_prefix_cache_hit(request, *most_tokens)
        return (*seq.hit.computed, False)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._cut_drafts(draft_token_ids.req_ids)

    @guarded
    def _cut_drafts(self, ids: Iterable[str]) -> None:
        """Cuts drafts to the planned length of each request: vLLM drafts one length for all."""
        if self._depths is None:
            return
        for id in ids:
            request, depth = self.requests.get(id), self._depths.get(id)
            if request is not None and depth is not None and len(request.spec_token_ids) > depth:
                request.spec_token_ids = request.spec_token_ids[:depth]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        now = self.rubato.clock.now()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.rubato.completed(scheduler_output, outputs, now, self.get_num_unfinished_requests())
        refused, self._refusals = self._refusals, []
        for client, last in refused:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        return outputs

    def shutdown(self) -> None:
        guard = self.guard
        log.info(
            "%d steps scheduled, %d left to vLLM with room for every SLO, %d after a fault; causes of steps not as "
            "planned: %s; faults: %s", guard.steps, guard.stood_aside, guard.fallbacks, dict(guard.deviations),
            dict(guard.faults),
        )  # fmt: skip
        self.rubato.reporting.close()
        super().shutdown()


def _prefills(request: Any) -> bool:
    return bool(request.num_computed_tokens < request.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Rules:
    """Holds how vLLM's scheduler admits requests.

    Args:
        reserve_full_isl: a prompt must fit as a whole.
        watermark_blocks: blocks to be kept free.
        max_active: how many requests may be running.
        prefill_interval: steps from one that prefills to the next (from vLLM 0.33 on).
    """

    reserve_full_isl: bool
    watermark_blocks: int
    max_active: int
    prefill_interval: int

    @classmethod
    def of(cls, scheduler: Any) -> Rules:
        return cls(
            scheduler.scheduler_reserve_full_isl,
            scheduler.kv_cache_manager.watermark_blocks,
            scheduler.max_num_active_reqs,
            getattr(scheduler, "local_prefill_interval", 1),
        )

    def apply(self, scheduler: Any) -> None:
        scheduler.scheduler_reserve_full_isl = self.reserve_full_isl
        scheduler.kv_cache_manager.watermark_blocks = self.watermark_blocks
        scheduler.max_num_active_reqs = self.max_active
        scheduler.local_prefill_interval = self.prefill_interval


class SyncScheduler(PolicyMixin, Scheduler):  # type: ignore[misc]
    """Schedules one batch at a time; with pipeline parallelism, one a stage."""


class AsyncPolicyScheduler(PolicyMixin, AsyncScheduler):  # type: ignore[misc]
    """Plans the next batch while one runs, as vLLM does by default on GPUs."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.num_spec_tokens:  # the drafts themselves come later, in the worker; here are their places
            self._cut_drafts(scheduler_output.num_scheduled_tokens)
