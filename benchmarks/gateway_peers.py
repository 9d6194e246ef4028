"""Gateways side by side before one stub server: chunks a CPU second, latency added, short answers a second.

    python benchmarks/gateway_peers.py --peers VENV --litellm VENV --json docs/measurements/gateway-peers.json

VENV: an environment with `smg` and `vllm-router`, and one with `litellm[proxy]`, from the package index. Rounds
alternate: in each every gateway is started anew, in another order, on the first core; upstream and client share the
second. A stub upstream writes the time into each chunk and sends one to every stream each 50 ms (`gateway_speed`).
Short answers: so many clients ask one after the other for 16 tokens in a stream. CPU seconds are those of the gateway's
processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gateway_speed import Client

UPSTREAM, SHORT = 9471, 16  # port; tokens of a short answer
HERE = Path(__file__).parent
BODY = b'{"model":"stub","prompt":"a b c","max_tokens":%d,"stream":true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@dataclass(frozen=True)
class Gateway:
    name: str
    port: int
    command: tuple[str, ...]


class Stream(Client):
    """A stream without end, whose prompt is text: some gateways take no other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = BODY % 100_000
        transport.write(HEAD % len(body) + body)  # type: ignore[attr-defined]


class Asker(asyncio.Protocol):
    """Asks for short answers, one after the other."""

    done = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def _ask(self) -> None:
        body = BODY % SHORT
        self._transport.write(HEAD % len(body) + body)
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        self._seen = (self._seen + data)[-64:]
        if b"[DONE]" in self._seen and self._seen.endswith(b"0\r\n\r\n"):
            Asker.done += 1
            self._ask()


def gateways(peers: Path | None, litellm: Path | None, folder: Path) -> list[Gateway]:
    url = f"http://127.0.0.1:{UPSTREAM}"
    found = [
        Gateway("rubato", 9472, (sys.executable, "-m", "rubato.cli", "gateway", "--server", url, "--port", "9472",
                                 "--set", "max_in_flight=null", "--set", "log.level=error"))
    ]  # fmt: skip
    if peers is not None:
        for port, name, start in ((9473, "smg", ("launch",)), (9474, "vllm-router", ())):
            found.append(
                Gateway(name, port, (str(peers / "bin" / name), *start, "--worker-urls", url, "--port", str(port),
                                     "--policy", "round_robin", "--log-level", "error",
                                     "--prometheus-port", str(port + 20_000)))
            )  # fmt: skip
    if litellm is not None:
        config = folder / "litellm.yaml"
        config.write_text(
            "general_settings: {dangerously_permit_weak_or_unset_master_key: true}\nmodel_list:\n - model_name: stub\n"
            f"   litellm_params: {{model: text-completion-openai/stub, api_base: {url}/v1, api_key: x}}\n"
        )
        found.append(
            Gateway("litellm", 9475, (str(litellm / "bin" / "litellm"), "--config", str(config), "--port", "9475",
                                      "--num_workers", "1"))
        )  # fmt: skip
    return found


def processes(pid: int) -> list[int]:
    """It and its children."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(one for child in children for one in processes(int(child)))]


def cpu_seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def wait_until_it_answers(port: int, log: Path) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data=BODY % 5, headers={"content-type": "application/json"}
    )
    error: Exception | None = None
    for _ in range(300):
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.readline()
                return
        except (OSError, urllib.error.HTTPError) as failed:
            error = failed
    raise RuntimeError(f"it did not start ({error}): see {log}")


async def measure_streams(port: int, streams: int, seconds: float, pids: list[int]) -> tuple[np.ndarray, float]:
    """Ages of chunks in milliseconds, and the CPU seconds of those processes."""
    loop = asyncio.get_running_loop()
    open_ = [(await loop.create_connection(Stream, "127.0.0.1", port))[0] for _ in range(streams)]
    await asyncio.sleep(1.5 + streams / 200)  # all have begun, and what that took is over
    Client.ages, Client.measuring = [], True
    used = cpu_seconds(pids)
    await asyncio.sleep(seconds)
    used = cpu_seconds(pids) - used
    Client.measuring = False
    for transport in open_:
        transport.abort()
    await asyncio.sleep(1.0)
    return np.array(Client.ages) / 1e6, used


async def measure_short(port: int, clients: int, seconds: float, pids: list[int]) -> tuple[int, float]:
    """Short answers that came, and the CPU seconds of those processes."""
    loop = asyncio.get_running_loop()
    open_ = [(await loop.create_connection(Asker, "127.0.0.1", port))[0] for _ in range(clients)]
    await asyncio.sleep(1.0)
    done, used = Asker.done, cpu_seconds(pids)
    await asyncio.sleep(seconds)
    done, used = Asker.done - done, cpu_seconds(pids) - used
    for transport in open_:
        transport.abort()
    await asyncio.sleep(0.5)
    return done, used


def run(gateway: Gateway, streams: list[int], seconds: float, core: int, folder: Path) -> list[dict[str, Any]]:
    log = folder / f"{gateway.name}.log"
    environment = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *gateway.command], stdout=out, stderr=out, env=environment
        )
    rows: list[dict[str, Any]] = []
    try:
        wait_until_it_answers(gateway.port, log)
        pids = processes(process.pid)
        for count in streams:
            direct, _ = asyncio.run(measure_streams(UPSTREAM, count, 3.0, []))
            ages, used = asyncio.run(measure_streams(gateway.port, count, seconds, pids))
            row: dict[str, Any] = {"gateway": gateway.name, "streams": count, "chunks a second": len(ages) / seconds}
            if used and len(ages) and len(direct):
                row["chunks a CPU second"] = len(ages) / used
                for share in (50, 99):
                    row[f"added p{share}, ms"] = float(np.percentile(ages, share) - np.percentile(direct, share))
            rows.append(row)
            print(row, flush=True)
        done, used = asyncio.run(measure_short(gateway.port, 32, seconds, pids))
        rows.append({"gateway": gateway.name, "short answers a second": done / seconds})
        if used:
            rows[-1]["short answers a CPU second"] = done / used
        print(rows[-1], flush=True)
    finally:
        for pid in reversed(processes(process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        process.wait()
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds, by gateway and streams: median, low and high of each measure."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        load = f"{row['streams']} streams" if "streams" in row else "short answers"
        for name, value in row.items():
            if name not in ("round", "gateway", "streams"):
                found.setdefault(row["gateway"], {}).setdefault(load, {}).setdefault(name, []).append(value)
    return {
        gateway: {
            load: {
                name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
                for name, values in measures.items()
            }
            for load, measures in loads.items()
        }
        for gateway, loads in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--litellm", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, order = Path(name), random.Random(1)
        upstream = subprocess.Popen(
            ["taskset", "-c", str(cores[-1]), sys.executable, str(HERE / "gateway_speed.py"), "--upstream",
             str(UPSTREAM)],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert upstream.stdout is not None
        upstream.stdout.readline()
        os.sched_setaffinity(0, {cores[-1]})
        try:
            chosen = [g for g in gateways(args.peers, args.litellm, folder) if not args.only or g.name in args.only]
            for number in range(args.rounds):
                for gateway in order.sample(chosen, len(chosen)):
                    found = run(gateway, args.streams, args.seconds, cores[0], folder)
                    rows += [{"round": number, **row} for row in found]
        finally:
            upstream.kill()
            upstream.wait()
    if args.json:
        args.json.write_text(json.dumps({"values": medians(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
