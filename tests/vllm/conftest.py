"""These tests run in vLLM's own environment (`make test-vllm`); without vLLM only those of the settings do."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

NEED_NO_VLLM = {"test_environment.py", "test_settings.py"}

if find_spec("vllm") is None:
    here = Path(__file__).parent
    collect_ignore = [path.name for path in here.glob("test_*.py") if path.name not in NEED_NO_VLLM]

# vLLM's engine core in this process; nothing is fetched. Read when vllm is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CONFIGURE_LOGGING="0",  # its logger would keep what caplog should see
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="",  # nothing is reported but where a test says so
    HF_HUB_OFFLINE="1",
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=1, max_position_embeddings=8192, **shape)
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speaking_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer, of 256 words, and a chat template."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("speaking") / "model"
    shutil.copytree(model, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", chat_template=template)
    made.save_pretrained(folder)
    return folder
