"""A simulated vLLM server as a process: `python -m rubato.demo.simulated_server --port 8001`.

Its steps take as long as a packaged hardware profile says, on the wall clock, without a model or a GPU. Gateways reach
its engine core by ZeroMQ through the same class as inside vLLM (`engines.vllm.core_link`). It prints one line of JSON
when it listens: the two ports and its process id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from rubato.core.clock import Clock, WallClock
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import NO_BATCH, Sample
from rubato.core.server_url import host_in_url
from rubato.demo.simulated_api import CHAT, COMPLETIONS, SimulatedApi, SimulatedReply
from rubato.demo.simulated_core import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PROFILE, SimulatedCore
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.settings import LinkSettings
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine, profiles
from rubato.wire.messages import Report, decode_command

STEP_NOISE = 0.02  # relative spread of step times
POLL_S = 0.02  # between two reads of gateways' commands while idle
CONTRACT_WAIT_S, CONTRACT_POLL_S = 0.2, 0.002  # wait for a gateway's message about a request that came first


class App:
    """An ASGI app over the API of a core.

    Args:
        link: what /rubato/link answers; None: a 404.
    """

    def __init__(self, api: SimulatedApi, link: dict[str, Any] | None) -> None:
        self.api, self.link = api, link

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
        await self.respond(scope, receive, send, body)

    async def respond(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path == "/rubato/link":
            reply = self.api.page(200, self.link) if self.link is not None else self.api.page(404, {})
        else:
            if self.link is not None and path in (CHAT, COMPLETIONS):
                await self._await_contract(headers.get("x-request-id", ""))
            reply = self.api.answer(method, path, headers, body)
        watcher = asyncio.create_task(_close_when_gone(receive, reply))
        try:
            await self.send(send, reply)
        finally:
            watcher.cancel()

    async def send(self, send: Send, reply: SimulatedReply) -> None:
        part = await reply.part()  # it may change the status
        headers = [(name.encode(), value.encode()) for name, value in reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            part = await self.next_part(reply)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def next_part(self, reply: SimulatedReply) -> bytes:
        return await reply.part()

    async def _await_contract(self, id: str) -> None:
        """Wait for the gateway's message about a request, which may arrive after the request itself."""
        for _ in range(int(CONTRACT_WAIT_S / CONTRACT_POLL_S) if id else 0):
            self.api.core.read_commands()
            if any(self.api.core.has_contract(f"{kind}-{id}") for kind in ("cmpl", "chatcmpl")):
                return
            await asyncio.sleep(CONTRACT_POLL_S)


async def _close_when_gone(receive: Receive, reply: SimulatedReply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.close()


class LinkedCore:
    """Carries a core's reports to gateways, and their commands to it. The link has a thread of its own."""

    def __init__(self, core: SimulatedCore, link: CoreLink, clock: Clock) -> None:
        self.core, self.link = core, link
        core.on_report, core.read_commands = self.report, self.read_commands
        link.snapshot(core.snapshot(), idle=True)
        link.start(core.describe, clock.now)

    def report(self, report: Report) -> None:
        self.link.end_idle()
        if self.link.listeners:
            self.link.report(report)
        self.send_snapshot()

    def read_commands(self) -> None:
        for _, command in self.link.commands():
            self.core.apply_command(decode_command(command))

    async def run(self) -> None:
        """Read commands while no request comes, and send snapshots to gateways that missed a report."""
        while True:
            self.read_commands()
            if self.link.wants_snapshot:
                self.send_snapshot()
            await asyncio.sleep(POLL_S)

    def send_snapshot(self) -> None:
        """Send a snapshot if a gateway wants one or the core is idle."""
        if self.link.wants_snapshot or self.core.is_idle:
            self.link.snapshot(self.core.snapshot(), idle=self.core.is_idle)


def fit_model(truth: LatencyModel, max_seqs: int, max_tokens: int) -> affine.Model:
    """Fit an affine model to these step times, as the plug-in would have learnt them."""
    shapes = [
        NO_BATCH.with_entries([(1, context)] * seqs + ([(chunk, cached)] if chunk > 1 else []))
        for seqs in (0, 1, 8, 32, min(128, max_seqs))
        for context in (100, 1000, 4000)
        for chunk in (0, 128, 512, max_tokens)
        for cached in (0, 2000)
        if seqs or chunk
    ]
    model = affine.Model()
    model.fit([Sample(shape, truth.step_time(shape)) for shape in shapes])
    return model


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m rubato.demo.simulated_server", description=__doc__)
    made.add_argument("--host", default="127.0.0.1", help="address of the API server and the engine core")
    made.add_argument("--port", type=int, default=0, help="of the API server (default: any free one)")
    made.add_argument("--link", type=int, default=0, metavar="PORT", help="of the engine core; -1: without the plug-in")
    made.add_argument(
        "--policy",
        default="rubato",
        metavar="NAME[:SETTING=VALUE]",
        help="what it schedules by",
    )
    made.add_argument("--profile", default=PROFILE, help="a hardware profile (`rubato profile`), for its step times")
    made.add_argument("--model", help="name that it serves (default: the profile's)")
    made.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    made.add_argument("--max-num-batched-tokens", type=int, default=MAX_NUM_BATCHED_TOKENS)
    made.add_argument("--seed", type=int, default=0, help="of the noise of step times")
    made.add_argument("--end-with-stdin", action="store_true", help="end when standard input does: with its parent")
    return made


def core_of(args: argparse.Namespace, clock: Clock) -> SimulatedCore:
    """Make the core. Raises ValueError for an unknown profile or policy, or one that this server cannot run."""
    profile, choice = profiles.load(args.profile), PolicyChoice.read(args.policy)
    truth, seqs, tokens = profile.model(), args.max_num_seqs, args.max_num_batched_tokens
    return SimulatedCore(
        truth, fit_model(truth, seqs, tokens), profile.limits(seqs, tokens), clock, choice.policy,
        settings=choice.settings, noise=STEP_NOISE, seed=args.seed,
    )  # fmt: skip


async def run(args: argparse.Namespace) -> None:
    clock = WallClock()
    core = core_of(args, clock)
    await core.start()
    link = CoreLink(LinkSettings.of({"host": args.host, "port": args.link})) if args.link >= 0 else None
    where = None if link is None else {"host": args.host, "port": link.port}
    app = App(SimulatedApi(core, args.model or args.profile), where)
    await listen(app, args, None if link is None else LinkedCore(core, link, clock))


async def listen(app: App, args: argparse.Namespace, linked: LinkedCore | None) -> None:
    """Serve until a signal, or the end of standard input, says to end."""
    bound = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((args.host, args.port))
    settings = uvicorn.Config(
        app, loop="asyncio", http="httptools", lifespan="off", ws="none", log_level="error", access_log=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(settings)
    bound.listen(settings.backlog)  # whoever reads the line below connects at once: a gateway leaves out who refuses
    tasks = [asyncio.create_task(linked.run())] if linked is not None else []
    if args.end_with_stdin:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: setattr(server, "should_exit", True))
    port = bound.getsockname()[1]
    url = f"http://{host_in_url(args.host)}:{port}"
    link = None if linked is None else linked.link.port
    print(json.dumps({"url": url, "port": port, "link": link, "pid": os.getpid()}), flush=True)
    try:
        await server.serve(sockets=[bound])
    finally:
        for task in tasks:
            task.cancel()
        if linked is not None:
            linked.link.close()


def main() -> None:
    args = parser().parse_args()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run(args))
    except (ValueError, OSError) as error:
        sys.exit(f"simulated server: {error}")


if __name__ == "__main__":
    main()
