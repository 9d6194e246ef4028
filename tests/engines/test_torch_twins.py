"""Every family's tiny random model gives its transformers twin's greedy tokens in fp32: batched, in random chunks,
preempted, with and without prefix cache; blocks and entries come from `Replica`, as in production."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rubato.engines.torch import Engine  # noqa: E402
from rubato.replica import Replica  # noqa: E402
from rubato.types import Finished, Plan, Request, Sampling, Stage, Started, Tokens, Work  # noqa: E402
from tests.doubles import Linear  # noqa: E402

NEW = 12
BLOCK = 8
WINDOW = 24  # tokens: shorter than most prompts
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral without window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows above": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen2 with yarn": (
        "Qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def twin(request: Any, bundled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model, and transformers' own of it."""
    family, changes = FAMILIES[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for (
            name,
            weight,
        ) in model.named_parameters():  # transformers leaves biases 0 and norms 1: they would not be seen
            if "bias" in name or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    folder = tmp_path_factory.mktemp("twin")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder / name, folder / name)
    return folder, model


def prompts() -> list[tuple[int, ...]]:
    """Some begin alike, by more than a block."""
    rng = random.Random(11)
    shared = [rng.randrange(3, 500) for _ in range(70)]
    alone = [tuple(rng.randrange(3, 500) for _ in range(n)) for n in (1, 5, 17, 40, 90)]
    return [*alone, *(tuple(shared[:n] + [rng.randrange(3, 500) for _ in range(4)]) for n in (20, 40, 70, 70))]


def expected(model: Any, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers one by one: no padding that a window could see."""
    found = []
    with torch.inference_mode():
        for prompt in asked:
            ids = torch.tensor([list(prompt)])
            out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=2)
            found.append(out[0, len(prompt) :].tolist())
    return found


async def serve(engine: Engine, asked: Sequence[Sequence[int]], prefix_cache: bool) -> tuple[list[list[int]], int, int]:
    """Random plans through a replica to the end: tokens of each, tokens that came from the cache, preemptions."""
    await engine.start()
    replica = Replica("r0", engine.limits, Linear(), prefix_cache=prefix_cache)
    rng = random.Random(5)
    waiting = [
        Request(str(i), (Stage(len(p), token_ids=tuple(p)),), 0.0, sampling=Sampling(NEW, ignore_eos=True))
        for i, p in enumerate(asked)
    ]
    tokens: dict[str, list[int]] = {r.id: [] for r in waiting}
    cached = preempted = 0
    while waiting or not replica.empty:
        if waiting and (replica.empty or rng.random() < 0.4):
            request = waiting.pop(0)
            engine.add(request)
            assert replica.submit(request, 0.0) == []
        plan = draw(replica, rng)
        preempted += len(plan.preempt)
        batch, events = replica.apply(plan, 0.0, "random")
        if batch.entries:
            events += replica.commit(batch, await engine.execute(batch), 0.0)
        replica.check_integrity()
        for event in events:
            if isinstance(event, Started):
                cached += event.cached
            elif isinstance(event, Tokens):
                tokens[event.id] += event.token_ids
            elif isinstance(event, Finished):
                assert event.outcome == "completed"
        engine.forget(replica.gone())
    await engine.close()
    return list(tokens.values()), cached, preempted


def draw(replica: Replica, rng: random.Random) -> Plan:
    """Whoever, in chunks of whatever size, as far as KV goes; now and then someone is preempted."""
    view = replica.view(0.0)
    preempt = [s.id for s in view.running if rng.random() < 0.15]
    free, work = view.kv_free, []
    for seq in [*view.running, *view.waiting]:
        if seq.id in preempt or (rng.random() < 0.2 and work):
            continue
        count = min(seq.pending, rng.choice((1, 3, 16, 50)))
        need = -(-(seq.cached + count) // BLOCK) - seq.blocks
        if need <= free:
            free -= max(0, need)
            work.append(Work(seq.id, count))
    if not work and not preempt:
        preempt = [view.running[-1].id]
    return Plan(tuple(work), tuple(preempt), wake_at=1.0)


def engine(folder: Path, blocks: int = 40) -> Engine:
    config = transformers.AutoConfig.from_pretrained(folder)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_block = BLOCK * config.num_hidden_layers * 2 * config.num_key_value_heads * dim * 4
    return Engine(folder, dtype="float32", device="cpu", kv_gib=(blocks + 0.5) * per_block / 2**30, block=BLOCK)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_are_transformers_own(twin: tuple[Path, Any], prefix_cache: bool) -> None:
    folder, model = twin
    asked = prompts()
    found, cached, preempted = asyncio.run(serve(engine(folder), asked, prefix_cache))
    assert found == expected(model, asked)
    assert preempted >= 10
    if prefix_cache:
        assert cached >= 150
    else:
        assert cached == 0
