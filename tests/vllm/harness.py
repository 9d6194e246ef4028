"""vLLM's scheduler with our plug-in and a model that is a formula: thousands of steps a second, on a clock of our own.

What vLLM's engine core does in a step is done here: `schedule`, a result for each request that came to its last pending
token, `update_from_output`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rubato.core.events import Event, Finished
from rubato.core.interfaces import Scheduler, View
from rubato.core.plan import Plan
from rubato.engines.vllm.scheduler import RubatoScheduler
from rubato.replica.plan_check import spelled_out
from tests.doubles import Linear

STEP = Linear(fixed=0.01, per_token=0.001)


@cache
def engine_config(model: str) -> Any:
    """vLLM's configuration; `harness` changes copies of the parts it varies."""
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        scheduler_cls=RubatoScheduler,
    )
    return args.create_engine_config()


class Recording:
    """A policy whose plans and events are kept."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner, self.needs = inner, inner.needs
        self.plans: list[Plan] = []
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events
        self.inner.observe(events)

    def plan(self, view: View) -> Plan:
        assert len({s.id for s in [*view.waiting, *view.running]}) == len(view.waiting) + len(view.running)
        for seq in [*view.waiting, *view.running]:
            assert 0 < seq.pending <= seq.length
            assert seq.own_blocks <= seq.blocks or seq in view.waiting
            assert seq.in_flight == 0
        self.plans.append(spelled_out(self.inner.plan(view), view))
        return self.plans[-1]


@dataclass
class Harness:
    """A scheduler under test. `out` holds each request's tokens, `ended` how often each was told to be over."""

    scheduler: RubatoScheduler
    policy: Recording
    now: float = 0.0
    steps: int = 0
    scheduled: list[dict[str, int]] = field(default_factory=list)
    out: dict[str, list[int]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, tuple[str, Any]] = field(default_factory=dict)
    exact: bool = True  # what is scheduled must be the plan

    def add(self, id: str, prompt: Sequence[int], most: int, *, stop: str | None = None, **extra: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, stop=stop, extra_args=extra or None)
        hasher = get_request_block_hasher(self.scheduler.block_size, sha256)
        request = Request(id, list(prompt), params, None, arrival_time=self.now, block_hasher=hasher)
        self.out[id] = []
        self.scheduler.add_request(request)

    def abort(self, id: str) -> None:
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, int]:
        """One step; returns what was scheduled, after comparing it with the plan."""
        scheduler, plans = self.scheduler, len(self.policy.plans)
        output = scheduler.schedule(False)
        counts = dict(output.num_scheduled_tokens)
        plan = self.policy.plans[-1] if len(self.policy.plans) > plans else Plan()
        assert not self.exact or counts == {w.seq: w.tokens for w in plan.work}
        self.now += STEP.fixed + STEP.per_token * sum(counts.values())
        sampled = [self._sample(id) for id in counts]
        result = ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={id: i for i, id in enumerate(counts)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for core in scheduler.update_from_output(output, result).values():
            for one in core.outputs:
                self.out[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ended[one.request_id] += 1
                    self.reasons[one.request_id] = (str(one.finish_reason), one.stop_reason)
        self.steps += 1
        self.scheduled.append(counts)
        self._check_blocks()
        return counts

    def run(self, most: int = 20_000) -> None:
        """Until nothing is left."""
        while self.scheduler.has_requests():
            self.step()
            assert self.steps < most, "livelock"

    def finish(self) -> dict[str, Finished]:
        """The last events, by request, each exactly once; KV is free and vLLM has nothing left."""
        self.step()  # what happened since the last plan is observed before the next
        finished = [e for e in self.policy.events if isinstance(e, Finished)]
        assert len({e.id for e in finished}) == len(finished)
        scheduler = self.scheduler
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.rubato.limits.kv_blocks
        assert not scheduler.requests
        assert not scheduler.rubato.seqs
        assert not scheduler.running
        assert not scheduler.waiting
        assert not self.exact or scheduler.rubato.deviations == 0
        assert scheduler.rubato.steps == self.steps
        return {e.id: e for e in finished}

    def _check_blocks(self) -> None:
        """Who holds a block is counted in it, and what is computed in it is the holder's own prefix."""
        manager = self.scheduler.kv_cache_manager
        holders: Counter[int] = Counter()
        for request in self.scheduler.requests.values():
            held = manager.get_blocks(request.request_id).blocks[0]
            holders.update(b.block_id for b in held)
            for i in range(request.num_computed_tokens // self.scheduler.block_size if manager.enable_caching else 0):
                assert held[i].block_hash is not None
                assert get_block_hash(held[i].block_hash) == request.block_hashes[i]
        pool = manager.block_pool
        assert {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null} == holders
        assert pool.get_num_free_blocks() == self.scheduler.rubato.limits.kv_blocks - len(holders)

    def _sample(self, id: str) -> list[int]:
        request = self.scheduler.requests[id]
        done = request.num_computed_tokens >= request.num_tokens
        return [token(id, request.num_output_tokens)] if done else []


def token(id: str, position: int) -> int:
    """The formula: output token `position` of request `id`, however it was scheduled."""
    return (sum(map(ord, id)) * 31 + position * 7) % 250 + 3


def harness(
    model: object, policy: str, *, blocks: int, block: int = 16, tokens: int = 64, seqs: int = 8, prefix: bool = False,
    settings: dict[str, Any] | None = None, wrap: Any = None,
) -> Harness:  # fmt: skip
    """`blocks` blocks of KV that can be used, of `block` tokens; `tokens` and `seqs` in a batch."""
    config = engine_config(str(model))
    config.additional_config = {"rubato": {"policy": policy, "settings": settings or {}}}
    config.cache_config.num_gpu_blocks = blocks + 1
    config.cache_config.block_size = block
    config.cache_config.enable_prefix_caching = prefix
    config.scheduler_config.max_num_seqs = seqs
    config.scheduler_config.max_num_batched_tokens = tokens
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = RubatoScheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        log_stats=True,
    )
    if wrap is not None:
        scheduler.rubato.policy = wrap(policy)
    recording = Recording(scheduler.rubato.policy)
    scheduler.rubato.policy = recording
    made = Harness(scheduler, recording)
    scheduler.rubato.clock = scheduler.rubato.unix = lambda: made.now
    return made
