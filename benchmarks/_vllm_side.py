"""vLLM's half of `engine_vs_vllm.py`: its settings, and the process that drives its engine.

Run as a program it is one side of the comparison, inside vLLM's own environment (so it imports nothing of Rubato): a
long-lived process that answers JSON lines. `serve` is that loop, and Rubato's side is served by it too, so that both
are told the same things by the same code.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from vllm_env import ENV

# What may be set in vLLM for this model on a CPU. `--tune` measures them against each other. By default both kinds of
# OpenMP run, compiled, and each case is compared with the faster: they are within a few per cent of each other, and
# which is ahead differs by batch and run. Eager was slower in every case; block size 32 made no difference to be told.
TUNINGS: dict[str, dict[str, Any]] = {
    "compiled-iomp": {"omp": "iomp"},
    "compiled-gomp": {"omp": "gomp"},
    "compiled-iomp-block32": {"omp": "iomp", "block_size": 32},
    "eager-iomp": {"omp": "iomp", "enforce_eager": True},
    "eager-gomp": {"omp": "gomp", "enforce_eager": True},
}
BEST = "compiled-gomp,compiled-iomp"

CLOCK = time.perf_counter


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. Seconds: `seconds` in all, of which `plan` and `commit` are the control plane's.

    tokens and seqs are what the scheduler put into the batch, sampled the sequences that got a token out of it.
    """

    seconds: float
    plan: float
    commit: float
    tokens: int
    seqs: int
    sampled: int


class Side(Protocol):
    """An engine under test. `add` queues greedy requests that ignore eos; `step` runs one plan-execute-commit."""

    def describe(self) -> dict[str, Any]: ...
    def add(self, prompts: list[list[int]], max_tokens: int) -> None: ...
    def step(self) -> Step: ...
    def waiting(self) -> int:
        """Requests that have no output token yet."""
        ...

    def clear(self) -> None:
        """End every request, free all KV."""
        ...


def serve(build: Callable[[dict[str, Any]], Side]) -> None:
    """Answer commands from stdin on the original stdout until stdin closes; anything printed goes to stderr.

    {"do": "start", ...settings} -> description
    {"do": "fresh", "prompts": [[id, ...], ...], "max_tokens": n, "prefill": bool} -> null; with `prefill`, all prompts
        are prefilled, untimed
    {"do": "steps", "count": n} -> [Step, ...]
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer: Any = None
        if do == "start":
            side = build(command)
            gc.collect()
            gc.freeze()  # what loading left behind is not scanned during timed steps; the same for both sides
            answer = side.describe()
        elif side is None:
            raise RuntimeError(f"command {do!r} before 'start'")
        elif do == "fresh":
            side.clear()
            side.add(command["prompts"], command["max_tokens"])
            while command["prefill"] and side.waiting():
                side.step()
        elif do == "steps":
            answer = [asdict(side.step()) for _ in range(command["count"])]
        else:
            raise ValueError(f"unknown command {do!r}: give start, fresh or steps")
        print(json.dumps(answer), file=replies, flush=True)


class VLLMSide:
    """vLLM's engine core in this process (no second process, no HTTP): schedule, execute, update.

    A step's seconds are those of `EngineCore.step` and `post_step`. vLLM's detokenisation comes after that and is not
    counted, though Rubato's is part of its step.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        self.settings = dict(settings)
        model = settings.pop("model")
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **settings))
        self.core = self.engine.engine_core.engine_core
        self.seen = 0
        self.prefilling: set[str] = set()
        self.live: set[str] = set()
        self.last: dict[str, Any] = {}
        self._watch()

    def _watch(self) -> None:
        """Time the scheduler's two halves and the engine core's step, and note what was scheduled."""
        scheduler, client, last = self.core.scheduler, self.engine.engine_core, self.last
        schedule, update, output = scheduler.schedule, scheduler.update_from_output, client.get_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            begin = CLOCK()
            out = schedule(*args, **kwargs)
            last["plan"] = CLOCK() - begin
            last["tokens"] = out.total_num_scheduled_tokens
            last["seqs"] = len(out.num_scheduled_tokens)
            return out

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            begin = CLOCK()
            out = update(*args, **kwargs)
            last["commit"] = CLOCK() - begin
            return out

        def timed_output() -> Any:
            begin = CLOCK()
            out = output()
            last["seconds"] = CLOCK() - begin
            last["sampled"] = sum(len(o.new_token_ids) for o in out.outputs)
            return out

        scheduler.schedule, scheduler.update_from_output, client.get_output = timed_schedule, timed_update, timed_output

    def describe(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self.engine.vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "preload": os.path.basename(os.environ.get("LD_PRELOAD", "")),
            "block": config.cache_config.block_size,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "compilation": str(config.compilation_config.mode),
            "runner": type(self.core.model_executor.driver_worker.worker.model_runner).__module__,
            "settings": self.settings,
        }

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for ids in prompts:
            name = f"r{self.seen}"
            self.seen += 1
            self.live.add(name)
            self.prefilling.add(name)
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)

    def step(self) -> Step:
        for output in self.engine.step():
            self.prefilling.discard(output.request_id)
            if output.finished:
                self.live.discard(output.request_id)
        last = self.last
        return Step(last["seconds"], last["plan"], last["commit"], last["tokens"], last["seqs"], last["sampled"])

    def waiting(self) -> int:
        return len(self.prefilling)

    def clear(self) -> None:
        if self.live:
            self.engine.abort_request(list(self.live))
            self.live.clear()
            self.prefilling.clear()
            while self.engine.has_unfinished_requests():
                self.engine.step()


# --------------------------------------------------------------------------- vLLM's settings


def vllm_settings(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's engine that every comparison uses."""
    return {
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
    }


def vllm_variables(omp: str, cores: list[int], kv_gib: int) -> dict[str, str]:
    """What vLLM sets for its own CPU worker processes; driven inside this process it has to be set from outside."""
    if omp == "iomp":
        library = ENV / "lib" / "libiomp5.so"
        places = ",".join(map(str, cores))
        bind = {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{places}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    else:
        library = next((ENV / "lib").glob("python3*/site-packages/torch/lib/libgomp*.so*"))
        bind = {"GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    return {
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(ENV / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(ENV / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **bind,
    }


if __name__ == "__main__":
    serve(VLLMSide)
