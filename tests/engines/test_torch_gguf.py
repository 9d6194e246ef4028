"""GGUF files: the same model as was written, text cut as the vocabulary was made, refusals that say why."""

import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

from rubato.core.request import Sampling  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from rubato_torch import gguf as ours  # noqa: E402
from rubato_torch.gguf_tokenizer import tokenizer  # noqa: E402
from rubato_torch.tokenizer import Text  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PROMPTS = [[(i * i * 5 + i + at) % 256 for i in range(size)] for at, size in enumerate((1, 17, 60))]
Reference = Callable[[Path, Sequence[Sequence[int]], Sequence[Sequence[int]]], list[list[int]]]

# GGUF's names for the parts of Hugging Face's.
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, file: Path, architecture: str, *, kind: str = "F32", **more: Any) -> Path:
    """A GGUF file of the model in `folder`; `more` are fields beside or instead of the usual ones."""
    raw = json.loads((folder / "config.json").read_text())
    heads = raw["num_attention_heads"]
    writer = gguf.GGUFWriter(file, architecture)
    numbers = {
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "attention.head_count": heads,
        "attention.head_count_kv": raw["num_key_value_heads"],
    }
    if raw.get("head_dim"):
        numbers |= {f"attention.{x}_length": raw["head_dim"] for x in ("key", "value")}
    if raw.get("sliding_window"):
        numbers["attention.sliding_window"] = raw["sliding_window"]
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", raw["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", raw["rope_theta"])
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*ALPHABET, "<s>", "</s>", "Ġt", *(f"[PAD{i}]" for i in range(41))],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1] + [5] * 41,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **more,
    }
    for key, value in fields.items():
        add(writer, key, value)
    permuted = {"attn_q": heads, "attn_k": raw["num_key_value_heads"]} if architecture == "llama" else {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name, part = gguf_s_name(name)
        values = tensor.float().numpy()
        if part in permuted:
            n = permuted[part]
            values = values.reshape(n, 2, len(values) // n // 2, -1).swapaxes(1, 2).reshape(values.shape)
        as_type = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name, gguf.quantize(values, as_type), raw_dtype=as_type)
    if (raw.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(raw))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def gguf_s_name(name: str) -> tuple[str, str]:
    stem, _, ending = name.rpartition(".")
    if stem in PARTS:
        return f"{PARTS[stem]}.{ending}", PARTS[stem]
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[rest]}.{ending}", PARTS[rest]


def llama3_factors(raw: dict[str, Any]) -> Any:
    """How much longer each wavelength is than without the scaling, by transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**raw)
    plain, scaled = (ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0] for kind in ("default", "llama3"))
    return (plain / scaled).numpy().astype(np.float32)


def greedy(model: Path, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    with Driver(Engine(model, dtype="float32", device="cpu", kv_gib=0.001, block_size=4)) as drive:
        for i, prompt in enumerate(prompts):
            drive.add(str(i), prompt, Sampling(max_tokens=new, ignore_eos=True))
        drive.run()
        return [drive.ids[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "architecture", "more"),
    [
        ("llama", "llama", {}),
        ("llama-llama3", "llama", {}),
        ("llama-biased", "llama", {}),
        ("llama-linear", "llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}),
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {}),
        (
            "qwen2-yarn",
            "qwen2",
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 64,
            },
        ),
        ("qwen3", "qwen3", {}),
    ],
)
def test_the_same_tokens_as_the_model_that_was_written(
    name: str,
    architecture: str,
    more: dict[str, Any],
    twin: Callable[[str], Path],
    reference: Reference,
    tmp_path: Path,
) -> None:
    file = write(twin(name), tmp_path / f"{name}.gguf", architecture, **more)
    ids = greedy(file, PROMPTS, 12)
    assert ids == reference(twin(name), PROMPTS, ids)


@pytest.mark.parametrize(("name", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_transformers_reads_our_folder_and_the_file_alike(
    name: str, architecture: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its own reader of GGUF is the witness that the files of these tests are such as others write."""
    more = {"tokenizer.ggml.pre": "qwen2"} if architecture == "qwen2" else {}
    file = write(twin(name), tmp_path / "it.gguf", architecture, **more)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = ours.ensure(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)
    made = load_file(folder / "model.safetensors")
    assert made.keys() == theirs["tensors"].keys()
    for key, values in made.items():
        assert torch.equal(values, theirs["tensors"][key]), key
    config = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_theta"):
        assert config[key] == theirs["config"][key], key


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", torch.float16), ("Q8_0", torch.bfloat16), ("Q4_0", torch.bfloat16)]
)
def test_quantised_weights_are_close(kind: str, dtype: Any, twin: Callable[[str], Path], tmp_path: Path) -> None:
    folder = ours.ensure(write(twin("llama"), tmp_path / "it.gguf", "llama", kind=kind))
    found, wanted = load_file(folder / "model.safetensors"), load_file(twin("llama") / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert values.dtype == dtype
        far = (values.float() - wanted[name]).norm() / wanted[name].norm()
        assert far < {"F16": 1e-3, "Q8_0": 0.01, "Q4_0": 0.12}[kind], name


def test_large_models_are_written_in_parts(
    twin: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    monkeypatch.setattr(ours, "SHARD", 40_000)
    file = write(twin("llama"), tmp_path / "it.gguf", "llama")
    folder = ours.ensure(file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(folder.glob("*.safetensors"))) > 3
    ids = greedy(file, PROMPTS, 3)
    assert ids == reference(twin("llama"), PROMPTS, ids)


def test_a_file_is_converted_once_until_it_changes(twin: Callable[[str], Path], tmp_path: Path) -> None:
    file = write(twin("qwen2"), tmp_path / "it.gguf", "qwen2")
    engine = Engine(file, dtype="float32", device="cpu")
    first = ours.ensure(file)
    assert (engine.model_name, first.parent) == ("it", ours.models_folder())
    marked = first / "marked"
    marked.touch()
    assert ours.ensure(file) == first
    assert marked.exists()
    os.utime(file, ns=(1, 1))
    assert ours.ensure(file) != first
    assert sorted(path.name for path in ours.models_folder().iterdir() if path.name.startswith(".")) == []


def test_special_tokens_and_chat_template(twin: Callable[[str], Path], tmp_path: Path) -> None:
    tokens = [*ALPHABET, "<|endoftext|>", "<|im_end|>", "<think>", "Ġt", *(f"[PAD{i}]" for i in range(40))]
    file = write(
        twin("qwen3"),
        tmp_path / "it.gguf",
        "qwen3",
        **{
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4, 1] + [5] * 40,
        },
    )
    engine = Engine(file, dtype="float32", device="cpu")
    assert engine._eos == {256, 257}  # also the one that no field names
    assert engine.text.chat([{"role": "user", "content": "a<think><|im_end|>"}]) == (ALPHABET.index("a"), 258, 257)
    assert engine.text.decode([258, 257]) == "<think>"


# --------------------------------------------------------------------------- tokenizers


def byte_level(pre: str, merges: Sequence[str] = (), **more: Any) -> Any:
    joined = [merge.replace(" ", "") for merge in merges]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*ALPHABET, *joined, "<s>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * (256 + len(joined)) + [3, 3],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 256 + len(joined),
        **more,
    }
    return tokenizer("it.gguf", fields)


def pieces(made: Any, text: str) -> list[str]:
    return [text[first:last] for _, (first, last) in made.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["We", "'ll", " PAY", " 12345", ",", " I", "'", "M", " ok", "!?", " ", " x", "\n", "\n", "y"]),
        (
            "smollm",
            [
                "We",
                "'ll",
                " PAY",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                ",",
                " I",
                "'",
                "M",
                " ok",
                "!?",
                " ",
                " x",
                "\n",
                "\n",
                "y",
            ],
        ),
        ("llama-bpe", ["We", "'ll", " PAY", " ", "123", "45", ",", " I", "'M", " ok", "!?", " ", " x", "\n\n", "y"]),
        (
            "qwen2",
            ["We", "'ll", " PAY", " ", "1", "2", "3", "4", "5", ",", " I", "'M", " ok", "!?", " ", " x", "\n\n", "y"],
        ),
        (
            "tekken",
            ["We", "'ll", " PAY", " ", "1", "2", "3", "4", "5", ",", " I", "'M", " ok", "!?", " ", " x", "\n\n", "y"],
        ),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_made(pre: str, expected: list[str]) -> None:
    made = byte_level(pre)
    assert pieces(made, "We'll PAY 12345, I'M ok!?  x\n\ny") == expected
    assert made.decode(made.encode("We'll PAY é 12345!").ids) == "We'll PAY é 12345!"


def test_qwen2_s_tokenizer_is_transformers_own(tmp_path: Path) -> None:
    merges = ["h e", "l l", "ll o", "he llo", "Ġ t", "Ġt h", "Ã ©", "1 2"]
    vocab = {token: i for i, token in enumerate([*ALPHABET, *(m.replace(" ", "") for m in merges)])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    theirs = transformers.Qwen2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    made = byte_level("qwen2", merges)
    for text in ("hello the 1212\n\n  he'LL caf\u00e9 cafe\u0301", "\t x  \r\n", "日本語 12é"):
        assert made.encode(text).ids == theirs(text)["input_ids"]


def test_digits_bytes_merges_and_special_tokens() -> None:
    made = byte_level("smollm", ["h e", "l l", "ll o", "he llo"])
    assert made.encode("hello12<|im_end|>é").tokens == ["hello", "1", "2", "<|im_end|>", "Ã", "©"]
    assert made.decode(made.encode("hello 12 é").ids) == "hello 12 é"


def test_a_text_begins_as_the_file_says_or_else_as_is_usual() -> None:
    assert byte_level("llama-bpe").encode("a").tokens == ["<s>", "a"]
    assert byte_level("llama-bpe").encode("a", add_special_tokens=False).tokens == ["a"]
    assert byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}).encode("a").tokens == ["a"]
    assert byte_level("qwen2").encode("a").tokens == ["a"]
    assert byte_level("qwen2", **{"tokenizer.ggml.add_bos_token": True}).encode("a").tokens == ["<s>", "a"]


def test_sentencepiece_joins_the_best_scored_neighbours(tmp_path: Path) -> None:
    """Beside a plain implementation of that rule; bytes stand in for what has no token."""
    words = ["▁", *"helowrd", "he", "ll", "lo", "el", "▁h", "ello", "▁he", "hell", "▁hello", "wor", "or", "ld", "▁w"]
    given = [-9.0, *[-8.0] * 7, -1.0, -2.0, -0.5, -3.0, -4.0, -6.0, -5.0, -7.0, -7.5, -4.5, -3.5, -1.5, -2.5]
    scores = dict(zip(words, given, strict=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    made = tokenizer("it.gguf", fields)

    def naive(text: str) -> list[str]:
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            joins = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
            if not joins:
                return parts
            at = -max(joins)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for text in ("hello world", "hell lord", "wor  ello", "doe"):
        assert made.encode(text).tokens == ["<s>", *naive(text)]
    assert made.encode("hé").tokens == ["<s>", "▁h", "<0xC3>", "<0xA9>"]
    made.save(str(tmp_path / "tokenizer.json"))
    assert Text(tmp_path).decode(made.encode("hello wé").ids) == "hello wé"


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("architecture", "more", "words"),
    [
        ("phi3", {}, "architecture 'phi3'; the torch engine reads GGUF of llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ("llama", {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "different sizes"),
        ("llama", {"tokenizer.ggml.pre": "deepseek-llm"}, "model 'gpt2', pre 'deepseek-llm': known are llama"),
        ("llama", {"tokenizer.ggml.model": "bert"}, "model 'bert'"),
        ("qwen2", {"qwen2.attention.head_count_kv": [2, 2, 1]}, "for each layer"),
    ],
)
def test_what_cannot_be_served_is_named(
    architecture: str, more: dict[str, Any], words: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write(twin("qwen2" if architecture == "qwen2" else "llama"), tmp_path / "it.gguf", architecture, **more)
    with pytest.raises(ValueError, match=words):
        Engine(file)
    assert list(ours.models_folder().iterdir()) == []


def test_other_rope_factors_and_tensors_are_named(
    twin: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "llama3_factors", lambda _: np.linspace(1, 3, 8, dtype=np.float32))
    with pytest.raises(ValueError, match="rope factors other than Llama 3's"):
        Engine(write(twin("llama-llama3"), tmp_path / "it.gguf", "llama"))
    monkeypatch.setitem(PARTS, "mlp.up_proj", "ffn_other")
    with pytest.raises(ValueError, match=r"a tensor 'blk\.\d\.ffn_other\.weight'"):
        Engine(write(twin("llama"), tmp_path / "other.gguf", "llama"))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"no")
    with pytest.raises(ValueError, match="is a file but no GGUF"):
        Engine(tmp_path / "model.bin")


def test_unpermute_undoes_gguf_s_row_order() -> None:
    """GGUF interleaves the two halves of each head: rows 0 1 2 3 of a head of 4 are stored as 0 2 1 3."""
    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    assert ours.unpermute(rows, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert ours.unpermute(rows[:, 0], 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
