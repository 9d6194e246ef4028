"""Models for engine tests: the bundled one, a tiny random Llama with the bundled tokenizer, and tiny random twins of
every family with a tokenizer of bytes."""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rubato_torch import Engine, bundled_model  # noqa: E402
from rubato_torch.drafters import Drafter  # noqa: E402
from rubato_torch.model import bytes_per_token  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from tests.engines.byte_tokenizer import write_tokenizer  # noqa: E402
from tests.engines.driver import Driver, started_behind_replica  # noqa: E402
from tests.engines.torch.harness import BLOCK, BLOCKS, Harness  # noqa: E402

WINDOW = 9  # of the twins that have one: shorter than most prompts
# What transformers' configuration of each family is given beside `SIZES`.
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"head_dim": 24, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_key_value_heads": 4},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-mixed": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of `TWINS`. Biases and norms are random too: initially 0 and 1, they would not be seen."""
    transformers = pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, more = TWINS[name]
            torch.manual_seed(len(name))
            config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            with torch.no_grad():
                for part, values in model.named_parameters():
                    if part.endswith(".bias"):
                        values.normal_(0.0, 0.3)
                    elif "norm" in part:
                        values.uniform_(0.5, 1.5)
            made[name] = tmp_path_factory.mktemp("twins") / name
            model.save_pretrained(made[name])
            write_tokenizer(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, Sequence[Sequence[int]], Sequence[Sequence[int]]], list[list[int]]]:
    """transformers' own greedy token in float32 after each prompt, and after each token that is said to follow it but
    for the last: what is said to follow is greedy if and only if it is what comes back. A pass a prompt."""
    transformers = pytest.importorskip("transformers")

    def after(folder: Path, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        for prompt, ids in zip(prompts, said, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits
            found.append(logits[0, len(prompt) - 1 :].argmax(-1).tolist())
        return found

    return after


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    return bundled_model.ensure()


@pytest.fixture(scope="session")
def tiny_folder(bundled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, 4 query and 2 KV heads, random weights, the llama3 rope; tokenizer and vocabulary are real."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        initializer_range=0.2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder / name, folder / name)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[Driver]:
    """A started engine on the tiny model in fp32: 256 blocks of 4 tokens."""
    kv = 256 * 4 * (3 * 2 * 2 * 16 * 4) / 2**30
    with Driver(Engine(tiny_folder, dtype="float32", device="cpu", kv_gib=kv, block_size=4)) as drive:
        yield drive


@pytest.fixture
def harness(twin: Callable[[str], Path]) -> Iterator[Callable[..., Harness]]:
    """Builds a harness on a twin: `harness("qwen3", drafter, seed)`."""
    made: list[Harness] = []

    def build(
        name: str,
        drafter: Drafter | None,
        seed: int = 1,
        *,
        cache: bool = False,
        dtype: str = "float32",
        block: int = BLOCK,
    ) -> Harness:
        per_block = block * bytes_per_token(load_config(twin(name)), getattr(torch, dtype))
        size = BLOCKS * BLOCK // block * per_block / 2**30
        engine = Engine(twin(name), dtype=dtype, device="cpu", block_size=block, kv_gib=size, drafter=drafter)
        replica, loop = started_behind_replica(engine, cache)
        made.append(Harness(engine, replica, loop, random.Random(seed)))
        return made[-1]

    yield build
    for one in made:
        one.loop.run_until_complete(one.engine.close())
        one.loop.close()
