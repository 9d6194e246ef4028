"""vLLM's whole engine in this process, with a real if tiny model: stock scheduler against the plug-in."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from llvmlite.binding import ffi
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from rubato.core.events import Event, Finished, Tokens
from rubato.engines.vllm.scheduler import SyncScheduler

CHANCE = "tests.vllm.random_plans"
CHANCE_DRAFTS = "tests.vllm.random_drafts"
BLOCK = 32  # vLLM's CPU attention takes multiples of it
BUDGET = 64
SCARCE = 9  # blocks: 288 tokens for twelve requests of up to 140


class Stock(Scheduler):  # type: ignore[misc]
    """vLLM's own, watched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, int]] = []
        self.preempted = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.batches.append(dict(output.num_scheduled_tokens))
        return output

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.preempted += 1
        super()._preempt_request(*args, **kwargs)


class Ours(Stock, SyncScheduler):  # type: ignore[misc]
    """The plug-in, watched by the same code."""


@dataclass
class Result:
    batches: list[dict[str, int]]
    preempted: int
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def finished(self) -> list[Finished]:
        return [e for e in self.events if isinstance(e, Finished)]


@pytest.fixture(autouse=True)
def numba_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks into every loaded module's objects when it starts on a CPU, and llvmlite's answers to any name, even
    to `__dict__`: with Numba loaded, as by an engine before in this process, vLLM 0.32 then stops."""
    answers = ffi._lib_wrapper.__getattr__

    def all_but_special(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answers(self, name)

    monkeypatch.setattr(ffi._lib_wrapper, "__getattr__", all_but_special)


@contextmanager
def engine(model: Path, cls: type, dtype: str, speculative: Any = None, **rubato: Any) -> Iterator[LLMEngine]:
    """An engine with little memory; both kinds of scheduler start prompts whose end does not fit yet."""
    made = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=SCARCE + 1,
            enable_prefix_caching=False,
            scheduler_reserve_full_isl=False,
            scheduler_cls=cls,
            speculative_config=speculative,
            additional_config={"rubato": {"stand_aside": False, **rubato}} if rubato else {},
        )
    )
    try:
        yield made
    finally:
        made.engine_core.shutdown()
        del made
        gc.collect()


def serve(made: LLMEngine, extra: dict[str, Any] | None = None, allowed: Collection[str] = ()) -> Result:
    """Twelve requests, some of them while others run; their greedy tokens. allowed: causes of deviations."""
    rng = Random(5)
    scheduler = made.engine_core.engine_core.scheduler
    result = Result(scheduler.batches, 0)
    policy = scheduler.rubato.policy if isinstance(scheduler, SyncScheduler) else None
    if policy is not None:
        observe = policy.observe
        policy.observe = lambda events: (result.events.extend(events), observe(events))
    for i in range(12):
        prompt = [rng.randrange(3, 256) for _ in range(rng.randint(5, 100))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(5, 40), ignore_eos=True, extra_args=extra)
        made.add_request(f"q{i}", {"prompt_token_ids": prompt}, params)
        for _ in range(rng.choice((0, 0, 3))):
            collect(made, result)
    while made.has_unfinished_requests():
        collect(made, result)
    result.preempted = scheduler.preempted
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == SCARCE
    if policy is not None:
        scheduler.schedule()  # what happened since the last plan is observed before the next
        assert scheduler.rubato.guard.deviations.keys() <= set(allowed)
        assert not scheduler.rubato.guard.faults
    return result


def collect(made: LLMEngine, result: Result) -> None:
    for output in made.step():
        if output.finished:
            assert output.request_id not in result.tokens
            result.tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            result.reasons[output.request_id] = output.outputs[0].finish_reason


def named(batches: list[dict[str, int]]) -> list[list[tuple[str, int]]]:
    """vLLM appends a random part to each id."""
    return [[(id.split("-")[0], n) for id, n in batch.items()] for batch in batches if batch]


@cache
def stock(model: Path, dtype: str) -> Result:
    """What stock vLLM does, once."""
    with engine(model, Stock, dtype) as made:
        return serve(made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_batches_give_equal_tokens(model: Path, dtype: str) -> None:
    """The `vllm` policy is vLLM's own rule: the same batches in the same order, and so the same tokens."""
    theirs = stock(model, dtype)
    with engine(model, Ours, dtype, policy="vllm", settings={"budget": BUDGET}) as made:
        ours = serve(made)
    assert theirs.preempted > 0
    assert ours.preempted == theirs.preempted
    assert named(ours.batches) == named(theirs.batches)
    assert ours.tokens == theirs.tokens
    assert len(theirs.tokens) == 12


@pytest.mark.parametrize("policy", ["edf", CHANCE])
def test_tokens_do_not_depend_on_the_policy(model: Path, policy: str) -> None:
    """In float32, where the order of additions does not decide between two tokens of this model."""
    theirs = stock(model, "float32")
    with engine(model, Ours, "float32", policy=policy) as made:
        ours = serve(made, {"slo_ttft_ms": 400, "slo_tpot_ms": 30, "slo_tier": "chat"})
    assert policy != CHANCE or named(ours.batches) != named(theirs.batches)
    assert ours.tokens == theirs.tokens
    assert set(ours.reasons.values()) == {"length"}
    assert sorted(e.id.split("-")[0] for e in ours.finished) == sorted(theirs.tokens)
    assert all(e.outcome == "completed" and e.verdict.ttft is not None for e in ours.finished)


def test_aborted_in_the_middle(model: Path) -> None:
    with engine(model, Ours, "float32", policy="edf") as made:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        for id in ("gone", "stays"):
            made.add_request(id, {"prompt_token_ids": [5] * 60}, params)
        for _ in range(5):
            made.step()
        scheduler = made.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        made.abort_request(["gone"])
        assert pool.get_num_free_blocks() > before
        result = Result([], 0)
        while made.has_unfinished_requests():
            collect(made, result)
        assert result.tokens.keys() == {"stays"}
        assert pool.get_num_free_blocks() == SCARCE


def test_a_dropped_request_reaches_the_client_as_an_error(model: Path) -> None:
    with engine(model, Ours, "float32", policy="edf") as made:
        extra = {"slo_ttft_ms": 0.001, "slo_on_decline": "refuse"}
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, extra_args=extra)
        made.add_request("late", {"prompt_token_ids": [5] * 60}, params)
        outputs = [o for _ in range(3) for o in made.step()]
        assert [(o.finished, o.outputs[0].finish_reason) for o in outputs] == [(True, "error")]
        why = r"rejected-slo-infeasible: the prompt of 60 tokens takes [\d.]+ ms here alone; asked 0\.001 ms"
        assert re.fullmatch(why, outputs[0].outputs[0].stop_reason)


# --------------------------------------------------------------------------- drafts

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTING = ["vllm_spec", "smart_spec", "slos_serve", "adaserve", "edf", CHANCE_DRAFTS]


@pytest.mark.parametrize(
    ("policy", "method"),
    [*((name, "ngram") for name in DRAFTING), *((name, "draft_model") for name in ("vllm_spec", CHANCE_DRAFTS))],
)
def test_drafts_change_no_token(model: Path, policy: str, method: str) -> None:
    """Drafts of both kinds, verified as the plan says; by policies that plan none, as vLLM would."""
    own = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "enforce_eager": True}
    theirs = stock(model, "float32")
    rare = {"kv"} if method == "draft_model" or policy == "edf" else set()  # for what is written ahead of any plan
    with engine(model, Ours, "float32", speculative=NGRAM if method == "ngram" else own, policy=policy) as made:
        driver = made.engine_core.engine_core.scheduler.rubato
        lengths, planned = Counter(), Counter()
        plan, scheduled = driver.plan, driver.scheduled

        def planning(view: Any) -> Any:
            step = plan(view)
            assert step is not None, driver.guard.faults
            planned.update(len(w.verify) for w in step.plan.work if w.verify)
            return step

        def noting(now: float, output: Any, *args: Any) -> Any:
            lengths.update(map(len, output.scheduled_spec_decode_tokens.values()))
            return scheduled(now, output, *args)

        driver.plan, driver.scheduled = planning, noting
        ours = serve(made, {"slo_ttft_ms": 4000, "slo_tpot_ms": 300}, rare)
        tokens = [e for e in ours.events if isinstance(e, Tokens)]
    assert ours.tokens == theirs.tokens
    assert sum(lengths.values()) > 0
    assert lengths == planned or policy == "edf"
    assert sum(len(e.accepted) for e in tokens) > 0
    assert sum(e.tried for e in tokens) >= sum(len(e.accepted) for e in tokens)
