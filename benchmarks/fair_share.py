"""A flooding tenant against another, live: the bundled model over HTTP, each tenant a client of its own.

    python benchmarks/fair_share.py [--policy edf --policy vllm] [--cell "flood, fair share"] [--seconds 30]

Tenant `quiet` offers `--rate` requests a second in every cell. Its neighbour is absent (alone, and alone with one of
the engine's two threads), offers the same (fair), `--share` times as much, which should be about half of what the
machine holds, or `--flood` times as much: with tenants configured, so that the fair share holds, and without, first
come first served. What `quiet` attains beside the flood must not be below what it attains beside a neighbour that
takes its share and no more. Alone on one thread it has the other core for HTTP and the clients, which no tenant has
beside a flood: that cell is kinder than half a machine. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rubato.measure.server_process import served
from rubato_torch import bundled_model

TIERS = {"chat": (900, 55), "code": (1000, 60), "summary": (1200, 65)}  # ms: TTFT, TPOT
KEYS = {"quiet": "sk-quiet-tenant", "loud": "sk-loud-tenant"}


def config(policy: str, tenants: bool, threads: int | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(bundled_model.ensure()),
        "engine": {"kind": "torch", "max_num_seqs": 64, "max_num_batched_tokens": 2048, "threads": threads or "auto"},
        "policy": policy,
        "prefix_cache": False,
        "max_in_flight": 1024,
        "tiers": {name: {"ttft_ms": ttft, "tpot_ms": tpot} for name, (ttft, tpot) in TIERS.items()},
    }
    if tenants:
        settings["tenants"] = {name: {"keys": [key]} for name, key in KEYS.items()}
    return settings


def bench(url: str, tenant: str, rate: float, seconds: float, seed: int, into: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "rubato.cli", "bench", url, "--rate", str(rate), "--duration", str(seconds)]
    words += ["--seed", str(seed), "--slo-as", "slo", "--api-key", KEYS[tenant], "--no-progress", "--allow-late"]
    words += [word for name, (ttft, tpot) in TIERS.items() for word in (f"--{name}", f"{ttft},{tpot}")]
    return subprocess.Popen([*words, "--json", str(into)], stdout=subprocess.DEVNULL)


def cell(
    policy: str, tenants: bool, rates: dict[str, float], seconds: float, threads: int | None, folder: Path
) -> dict[str, str]:
    """Per tenant, met of offered."""
    with served(config(policy, tenants, threads), folder / "server.log") as (url, _):
        warm = bench(url, "quiet", 1.0, 4.0, 99, folder / "warm.json")
        warm.wait()
        running = {}
        for seed, (name, rate) in enumerate(rates.items()):
            running[name] = bench(url, name, rate, seconds, seed, folder / f"{name}.json")
        found = {}
        for name, process in running.items():
            process.wait()
            rows = json.loads((folder / f"{name}.json").read_bytes())["runs"][0]["tiers"]
            total = next(row for row in rows if row["tier"] == "all")
            found[name] = f"{total['met']} of {total['offered']}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second of the quiet tenant")
    parser.add_argument("--share", type=float, default=1.5, help="times as much from one that takes its share")
    parser.add_argument("--flood", type=float, default=8.0, help="times as much from the loud one")
    parser.add_argument("--cell", action="append", help="only these")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    cells: dict[str, tuple[bool, dict[str, float], int | None]] = {
        "alone": (True, {"quiet": args.rate}, None),
        "alone, half": (True, {"quiet": args.rate}, 1),
        "fair": (True, {"quiet": args.rate, "loud": args.rate}, None),
        "at its share": (True, {"quiet": args.rate, "loud": args.share * args.rate}, None),
        "flood, fair share": (True, {"quiet": args.rate, "loud": args.flood * args.rate}, None),
        "flood, no tenants": (False, {"quiet": args.rate, "loud": args.flood * args.rate}, None),
    }
    for policy in args.policy or ["edf", "vllm"]:
        for name in args.cell or cells:
            tenants, rates, threads = cells[name]
            with tempfile.TemporaryDirectory() as folder:
                found = cell(policy, tenants, rates, args.seconds, threads, Path(folder))
            rows.append({"policy": policy, "cell": name, **found})
            print(f"{policy:8} {name:20} quiet {found['quiet']:12} loud {found.get('loud', '-')}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
