"""A sequence moves to another engine with its KV, and goes on with the tokens it would have had."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.core.plan import KV  # noqa: E402
from rubato.core.request import Progress, Request, Sampling, Stage  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from rubato_torch.cpu import llvm_jit  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

PROMPT = tuple((7 * i * i + 3) % 256 for i in range(45))
NEW, BEFORE = 16, 6  # tokens in all; tokens out when it moves
needs_kernels = pytest.mark.skipif(not llvm_jit.available(), reason="no LLVM kernels on this platform")


@pytest.fixture
def driver(twin: Callable[[str], Path]) -> Iterator[Callable[..., Driver]]:
    """Starts an engine on a twin: `driver("qwen3", "float32", block)`."""
    with ExitStack() as stack:

        def start(name: str, dtype: str, block: int) -> Driver:
            engine = Engine(twin(name), dtype=dtype, device="cpu", kv_gib=0.002, block_size=block)
            return stack.enter_context(Driver(engine))

        yield start


def begin(drive: Driver, prompt: Sequence[int] = PROMPT) -> Request:
    stages = (Stage(len(prompt), token_ids=tuple(prompt)),)
    request = Request("r", stages, 0.0, sampling=Sampling(max_tokens=NEW, ignore_eos=True))
    drive.add_request(request)
    drive.step({"r": len(prompt)})
    return request


def poison(drive: Driver) -> None:
    """Nothing may depend on KV that is not its own."""
    with torch.inference_mode():
        drive.engine._model.kv.fill_(float("nan"))  # type: ignore[attr-defined]
    drive.free.reverse()


@pytest.mark.parametrize(
    ("name", "dtype", "blocks"),
    [
        ("llama", "float32", (4, 16)),
        ("qwen3-mixed", "float32", (16, 1)),
        ("mistral", "float16", (8, 8)),
        pytest.param("qwen3", "bfloat16", (16, 32), marks=needs_kernels),
        pytest.param("qwen3-mixed", "bfloat16", (48, 16), marks=needs_kernels),
        pytest.param("qwen3", "bfloat16", (16, 4), marks=needs_kernels),  # from the kernels' layout to the plain one
    ],
)
def test_a_moved_sequence_goes_on_as_it_would_have(
    driver: Callable[..., Driver], name: str, dtype: str, blocks: tuple[int, int]
) -> None:
    alone = driver(name, dtype, blocks[1])
    begin(alone)
    alone.run()
    first, second = (driver(name, dtype, block) for block in blocks)
    native = [drive.engine._model.native is not None for drive in (first, second)]  # type: ignore[attr-defined]
    assert native == [dtype == "bfloat16" and block % 16 == 0 for block in blocks]
    request = begin(first)
    while len(first.ids["r"]) < BEFORE:
        first.step({"r": 1})
    assert first.ids["r"] == alone.ids["r"][:BEFORE]
    kv = first.export_kv("r")
    assert (kv.tokens, kv.form, kv.size) == (len(PROMPT) + BEFORE - 1, f"torch-kv:{dtype}", len(kv.data))
    poison(second)
    progress = Progress((0.0,), (tuple(map(float, range(BEFORE))),), tuple(first.ids["r"]))
    second.add_request(replace(request, progress=progress))
    second.length["r"] += BEFORE
    second.import_kv("r", kv)
    assert second.pending("r") == 1
    assert second.export_kv("r") == kv
    second.run()
    assert first.ids["r"] + second.ids["r"] == alone.ids["r"]
    assert second.finished["r"] == "length"
    assert len(second.ids["r"]) == NEW - BEFORE


def test_the_kv_is_read(driver: Callable[..., Driver]) -> None:
    """With another prompt's KV the tokens are others: a move that lost it would be seen."""
    first, second = driver("llama", "float32", 4), driver("llama", "float32", 4)
    begin(first, PROMPT[::-1])
    first.run()
    begin(second)
    second.preempt("r")
    again = driver("llama", "float32", 4)
    begin(again, PROMPT[::-1])
    second.import_kv("r", again.export_kv("r"))
    second.run()
    alone = driver("llama", "float32", 4)
    begin(alone)
    alone.run()
    assert second.ids["r"] != alone.ids["r"]


def test_the_layout_is_what_it_says(driver: Callable[..., Driver]) -> None:
    """Both layouts export the same numbers, up to bfloat16's rounding, in (layers, tokens, 2, kv_heads, head_dim)."""
    if not llvm_jit.available():
        pytest.skip("no LLVM kernels on this platform")
    found = []
    for block in (16, 4):
        drive = driver("qwen3", "bfloat16", block)
        begin(drive)
        kv = drive.export_kv("r")
        assert kv.shape == (3, 2, 32)
        found.append(torch.frombuffer(bytearray(kv.data), dtype=torch.bfloat16).view(3, 45, 2, 2, 32).float())
    assert (found[0] - found[1]).abs().max() < 0.05 * found[0].abs().max()
    assert found[0].std() > 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "torch-kv:bfloat16"}, "form 'torch-kv:bfloat16' cannot be imported: this engine's is 'torch-kv:flo"),
        ({"shape": (3, 2, 64)}, r"shape \(3, 2, 64\) cannot be imported: this engine's is \(3, 2, 16\)"),
        ({"data": b"\0" * 8}, "KV of 45 tokens holds 8 bytes: this engine's takes 34560"),
        ({"tokens": 49}, "KV of 49 tokens does not fit 12 blocks of 4"),
        ({"tokens": 0}, "KV of 0 tokens does not fit"),
    ],
)
def test_other_kv_is_refused(driver: Callable[..., Driver], change: dict[str, Any], words: str) -> None:
    drive = driver("llama", "float32", 4)
    begin(drive)
    kv = replace(drive.export_kv("r"), **change)
    before = drive.engine._model.kv.clone()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=words):
        drive.loop.run_until_complete(drive.engine.import_kv(drive.blocks["r"], kv))
    assert torch.equal(drive.engine._model.kv, before)  # type: ignore[attr-defined]


def test_blocks_that_are_not_there_are_refused(driver: Callable[..., Driver]) -> None:
    drive = driver("llama", "float32", 4)
    last = drive.engine.limits.kv_blocks
    for blocks in ([0, last], [-1, 0]):
        with pytest.raises(ValueError, match=rf"this engine has 0\.\.{last - 1}"):
            drive.loop.run_until_complete(drive.engine.export_kv(blocks, 5))
    with pytest.raises(ValueError, match="KV of 9 tokens does not fit 2 blocks of 4"):
        drive.loop.run_until_complete(drive.engine.export_kv([0, 1], 9))


def test_a_transfer_needs_a_running_engine(twin: Callable[[str], Path]) -> None:
    drive = Driver(Engine(twin("llama"), dtype="float32", device="cpu"))
    assert "kv_transfer" in drive.engine.supports
    for call in (drive.engine.export_kv([0], 1), drive.engine.import_kv([0], KV(1, "", (), b"", 0))):
        with pytest.raises(RuntimeError, match="call start"):
            drive.loop.run_until_complete(call)
    drive.loop.close()
