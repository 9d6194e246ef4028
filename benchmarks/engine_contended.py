"""Step time of the torch engine beside other programs that keep cores busy.

    python benchmarks/engine_contended.py [--rounds 4] [--busy 0,1,2] [--json FILE]

Two engines take turns, a block of steps each: `auto`, which uses fewer threads while other programs take cores
(`rubato.core.cpu_usage`), and `fixed`, one thread for each core, as it was before. In each round both run every case
beside 0, 1 and 2 programs that only count. Reported are medians over all steps, and how many times the same engine's
quiet step that is, with a 95 % interval by a bootstrap over rounds."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
from engine_vs_vllm import ROOT, Block, Case, Child, _block, _bundled_model, _cpu_model, _prompts, children, ours

CASES = (Case("decode1", 1, 1, 12, 3), Case("decode8", 8, 1, 9, 3), Case("decode32", 32, 1, 6, 3),
         Case("prefill256", 1, 256, 4, 0))  # fmt: skip
CONTEXT = 200  # tokens of a decode's prompt
SETTLE = 1.6  # seconds of steps before those that count
Key = tuple[str, str, int]  # case, side, busy programs


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many programs that only count, for two seconds before and while it lasts."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(2.0)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run(case: Case, number: int, side: str, sides: dict[str, Child], rng: random.Random) -> Block:
    """A block of steps, after others for as long as `auto` takes to know that its neighbour of the last block is done:
    between two blocks of its own it reads nothing, and counts the other engine's as another program's."""
    child = sides[side]
    child.ask("fresh", prompts=_prompts(rng, case.seqs, CONTEXT), max_tokens=2000, prefill=True)
    until = time.monotonic() + SETTLE
    while time.monotonic() < until:
        child.ask("steps", count=3)
    fresh: list[list[list[int]]] = []
    if case.tokens > 1:
        fresh = [_prompts(rng, case.seqs, case.tokens) for _ in range(case.steps)]
    return _block(case, number, side, sides, fresh)


def ratio(blocks: dict[Key, list[Block]], key: Key, resamples: int = 2000) -> tuple[float, float, float]:
    """Median step over the quiet median of the same engine and case, and its interval."""
    loaded, quiet = (np.array([[s["seconds"] for s in b.steps] for b in blocks[k]]) for k in (key, (*key[:2], 0)))
    rng, found = np.random.default_rng(0), []
    for _ in range(resamples):
        drawn = rng.integers(0, len(loaded), len(loaded))
        found.append(np.median(loaded[drawn]) / np.median(quiet[drawn]))
    value = float(np.median(loaded) / np.median(quiet))
    low, high = np.percentile(found, (2.5, 97.5))
    return value, float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="blocks of steps per engine, case and load (default 4)")
    parser.add_argument("--busy", default="0,1,2", help="how many other programs; 0 is what they are compared with")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    loads = [int(word) for word in options.busy.split(",")]
    if 0 not in loads:
        parser.error("--busy has no 0: there must be a quiet step to compare with")
    cores = sorted(os.sched_getaffinity(0))
    starts = {"auto": ours(cores, threads="auto"), "fixed": ours(cores)}
    rng, blocks = random.Random(0), dict[Key, list[Block]]()
    with children(starts, _bundled_model(), ROOT / "results" / "engine_contended") as sides:
        for number in range(options.rounds):
            for count in loads:
                with busy(count):
                    for case in CASES:
                        for side in rng.sample(list(sides), len(sides)):
                            time.sleep(0.1)  # the other goes to sleep: OpenMP threads spin for some milliseconds
                            blocks.setdefault((case.name, side, count), []).append(run(case, number, side, sides, rng))
            print(f"round {number + 1} of {options.rounds} is done", file=sys.stderr)
    print(f"{_cpu_model()}, {len(cores)} cores. Median step in ms, and how many times its quiet one (95 %).\n")
    columns = [(side, count) for side in starts for count in loads]
    print("| case | " + " | ".join(f"{side}, {count} busy" for side, count in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for case in CASES:
        cells = []
        for side, count in columns:
            key = (case.name, side, count)
            median = statistics.median(float(s["seconds"]) for b in blocks[key] for s in b.steps)
            value, low, high = ratio(blocks, key)
            cells.append(f"{1e3 * median:.1f}" + (f": {value:.2f} ({low:.2f}–{high:.2f})" if count else ""))
        print(f"| {case.name} | " + " | ".join(cells) + " |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {" ".join(map(str, key)): [asdict(block) for block in own] for key, own in blocks.items()}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
