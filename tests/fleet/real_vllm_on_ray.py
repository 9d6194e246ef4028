"""Two real vLLM servers (CPU) that Ray actors start behind `rubato serve --engine vllm`: three policies, 20 requests
each, all planned by the policy; one actor is killed half-way, and nothing is left afterwards.

    python -m tests.fleet.real_vllm_on_ray [--model FOLDER] [--python .venv-vllm/bin/python]

About 4 minutes and 8 GiB on two cores. Prints a line for each policy, and ends with status 1 where something is not as
it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from rubato.fleet.server_guard import descendants

ROOT = Path(__file__).parents[2]
REQUESTS, RATE = 20, 2.0
READY, GONE = 240.0, 10.0
RUNS: list[tuple[dict[str, Any], bool]] = [
    ({"policy": {"name": "edf"}, "router": {"name": "least_loaded"}}, False),
    ({"policy": {"name": "polyserve"}, "router": {"name": "auto", "tiers": [0.5, 1.0]}}, True),
    ({"policy": {"name": "ascendra"}}, False),
]
TIERS = {"chat": {"ttft_ms": 8000, "tpot_ms": 500}, "slow": {"ttft_ms": 16000, "tpot_ms": 1000}}


class Watched:
    """All processes below one, and those whose parent has changed meanwhile: their memory, and which are left."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.known: set[int] = set()
        self.guards: set[int] = set()
        self.peak = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(1.0):
            self.look()
            self.peak = max(self.peak, sum(map(pss, self.known)))

    def look(self) -> None:
        now = {self.pid, *descendants(self.pid)}
        for name in os.listdir("/proc"):  # guards leave the tree of their actors
            if name.isdecimal() and "server_guard.py" in command(int(name)) and mine(int(name)):
                now |= {int(name), *descendants(int(name))}
        self.known |= now

    def left(self) -> list[int]:
        return [pid for pid in self.known if state(pid) not in ("", "Z")]

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def mine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


MARK = f"RUBATO_RUN={os.getpid()}"


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def pss(pid: int) -> float:
    """GiB, what is shared divided among those who share it."""
    with contextlib.suppress(OSError, AttributeError):
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) / 2**20  # type: ignore[index]
    return 0.0


@contextlib.contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    file, log = folder / "config.yaml", folder / "log"
    file.write_text(yaml.safe_dump(config))
    name, _, value = MARK.partition("=")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.cli", "serve", "--config", str(file)],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path, name: value},
        )  # fmt: skip
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait()


def ready(process: subprocess.Popen[bytes], log: Path) -> str:
    began = time.monotonic()
    while not (found := re.search(r"serving at (http://[\d.]+:\d+)", log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > began + READY:
            raise SystemExit(f"it did not start:\n{log.read_text(errors='replace')[-6000:]}")
        time.sleep(0.2)
    return found[1]


async def ask(url: str, kill: int | None, log: Path) -> list[dict[str, Any]]:
    """Poisson arrivals; the actor of r0 is killed at the middle one."""
    rng = random.Random(3)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:

        async def one(number: int) -> dict[str, Any]:
            words = " ".join(
                rng.choice(["the", "sea", "a", "hill", "of", "green", "and", "old", "stones"]) for _ in range(60)
            )
            body = {
                "model": "m", "prompt": f"{number} {words}", "max_tokens": rng.randint(12, 40), "stream": True,
                "temperature": 0, "ignore_eos": True, "service_tier": rng.choice(list(TIERS)),
            }  # fmt: skip
            text, verdict = "", None
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    return {"error": await reply.text()}
                async for line in reply.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return {"error": str(chunk["error"])}
                    text += "".join(c["text"] for c in chunk["choices"])
                    verdict = chunk.get("rubato") or verdict
            return {"text": text, "verdict": verdict}

        tasks = []
        for number in range(REQUESTS):
            if number == REQUESTS // 2 and kill is not None:
                os.kill(kill, signal.SIGKILL)
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(rng.expovariate(RATE))
        return await asyncio.gather(*tasks)


def deviations(servers: list[str]) -> dict[str, float]:
    """Of all servers: totals of the plug-in's counters."""
    totals: Counter[str] = Counter()
    for url in servers:
        text = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
        for name in ("deviations_total", "fallbacks_total", "faults_total", "stood_aside_total", "seconds_count"):
            found = re.findall(rf"^rubato_plan_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
            totals[name.partition("_total")[0].replace("seconds_count", "plans")] += sum(map(float, found))
    return dict(totals)


def run(config: dict[str, Any], kill: bool) -> bool:
    label = config["policy"]["name"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with serving(config, Path(folder)) as (process, log):
            watched = Watched(process.pid)
            url = ready(process, log)
            ready_after = time.monotonic() - began
            said = re.findall(
                r"replica (\S+) serves at (\S+) \(process (\d+), actor (\d+)", log.read_text(errors="replace")
            )
            servers = {id: (at, int(pid), int(actor)) for id, at, pid, actor in said}
            watched.look()
            r0 = {servers["r0"][1], *descendants(servers["r0"][1])}
            answers = asyncio.run(ask(url, servers["r0"][2] if kill else None, log))
            asked = time.monotonic() - began - ready_after
            left_of_killed = [pid for pid in r0 if state(pid) not in ("", "Z")] if kill else []
            counts = deviations([at for id, (at, _, _) in servers.items() if not (kill and id == "r0")])
            ending = time.monotonic()
            watched.look()
        ended = time.monotonic() - ending
        watched.stop()
        while (left := watched.left()) and time.monotonic() < ending + GONE:
            time.sleep(0.1)
        gone = time.monotonic() - ending
        lost = re.findall(r"replica r0 is lost.*", log.read_text(errors="replace"))
        status = process.returncode
        shown = log.read_text(errors="replace")
    failed = [answer for answer in answers if "error" in answer]
    met = sum(
        bool((answer.get("verdict") or {}).get("slo_met", (answer.get("verdict") or {}).get("met")))
        for answer in answers
    )
    wrong = bool(failed or left or left_of_killed or counts["deviations"] or status)
    print(
        f"{label}: ready {ready_after:.0f} s, asked {asked:.0f} s, ended {REQUESTS - len(failed)}/{REQUESTS}, "
        f"met {met}, killed {'r0' if kill else 'none'} {lost[:1]}, {counts}, peak {watched.peak:.1f} GiB (PSS), "
        f"exit {status} after {ended:.1f} s, nothing left after {gone:.1f} s: {not left}",
        flush=True,
    )
    if wrong:
        print(failed, [command(pid) for pid in [*left, *left_of_killed]], shown[-4000:], sep="\n")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(Path.home() / ".cache/rubato/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--only", default="", help="a policy's name")
    args = parser.parse_args()
    good = True
    began = time.monotonic()
    for chosen, kill in RUNS:
        if args.only not in ("", chosen["policy"]["name"]):
            continue
        config = {
            **chosen,
            "model": args.model, "served_model_name": "m", "replicas": 2, "port": 0, "tiers": TIERS,
            "default_tier": "chat",
            "fleet": {"kind": "ray", "num_gpus": 0},
            "engine": {
                "kind": "vllm", "python": args.python, "start_seconds": READY, "plugin": {"stand_aside": False},
                "args": ["--dtype=bfloat16", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=16"],
                "env": {
                    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                },
            },
        }  # fmt: skip
        good &= run(config, kill)
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
