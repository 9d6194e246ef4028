"""The figures whose small form takes seconds, one after the other in one process: `python -m experiments --quick`."""

from __future__ import annotations

import json
from pathlib import Path

import experiments
from rubato.core.clock import process_cpu_time

# 31 CPU s, of four papers' figures that run by themselves; and live servers, which take minutes of the wall clock
LEFT_OUT = frozenset({"host-today", "simulator-fidelity"})


def run(file: Path) -> int:
    """Prints each figure's CPU seconds; what `file` says has run does not run again. Its end removes the file. Returns
    1 where a check does not hold, and stops there."""
    ran: dict[str, float] = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
    if ran:
        print(f"{len(ran)} figures have run, says {file}: without it they run again")
    for name in experiments.names():
        if name in LEFT_OUT or name in ran:
            continue
        begin = process_cpu_time()
        failed = experiments.failed(experiments.run(name, small=True, workers=1))
        if failed:
            print(f"{name}: these checks do not hold: {', '.join(failed)}")
            return 1
        ran[name] = process_cpu_time() - begin
        print(f"{name}: {ran[name]:.1f} s", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as out:
            out.write(json.dumps([name, ran[name]]) + "\n")
    print(f"{len(ran)} figures in their small form: {sum(ran.values()):.0f} CPU s")
    file.unlink(missing_ok=True)
    return 0
