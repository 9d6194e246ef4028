"""CPU time per step of the scheduler's and the replica's own work, beside an engine that takes none.

    python benchmarks/step_overhead.py [--seqs 1,8,32,64] [--policies edf,sarathi,vllm] [--rounds 7] [--against SRC]

All of the sequences decode. `host` is a whole step of the embedded engine's loop (LocalHost on asyncio and the wall
clock: plan, apply, execute, commit, the latency model's update, events), less the time in the engine itself, which
returns at once with a token for each sequence, text and id as the torch engine gives them. Its parts are timed around
the same calls on a Replica alone, at steps of `STEP` seconds of a clock that is set by hand: plan (the policy), apply
(the view and the plan's checks, accounting and batch), commit.

A round is a process of its own; reported are medians over rounds in ms. --against: the folder that holds another
`rubato`, such as another checkout's src; the two take turns, round by round, and the ratio is of this one to the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import rubato
from rubato.core.clock import WallClock, run_strict
from rubato.core.events import Event
from rubato.core.plan import KV, Batch, Emitted, Limits, Sample, StepResult
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.local_host import LocalHost
from rubato.latency.affine import Model
from rubato.policies import load
from rubato.replica.replica import Replica

PROMPT, BLOCK = 512, 16
WARM, STEPS = 20, 300  # steps, before the clock and under it
STEP = 0.02  # seconds of a step, where the clock is set by hand
SUPPORTS = frozenset({"chunked", "preempt", "mixed", "handoff", "recall"})
PARTS = ("host", "plan", "apply", "commit")
MOST = PROMPT + WARM + 2 * STEPS


def limits(seqs: int) -> Limits:
    return Limits(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2 * MOST,
        kv_blocks=seqs * (2 * MOST // BLOCK),
        block_size=BLOCK,
    )


def requests(seqs: int, now: float) -> list[Request]:
    stage, sampling = Stage(PROMPT, SLO(ttft=60.0, tpot=0.1), token_ids=tuple(range(PROMPT))), Sampling(MOST)
    return [Request(f"q{i}", (stage,), now, sampling=sampling) for i in range(seqs)]


def result(batch: Batch) -> StepResult:
    """A token for each that samples."""
    return StepResult({e.seq: Emitted(1, " word", (11,)) for e in batch.entries if e.sample}, STEP)


class Engine:
    """Takes no time and says when `seqs` sequences have decoded together for `WARM` + `STEPS` steps. cpu, own: CPU
    seconds of all that ran between the first and the last of the latter, and of them its own."""

    supports = frozenset({"chunked", "preempt", "mixed"})

    def __init__(self, seqs: int) -> None:
        self.limits = limits(seqs)
        self.over = asyncio.Event()
        self.cpu = self.own = 0.0
        self._seqs = seqs
        self._decodes = 0

    async def start(self) -> None: ...

    def add(self, request: Request) -> None: ...

    async def execute(self, batch: Batch) -> StepResult:
        began = time.process_time()
        self._decodes += len(batch.entries) == self._seqs and all(e.count == 1 for e in batch.entries)
        if self._decodes == WARM + STEPS:
            self.cpu += began
            self.over.set()
        out = result(batch)
        if WARM <= self._decodes < WARM + STEPS:
            now = time.process_time()
            if self._decodes == WARM:
                self.cpu = -now
            else:
                self.own += now - began
        return out

    def forget(self, seqs: Iterable[str]) -> None: ...

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        raise NotImplementedError("nothing is handed off here")

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        raise NotImplementedError("nothing is handed off here")

    async def close(self) -> None: ...


async def in_host(policy: str, seqs: int) -> float:
    """CPU seconds of a step in the host's loop, without the engine's."""

    def lost(id: str, error: BaseException, requests: Sequence[Request]) -> None:
        raise error

    engine, clock, heard = Engine(seqs), WallClock(), 0

    def emit(event: Event) -> None:
        nonlocal heard
        heard += 1

    host = LocalHost(
        "r0", engine, load(policy), Model(), clock, emit=emit, lost=lost, policy=policy
    )  # fmt: skip
    await host.start()
    for request in requests(seqs, clock.now()):
        host.submit(request)
    await asyncio.wait_for(engine.over.wait(), 120.0)
    await host.close()
    assert heard >= seqs * STEPS
    return (engine.cpu - engine.own) / STEPS


def in_parts(policy: str, seqs: int) -> dict[str, float]:
    """Seconds of each part of a step, on a Replica alone."""
    scheduler, model = load(policy), Model()
    replica = Replica("r0", limits(seqs), model, supports=SUPPORTS)
    now, decodes = 0.0, 0
    spent = dict.fromkeys(PARTS[1:], 0.0)
    for request in requests(seqs, now):
        replica.submit(request, now)
    clock = time.perf_counter
    while decodes < WARM + STEPS:
        at = [clock()]
        view = replica.view(now)
        at.append(clock())
        plan = scheduler.plan(view)
        at.append(clock())
        batch, events = replica.apply(plan, now, policy)
        at.append(clock())
        scheduler.observe(events)
        out = result(batch)
        now += STEP
        at.append(clock())
        events = replica.commit(batch, out, now)
        at.append(clock())
        model.update(Sample(batch.shape, STEP))
        scheduler.observe(events)
        decodes += len(batch.entries) == seqs and all(e.count == 1 for e in batch.entries)
        if decodes > WARM:
            spent["plan"] += at[2] - at[1]
            spent["apply"] += at[1] - at[0] + at[3] - at[2]
            spent["commit"] += at[5] - at[4]
    return {part: seconds / STEPS for part, seconds in spent.items()}


def measure(policies: Sequence[str], seqs: Sequence[int]) -> dict[str, dict[str, float]]:
    """One round: "policy seqs" -> seconds by part."""
    return {
        f"{policy} {count}": {"host": run_strict(in_host(policy, count)), **in_parts(policy, count)}
        for policy in policies for count in seqs
    }  # fmt: skip


def in_process(source: Path, policies: str, seqs: str) -> dict[str, dict[str, float]]:
    words = [sys.executable, __file__, "--once", "--policies", policies, "--seqs", seqs]
    env = os.environ | {"PYTHONPATH": str(source)}
    found: dict[str, dict[str, float]] = json.loads(
        subprocess.run(words, env=env, check=True, capture_output=True).stdout
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", default="1,8,32,64")
    parser.add_argument("--policies", default="edf,sarathi,vllm")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, help="the folder that holds another `rubato`")
    parser.add_argument("--once", action="store_true", help="one round in this process, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure(args.policies.split(","), list(map(int, args.seqs.split(","))))))
        return
    sides = {"this": Path(rubato.__file__).parents[1]}
    if args.against is not None:
        if not (args.against / "rubato").is_dir():
            parser.error(f"--against {args.against}: there is no rubato in it; give the src folder of a checkout")
        sides["other"] = args.against.resolve()
    rounds = [{side: in_process(path, args.policies, args.seqs) for side, path in sides.items()}
              for _ in range(args.rounds)]  # fmt: skip
    print("ms per step" + (": this / other, ratio" if len(sides) > 1 else ""))
    print(f"{'policy':10} {'seqs':>4}" + "".join(f"{part:>24}" for part in PARTS))
    rows = []
    for case in rounds[0]["this"]:
        policy, count = case.split()
        row: dict[str, Any] = {"policy": policy, "seqs": int(count)} | {
            side: {part: 1e3 * median(r[side][case][part] for r in rounds) for part in PARTS} for side in sides
        }
        rows.append(row)
        cells = []
        for part in PARTS:
            cell = f"{row['this'][part]:.4f}"
            if "other" in row:
                ratio = median(r["this"][case][part] / r["other"][case][part] for r in rounds)
                cell += f" / {row['other'][part]:.4f} {ratio:5.2f}"
            cells.append(f"{cell:>24}")
        print(f"{policy:10} {count:>4}" + "".join(cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
