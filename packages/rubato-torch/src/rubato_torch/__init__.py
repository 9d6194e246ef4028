"""The embedded engine: Llama, Mistral, Qwen2 and Qwen3 checkpoints in PyTorch, on CPU or CUDA, with paged KV.

One packed forward pass runs prefill chunks, decodes and trees of candidates of many sequences together. The engine
keeps token ids, sampling state and text; which tokens run, and where their KV lies, comes with each batch.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from rubato.core.clock import WallClock
from rubato.core.cpu_usage import TakenCores, usable_cores
from rubato.core.extras import extra
from rubato.core.plan import KV, Batch, Emitted, Limits, StepResult
from rubato.core.request import Request

with extra("torch", "the embedded engine"):
    import jinja2  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # type: ignore[import-untyped]  # noqa: F401
    import torch

from rubato_torch.batch_tensors import Packed
from rubato_torch.cpu import llvm_jit, matmul_backends
from rubato_torch.drafters import Drafter, Wanted
from rubato_torch.free_cores import FreeCores
from rubato_torch.model import Model, bytes_per_token
from rubato_torch.model_config import Config, ids_of, load_config, read_json
from rubato_torch.model_drafter import OfTarget
from rubato_torch.model_folder import folder_of
from rubato_torch.sequence import Sequence as Running
from rubato_torch.tokenizer import Text
from rubato_torch.trees import Candidates, Walk, accept, check_draft
from rubato_torch.weights import load_weights

__all__ = ["Engine"]

log = logging.getLogger(__name__)

GIB = 1 << 30
SPARE = 2  # KV blocks a sequence of a batch, for the paths of its tree beside one
THREADS = torch.get_num_threads()  # on a quiet machine; read before any engine changes it for the whole process
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Engine:
    """Runs batches of one model (an `interfaces.Engine`).

    model: a local Hugging Face folder, a GGUF file (converted once, into the cache), or "bundled"
    (SmolLM2-135M-Instruct, fetched on first use). dtype: of activations, KV and weights (which `matmul_backends` may
    keep in another form of 16 bits); "auto" is bfloat16 where the device has a fast way with it, else float16 (older
    GPUs) or float32 (CPUs without AVX2 whose oneDNN takes no bfloat16). device: "auto" (CUDA where there is one),
    "cpu", "cuda" or "cuda:1". kv_gib: KV memory, preallocated. max_num_seqs: sequences of one batch.
    max_num_batched_tokens: tokens of one batch. max_model_len: tokens of one sequence (None: what model and KV memory
    allow). block_size: tokens per KV block. threads: of the forward pass on a CPU; "auto" is PyTorch's default, less
    the cores that other programs take at the time (`free_cores.FreeCores`). drafter: proposes the candidate trees that
    batches ask for and later verify; None: this engine does not speculate. The compiled path keeps two KV blocks for
    each of `max_num_seqs`, beside `kv_gib`, for trees. Raises ValueError or FileNotFoundError for a model or a setting
    that cannot be served.
    """

    supports = frozenset({"chunked", "preempt", "mixed", "kv_transfer"})

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv_gib: float = 1.0,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        block_size: int = 16,
        threads: int | Literal["auto"] = "auto",
        drafter: Drafter | None = None,
    ) -> None:
        self._device = _device(device)
        self._dtype = _dtype(dtype, self._device)
        for name, value in {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        }.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number, 1 or more")
        if threads != "auto" and (type(threads) is not int or threads < 1):
            raise ValueError(f"threads is {threads!r}: give a whole number, 1 or more, or auto")
        llvm_jit.masked()  # raises for an unknown mask, before the weights are loaded
        self._folder, self.model_name = folder_of(model)
        config = load_config(self._folder)
        self._limits = _limits(
            config, self._dtype, kv_gib, max_num_seqs, max_num_batched_tokens, max_model_len, block_size
        )
        self._config = config.within(self._limits.max_model_len)
        self.text = Text(self._folder)
        self._eos = _eos(self._folder, self._config, self.text)
        self._threads = threads
        self._free: FreeCores | None = None
        self._clock = WallClock()
        self._worker: ThreadPoolExecutor | None = None
        self._model: Model | None = None
        self._seqs: dict[str, Running] = {}
        self._drafter = drafter
        self._forgotten: list[str] = []  # sequences that the drafter, on its own thread, is still to forget
        if drafter is not None:
            self.supports = self.supports | {"draft", "tree"}
        if isinstance(drafter, OfTarget):
            drafter.attach(self._config, self._folder, self._limits)

    @property
    def limits(self) -> Limits:
        return self._limits

    async def start(self) -> None:
        """Load the weights, preallocate KV and warm up; after a failed step, forget every sequence and go on."""
        self.forget(list(self._seqs))
        if self._worker is None:
            # one thread of our own: steps never overlap, and the event loop is free while one runs
            self._worker = ThreadPoolExecutor(1, "torch-engine", self._set_threads)
        await asyncio.get_running_loop().run_in_executor(self._worker, self._prepare)

    def add(self, request: Request) -> None:
        """Raises ValueError when the request could never be run: too long, no token ids, settings out of range."""
        if request.id in self._seqs:
            raise ValueError(f"request id {request.id!r} is in the engine already: ids must be unique")
        prompt = request.prompt
        most = request.sampling.max_tokens
        if prompt + most > self._limits.max_model_len:
            raise ValueError(
                f"request {request.id!r} has {prompt} prompt tokens and max_tokens {most}, together "
                f"{prompt + most}: this model serves at most {self._limits.max_model_len} "
                "(lower max_tokens or the prompt)"
            )
        for stage in request.stages:
            if stage.token_ids and not 0 <= min(stage.token_ids) <= max(stage.token_ids) < self._config.vocab:
                raise ValueError(
                    f"request {request.id!r} has token ids outside the vocabulary, 0..{self._config.vocab - 1}"
                )
        eos = frozenset[int]() if request.sampling.ignore_eos else self._eos
        literals = [None if stage.ends == "eos" else self.text.id_of(stage.ends) for stage in request.stages]
        seq = Running(request, self.text.token_bytes, eos, literals)
        if request.progress is not None:
            seq.resume(request.progress)
        self._seqs[request.id] = seq

    async def execute(self, batch: Batch) -> StepResult:
        """Raises KeyError for a sequence that was not added, ValueError for tokens or candidates that it does not have
        and for drafts without a drafter, RuntimeError before `start`."""
        worker = self._running()
        for entry in batch.entries:
            if entry.seq not in self._seqs:
                raise KeyError(f"the batch mentions sequence {entry.seq!r}, which was not added to this engine")
            end = entry.start + entry.count - len(entry.verify)
            there = len(self._seqs[entry.seq].tokens)
            if end > there:
                raise ValueError(
                    f"the batch runs tokens {entry.start} to {end} of sequence {entry.seq!r}, which has {there} by now"
                )
            if entry.verify and end < there:
                raise ValueError(
                    f"the batch verifies candidates of sequence {entry.seq!r} after {end} of its {there} tokens: "
                    "all of them must run"
                )
            if entry.draft is not None and self._drafter is None:
                raise ValueError(f"the batch drafts for sequence {entry.seq!r}, and this engine was given no drafter")
        return await asyncio.get_running_loop().run_in_executor(worker, self._step, batch)

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        """Keys and values as raw bytes, (layers, tokens, 2, kv_heads, head_dim), whatever this engine's own layout.

        Raises ValueError for blocks that are not there or too few, RuntimeError before `start`.
        """
        worker = self._checked(blocks, tokens)
        return await asyncio.get_running_loop().run_in_executor(worker, self._read_kv, tuple(blocks), tokens)

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        """KV that `export_kv` of an engine with the same model and dtype gave. Raises ValueError for any other and for
        blocks that are not there or too few, RuntimeError before `start`."""
        worker = self._checked(blocks, kv.tokens)
        for what, given, own in (("form", kv.form, self._kv_form), ("shape", kv.shape, self._kv_shape)):
            if given != own:
                raise ValueError(f"KV of {what} {given!r} cannot be imported: this engine's is {own!r}")
        size = kv.tokens * bytes_per_token(self._config, self._dtype)
        if len(kv.data) != size:
            raise ValueError(f"KV of {kv.tokens} tokens holds {len(kv.data)} bytes: this engine's takes {size}")
        await asyncio.get_running_loop().run_in_executor(worker, self._write_kv, tuple(blocks), kv)

    def forget(self, seqs: Iterable[str]) -> None:
        for seq in seqs:
            if self._seqs.pop(seq, None) is not None and self._drafter is not None:
                self._forgotten.append(seq)

    async def close(self) -> None:
        """Give back memory and thread. `start` would load again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.shutdown)  # a step may still run: the event loop does not wait for it
        self._model = None
        self.forget(list(self._seqs))
        self._forget_drafts()
        if isinstance(self._drafter, OfTarget):
            self._drafter.release()

    @property
    def _kv_form(self) -> str:
        return f"torch-kv:{str(self._dtype).removeprefix('torch.')}"

    @property
    def _kv_shape(self) -> tuple[int, ...]:
        return self._config.layers, self._config.kv_heads, self._config.head_dim

    def _running(self) -> ThreadPoolExecutor:
        """The engine's thread, which has a model."""
        if self._worker is None or self._model is None:
            raise RuntimeError("the torch engine is not running: call start() first")
        return self._worker

    def _checked(self, blocks: Sequence[int], tokens: int) -> ThreadPoolExecutor:
        """The engine's thread, if it runs and `blocks` can hold so many tokens."""
        worker, limits = self._running(), self._limits
        if not 1 <= tokens <= len(blocks) * limits.block_size:
            raise ValueError(
                f"KV of {tokens} tokens does not fit {len(blocks)} blocks of {limits.block_size}: give 1 token or "
                "more, and blocks for all"
            )
        if not 0 <= min(blocks) <= max(blocks) < limits.kv_blocks:
            raise ValueError(f"KV block ids {min(blocks)} to {max(blocks)}: this engine has 0..{limits.kv_blocks - 1}")
        return worker

    # ----------------------------------------------------------------- on the engine's own thread

    @property
    def _most_threads(self) -> int:
        return self._threads if isinstance(self._threads, int) else THREADS

    def _set_threads(self) -> None:
        torch.set_num_threads(self._most_threads)
        if self._device.type == "cuda":
            # cuDNN's attention, which PyTorch prefers on Hopper, plans anew for each length of KV (PyTorch's pull
            # request 155958), and decodes have new ones in every step: it took 50 to 80 ms of a step on an H200.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self._threads == "auto" and self._device.type == "cpu":
            self._free = FreeCores(THREADS, self._clock, TakenCores(self._clock).now, len(usable_cores()))

    @torch.inference_mode()
    def _prepare(self) -> None:
        self._forget_drafts()
        if self._model is None:
            log.info("%s: loading the weights, and measuring which products are the fastest here", self.model_name)
            weights = load_weights(self._folder, self._config, self._dtype, self._device)
            spare = 0 if self._drafter is None else SPARE * self._limits.max_num_seqs
            torch.set_num_threads(self._most_threads)  # another engine's loading may have changed it meanwhile
            limits = self._limits
            self._model = Model(self._config, weights, limits.kv_blocks, limits.block_size, spare, self._most_threads)
            log.info(
                "%s: %s. Products: %s. Attention: %s. Threads: %d%s",
                self.model_name,
                self._device,
                weights.products.why,
                "PyTorch" if self._model.native is None else f"compiled for {self._model.native.instructions}",
                self._model.threads,
                "" if self._free is None else ", fewer while other programs use the cores",
            )
            log.info("%s: warming up", self.model_name)
        self._model.kv.zero_()  # touches every page now, not in the first steps; and nothing of a failed step remains
        self._model.warm_up()
        if isinstance(self._drafter, OfTarget):
            self._drafter.prepare(self._model)

    @torch.inference_mode()
    def _read_kv(self, blocks: tuple[int, ...], tokens: int) -> KV:
        assert self._model is not None
        data = self._model.read_kv(blocks, tokens).cpu().view(torch.uint8).numpy().tobytes()
        return KV(tokens, self._kv_form, self._kv_shape, data, len(data))

    @torch.inference_mode()
    def _write_kv(self, blocks: tuple[int, ...], kv: KV) -> None:
        assert self._model is not None
        layers, heads, dim = self._kv_shape
        data = torch.frombuffer(bytearray(kv.data), dtype=self._dtype).view(layers, kv.tokens, 2, heads, dim)
        self._model.write_kv(blocks, data.to(self._device))

    @torch.inference_mode()
    def _step(self, batch: Batch) -> StepResult:
        began = self._clock.now()
        assert self._model is not None
        if self._free is not None:
            self._model.use_threads(self._free.threads())
        self._forget_drafts()
        seqs = self._seqs
        tokens = {entry.seq: seqs[entry.seq].tokens for entry in batch.entries}
        candidates = {e.seq: Candidates.of(e.seq, seqs[e.seq].draft, e.verify) for e in batch.entries if e.verify}
        packed = self._model.pack(batch, tokens, candidates)
        emitted: dict[str, Emitted] = {}
        if batch.entries:
            logits = self._model.forward(packed)
            if packed.seqs:
                walks = accept(logits, [seqs[id] for id in packed.seqs], candidates)
                emitted = {walk.seq.request.id: walk.emitted for walk in walks}
                if candidates:
                    self._compact(walks, packed)
            elif self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the step is over when its KV is written
        drafting = self._clock.now()
        if self._drafter is not None:
            self._draft(batch, emitted, self._drafter)
        ended = self._clock.now()
        return StepResult(emitted, ended - began, ended - drafting if self._drafter is not None else 0.0)

    def _compact(self, walks: Sequence[Walk], packed: Packed) -> None:
        """Bring the KV of accepted candidates to the front, behind the pending tokens', and tell the drafter. What lies
        behind them is unused."""
        assert self._model is not None
        assert self._drafter is not None, "candidates came from it"
        slots: list[int] = []
        to: list[int] = []
        for walk in walks:
            if walk.candidates is None:
                continue
            id = walk.seq.request.id
            for at, new in zip(walk.accepted, packed.front[id], strict=False):
                if (old := packed.kept[id][at]) != new:
                    slots.append(old)
                    to.append(new)
            self._drafter.verified(id, walk.candidates.draft, walk.judged, walk.right)
        self._model.move_kv(slots, to)

    def _draft(self, batch: Batch, emitted: dict[str, Emitted], drafter: Drafter) -> None:
        """Ask for what the batch drafts, all sequences at once, and put the trees into `emitted`."""
        wanted: list[Wanted] = []
        for entry in batch.entries:
            seq, out = self._seqs[entry.seq], emitted.get(entry.seq)
            seq.draft = None
            if entry.draft is None or out is None or out.finish is not None:
                continue
            if len(seq.tokens) > entry.start + entry.count - len(entry.verify) + out.tokens:
                continue  # the next stage's prompt follows: no candidate does
            depth = min(entry.draft[0], seq.request.sampling.max_tokens - seq.output - 1)
            if depth > 0:
                wanted.append(Wanted(entry.seq, seq.tokens, depth, entry.draft[1], seq.request.tenant))
        if not wanted:
            return
        drafts = drafter.draft(wanted)
        if len(drafts) != len(wanted):
            raise ValueError(f"the drafter gave {len(drafts)} drafts for {len(wanted)} sequences: give one for each")
        for one, draft in zip(wanted, drafts, strict=True):
            check_draft(one, draft, self._config.vocab)
            self._seqs[one.seq].draft = draft
            emitted[one.seq] = emitted[one.seq]._replace(draft=draft.tree)

    def _forget_drafts(self) -> None:
        while self._forgotten and self._drafter is not None:
            self._drafter.forget(self._forgotten.pop(0))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        fast = matmul_backends.onednn_takes_bfloat16() or matmul_backends.has_fbgemm()
        return torch.bfloat16 if fast else torch.float32
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported by the torch engine: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is not supported by the torch engine: give auto, cpu, cuda or cuda:N")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but PyTorch sees no CUDA device here: give cpu or auto")
    return torch.device(name)


def _limits(
    config: Config, dtype: torch.dtype, kv_gib: float, seqs: int, tokens: int, length: int | None, block: int
) -> Limits:
    per_block = block * bytes_per_token(config, dtype)
    blocks = int(kv_gib * GIB) // per_block
    if blocks < 1:
        raise ValueError(f"kv_gib is {kv_gib}: less than one block of {block} tokens, which takes {per_block} bytes")
    if length is not None and not 1 <= length <= config.context:
        raise ValueError(f"max_model_len is {length}: this model's context is {config.context} tokens, give 1 to that")
    most = min(length or config.context, blocks * block)
    return Limits(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=most, kv_blocks=blocks, block_size=block
    )


def _eos(folder: Path, config: Config, text: Text) -> frozenset[int]:
    """Every id that some file of the folder calls the end of a text."""
    ids = set(config.eos | ids_of(read_json(folder / "generation_config.json").get("eos_token_id")))
    token = text.special("eos_token")
    if token is not None and (id := text.id_of(token)) is not None:
        ids.add(id)
    return frozenset(ids)
