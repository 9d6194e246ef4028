"""Step time of the torch engine on CPUs with fewer instructions: this one, some of its instructions hidden.

    python benchmarks/engine_isa.py [--masks none,avx512,avx2] [--rounds 6] [--vllm] [--json FILE]

Under each mask three engines take turns, a block of steps each, as in engine_vs_vllm.py: `auto` (the default: whichever
form of the weights is the fastest here), `bfloat16` as it was before there was a choice (oneDNN where it takes
bfloat16, else PyTorch's own product), and `float32`; with --vllm also vLLM's CPU build, told the same. Reported are
medians, ratios of medians (auto / other) with a 95 % interval by a bootstrap over rounds, and each process's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_vs_vllm import (
    CASES,
    ROOT,
    Measured,
    Start,
    _bundled_model,
    _cpu_model,
    _known,
    children,
    compare,
    measure,
    ours,
    settled,
    vllm,
)

from rubato_torch.cpu.llvm_jit import SHOWN_AS

MASKS: dict[str, dict[str, str]] = {"none": {}, **SHOWN_AS}
AUTO, BEFORE, FLOAT32, VLLM = "auto", "bfloat16 before", "float32", "vLLM"


def starts(mask: str, with_vllm: bool) -> dict[str, Start]:
    cores, hidden = sorted(os.sched_getaffinity(0)), MASKS[mask]
    before = "Plain" if mask == "avx2" else "OneDNN"
    found = {
        AUTO: ours(cores, hidden),
        BEFORE: ours(cores, hidden, dtype="bfloat16", form=before),
        FLOAT32: ours(cores, hidden, dtype="float32"),
    }
    return found | ({VLLM: vllm("compiled-gomp", cores, hidden)} if with_vllm else {})


def lines(mask: str, results: list[Measured], others: list[str]) -> list[str]:
    found = []
    for measured in results:
        cells = [f"{1e3 * measured.median(AUTO):.1f}"]
        for side in others:
            c = compare(measured, side, AUTO)
            cells.append(f"{1e3 * c.theirs:.1f}: {c.ratio:.3f} ({c.low:.3f}–{c.high:.3f})")
        found.append(f"| {mask} | {measured.case.name} | " + " | ".join(cells) + " |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", default=",".join(MASKS), help=f"of {', '.join(MASKS)} (default all)")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of steps per engine and case (default 6)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--vllm", action="store_true", help="beside vLLM's CPU build (builds its environment, 3.5 GB)")
    parser.add_argument("--json", type=Path, help="write versions, settings and every sample to this file")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the order within a round")
    options = parser.parse_args()
    masks = options.masks.split(",")
    for name in masks:
        _known("--masks", name, MASKS)
    cases = [_known("--cases", name, CASES) for name in options.cases.split(",")]
    model, table, report = _bundled_model(), [], []
    for mask in masks:
        with children(starts(mask, options.vllm), model, ROOT / "results" / "engine_isa" / mask) as sides:
            described: dict[str, Any] = {name: child.description for name, child in sides.items()}
            results = []
            for case in cases:
                results.append(measure(case, sides, options.rounds, options.seed))
                print(f"{mask}: {settled(results[-1])}", file=sys.stderr)
        others = [name for name in described if name != AUTO]
        table += lines(mask, results, others)
        for name in (AUTO, BEFORE, FLOAT32):
            print(f"{mask}, {name}: {described[name]['products']}; {described[name]['memory_mib']} MiB")
        report.append({"mask": mask, "sides": described, "cases": [asdict(m) for m in results]})
    print(f"\n{_cpu_model()}, {len(os.sched_getaffinity(0))} cores. Milliseconds a step; ratio: auto / other (95 %).\n")
    head = ["mask", "case", AUTO, *others]
    print("\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *table]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
