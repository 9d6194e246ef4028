"""`experiments.fidelity` on the bundled model, and the table in docs/measurements/fidelity.md.

    python benchmarks/fidelity.py --table docs/measurements/fidelity.md --json results/fidelity.json [--loads | --quick]

About 30 minutes on two cores, which must be free: three policies at 0.7 and 1.0 of the rate at which simulated `vllm`
attains 90 %, tier by tier; a row holds within 5 points of attainment and 10 % of mean e2e. --loads: 0.6, 0.9 and 1.2 of
that rate, all tiers together, within 3 points, 7 % of mean e2e and 15 % of the P99 of TTFT, which
`python -m experiments simulator-fidelity` runs, too; --quick: three minutes, too few requests to judge by.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from experiments.fidelity.fit_run import LearnedModel, say
from experiments.fidelity.live_runs import FULL, HOLDS, LOADS, QUICK, Scale, torch_rig
from experiments.fidelity.table import table
from rubato.measure import results


def told(what: LearnedModel, rate: float, scale: Scale, threads: int | None) -> str:
    """What stands above the table."""
    assert what.inside is not None
    assert what.held_out is not None
    return (
        f"`benchmarks/fidelity.py`. Load 1 is {rate:.2f} requests/s, at which `vllm` attains {100 * HOLDS:.0f} % in "
        f"simulation. Engine threads: {threads or 'auto'}. Each workload ran twice live, each time on a fresh "
        f"server, and "
        f"{scale.seeds} times in simulation for each live run (seeds of the noise, pooled), with the fitted model at "
        "the speed of the machine in the other of the two.\n\n"
        f"From the fit run, another workload and seed: step times with R² {what.inside.r2:.3f}, relative error p50 "
        f"{what.inside.p50:.1%} p95 {what.inside.p95:.1%}; held out {what.held_out.p50:.1%} and "
        f"{what.held_out.p95:.1%} ({what.inside.n + what.held_out.n} steps). Spread of step times {what.noise:.1%}; "
        f"between steps {1e3 * what.gap:.2f} ms (within the model); in HTTP and client {1e3 * what.first:.1f} ms until "
        f"the first token, {1e3 * what.last:.1f} ms at the last (added to the simulated times)."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulated against live, with a latency model of another run.")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="everything measured, as JSON")
    parser.add_argument("--out", type=Path, help="folder for logs and records (default: a temporary one)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a few requests: does it run?")
    which.add_argument("--loads", action="store_true", help="60, 90 and 120 %% of what vllm holds, stricter")
    parser.add_argument("--threads", type=int, help="of the engine (default: auto)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server is stopped on the way out
    scale = QUICK if options.quick else LOADS if options.loads else FULL
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        rig = torch_rig(out, options.threads or "auto")
        ground = rig.ground(scale)
        what, rate = ground.what, ground.rate
        say(f"{len(ground.load.arrivals)} requests; vllm holds {rate:.2f}/s in simulation; SLOs {ground.slos}")
        rows = [
            row
            for policy in scale.policies
            for share in scale.loads
            for row in rig.cell(policy, share, ground, scale).rows
        ]
    written = table(rows, told(what, rate, scale, options.threads))
    print(written)
    if options.table:
        options.table.write_text(written)
    if options.json:
        found = {
            "truth": what.truth.to_dict(), "believed": what.believed.to_dict(), "in_sample": what.inside,
            "held_out": what.held_out, "noise": what.noise, "gap": what.gap, "first": what.first, "last": what.last,
        }  # fmt: skip
        slo = {tier: asdict(s) for tier, s in ground.slos.items()}
        options.json.write_bytes(
            results.as_json({"learned": found, "rate": rate, "slos": slo, "cells": [c.to_json() for c in rows]})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
