"""Drafts inside vLLM: tokens per second and attainment, stock and under the plug-in's policies, with the same drafter.

    python benchmarks/vllm_drafts.py [--at 1,4,8] [--rounds 3] [--json FILE]

So many clients send one request after the other, greedy, to vLLM's CPU build with the bundled model, in process,
without HTTP: stock without drafts, stock with drafts by n-grams (4 tokens), and the plug-in with the
same drafts under each policy. Each system is a process of its own with all cores; they take turns, in another order
each round, with the same prompts. A third of the requests each have a TPOT of 1.2, 1.6 and 3 times what stock without
drafts needs for one alone (median), and all a TTFT of 20 times that and 10 ms for each token of the prompt. Attained is
what is in time by the deadline rule, of all offered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from vllm_env import ensure_env

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SYSTEMS: dict[str, tuple[str, bool]] = {  # policy ("": stock), with drafts
    "stock": ("", False),
    "stock, drafts": ("", True),
    "vllm_spec": ("vllm_spec", True),
    "smart_spec": ("smart_spec", True),
    "slos_serve": ("slos_serve", True),
    "adaserve": ("adaserve", True),
    "edf": ("edf", True),
}
TPOTS = (1.2, 1.6, 3.0)
PROMPTS = (("chat", 60), ("code", 160), ("summary", 320))  # tokens
MOST = 32  # output tokens
REQUESTS = {1: 6, 4: 9, 8: 12}  # of a round, by clients at once


# --------------------------------------------------------------------------- in vLLM's environment


def side(name: str, model: str, dtype: str) -> None:
    """One system: answers a JSON line with another, round by round."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    policy, drafts = SYSTEMS[name]
    own: dict[str, Any] = {"speculative_config": NGRAM} if drafts else {}
    if policy:
        own["scheduler_cls"] = "rubato.vllm.Scheduler"
        own["additional_config"] = {"rubato": {"policy": policy}}
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=16, **own)
    )
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        waiting, done = list(enumerate(asked["requests"])), []
        running: dict[str, tuple[float, list[float]]] = {}
        begin = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < asked["at"]:
                index, request = waiting.pop(0)
                params = SamplingParams(
                    temperature=0.0, max_tokens=MOST, ignore_eos=True, extra_args=request["slo"] if policy else None
                )
                engine.add_request(str(index), request["prompt"], params)
                running[str(index)] = (time.perf_counter(), [])
            for output in engine.step():
                arrival, times = running[output.request_id]
                times += [time.perf_counter() - arrival] * (len(output.outputs[0].token_ids) - len(times))
                if output.finished:
                    del running[output.request_id]
                    done.append({"index": int(output.request_id), "times": times})
        scheduler = engine.engine_core.engine_core.scheduler
        driver = getattr(scheduler, "rubato", None)
        seconds = time.perf_counter() - begin
        about = {"deviations": driver.guard.deviations.total(), "faults": driver.guard.faults.total()} if driver else {}
        print(json.dumps({"seconds": seconds, "requests": done, **about}), flush=True)


# --------------------------------------------------------------------------- here


class Child:
    """A system's process."""

    def __init__(self, name: str, python: Path, model: Path, dtype: str, log: Path) -> None:
        self.name = name
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CONFIGURE_LOGGING": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(python), __file__, "--side", name, "--model", str(model), "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env={**os.environ, **variables},
            text=True,
        )
        self.told()

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended with status {self.process.wait()}: see its log")

    def ask(self, at: int, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"at": at, "requests": list(requests)}) + "\n")
        self.process.stdin.flush()
        return self.told()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()


def requests_of(at: int, seed: int, alone: float) -> Iterator[dict[str, Any]]:
    """What the clients send; the same to every system. alone: seconds a token of one request alone."""
    from rubato.workloads.prompts import fresh_text

    rng, seen = np.random.default_rng(seed), set[str]()
    for i in range(REQUESTS[at]):
        app, tokens = PROMPTS[(i // 3 + i) % 3]  # each kind with each TPOT
        tpot, ttft = TPOTS[i % 3] * alone, 20 * alone + 0.01 * tokens
        yield {
            "prompt": fresh_text(app, tokens, rng, seen),
            "slo": {"slo_ttft_ms": 1e3 * ttft, "slo_tpot_ms": 1e3 * tpot, "slo_tier": f"{TPOTS[i % 3]:g}"},
        }


def attained(asked: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> int:
    """How many had each token by its deadline."""
    from rubato.core.request import SLO, Request, Stage
    from rubato.core.slo import StageTimes, judge

    met = 0
    for one in answer["requests"]:
        slo = asked[one["index"]]["slo"]
        stage = Stage(1, SLO.from_ms(slo["slo_ttft_ms"], slo["slo_tpot_ms"]))
        met += judge(Request(str(one["index"]), (stage,), 0.0), [StageTimes(0.0, one["times"])]).met
    return met


def told(rows: Sequence[Mapping[str, Any]], baseline: str = "stock, drafts") -> str:
    from rubato.measure.confidence import attainment_over_seeds, over_seeds
    from rubato.measure.tables import percent

    lines = [
        f"| at once | system | tokens/s | times `{baseline}` | attained | deviations |",
        "|---|---|---|---|---|---|",
    ]
    for at in dict.fromkeys(r["at"] for r in rows):
        base = {r["seed"]: r["tokens_per_second"] for r in rows if r["at"] == at and r["system"] == baseline}
        for system in dict.fromkeys(r["system"] for r in rows):
            own = [r for r in rows if r["at"] == at and r["system"] == system]
            speed = over_seeds([r["tokens_per_second"] for r in own])
            ratio = over_seeds([r["tokens_per_second"] / base[r["seed"]] for r in own])
            share = percent(attainment_over_seeds([r["met"] for r in own], [r["offered"] for r in own]))
            lines.append(
                f"| {at} | {system} | {speed.value:.1f} {speed.interval('{:.1f}'.format)} "
                f"| {ratio.value:.2f} {ratio.interval('{:.2f}'.format)} | {share} "
                f"| {sum(r['deviations'] for r in own)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default="1,4,8", help="clients at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(n for n in SYSTEMS if n != "stock, drafts"))
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on CPUs without BF16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(args.side, args.model, args.dtype)
        return
    from rubato_torch import bundled_model

    model, python = Path(bundled_model.ensure()), ensure_env()
    out = Path("results") / "vllm_drafts"
    out.mkdir(parents=True, exist_ok=True)
    names = ["stock", "stock, drafts", *(n for n in args.systems.split(",") if n != "stock")]
    children = [Child(name, python, model, args.dtype, out / f"{name.replace(', ', '-')}.log") for name in names]
    rows: list[dict[str, Any]] = []
    try:
        for child in children:  # warm
            child.ask(8, list(requests_of(8, 999, 0.1))[:8])
        lone = children[0].ask(1, list(requests_of(1, 998, 0.1)))
        alone = median((r["times"][-1] - r["times"][0]) / (len(r["times"]) - 1) for r in lone["requests"])
        print(f"stock without drafts, one alone: {1e3 * alone:.1f} ms a token", flush=True)
        for seed in range(1, args.rounds + 1):
            for at in map(int, args.at.split(",")):
                asked = list(requests_of(at, 10 * seed + at, alone))
                for i in range(len(children)):
                    child = children[(i + seed) % len(children)]
                    answer = child.ask(at, asked)
                    tokens = sum(len(r["times"]) for r in answer["requests"])
                    rows.append(
                        {
                            "system": child.name, "at": at, "seed": seed, "offered": len(asked),
                            "met": attained(asked, answer), "tokens_per_second": tokens / answer["seconds"],
                            "deviations": answer.get("deviations", 0), "faults": answer.get("faults", 0),
                        }
                    )  # fmt: skip
                    print(json.dumps(rows[-1]), flush=True)
    finally:
        for child in children:
            child.end()
    print("\n" + told(rows))
    if args.json:
        args.json.write_text(json.dumps({"alone": alone, "tpots": TPOTS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
