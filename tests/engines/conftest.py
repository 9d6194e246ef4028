"""Models for engine tests: the bundled one, and a tiny random Llama with the bundled tokenizer."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rubato.engines.torch import Engine, bundled  # noqa: E402
from rubato.engines.torch.drive import Driver  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    return bundled.ensure()


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
    with Driver(Engine(tiny_folder, dtype="float32", device="cpu", kv_gib=kv, block=4)) as drive:
        yield drive
