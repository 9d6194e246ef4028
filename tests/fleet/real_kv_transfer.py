"""Two real vLLM servers (CPU, NIXL) behind `rubato gateway`: prompts are prefilled at one and decoded at the other.

    python -m tests.fleet.real_kv_transfer [--model FOLDER] [--python .venv-vllm/bin/python] [--lease 6]

About 3 minutes and 6 GiB on two cores. In float32 the tokens are those of one server alone; the first server's KV is
free afterwards, also when clients leave and when nobody reads it before its lease ends. Prints a line for each policy,
and ends with status 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

ROOT = Path(__file__).parents[2]
READY = 300.0
POLICIES: list[dict[str, Any]] = [
    {"policy": {"name": "distserve"}},
    {"policy": {"name": "polyserve"}, "router": {"name": "polyserve", "mode": "pd", "tiers": [0.5, 1.0]}},
]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Process:
    """A server in a process group of its own, with its log in a file."""

    def __init__(self, words: list[str], log: Path, **environment: str) -> None:
        self.log = log
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RUBATO_"))}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env={**kept, **environment}, start_new_session=True
            )

    def end(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20.0 if sent is signal.SIGTERM else None)


class VllmServer(Process):
    def __init__(self, folder: Path, number: int, model: str, python: str, policy: str, lease: float) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        transfer = {
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": lease},
        }  # fmt: skip
        rubato = {"policy": policy, "stand_aside": False, "link": {}}
        words = [
            python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--served-model-name=m",
            "--host=127.0.0.1", f"--port={self.port}", "--dtype=float32", "--enforce-eager", "--max-model-len=1024",
            "--max-num-seqs=8", "--block-size=32", "--kv-cache-memory-bytes=200000000",
            "--no-enable-prefix-caching", "--scheduler-cls=rubato.vllm.Scheduler",
            "--middleware=rubato.vllm.Middleware", f"--kv-transfer-config={json.dumps(transfer)}",
            f"--additional-config={json.dumps({'rubato': rubato})}",
        ]  # fmt: skip
        super().__init__(
            words, folder / f"vllm{number}", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()), OMP_NUM_THREADS="1",
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind", TMPDIR=str(folder),
        )  # fmt: skip


@contextlib.contextmanager
def ended(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for one in processes:
            log = one.log.read_text(errors="replace")
            print(f"{one.log.name}'s log:\n{log[log.find('Traceback') - 2000 :][:8000]}", file=sys.stderr)
        raise
    finally:
        for one in processes:
            one.end()


async def ready(http: aiohttp.ClientSession, url: str, process: Process) -> None:
    until = time.monotonic() + READY
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        if process.process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{url} did not start: {process.log.read_text()[-3000:]}")
        await asyncio.sleep(0.5)


def body(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randrange(100, 40_000) for _ in range(rng.randint(40, 400))]
    return {
        "model": "m", "prompt": ids, "max_tokens": rng.randint(8, 24), "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


async def tokens(http: aiohttp.ClientSession, url: str, asked: dict[str, Any], stream: bool) -> list[int]:
    """Of the response to a completion."""
    async with http.post(f"{url}/v1/completions", json={**asked, "stream": stream}) as answer:
        raw = await answer.text()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {raw[:500]}")
    if not stream:
        return list(json.loads(raw)["choices"][0]["token_ids"])
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    found: list[int] = []
    for chunk in chunks:
        if "error" in chunk:
            raise RuntimeError(raw[-500:])
        for choice in chunk["choices"]:
            found += choice.get("token_ids") or ()
    return found


async def leaves(http: aiohttp.ClientSession, url: str, asked: dict[str, Any], after: float) -> None:
    """A client that has left after so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after):
            await tokens(http, url, {**asked, "max_tokens": 200}, True)


async def orphan(http: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> None:
    """A prompt whose KV nobody reads."""
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    async with http.post(f"{url}/v1/completions", json={**asked, "max_tokens": 1, "kv_transfer_params": kv}) as answer:
        if not (await answer.json())["kv_transfer_params"]["remote_block_ids"]:
            raise RuntimeError("no KV was kept")


async def figure(http: aiohttp.ClientSession, url: str, name: str, but: str = "") -> float:
    """The sum of a metric's samples. but: a label's value that does not count."""
    async with http.get(f"{url}/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if not but or f'"{but}"' not in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


async def emptied(http: aiohttp.ClientSession, servers: list[VllmServer], seconds: float) -> float:
    """Seconds until no server holds KV any more. Raises RuntimeError."""
    began = time.monotonic()
    while any([await figure(http, server.url, "vllm:kv_cache_usage_perc") > 0 for server in servers]):
        if time.monotonic() > began + seconds:
            raise RuntimeError("KV is still held")
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def run(settings: dict[str, Any], model: str, python: str, lease: float, folder: Path) -> None:
    policy, began = settings["policy"]["name"], time.monotonic()
    servers = [VllmServer(folder, number, model, python, policy, lease) for number in range(2)]
    processes: list[Process] = [*servers]
    with ended(processes):
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
            for server in servers:
                await ready(http, server.url, server)
            port, file = free_port(), folder / "gateway.yaml"
            tiers = {"chat": {"ttft_ms": 20_000, "tpot_ms": 900}}
            given = {"servers": [server.url for server in servers], "tiers": tiers, "default_tier": "chat"}
            file.write_text(yaml.safe_dump({**settings, **given, "port": port}))
            path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            words = [sys.executable, "-m", "rubato.cli", "gateway", "--config", str(file)]
            processes.append(Process(words, folder / "gateway", PYTHONPATH=path))
            url = f"http://127.0.0.1:{port}"
            await ready(http, url, processes[-1])
            started, rng = time.monotonic() - began, random.Random(1)
            bodies = [body(rng) for _ in range(12)]
            alone = [await tokens(http, servers[1].url, one, False) for one in bodies]
            through = await asyncio.gather(
                *(tokens(http, url, one, number % 2 == 0) for number, one in enumerate(bodies))
            )
            unlike = [number for number, (a, b) in enumerate(zip(alone, through, strict=True)) if a != b]
            await emptied(http, servers, 5.0)
            await asyncio.gather(*(leaves(http, url, one, 0.2 + 0.2 * number) for number, one in enumerate(bodies)))
            after_leaving = await emptied(http, servers, lease + 5.0)
            for one in bodies[:3]:
                await orphan(http, servers[0].url, one)
            after_lease = await emptied(http, servers, lease + 5.0)
            names = ("rubato_plan_deviations_total", "rubato_plan_fallbacks_total", "rubato_plan_faults_total")
            bad = {
                name: sum([await figure(http, server.url, name, "not_in_view") for server in servers]) for name in names
            }
            read = sum([await figure(http, server.url, "vllm:nixl_xfer_time_seconds_count") for server in servers])
            offered = await figure(http, url, "rubato_requests_offered_total")
            finished = await figure(http, url, "rubato_requests_finished_total")
    print(
        f"{policy}: ready after {started:.0f} s; {len(bodies)} requests, {len(unlike)} with other tokens than one "
        f"server's; KV read {read:.0f} times; free {after_leaving:.1f} s after clients left, {after_lease:.1f} s after "
        f"prompts that nobody read (lease {lease:g} s); offered {offered:.0f}, finished {finished:.0f}; {bad}; "
        f"{time.monotonic() - began:.0f} s in all",
        flush=True,
    )
    if unlike or any(bad.values()) or offered != finished:
        raise RuntimeError("not as it must be")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path.home() / ".cache/rubato/models/SmolLM2-135M-Instruct"
    parser.add_argument("--model", default=str(home))
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm/bin/python"))
    parser.add_argument("--lease", type=float, default=6.0)
    parser.add_argument("--policy", default=None)
    args = parser.parse_args()
    for settings in POLICIES:
        if args.policy not in (None, settings["policy"]["name"]):
            continue
        with tempfile.TemporaryDirectory(prefix="kv-") as folder:
            asyncio.run(run(settings, args.model, args.python, args.lease, Path(folder)))


if __name__ == "__main__":
    main()
