"""The engine's contract: KV arithmetic and isolation, beginning afresh, ends of text, errors that say what is wrong."""

import asyncio
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from rubato.core.plan import Batch, Entry  # noqa: E402
from rubato.core.request import Request, Sampling, Stage  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from rubato_torch.free_cores import FreeCores  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

PROMPT = tuple(range(1000, 1030))
GO_ON = Sampling(max_tokens=8, ignore_eos=True)


def request(prompt: tuple[int, ...] = PROMPT, sampling: Sampling = GO_ON, id: str = "r") -> Request:
    return Request(id, (Stage(len(prompt), token_ids=prompt),), 0.0, sampling=sampling)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_kv_blocks_are_what_the_budget_holds(bundled_folder: Path, dtype: str, size: int) -> None:
    """30 layers of 3 KV heads of 64, keys and values."""
    limits = Engine(bundled_folder, dtype=dtype, device="cpu", kv_gib=0.5, block_size=16).limits
    assert limits.kv_blocks == 2**29 // (30 * 2 * 3 * 64 * 16 * size)
    assert limits.max_model_len == 8192


def test_max_length_is_no_more_than_kv_memory_holds(tiny_folder: Path) -> None:
    per_token = 3 * 2 * 2 * 16 * 4
    engine = Engine(tiny_folder, dtype="float32", device="cpu", kv_gib=100 * per_token / 2**30, block_size=16)
    assert (engine.limits.kv_blocks, engine.limits.max_model_len) == (6, 96)
    assert Engine(tiny_folder, dtype="float32", device="cpu", max_model_len=77).limits.max_model_len == 77


def test_one_sequence_never_writes_another_s_kv(tiny: Driver) -> None:
    tiny.add("a", PROMPT, GO_ON)
    tiny.step({"a": 30})
    kv = tiny.engine._model.kv  # type: ignore[attr-defined]
    mine = torch.tensor(tiny.blocks["a"])
    others = [b for b in range(kv.shape[1]) if b not in tiny.blocks["a"]]
    before = kv[:, mine].clone()
    assert before.abs().sum() > 0
    assert kv[:, others].abs().sum() == 0
    tiny.add("b", PROMPT[::-1], GO_ON)
    tiny.step({"b": 11})
    tiny.step({"b": 19})
    tiny.step({"b": 1})
    assert torch.equal(kv[:, mine], before)
    tiny.step({"a": 1, "b": 1})
    assert torch.equal(kv[:, mine].flatten(1, 2)[:, :30], before.flatten(1, 2)[:, :30])


def test_a_chunk_without_the_last_pending_token_samples_nothing(tiny: Driver) -> None:
    tiny.add("a", PROMPT, GO_ON)
    assert tiny.step({"a": 29}).emitted == {}
    result = tiny.step({"a": 1})
    assert result.emitted["a"].tokens == 1
    assert result.seconds > 0.0


def test_start_again_begins_afresh(tiny: Driver) -> None:
    tiny.add("a", PROMPT, GO_ON)
    tiny.run()
    tiny.add("b", PROMPT, GO_ON)
    tiny.step({"b": 30})
    tiny.loop.run_until_complete(tiny.engine.start())
    with pytest.raises(KeyError, match="'b'"):
        tiny.step({"b": 1})
    tiny.finished["b"] = "lost"
    tiny.add("c", PROMPT, GO_ON)
    tiny.run()
    assert tiny.ids["c"] == tiny.ids["a"]


def test_the_event_loop_is_free_during_a_step(tiny: Driver) -> None:
    tiny.add("a", PROMPT, GO_ON)
    order: list[str] = []

    async def step() -> None:
        await tiny.engine.execute(tiny.batch({"a": 30}))
        order.append("step")

    async def both() -> None:
        running = asyncio.ensure_future(step())
        await asyncio.sleep(0)
        order.append("loop")
        await running

    tiny.loop.run_until_complete(both())
    assert order == ["loop", "step"]


def test_max_tokens_and_end_of_text(tiny: Driver, tiny_folder: Path) -> None:
    """Whatever the model says first is declared its end of text: it then ends there, unless told to ignore it."""
    tiny.add("length", PROMPT, GO_ON)
    tiny.run()
    assert (len(tiny.ids["length"]), tiny.finished["length"]) == (8, "length")
    first = tiny.ids["length"][0]
    tiny.engine._eos = frozenset({first})  # type: ignore[attr-defined]
    tiny.add("stop", PROMPT, Sampling(max_tokens=8))
    tiny.add("ignored", PROMPT, GO_ON)
    tiny.run()
    assert (tiny.ids["stop"], tiny.finished["stop"], tiny.text["stop"]) == ([first], "stop", "")
    assert (tiny.ids["ignored"], tiny.finished["ignored"]) == (tiny.ids["length"], "length")


def test_every_file_may_name_an_end_of_text(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "<|endoftext|>"}}))
    assert Engine(folder, device="cpu")._eos == {0, 2, 3}


def test_a_second_stage_goes_on_with_its_own_prompt(tiny: Driver) -> None:
    """The literal is whatever the model says second; the tool's tokens then follow in the same KV."""
    tiny.add("plain", PROMPT, GO_ON)
    tiny.run()
    second = tiny.ids["plain"][1]
    literal = tiny.engine.text.decode([second])  # type: ignore[attr-defined]
    assert literal.strip()
    stages = (Stage(30, ends=literal, token_ids=PROMPT), Stage(2, token_ids=(7, 8)))
    tiny.add_request(Request("staged", stages, 0.0, sampling=GO_ON))
    tiny.step({"staged": 30})
    assert tiny.step({"staged": 1}).emitted["staged"].stage_done
    tiny.length["staged"] += 2
    tiny.step({"staged": tiny.pending("staged")})
    tiny.add("same", (*PROMPT, *tiny.ids["plain"][:2], 7, 8), Sampling(max_tokens=1, ignore_eos=True))
    tiny.step({"same": 34})
    assert tiny.ids["staged"][2] == tiny.ids["same"][0]


def test_an_empty_batch_is_no_work(tiny: Driver) -> None:
    assert tiny.step({}).emitted == {}


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(sampling=Sampling(max_tokens=483)), "30 prompt tokens and max_tokens 483, together 513"),
        (Request("r", (Stage(5),), 0.0), "needs the prompt's token_ids"),
        (request(prompt=(5, 49152)), "outside the vocabulary"),
        (request(prompt=(-1, 5)), "outside the vocabulary"),
        (request(sampling=Sampling(temperature=-1.0)), "temperature is -1.0"),
    ],
)
def test_requests_that_can_never_run_are_refused(tiny: Driver, bad: Request, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny.engine.add(bad)
    tiny.engine.add(request())  # nothing of it is left


def test_the_same_id_twice_is_refused(tiny: Driver) -> None:
    tiny.engine.add(request())
    with pytest.raises(ValueError, match="'r' is in the engine already"):
        tiny.engine.add(request())


def test_execute_before_start_says_so(tiny_folder: Path) -> None:
    engine = Engine(tiny_folder, device="cpu")
    with pytest.raises(RuntimeError, match="call start"):
        asyncio.run(engine.execute(Batch((Entry("a", 0, 1, (0,), True),))))


def test_an_entry_beyond_the_tokens_there_are_is_refused(tiny: Driver) -> None:
    tiny.engine.add(request())
    batch = Batch((Entry("r", 29, 2, tuple(range(8)), True),))
    with pytest.raises(ValueError, match="tokens 29 to 31 of sequence 'r', which has 30"):
        tiny.loop.run_until_complete(tiny.engine.execute(batch))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int4"}, "dtype 'int4'.*bfloat16, float16, float32"),
        ({"device": "tpu"}, "device 'tpu'.*auto, cpu, cuda"),
        ({"device": "cuda:x"}, "device 'cuda:x'"),
        ({"kv_gib": 1e-9}, "less than one block of 16 tokens"),
        ({"max_model_len": 513}, "this model's context is 512"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_impossible_settings_are_refused(tiny_folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(tiny_folder, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; the torch engine runs LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'.*default, linear, llama3, yarn"),
        ({"partial_rotary_factor": 0.5}, "rotates a part of each head"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=words):
        Engine(folder)


def test_a_folder_that_is_no_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*'bundled'"):
        Engine(tmp_path)


def test_a_folder_that_lacks_a_tensor_is_an_error_that_names_it(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_folder, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    engine = Engine(folder, dtype="float32", device="cpu", kv_gib=0.01, block_size=4)
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.weight'"):
        asyncio.run(engine.start())


def test_steps_use_as_many_threads_as_cores_are_free(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer while other programs use them, and all again; the tokens are the same."""
    before, taken, used = torch.get_num_threads(), [0.0], []
    monkeypatch.setattr("rubato_torch.THREADS", 2)
    monkeypatch.setattr("rubato_torch.usable_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr("rubato_torch.TakenCores.now", lambda self: taken[0])
    monkeypatch.setattr("rubato_torch.FreeCores", partial(FreeCores, patience=0.0))
    try:
        with Driver(Engine(tiny_folder, device="cpu", kv_gib=0.01)) as drive:
            drive.add("a", [5, 6, 7], Sampling(max_tokens=4, ignore_eos=True))
            for taken[0] in (0.0, 1.0, 0.0):
                drive.step({"a": drive.pending("a")})
                assert drive.engine._model is not None  # type: ignore[attr-defined]
                used.append(drive.engine._model.threads)  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(before)
    assert used == [2, 1, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threads": 0}, "threads is 0: give a whole number, 1 or more, or auto"),
        ({"threads": True}, "threads is True"),
        ({"threads": 2.5}, "threads is 2.5"),
        ({"threads": None}, "threads is None"),
        ({"threads": "2"}, "threads is '2'"),
        ({"block_size": 2.5}, "block_size is 2.5: give a whole number"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"dtype": ["a"]}, "is not supported by the torch engine: choose from auto, bfloat16"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_folder: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Engine(tiny_folder, device="cpu", **settings)


def test_a_wrong_mask_is_refused_before_the_weights_are_loaded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUBATO_CPU", "avx3")
    with pytest.raises(ValueError, match="RUBATO_CPU is 'avx3'"):
        Engine(tiny_folder, device="cpu")
