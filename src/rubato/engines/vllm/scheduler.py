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
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rubato.core.interfaces import View
from rubato.core.plan import Limits
from rubato.core.request import NOTHING, HandoffReason
from rubato.engines.vllm.guards import guarded
from rubato.engines.vllm.kv_transfer import lacks_kv_source, lease_of
from rubato.engines.vllm.kv_view import KVView
from rubato.engines.vllm.policy_driver import PlannedStep, PolicyDriver, log
from rubato.engines.vllm.sequence import Hit, VllmSeq
from rubato.engines.vllm.settings import Settings, settings_of


class DraftLength:
    """vLLM's table of how many tokens to draft by batch size (`dynamic_sd_lookup`), answered by the plan. With such a
    table, vLLM also does not pad a request's first decode with drafts that no plan knows of."""

    def __init__(self, table: Any, most: int) -> None:
        self._table = table
        self._most = most
        self.planned: int | None = None  # for the step being scheduled; None: vLLM's own

    def __getitem__(self, batch_size: int) -> int:
        default = self._table[batch_size] if self._table is not None else self._most
        return int(default if self.planned is None else min(default, self.planned))


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
        """settings: default: vLLM's `additional_config`. around: further arguments of `PolicyDriver`."""
        super().__init__(*args, **kwargs)
        if problems := list(self._unsupported()):
            raise ValueError(f"Rubato cannot schedule this vLLM: {'; '.join(problems)}")
        config = self.scheduler_config
        self._step: PlannedStep | None = None  # that is carried out; None in vLLM's own order
        self._barred_ids: frozenset[str] = frozenset()  # in vLLM's own order: running, with no place in the batch
        self._depths: Mapping[str, int] | None = None  # tokens to draft, by the last step's plan; None: vLLM's own
        self._unseen_ids: set[str] = set()  # requests that a View cannot show: vLLM schedules them by its own rule
        self._adapters: set[int] = set()  # LoRA adapters of the batch being made
        self._preempted_ids: set[str] = set()  # requests that vLLM preempted in this step, against the plan
        self._refusals: list[tuple[int, EngineCoreOutput]] = []  # (client, its last word) not sent yet
        self._draft_length = DraftLength(self.dynamic_sd_lookup, self.num_spec_tokens)
        if self.num_spec_tokens:
            self.dynamic_sd_lookup = self._draft_length
        self._kv_arrived: list[Any] = []  # requests with KV from another engine that have not started
        self._kv_pulls: list[Any] = []  # requests whose KV this step asks for
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
        self._overlaps = self.vllm_config.max_concurrent_batches > 1  # batches run while others are scheduled
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
        """The token limit of any batch: some drafters take further places for each sequence."""
        config, speculative = self.scheduler_config, self.vllm_config.speculative_config
        most: int = config.max_num_batched_tokens
        places: int = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
        return max(most - places * int(config.max_num_seqs), most // (1 + places))

    # ----------------------------------------------------------------- coming and going

    def add_request(self, request: Any) -> None:
        self._apply_gateway_commands()
        id = request.request_id
        if self.rubato.kv_lease is not None and lacks_kv_source(request):
            log.warning("request %.100s: its kv_transfer_params do not say where its KV is; it is prefilled here", id)
            request.kv_transfer_params = None
        goes_on = id in self.requests  # a further part of a streamed input
        super().add_request(request)
        if goes_on:
            return
        generates = request.sampling_params is not None and not request.resumable
        if generates and (why := self.rubato.offer(request)):
            self._refuse(request, why)
        elif id not in self.rubato.seqs:
            self._unseen_ids.add(id)
            self.rubato.invalidate_slack()

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            if finished_status == RequestStatus.FINISHED_ABORTED:
                self.rubato.aborted(request.request_id)
            else:
                self.rubato.end(request.request_id, "failed", str(request.get_finished_reason()))
        self.rubato.report()
        return ended

    def _refuse(self, request: Any, reason: str) -> None:
        """End a request with an error. vLLM makes that a 500 whatever the reason."""
        self.rubato.refuse(request.request_id, reason)
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
        for id, reason in self.rubato.apply_gateway_commands():
            self._hand_off(id, reason)

    def _hand_off(self, id: str, reason: HandoffReason) -> None:
        """Hands a request off. Its client gets nothing: the gateway closes the stream."""
        self.rubato.hand_off(id, reason)
        self.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._step is not None:
            self._preempted_ids.add(request.request_id)
        self.rubato.preempted(request.request_id)

    # ----------------------------------------------------------------- one step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One step by the policy's plan. (throttle_prefills: vLLM balances prefills between data parallel engines.)"""
        self._apply_gateway_commands()
        now = self.rubato.clock()
        self._adapters.clear()
        self._preempted_ids.clear()
        aside: bool | None = self.rubato.keep_default()
        step = None
        if not aside and not self.rubato.has_given_up and (view := self.view()) is not None:
            aside = self.rubato.observe(view)  # None after a fault
            step = self._make_step(view) if aside is False else None
        starting = self._starting(step) if step is not None else None
        if step is None or starting is None:
            self.rubato.fallbacks += not aside
            output = self._in_vllms_order(throttle_prefills)
        else:
            output = self._carry_out(step, starting, throttle_prefills)
        self.rubato.scheduled(now, output, self.requests, self._depths)
        return output

    def fault(self, place: str) -> None:
        """Counts a fault in a `guarded` method."""
        self.rubato.fault(place)

    def _make_step(self, view: View) -> PlannedStep | None:
        """The policy's plan, with its drops, hand-offs and preemptions carried out; None after a fault."""
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

    @guarded
    def view(self) -> View:
        """The requests that can be scheduled now: fewer in a paused engine, and none that waits for a grammar."""
        waiting: list[Any] = []
        running: list[Any] = []
        moving: list[Any] = []
        self._kv_arrived, self._kv_pulls, kv_taken = [], [], 0
        self.rubato.hide_untracked()
        if self.pause_state != PauseState.PAUSED_ALL:
            for request in list(self.kv_holding_waiting):
                id = request.request_id
                if not self._is_ready(request):
                    moving.append(request)
                elif self.rubato.has_kv_arrived(id) or (self.rubato.is_kv_arriving(id) and request.num_computed_tokens):
                    self._kv_arrived.append(request)
                elif not self.rubato.is_kv_arriving(id):
                    waiting.append(request)
                else:  # the transfer has failed
                    self.kv_holding_waiting.remove_requests([request])
                    self.waiting.prepend_request(request)
                    self.rubato.kv_missed(id)
            if not self._overlaps:
                running = self.running
            for request in self.running if self._overlaps else ():
                (running if self._has_tokens_to_run(request) else moving).append(request)
        if self.pause_state == PauseState.UNPAUSED:
            new = RequestStatus.WAITING
            waiting += [
                r for r in self.waiting if (r.status is new and not r.num_stale_output_tokens) or self._is_ready(r)
            ]
            if self.rubato.arriving:
                kv_taken = self._choose_pulls(waiting)
                moving += [r for r in waiting if self.rubato.is_kv_arriving(r.request_id)]
                waiting = [r for r in waiting if not self.rubato.is_kv_arriving(r.request_id)]
        # In the V2 runner a streamed input that waits for its next part keeps its slot, and a request whose KV has come
        # has none yet.
        slots_taken = len(self.running) + self.num_waiting_for_streaming_input
        slots_left = max(0, self.max_num_active_reqs - slots_taken)
        moving += self._kv_arrived[slots_left:]
        del self._kv_arrived[slots_left:]
        places = slots_taken - len(running)
        view: View = self.rubato.view(waiting, [*running, *self._kv_arrived], moving, places, kv_taken)
        return view

    def _choose_pulls(self, waiting: Iterable[Any]) -> int:
        """Chooses the requests whose KV this step asks for, in order, as far as memory goes. Returns the blocks that
        they take."""
        free, blocks_taken = self._kv.free(), 0
        for request in waiting:
            if not self.rubato.is_kv_arriving(request.request_id):
                continue
            if not self._kv.comes_later(self.rubato.seqs[request.request_id]):
                self.rubato.kv_missed(request.request_id)
                continue
            needed = self.rubato.limits.blocks(request.num_tokens)
            if blocks_taken + needed > free:
                break
            blocks_taken += needed
            self._kv_pulls.append(request)
        return blocks_taken

    def _give_up_kv(self, request: Any) -> None:
        """Drops a request's KV: it waits again."""
        self.kv_holding_waiting.remove_requests([request])
        self._inflight_prefills.discard(request)
        self._free_request_blocks(request)
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)
        self.rubato.preempted(request.request_id)

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)
        self.rubato.kv_sent(request.request_id)

    def _is_ready(self, request: Any) -> bool:
        """Whether a waiting request can be started; with the side effects of vLLM's own check."""
        if request.status != RequestStatus.WAITING and not self._handle_blocked_waiting_request(request):
            return False
        return not request.num_stale_output_tokens

    def _has_tokens_to_run(self, request: Any) -> bool:
        """Whether vLLM would schedule a running request: its next token may be in flight still (pipeline parallel), or
        surely be its last (asynchronous scheduling)."""
        placeholders, computed = request.num_output_placeholders, request.num_computed_tokens
        if placeholders:
            if computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                return False
            if self.current_step + 1 < request.next_decode_eligible_step:
                return False
        if computed + 1 >= self.max_model_len:
            return False
        return bool(request.num_tokens + placeholders > computed)

    @guarded
    def _starting(self, step: PlannedStep) -> list[tuple[Any, Hit]]:
        """The requests that the plan starts, each with its cached prefix."""
        seqs = self.rubato.seqs
        starting = [
            (self.requests[work.seq], self._current_hit(seq))
            for work in step.plan.work
            if (seq := seqs[work.seq]).waiting
        ]
        landed = [r for r in self._kv_arrived if r.request_id in step.chunks and r.num_computed_tokens]
        return [*((r, Hit(r.num_computed_tokens, (), None)) for r in landed), *starting]

    def _carry_out(self, step: PlannedStep, starting: Sequence[tuple[Any, Hit]], throttle_prefills: bool) -> Any:
        """Runs vLLM's own step so that it carries the plan out."""
        hits = [block for _, hit in starting if hit.computed is not None for block in hit.blocks]
        self._step, self._depths = step, step.depths
        self._draft_length.planned = max(step.depths.values(), default=0)
        queues = self._set_aside([request for request, _ in starting])
        pool = self.kv_cache_manager.block_pool
        pool.touch(hits)  # else running requests, which come first, may take the memory of a hit that was planned on
        try:
            output = super().schedule(throttle_prefills)
        finally:
            pool.free_blocks(reversed(hits))
            self._step = None
            self._put_back(*queues)
        if not throttle_prefills:  # as vLLM has it, of the queues as they are
            self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        self._compare(step, output.num_scheduled_tokens, starting)
        return output

    def _current_hit(self, seq: VllmSeq) -> Hit:
        """The cached prefix of a request, looked up again if others have taken a block of it."""
        hit = self._kv.look_up(seq)
        if any(block.block_hash != key for block, key in zip(hit.blocks, hit.keys, strict=False)):
            hit = self._kv.refresh_hit(seq)
        return hit

    def _set_aside(self, starting: Sequence[Any]) -> tuple[Any, Any]:
        """Leaves three kinds of requests in vLLM's queues: those that start, in this order, then those that no View
        shows, and those whose KV is asked for. Returns the queues with all others."""
        queues = self.waiting, self.kv_holding_waiting
        self._unseen_ids.intersection_update(self.requests)
        unseen = self._unseen_ids.union(self.rubato.unplanned_ids)
        for name, aside in zip(("waiting", "kv_holding_waiting"), queues, strict=True):
            remaining = create_request_queue(SchedulingPolicy.FCFS)
            if aside:
                holding = name == "kv_holding_waiting"
                remaining.extend(r for r in starting if self._holds_kv_blocks(r) == holding)
                if unseen:
                    remaining.extend(r for r in aside if r.request_id in unseen)
                if not holding:  # last, since vLLM starts none behind one for which memory lacks after all
                    remaining.extend(r for r in self._kv_pulls if r.request_id in self.requests and not r.is_finished())
                if remaining:
                    aside.remove_requests(remaining)
            setattr(self, name, remaining)
        return queues

    def _put_back(self, *queues: Any) -> None:
        for name, aside in zip(("waiting", "kv_holding_waiting"), queues, strict=True):
            for request in reversed(getattr(self, name)):  # left, or preempted, by vLLM
                aside.prepend_request(request)
            setattr(self, name, aside)

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

    def _as_planned(self, request: Any, num_new_tokens: int) -> int:
        """A request's chunk, cut to the plan: 0 if it is passed over."""
        id = request.request_id
        if self._step is None or id not in self.rubato.seqs or id in self.rubato.unplanned_ids:
            return 0 if id in self._barred_ids else num_new_tokens
        planned: int = self._step.chunks.get(id, 0)
        if planned and not self.scheduler_config.enable_chunked_prefill and _prefills(request):
            return num_new_tokens
        return min(num_new_tokens, planned)

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: int, **kwargs: int) -> int:
        """vLLM ends chunks where the state of Mamba layers is to be kept: the planned chunk, unless it is too short."""
        cut, split = self._as_planned(request, num_new_tokens), super()._mamba_block_aligned_split
        aligned: int = split(request, cut, *args, **kwargs) if cut else 0
        return aligned or split(request, num_new_tokens, *args, **kwargs)

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: int, **kwargs: int
    ) -> tuple[Any, ...]:
        """vLLM ends chunks before an input that is not encoded yet, or that must not be cut. Gives it the planned
        chunk, unless nothing would be left."""
        cut, encode = self._as_planned(request, num_new_tokens), super()._try_schedule_encoder_inputs
        inputs: tuple[Any, ...] = encode(request, num_computed_tokens, cut, *args, **kwargs)
        return inputs if inputs[1] or not cut else encode(request, num_computed_tokens, num_new_tokens, *args, **kwargs)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The last limit on a chunk. With several modules of multi-token prediction it must not end just before the
        prompt does."""
        if self._is_plain and self._step is not None:  # nothing but the plan to ask, for each running request
            planned = self._step.chunks.get(request.request_id, 0)
            if planned or (
                request.request_id in self.rubato.seqs and request.request_id not in self.rubato.unplanned_ids
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
        """Whether this batch has room for the request's LoRA adapter. vLLM checks only starting requests, since it
        never passes over a running one; more than `max_loras` adapters in a batch end the engine."""
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
        seq = self.rubato.seqs.get(request.request_id) if self._step is not None and self._kv.is_exact else None
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
        now = self.rubato.clock()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.rubato.completed(scheduler_output, outputs, now, self.get_num_unfinished_requests())
        refused, self._refusals = self._refusals, []
        for client, last in refused:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        return outputs

    # ----------------------------------------------------------------- what vLLM did otherwise

    @guarded
    def _compare(
        self, step: PlannedStep, scheduled_tokens: Mapping[str, int], started: Iterable[tuple[Any, Hit]]
    ) -> None:
        """Counts deviations from the plan by cause, each cause once a step."""
        planned, causes, about = step.chunks, set(), []
        if scheduled_tokens != planned:
            for id in planned.keys() | scheduled_tokens.keys():
                tokens, scheduled = planned.get(id, 0), scheduled_tokens.get(id, 0)
                if tokens != scheduled:
                    causes.add(self._cause(self.requests[id], tokens, scheduled))
                    about.append(f"{id:.100} {tokens} tokens planned, {scheduled} scheduled")
        for request, hit in started:
            scheduled = scheduled_tokens.get(request.request_id, 0)
            if scheduled and request.num_computed_tokens - scheduled != hit.tokens:
                causes.add("prefix_cache" if self.connector is None else "kv_connector")
                about.append(
                    f"{request.request_id:.100} found in KV: {request.num_computed_tokens - scheduled} tokens, the "
                    f"plan saw {hit.tokens}"
                )
        if len(causes) > 1:
            causes.discard("kv")  # vLLM passed over a request behind another one
        if causes:
            self.rubato.deviated(causes, "; ".join(sorted(about)[:8]))

    def _cause(self, request: Any, planned: int, scheduled: int) -> str:
        """Why vLLM gave a request other than the planned number of tokens; a word of docs/vllm.md's table."""
        threshold = self.scheduler_config.long_prefill_token_threshold
        if request.request_id not in self.rubato.seqs or request.request_id in self.rubato.hidden_ids:
            return "not_in_view"
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "kv_connector"
        if request.request_id in self._preempted_ids:
            return "kv"
        if not self.scheduler_config.enable_chunked_prefill:
            return "chunked_prefill_off"
        if self.need_mamba_block_aligned_split or self.num_prefill_lookahead:
            return "chunk_boundary"
        if threshold and scheduled and scheduled < planned:
            return "long_prefill_token_threshold"
        if request.has_encoder_inputs:
            return "encoder"
        if not scheduled and request.lora_request is not None:
            return "lora"
        if self.connector is not None and scheduled and scheduled < planned:
            return "kv_connector"
        if self.parallel_config.data_parallel_size > 1 and not scheduled:
            return "data_parallel"
        return "kv" if not scheduled else "other"

    def shutdown(self) -> None:
        driver = self.rubato
        log.info(
            "%d steps scheduled, %d left to vLLM with room for every SLO, %d after a fault; causes of steps not as "
            "planned: %s; faults: %s", driver.steps, driver.stood_aside, driver.fallbacks, dict(driver.deviations),
            dict(driver.faults),
        )  # fmt: skip
        driver.close()
        super().shutdown()


def _prefills(request: Any) -> bool:
    return bool(request.num_computed_tokens < request.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Rules:
    """How vLLM's scheduler admits requests: whether a prompt must fit as a whole, blocks to be kept free, how many may
    be running, steps from one that prefills to the next (from 0.33 on)."""

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
    """One batch at a time; with pipeline parallelism, one a stage."""


class AsyncPolicyScheduler(PolicyMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's default on GPUs: the next batch is planned while one runs."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.num_spec_tokens:  # the drafts themselves come later, in the worker; here are their places
            self._cut_drafts(scheduler_output.num_scheduled_tokens)
