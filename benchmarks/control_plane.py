"""What the control plane costs: CPU seconds of the server's main thread per step, with N streams over HTTP.

The engine's forward runs on a thread of its own; the main thread plans, commits, parses requests and writes every
stream. Its CPU time (from /proc) over a window, divided by the window's steps, is the control plane's whole cost per
step; it is compared with the mean step time of the same window. Linux only.

    python benchmarks/control_plane.py [--seqs 32] [--policy edf] [--tokens 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from statistics import median

import aiohttp

from rubato.measure.server_process import served
from rubato_torch import bundled_model

TICK = os.sysconf("SC_CLK_TCK")


def main_thread_cpu(pid: int) -> float:
    """CPU seconds, user and system, that the process's main thread has used."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def steps_so_far(url: str) -> tuple[float, float]:
    """(steps, seconds in them) since the server's start."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = [re.search(rf"^rubato_step_seconds_{part}(?:{{[^}}]*}})? (\S+)", text, re.M) for part in ("count", "sum")]
    if not all(found):
        sys.exit("the server's /metrics has no rubato_step_seconds histogram")
    count, total = (float(match[1]) for match in found if match)
    return count, total


async def stream(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> None:
    body = {
        "model": "bundled",
        "messages": [{"role": "user", "content": f"Count slowly, beginning at {number}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "slo": {"ttft_ms": 60000, "tpot_ms": 5000},
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def measure(url: str, pid: int, seqs: int, tokens: int, windows: int) -> list[dict[str, float]]:
    """Windows of about a second in which all the streams run."""
    rows = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = [asyncio.create_task(stream(session, url, i, tokens)) for i in range(seqs)]
        await asyncio.sleep(4.0)  # the prefills
        for _ in range(windows):
            count, seconds = await asyncio.to_thread(steps_so_far, url)
            cpu = main_thread_cpu(pid)  # the scrapes before and after are not a step's cost
            await asyncio.sleep(1.5)
            cpu_ = main_thread_cpu(pid)
            count_, seconds_ = await asyncio.to_thread(steps_so_far, url)
            if any(task.done() for task in streams):
                break
            steps = count_ - count
            if steps < 3:  # still in the prefills, or the machine is elsewhere
                continue
            rows.append({"steps": steps, "control": (cpu_ - cpu) / steps, "step": (seconds_ - seconds) / steps})
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--policy", default="edf")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = {
        "model": str(bundled_model.ensure()),
        "served_model_name": "bundled",
        "engine": {"kind": "torch", "max_num_seqs": 64},
        "policy": args.policy,
        "prefix_cache": False,
    }
    with tempfile.TemporaryDirectory() as folder, served(config, Path(folder) / "server.log") as (url, pid):
        rows = asyncio.run(measure(url, pid, args.seqs, args.tokens, args.windows))
    if not rows:
        sys.exit("the streams ended before a window was measured: raise --tokens")
    shares = sorted(row["control"] / row["step"] for row in rows)
    result = {
        "seqs": args.seqs,
        "policy": args.policy,
        "prefix_cache": False,
        "windows": len(rows),
        "step_ms": 1e3 * median(row["step"] for row in rows),
        "control_plane_ms": 1e3 * median(row["control"] for row in rows),
        "share": median(shares),
        "share_low": shares[0],
        "share_high": shares[-1],
    }
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps({**result, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
