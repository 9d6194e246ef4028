"""A stub vLLM server as a process: `python -m tests.stubs --port 0`, which prints its addresses as one line of JSON.

The product's simulated server (`demo.simulated_server`) with step times as given, and with faults at request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from rubato.core.clock import WallClock
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.demo.simulated_api import SimulatedApi, SimulatedReply
from rubato.demo.simulated_core import SimulatedCore
from rubato.demo.simulated_server import App, LinkedCore, listen
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.settings import LinkSettings
from rubato.latency.affine import Model
from rubato.wire.messages import Report


class FaultyApp(App):
    """fail: how many requests are answered with 503."""

    def __init__(self, api: SimulatedApi, link: dict[str, Any] | None) -> None:
        super().__init__(api, link)
        self.linked: FaultyLink | None = None
        self.fail = 0
        self.hang = False
        self.mute = False  # nothing comes of what is open
        self.delay = 0.0  # seconds that each chunk takes

    async def respond(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        if scope["path"] == "/stub":  # what a test makes of it
            self._set_faults(json.loads(body))
            await self.send(send, self.api.page(200, {}))
        elif self.hang:
            await asyncio.sleep(3600)
        elif scope["method"] == "POST" and self.fail > 0:
            self.fail -= 1
            await self.send(send, self.api.page(503, {"error": {"message": "no"}}))
        else:
            await super().respond(scope, receive, send, body)

    async def next_part(self, reply: SimulatedReply) -> bytes:
        while self.mute:  # noqa: ASYNC110 - a test sets it
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.delay)
        return await super().next_part(reply)

    def _set_faults(self, told: dict[str, Any]) -> None:
        for name in ("fail", "hang", "mute", "delay"):
            setattr(self, name, told.get(name, getattr(self, name)))
        if self.linked is not None:
            self.linked.silent = told.get("silent", self.linked.silent)


class FaultyLink(LinkedCore):
    """silent: nothing of the core goes to gateways."""

    silent = False

    def report(self, report: Report) -> None:
        if not self.silent:
            super().report(report)

    def send_snapshot(self) -> None:
        if not self.silent:
            super().send_snapshot()


async def main(args: argparse.Namespace) -> None:
    clock = WallClock()
    limits = Limits(args.seqs, 512, 4096, args.blocks, 16)
    step = Model(k=(0.0, args.token), b=(args.step, 0.0), host_per_seq=args.seq)
    options = ReplicaOptions(causes=False)
    core = SimulatedCore(
        step, replace(step), limits, clock, args.policy, options, noise=0.02, seed=os.getpid()
    )  # fmt: skip
    await core.start()
    link = CoreLink(LinkSettings.of({"host": args.host, "port": args.link})) if args.link >= 0 else None
    app = FaultyApp(
        SimulatedApi(core, args.model), {"host": args.host, "port": link.port} if link is not None else None
    )
    app.linked = None if link is None else FaultyLink(core, link, clock)
    await listen(app, args, app.linked)


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
    made.set_defaults(end_with_stdin=False)
    return made


if __name__ == "__main__":
    asyncio.run(main(_parser().parse_args()))
