"""What a View cannot say is vLLM's to decide: every request ends once with its own tokens, the policy goes on, and what
was not as planned is counted by its cause. The table in docs/vllm.md is this file's."""

from __future__ import annotations

import random
from collections import Counter
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.config import KVTransferConfig, LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from tests.vllm.harness import Harness, harness, token, with_model_runner
from tests.vllm.test_plans import CHANCE, QUEUES, Fields, drive, scarce

POLICIES = ["rubato", "edf", "slos_serve", CHANCE]
SEEDS = range(3)
both = pytest.mark.parametrize("queue", QUEUES)
of_all = [both, pytest.mark.parametrize("seed", SEEDS), pytest.mark.parametrize("policy", POLICIES)]


def each(test: Any) -> Any:
    for mark in of_all:
        test = mark(test)
    return test


def made_for(model: Path, policy: str, seed: int, queue: str, **more: Any) -> Harness:
    settings = {"seed": seed} if policy == CHANCE else None
    made = harness(model, policy, settings=settings, **{**scarce(seed), **QUEUES[queue], **more})
    made.exact = False
    return made


def setting(part: str, name: str, value: Any) -> Any:
    """Of vLLM's configuration."""
    return lambda config: vars(getattr(config, part)).update({name: value})


def one_lora(config: Any) -> None:
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)


def served(made: Harness, seed: int, fields: Fields | None = None) -> Counter[str]:
    """Drive a load; returns the causes of deviations."""
    most = drive(made, seed, fields=fields)
    finished = made.finish()
    driver = made.scheduler.rubato
    assert made.ended == dict.fromkeys(most, 1)
    assert not driver.guard.faults
    assert driver.guard.fallbacks == 0
    for id, end in finished.items():
        assert end.outcome in ("completed", "refused")
        if end.outcome == "completed":
            assert made.out[id] == [token(id, i) for i in range(most[id])]
    return driver.guard.deviations


# --------------------------------------------------------------------------- LoRA


@each
def test_lora(model: Path, policy: str, seed: int, queue: str) -> None:
    """No more adapters in a batch than `max_loras`: a request of one more waits, planned or not."""

    def fields(rng: random.Random, prompt: int) -> dict[str, Any]:
        which = rng.choice((0, 1, 2, 3))
        return {"lora_request": LoRARequest(f"lora{which}", which, "none")} if which else {}

    made = made_for(model, policy, seed, queue, change=one_lora, seqs=8, tokens=256)
    assert served(made, seed, fields).keys() <= {"lora"}


def test_lora_is_what_they_wait_for(model: Path) -> None:
    made = harness(model, "vllm", blocks=40, change=one_lora)
    made.exact = False
    for which in (1, 2):
        made.add(f"q{which}", [5] * 20, 3, fields={"lora_request": LoRARequest(f"lora{which}", which, "none")})
    assert made.step() == {"q1": 20}
    assert made.scheduler.rubato.guard.deviations == {"lora": 1}
    made.run()
    assert made.ended == {"q1": 1, "q2": 1}


# --------------------------------------------------------------------------- KV that is not one group of full attention

BLOCK = 4


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=tokens)


def mamba(block: int) -> MambaSpec:
    return MambaSpec(block_size=block, shapes=((2, 512),), dtypes=(torch.float32,), page_size_padded=1024)


@each
@pytest.mark.parametrize("groups", [[window(16)], [full(), window(16)], [full(), window(8), window(32)]])
def test_sliding_windows(model: Path, policy: str, seed: int, queue: str, groups: list[Any]) -> None:
    rng = random.Random(seed)
    blocks = len(groups) * 256 // BLOCK + rng.randint(0, 40)
    made = made_for(model, policy, seed, queue, kv=groups, block=BLOCK, blocks=blocks)
    assert served(made, seed).keys() <= {"kv", "prefix_cache"}


def test_block_hashes_that_cover_tokens_after_their_block(model: Path) -> None:
    """As 0.33 has them with EAGLE and MTP: the last full block of a prompt has no hash yet."""
    if "num_hash_lookahead_tokens" not in signature(get_request_block_hasher).parameters:
        pytest.skip("from vLLM 0.33 on")
    made = harness(model, "edf", blocks=40, block=BLOCK, prefix=True)
    made.watched = False  # blocks are named later than elsewhere
    hasher = get_request_block_hasher(BLOCK, sha256, num_hash_lookahead_tokens=5)
    for id in ("first", "again"):
        made.add(id, [5] * 9, 3, fields={"block_hasher": hasher})
        made.run()
    assert made.finish().keys() == {"first", "again"}


# --------------------------------------------------------------------------- encoders


def encoders(made: Harness, budget: int, *, whole: bool) -> None:
    scheduler = made.scheduler
    scheduler.max_num_encoder_input_tokens = budget
    scheduler._is_plain = False
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=budget)
    scheduler.scheduler_config.disable_chunked_mm_input = whole


def image(rng: random.Random, prompt: int) -> dict[str, Any]:
    if prompt < 16 or rng.random() < 0.3:
        return {}
    offset = rng.randint(0, prompt - 12)
    at = PlaceholderRange(offset=offset, length=12)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", f"image{rng.randint(0, 5)}", at)]}


@each
@pytest.mark.parametrize("whole", [False, True])
def test_multimodal(model: Path, policy: str, seed: int, queue: str, whole: bool) -> None:
    """The encoder takes 24 embeddings a step; an image that must not be cut is in one chunk."""
    made = made_for(model, policy, seed, queue, prefix=False, tokens=64)
    encoders(made, 24, whole=whole)
    schedule, cut = made.scheduler.schedule, []

    def watching(*args: Any) -> Any:
        output = schedule(*args)
        for id, tokens in output.num_scheduled_tokens.items():
            request = made.scheduler.requests[id]
            end = request.num_computed_tokens
            for feature in request.mm_features:
                offset = feature.mm_position.offset
                if end - tokens < offset < end < offset + feature.mm_position.length:
                    cut.append(id)
        return output

    made.scheduler.schedule = watching
    assert served(made, seed, image).keys() <= {"encoder", "kv"}
    assert not (whole and cut)


# --------------------------------------------------------------------------- structured output


class Grammars:
    """The grammar of a request is compiled when a test says so."""

    def accept_tokens(self, request: Any, tokens: Any) -> bool:
        return True


@both
def test_a_request_whose_grammar_is_not_compiled_yet_is_not_in_the_view(model: Path, queue: str) -> None:
    made = harness(model, "vllm", blocks=20, **QUEUES[queue])
    made.scheduler.structured_output_manager = Grammars()
    made.add("json", [5] * 20, 3)
    made.add("text", [6] * 20, 3)
    json = made.scheduler.requests["json"]
    json.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert made.step() == {"text": 20}
    json.structured_output_request = None
    assert "json" not in made.step()
    json.status = RequestStatus.WAITING
    made.run()
    assert made.finish().keys() == {"json", "text"}


# --------------------------------------------------------------------------- several engines, several stages


@each
def test_data_parallel(model: Path, policy: str, seed: int, queue: str) -> None:
    """vLLM holds prefills back in the steps between those in which all engines may begin some."""

    made = made_for(model, policy, seed, queue, change=setting("parallel_config", "data_parallel_size", 2))
    schedule, steps = made.scheduler.schedule, iter(range(100_000))
    made.scheduler.schedule = lambda *args: schedule(next(steps) % 3 > 0)
    assert served(made, seed).keys() <= {"data_parallel", "kv"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_pipeline_parallel_and_asynchronous(model: Path, policy: str, seed: int, monkeypatch: Any) -> None:
    """With vLLM's V2 model runner: a request's next token is planned as many steps later as there are stages."""
    with_model_runner(2, model, monkeypatch)

    made = made_for(
        model, policy, seed, "async", change=setting("parallel_config", "pipeline_parallel_size", 2), depth=3
    )
    made.exact = True
    assert not served(made, seed)


# --------------------------------------------------------------------------- vLLM's own rules

AS_PLANNED: list[tuple[str, str, Any]] = [
    ("parallel_config", "decode_context_parallel_size", 2),  # a block holds the tokens of two GPUs
    ("scheduler_config", "policy", "priority"),  # which request runs is the policy's, and who is preempted vLLM's
    ("scheduler_config", "prefill_schedule_interval", 4),  # from 0.33 on: no steps of vLLM's own while a policy plans
]
AGAINST_PLAN: list[tuple[str, Any, dict[str, int]]] = [
    ("long_prefill_token_threshold", 8, {}),
    ("chunked_prefill_off", False, {"tokens": 256}),
]


@each
@pytest.mark.parametrize(("part", "name", "value"), AS_PLANNED)
def test_setting_changes_no_plan(
    model: Path, policy: str, seed: int, queue: str, part: str, name: str, value: Any
) -> None:
    made = made_for(model, policy, seed, queue, change=setting(part, name, value))
    made.exact = True
    fields = (lambda rng, prompt: {"priority": rng.randint(0, 3)}) if name == "policy" else None
    assert not served(made, seed, fields)


@each
@pytest.mark.parametrize(("cause", "value", "limits"), AGAINST_PLAN)
def test_setting_that_changes_plans_is_the_cause(
    model: Path, policy: str, seed: int, queue: str, cause: str, value: Any, limits: dict[str, int]
) -> None:
    name = {"chunked_prefill_off": "enable_chunked_prefill"}.get(cause, cause)
    made = made_for(model, policy, seed, queue, change=setting("scheduler_config", name, value), **limits)
    assert served(made, seed).keys() <= {cause, "kv"}


@each
def test_requests_that_no_view_can_show(model: Path, policy: str, seed: int, queue: str) -> None:
    """Prompts to be embedded (pooling) run beside the others, by vLLM's own rule."""

    def fields(rng: random.Random, prompt: int) -> dict[str, Any]:
        return {"session_id": "x"} if rng.random() < 0.5 else {}

    made = made_for(model, policy, seed, queue)
    offer = made.scheduler.rubato.requests.offer
    made.scheduler.rubato.requests.offer = lambda own: "" if own.session_id else offer(own)
    most = drive(made, seed, fields=fields)
    made.finish()
    assert made.ended == dict.fromkeys(most, 1)
    assert made.scheduler.rubato.guard.deviations.keys() <= {"not_in_view", "kv"}


def test_a_pooling_request_is_vllms(model: Path) -> None:
    made = harness(model, "edf", blocks=20)
    made.exact = False
    made.add("embed", [5] * 20, 1, fields={"sampling_params": None, "pooling_params": PoolingParams(task="embed")})
    made.add("chat", [6] * 20, 3, slo_ttft_ms=500)
    assert made.step() == {"embed": 20, "chat": 20}
    assert made.scheduler.rubato.guard.deviations == {"not_in_view": 1}
    made.run()
    assert made.ended == {"embed": 1, "chat": 1}
    assert made.finish().keys() == {"chat"}


# --------------------------------------------------------------------------- KV connectors


def connected(model: Path, policy: str, seed: int, queue: str) -> Harness:
    def change(config: Any) -> None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="FakeConnector", kv_connector_module_path="tests.vllm.fake_connector", kv_role="kv_both"
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = True

    return made_for(model, policy, seed, queue, change=change)


@each
@pytest.mark.parametrize("steps", [0, 3])
def test_kv_connector(model: Path, policy: str, seed: int, queue: str, steps: int) -> None:
    """KV that comes from elsewhere, at once or while other batches run."""

    def fields(rng: random.Random, prompt: int) -> dict[str, Any]:
        return {}

    made = connected(model, policy, seed, queue)
    add = made.scheduler.add_request

    def adding(request: Any) -> None:
        if made.steps % 3 < 2:
            request.kv_transfer_params = {"remote": 48, "steps": steps}
        add(request)

    made.scheduler.add_request = adding
    assert served(made, seed, fields).keys() <= {"kv_connector", "kv"}


@both
def test_kv_on_its_way_is_moving_and_then_waits_with_it(model: Path, queue: str) -> None:
    made = connected(model, "vllm", 2, queue)
    made.add("far", [5] * 90, 3)
    made.scheduler.requests["far"].kv_transfer_params = {"remote": 64, "steps": 2}
    made.add("here", [6] * 20, 3)
    seen = []
    asked = made.policy.inner.plan

    def looking(view: Any) -> Any:
        seen.append(tuple([s.id for s in group] for group in (view.waiting, view.running, view.moving)))
        return asked(view)

    made.policy.inner.plan = looking  # type: ignore[method-assign]
    made.run()
    assert any("far" in moving for _, _, moving in seen)
    assert made.ended == {"far": 1, "here": 1}
    assert made.scheduler.rubato.guard.deviations.keys() <= {"kv_connector"}
    assert made.finish()["far"].outcome == "completed"


# --------------------------------------------------------------------------- refused at start


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("model_config", "is_diffusion", True, "Rubato cannot schedule this vLLM: the model is a diffusion model"),
        ("parallel_config", "worker_cls", "vllm_ascend.worker.worker.NPUWorker",
         r"the worker is vllm_ascend.*use a worker of vLLM's own"),
    ],
)  # fmt: skip
def test_vllm_that_cannot_be_scheduled_is_refused(model: Path, part: str, name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        harness(model, "edf", blocks=20, change=setting(part, name, value))


def test_a_paused_engine_shows_what_holds_kv(model: Path) -> None:
    made = connected(model, "vllm", 2, "sync")
    made.add("far", [5] * 90, 3)
    made.scheduler.requests["far"].kv_transfer_params = {"remote": 64, "steps": 1}
    made.step()
    made.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    made.add("new", [6] * 20, 3)
    for _ in range(6):
        assert "new" not in made.step()
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    made.run()
    assert made.ended == {"far": 1, "new": 1}
