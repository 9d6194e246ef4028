"""What the gateway costs: latency that it adds, streamed chunks a second on one core, reports and placements a second.

    python benchmarks/gateway_speed.py [--json FILE] [--seconds 10]

Streams: a stub upstream writes the time into each chunk and sends one to every stream each 50 ms; a client measures how
old a chunk is when it comes, straight from the upstream and through the gateway, in turns. Gateway, upstream and client
share the machine: the gateway has the first core, both others the second. Chunks a second on one core are those that
came, over the CPU seconds that the gateway used. Reports: 8, 64 and 256 servers, each with 16 requests that decode, say
what happened in each step; the gateway folds it. Placements: a router asked about one request over so many views.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Stage, without_texts
from rubato.fleet.link_reader import LinkReader
from rubato.fleet.remote_view import RemoteReplica
from rubato.latency.affine import Model
from rubato.policies import load_router
from rubato.replica.sequence import Seq
from rubato.wire.messages import PresentRow, Report, Snapshot, TokensRow, decode_from_core, encode

EVERY = 0.05  # seconds from one chunk of a stream to the next
STREAMS = (100, 500, 1000)
SERVERS = (8, 64, 256)
DECODES = 16  # requests at each server
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, kv_blocks=20_000, block_size=16)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,"text":" %d ",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = CHUNK.replace(b" %d ", b"").replace(b'"finish_reason":null', b'"finish_reason":"length"')
MAX_SHORT = 100  # tokens of an answer that comes at once, with its end
TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
SENT = re.compile(rb'"text":" (\d+) "')


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join([b"%x\r\n%s\r\n" % (len(part), part) for part in parts])


class Upstream(asyncio.Protocol):
    """A server that answers a short completion at once, any other with a stream without end, and says that it is
    well."""

    open: ClassVar[set[Upstream]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._raw = b""

    def connection_lost(self, error: Exception | None) -> None:
        Upstream.open.discard(self)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        while b"\r\n\r\n" in self._raw:
            head, _, rest = self._raw.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            self._raw = rest[size:]
            if head.startswith(b"POST"):
                self.transport.write(HEAD)
                tokens = int(found[1]) if (found := TOKENS.search(rest)) else MAX_SHORT + 1
                if tokens <= MAX_SHORT:
                    self.transport.write(chunked([CHUNK % 0] * tokens + [LAST, b"data: [DONE]\n\n"]) + b"0\r\n\r\n")
                else:
                    Upstream.open.add(self)
            else:
                page = b"{}"
                if b"/v1/models" in head:
                    page = b'{"data": [{"id": "stub", "max_model_len": 100000}]}'
                status = b"404 Not Found" if b"/rubato" in head or b"/metrics" in head else b"200 OK"
                self.transport.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(page), page))


async def upstream(port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(Upstream, "127.0.0.1", port, backlog=2000)
    print("ready", flush=True)
    due = loop.time()
    parts = 10  # of the streams at a time: one burst of all would measure itself
    while True:
        for part in range(parts):
            due += EVERY / parts
            await asyncio.sleep(max(0.0, due - loop.time()))
            for at, one in enumerate(list(Upstream.open)):
                if at % parts == part:
                    chunk = CHUNK % time.monotonic_ns()
                    one.transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))


class Client(asyncio.Protocol):
    """One stream; ages of its chunks, in nanoseconds."""

    ages: ClassVar[list[int]] = []
    measuring = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = b'{"model":"stub","prompt":[1,2,3],"max_tokens":100000,"stream":true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        transport.write(head % len(body) + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if Client.measuring:
            now = time.monotonic_ns()
            Client.ages += [now - int(sent) for sent in SENT.findall(data)]


async def ages(port: int, streams: int, seconds: float, cpu_of: int | None) -> tuple[np.ndarray, float, float]:
    """Ages of chunks in milliseconds, how many came a second, and the CPU seconds of that process a second."""
    loop = asyncio.get_running_loop()
    open_ = [(await loop.create_connection(Client, "127.0.0.1", port))[0] for _ in range(streams)]
    await asyncio.sleep(1.0)
    Client.ages = []
    Client.measuring = True
    began, used = time.monotonic(), _cpu(cpu_of)
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - began, _cpu(cpu_of) - used
    Client.measuring = False
    for transport in open_:
        transport.abort()
    await asyncio.sleep(0.5)
    return np.array(Client.ages) / 1e6, len(Client.ages) / took, used / took


def _cpu(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def streams(seconds: float) -> list[dict[str, float]]:
    """Direct and through the gateway, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    up, door = 9471, 9472
    pinned = ["taskset", "-c", str(cores[-1])]
    server = subprocess.Popen([*pinned, sys.executable, __file__, "--upstream", str(up)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    gateway = subprocess.Popen(
        ["taskset", "-c", str(cores[0]), sys.executable, "-m", "rubato.cli", "gateway", "--server",
         f"http://127.0.0.1:{up}", "--port", str(door), "--set", "max_in_flight=null", "--set", "log.level=error"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert gateway.stdout is not None
    gateway.stdout.readline()
    os.sched_setaffinity(0, {cores[-1]})
    found = []
    try:
        for count in STREAMS:
            rows: dict[str, list[np.ndarray]] = {"direct": [], "gateway": []}
            rate = used = 0.0
            for _ in range(2):
                rows["direct"].append(asyncio.run(ages(up, count, seconds / 2, None))[0])
                through, rate, used = asyncio.run(ages(door, count, seconds / 2, gateway.pid))
                rows["gateway"].append(through)
            at = {name: np.percentile(np.concatenate(of), [50, 99]) for name, of in rows.items()}
            row = {
                "streams": count, "chunks a second": rate, "gateway's CPU": used, "chunks a CPU second": rate / used,
                "direct p50, ms": at["direct"][0], "direct p99, ms": at["direct"][1],
                "added p50, ms": at["gateway"][0] - at["direct"][0],
                "added p99, ms": at["gateway"][1] - at["direct"][1],
            }  # fmt: skip
            found.append({name: round(float(value), 3) for name, value in row.items()})
            print(found[-1], flush=True)
    finally:
        for process in (gateway, server):
            process.kill()
            process.wait()
        os.sched_setaffinity(0, set(cores))
    return found


def reports(servers: int, steps: int = 40) -> dict[str, float]:
    """CPU of folding the reports of so many servers, and of placing one request over their views."""
    folds = [(LinkReader(f"r{i}"), RemoteReplica(f"r{i}", LIMITS, Model(), frozenset({"step_times", "recall"}), 0.0))
             for i in range(servers)]  # fmt: skip
    requests = [Request(f"c{i}", (Stage(200, SLO(1.0, 0.05)),), 0.0) for i in range(DECODES)]
    number = 0

    def told(*messages: Report | Snapshot) -> float:
        raw = [encode(message) for message in messages]
        began = time.process_time()
        for reader, mirror in folds:
            for one in raw:
                report = reader.read(decode_from_core(one))  # type: ignore[arg-type]
                assert report is not None
                mirror.apply(report)
        return time.process_time() - began

    first = [PresentRow(without_texts(r), r.id, "running", True, False, 200, 13) for r in requests]
    told(Snapshot(0, 0.0, 1000, first))
    spent = 0.0
    shape = Shape(DECODES, DECODES, DECODES * 200)
    for step in range(steps):
        at = 0.02 * (step + 1)
        batch = Report(number + 1, at - 0.02, 1000, shape=shape, busy=at, tokens={r.id: 1 for r in requests})
        rows, held = [TokensRow(r.id, (7,)) for r in requests], {r.id: (201 + step, 13 + step // 16) for r in requests}
        done = Report(number + 2, at, 1000, rows, done=(shape, 0.02), held=held)
        number += 2
        spent += told(batch, done)
    row = {"servers": servers, "steps' reports a CPU second": servers * steps / spent}
    views = [mirror.view(1.0) for _, mirror in folds]
    for name in ("least_loaded", "lmetric", "polyserve", "slos_serve"):
        router = load_router(name)
        if hasattr(router, "roles"):
            router.roles([view.id for view in views])
        placed, began = 0, time.process_time()
        while time.process_time() - began < 1.0:
            request = Request(f"n{placed}", (Stage(200, SLO(1.0, 0.05)),), 1.0)
            router.place([Seq(request, placed, 1.0)], views, 1.0)
            placed += 1
        row[f"{name}, placements a CPU second"] = placed / (time.process_time() - began)
    return {name: round(float(value), 1) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upstream is not None:
        asyncio.run(upstream(args.upstream))
        return
    found: dict[str, Any] = {"streams": streams(args.seconds), "reports": []}
    for servers in SERVERS:
        found["reports"].append(reports(servers))
        print(found["reports"][-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
