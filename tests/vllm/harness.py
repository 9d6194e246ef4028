"""vLLM's scheduler with our plug-in and a model that is a formula: thousands of steps a second, on a clock of our own.

What vLLM's engine core does in a step is done here: `schedule`, a result for each request that came to its last pending
token, `update_from_output`; with a queue of batches that run (`step_with_batch_queue`) where there are several.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rubato.core.events import Event, Finished
from rubato.core.interfaces import Scheduler, View
from rubato.core.plan import Plan
from rubato.policies import load
from rubato.replica.plan_check import spelled_out
from tests.kit import Linear

STEP = Linear(fixed=0.01, per_token=0.001)


@cache
def engine_config(model: str, speculative: str = "null") -> Any:
    """vLLM's configuration; `harness` changes copies of the parts it varies."""
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        scheduler_cls="rubato.vllm.Scheduler",
        speculative_config=json.loads(speculative),
    )
    return args.create_engine_config()


def with_model_runner(version: int, model: Path, monkeypatch: Any) -> None:
    """Of vLLM's two model runners that one, whatever the platform would choose."""
    engine_config(str(model))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", version == 2)


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
            # (with a drafter that has KV of its own, what it may yet need is taken off)
            assert seq.own_blocks <= seq.blocks or seq in view.waiting or "draft" in view.supports
        self.plans.append(spelled_out(self.inner.plan(view), view))
        return self.plans[-1]


@dataclass(frozen=True)
class Running:
    """A batch that runs. sampled: of each request that it brings tokens, its place in the output and its drafts."""

    output: Any
    sampled: dict[str, tuple[int, list[int]]]


@dataclass
class Harness:
    """A scheduler under test. `out` holds each request's tokens, `ended` how often each was told to be over."""

    scheduler: Any
    policy: Recording
    depth: int = 1  # batches that run at once
    now: float = 0.0
    steps: int = 0
    scheduled: list[dict[str, int]] = field(default_factory=list)
    verified: list[dict[str, int]] = field(default_factory=list)  # drafted tokens, of each step
    out: dict[str, list[int]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, tuple[str, Any]] = field(default_factory=dict)
    exact: bool = True  # what is scheduled must be the plan
    pace: float = 0.0  # seconds of each step, whatever is in it; 0: by `STEP`
    watched: bool = True  # plans, events and blocks are looked at; for what is measured they are not
    running: deque[Running] = field(default_factory=deque)
    slots: set[str] = field(default_factory=set)  # requests that the V2 model runner holds

    def add(
        self,
        id: str,
        prompt: Sequence[int],
        most: int,
        *,
        stop: str | None = None,
        fields: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        """fields: of vLLM's Request. extra: `vllm_xargs`."""
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, stop=stop, extra_args=extra or None)
        hasher = get_request_block_hasher(self.scheduler.hash_block_size, sha256)
        given: dict[str, Any] = {"sampling_params": params, "pooling_params": None, "block_hasher": hasher}
        request = Request(id, list(prompt), arrival_time=self.now, **{**given, **(fields or {})})
        self.out[id] = []
        self.scheduler.add_request(request)

    def serve(
        self,
        rng: random.Random,
        requests: int,
        most_steps: int,
        *,
        aborts: float = 0.0,
        slo: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Requests `r0` to ... of random lengths with up to so many steps between them, until all have ended. aborts:
        after so many of them one is aborted. slo: of the next request."""
        for i in range(requests):
            stated = slo()
            self.add(f"r{i}", [rng.randrange(200) for _ in range(rng.randint(5, 60))], rng.randint(1, 12), **stated)
            for _ in range(rng.randint(0, most_steps)):
                self.step()
            if aborts and rng.random() < aborts:
                self.abort(f"r{rng.randrange(i + 1)}")
        while self.scheduler.has_requests():
            self.step()

    def abort(self, id: str) -> None:
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, int]:
        """One step; returns what was scheduled, after comparing it with the plan."""
        scheduler, plans = self.scheduler, len(self.policy.plans) if self.watched else 0
        if self.running and not scheduler.has_requests():
            self._complete(self.running.popleft())
            return {}
        output = scheduler.schedule(False)
        counts = dict(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        if self.watched and self.exact:
            plan = self.policy.plans[-1] if len(self.policy.plans) > plans else Plan()
            assert counts == {w.seq: w.tokens + len(w.verify) for w in plan.work}
            assert {k: len(v) for k, v in drafts.items()} == {w.seq: len(w.verify) for w in plan.work if w.verify}
        self.verified.append({id: len(tokens) for id, tokens in drafts.items()})
        sampled = {}
        for id in counts:
            request = scheduler.requests[id]
            if not request.is_prefill_chunk and request.pooling_params is None:
                own = drafts.get(id, [])
                sampled[id] = (request.num_computed_tokens - len(own) - request.num_prompt_tokens, own)
        if scheduler.use_v2_model_runner:
            self._check_slots(output)
        self.running.append(Running(output, sampled))
        self.steps += 1
        self.scheduled.append(counts)
        if len(self.running) == self.depth or not (counts or scheduler.has_requests()):
            self._complete(self.running.popleft())
        if self.watched:
            self._check_blocks()
        return counts

    def _complete(self, batch: Running) -> None:
        """A batch has run: its tokens, and the next drafts, where the engine core hands them over."""
        scheduler, output = self.scheduler, batch.output
        counts = output.num_scheduled_tokens
        self.now += self.pace or STEP.fixed + STEP.per_token * sum(counts.values())
        result = ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={id: i for i, id in enumerate(counts)},
            sampled_token_ids=[self._sample(id, *batch.sampled[id]) if id in batch.sampled else [] for id in counts],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[self._pooled(id) for id in counts],
        )
        if scheduler.connector is not None:
            result.kv_connector_output = scheduler.connector.worker(output)
        for core in scheduler.update_from_output(output, result).values():
            for one in core.outputs:
                self.out[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ended[one.request_id] += 1
                    self.reasons[one.request_id] = (str(one.finish_reason), one.stop_reason)
        if scheduler.num_spec_tokens and counts and not scheduler.scheduler_config.async_scheduling:
            drafting = [] if getattr(output, "skip_drafts", False) else batch.sampled
            ids = [id for id in drafting if id in scheduler.requests]
            most = output.num_spec_tokens_to_schedule
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [self._drafted(id, most) for id in ids]))

    def run(self, most: int = 20_000) -> None:
        """Until nothing is left."""
        while self.scheduler.has_requests() or self.running:
            self.step()
            assert self.steps < most, "livelock"

    def finish(self) -> dict[str, Finished]:
        """The last events, by request, each exactly once; KV is free and vLLM has nothing left."""
        self.step()  # what happened since the last plan is observed before the next
        finished = [e for e in self.policy.events if isinstance(e, Finished)]
        assert len({e.id for e in finished}) == len(finished)
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not scheduler.requests
        assert not scheduler.rubato.requests.seqs
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        assert not self.exact or not scheduler.rubato.guard.deviations
        assert not self.exact or not scheduler.rubato.guard.faults
        assert scheduler.rubato.guard.steps == self.steps
        assert not self.running
        return {e.id: e for e in finished}

    def _check_slots(self, output: Any) -> None:
        """As the V2 model runner does: one that is started and finds no slot ends the engine."""
        self.slots -= output.finished_req_ids | (output.preempted_req_ids or set())
        started = [new.req_id for new in output.scheduled_new_reqs]
        assert self.slots.isdisjoint(started)
        self.slots.update(started)
        assert len(self.slots) <= self.scheduler.scheduler_config.max_num_seqs
        assert self.slots.issuperset(output.scheduled_cached_reqs.req_ids)

    def _check_blocks(self) -> None:
        """Who holds a block is counted in it, and what is computed in it is the holder's own prefix."""
        manager = self.scheduler.kv_cache_manager
        holders: Counter[int] = Counter()
        for request in self.scheduler.requests.values():
            groups = manager.get_blocks(request.request_id).blocks
            holders.update(b.block_id for held in groups for b in held if not b.is_null)
            done = request.num_computed_tokens - request.num_output_placeholders
            named = manager.enable_caching and self.scheduler._kv.is_exact and request.status == RequestStatus.RUNNING
            named = named and not self.scheduler.num_spec_tokens  # drafts that were right are named a step later
            for i in range(done // self.scheduler.block_size if named else 0):
                assert groups[0][i].block_hash is not None
                assert get_block_hash(groups[0][i].block_hash) == request.block_hashes[i]
        for _, blocks in self.scheduler.deferred_frees:  # which batches that run may still write
            holders.update(b.block_id for b in blocks)
        pool = manager.block_pool
        assert {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null} == holders
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(holders)

    def _sample(self, id: str, place: int, drafts: Sequence[int]) -> list[int]:
        """The model's tokens from this place in the output on: as many as drafts are right, and one."""
        request = self.scheduler.requests.get(id)
        if request is not None and self.scheduler.num_spec_tokens:  # drafts in flight were counted as if all right
            place = request.num_output_tokens
        own = [token(id, place + i) for i in range(len(drafts) + 1)]
        if -1 in drafts:  # known to the worker alone, with asynchronous scheduling
            right = place % (len(drafts) + 1)
        else:
            right = next((i for i, drafted in enumerate(drafts) if drafted != own[i]), len(drafts))
        return own[: right + 1]

    def _pooled(self, id: str) -> Any:
        request = self.scheduler.requests.get(id)
        return torch.zeros(1) if request is not None and request.pooling_params is not None else None

    def _drafted(self, id: str, most: int) -> list[int]:
        """Drafts of what comes next, of which some at the beginning are right."""
        place = self.scheduler.requests[id].num_output_tokens
        return [token(id, place + i) + (i > place % (most + 1)) for i in range(most)]


def token(id: str, position: int) -> int:
    """The formula: output token `position` of request `id`, however it was scheduled."""
    return (sum(map(ord, id)) * 31 + position * 7) % 250 + 3


def harness(
    model: object, policy: str, *, blocks: int, block: int = 16, tokens: int = 64, seqs: int = 8, prefix: bool = False,
    settings: dict[str, Any] | None = None, wrap: Any = None, asynchronous: bool = False, depth: int = 0,
    kv: Sequence[Any] = (), change: Callable[[Any], None] | None = None, rubato: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None, watched: bool = True,
) -> Harness:  # fmt: skip
    """`blocks` blocks of KV that can be used, of `block` tokens; `tokens` and `seqs` in a batch. depth: batches that
    run at once (2 with asynchronous scheduling, else 1). kv: the spec of each group of layers (one of full attention).
    change: of vLLM's configuration. policy "": vLLM's own scheduler, not watched."""
    config = copy.deepcopy(engine_config(str(model), json.dumps(speculative)))
    config.additional_config = {
        "rubato": {"policy": policy, "settings": settings or {}, "stand_aside": False, **(rubato or {})}
    }
    config.cache_config.num_gpu_blocks = blocks + 1
    config.cache_config.block_size = block
    config.cache_config.enable_prefix_caching = prefix
    config.scheduler_config.max_num_seqs = seqs
    config.scheduler_config.max_num_batched_tokens = tokens
    config.scheduler_config.async_scheduling = asynchronous
    if depth and not asynchronous:
        config.parallel_config.pipeline_parallel_size = depth
    if not policy:
        config.scheduler_config.scheduler_cls = None
    if change is not None:
        change(config)
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            blocks + 1, [], [KVCacheGroupSpec([f"layer{i}"], one) for i, one in enumerate(kv or [spec])]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block * config.parallel_config.decode_context_parallel_size,
        log_stats=True,
    )
    if wrap is not None:
        scheduler.rubato.policy = wrap(policy)
    recording = Recording(scheduler.rubato.policy) if policy else Recording(load("vllm"))
    made = Harness(scheduler, recording, depth or config.max_concurrent_batches, watched=watched and bool(policy))
    if made.watched:
        scheduler.rubato.policy = recording
    if policy:
        scheduler.rubato.clock.now = scheduler.rubato.requests.unix = lambda: made.now
    return made
