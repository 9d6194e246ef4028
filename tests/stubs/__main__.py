"""A stub vLLM server as a process: `python -m tests.stubs --port 0`, which prints its addresses as one line of JSON.

Its API server speaks HTTP, its core ZeroMQ, by the very class that is inside vLLM (`engines.vllm.core_link`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from rubato.core.clock import WallClock
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.engines.vllm.core_link import CoreLink, LinkSettings
from rubato.fleet.upstream import UpstreamError
from rubato.latency.affine import Model
from rubato.wire.messages import Do, FromCore, Report
from tests.stubs.vllm_server import StubCore, StubServer


class App:
    """ASGI over a `StubServer`. fail: how many requests are answered with 503."""

    def __init__(self, server: StubServer, link: dict[str, Any] | None) -> None:
        self.server, self.link = server, link
        self.fail = 0
        self.hang = False
        self.mute = False  # nothing comes of what is open
        self.delay = 0.0  # seconds that each chunk takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path, method = scope["path"], scope["method"]
        if path == "/stub":  # what a test makes of it
            told = json.loads(body)
            self.fail, self.hang = told.get("fail", self.fail), told.get("hang", self.hang)
            core = self.server.core
            core.silent, core.unix_off = told.get("silent", core.silent), told.get("unix_off", core.unix_off)
            self.mute, self.delay = told.get("mute", self.mute), told.get("delay", self.delay)
            await self._send(send, 200, b"{}")
        elif self.hang:
            await asyncio.sleep(3600)
        elif path == "/rubato/link":
            await self._send(send, 200 if self.link else 404, json.dumps(self.link or {}).encode())
        elif method == "POST" and self.fail > 0:
            self.fail -= 1
            await self._send(send, 503, b'{"error": {"message": "no"}}')
        else:
            await self._pass(scope, receive, send, method, path, body)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, method: str, path: str, body: bytes) -> None:
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        if method == "POST" and self.link is not None:
            await self._told(dict(headers).get("x-request-id", ""))
        reply = await self.server.open(method, path, headers, body)

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            reply.close()

        watcher = asyncio.create_task(gone())
        try:
            first = await reply.part()
            await send(
                {
                    "type": "http.response.start",
                    "status": reply.status,
                    "headers": [(name.encode(), value.encode()) for name, value in reply.headers],
                }
            )
            while first:
                while self.mute:  # noqa: ASYNC110 - a test sets it
                    await asyncio.sleep(0.05)
                await asyncio.sleep(self.delay)
                await send({"type": "http.response.body", "body": first, "more_body": True})
                first = await reply.part()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError:
            raise ConnectionError("cut") from None
        finally:
            watcher.cancel()

    async def _told(self, id: str) -> None:
        """What a gateway says of a request may come after it here, where one process does all; wait, but not long."""
        for _ in range(100):
            self.server.core.ask()
            if any(self.server.core.expects(f"{kind}-{id}") for kind in ("cmpl", "chatcmpl")):
                return
            await asyncio.sleep(0.002)

    async def _send(self, send: Send, status: int, body: bytes) -> None:
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Linked:
    """The core's messages over ZeroMQ. The link's thread hands commands over to the loop."""

    def __init__(self, core: StubCore, link: CoreLink) -> None:
        self.core, self.link = core, link
        core.peers.append(self.tell)
        core.ask = self.ask
        link.snapshot(core.snapshot(), idle=True)
        link.start(core.about, time.monotonic)

    def tell(self, message: FromCore) -> None:
        self.link.busy()
        if not self.core.silent and isinstance(message, Report):
            self.link.report(message)

    def ask(self) -> None:
        for _, command in self.link.commands():
            self.core.hear(Do((command,)), self.tell)

    async def run(self) -> None:
        while True:
            self.ask()
            idle = self.core.host.replica is not None and self.core.host.replica.idle
            if (self.link.wanted or idle) and not self.core.silent:
                self.link.snapshot(self.core.snapshot(), idle=idle)
            await asyncio.sleep(0.0005)


async def main(args: argparse.Namespace) -> None:
    clock = WallClock()
    limits = Limits(args.seqs, 512, 4096, args.blocks, 16)
    step = Model(k=(0.0, args.token), b=(args.step, 0.0), host_per_seq=args.seq)
    core = StubCore(step, limits, clock, args.policy, ReplicaOptions(causes=False), noise=0.02, seed=os.getpid())
    await core.start()
    link = CoreLink(LinkSettings.of({"host": args.host, "port": args.link})) if args.link >= 0 else None
    app = App(StubServer(core, args.model), {"host": args.host, "port": link.port} if link is not None else None)
    tasks = [asyncio.create_task(Linked(core, link).run())] if link is not None else []
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((args.host, args.port))
    config = uvicorn.Config(app, loop="asyncio", http="httptools", lifespan="off", log_level="error", access_log=False)
    print(json.dumps({"port": bound.getsockname()[1], "link": link.port if link is not None else None}), flush=True)
    await uvicorn.Server(config).serve(sockets=[bound])
    for task in tasks:
        task.cancel()


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0)
    made.add_argument("--link", type=int, default=0, help="port; -1: no link")
    made.add_argument("--policy", default="edf")
    made.add_argument("--model", default="stub")
    made.add_argument("--seqs", type=int, default=64)
    made.add_argument("--blocks", type=int, default=4000)
    made.add_argument("--step", type=float, default=5e-3, help="seconds of a step, ")
    made.add_argument("--seq", type=float, default=1e-5, help="of each sequence in it, ")
    made.add_argument("--token", type=float, default=2e-5, help="of each token")
    return made


if __name__ == "__main__":
    asyncio.run(main(_parser().parse_args()))
