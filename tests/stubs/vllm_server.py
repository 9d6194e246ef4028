"""A server as vLLM with the plug-in is one, seen from a gateway: OpenAI's completions and the link, over a formula.

`StubCore` is the engine core: a replica of ours with a simulated engine, which tells gateways of its steps in the
messages of `core.link_messages`. `StubServer` is the API server in front of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import orjson

from rubato.core.clock import Clock, unix_time
from rubato.core.events import Event, Finished, HandedOff, Offered, Stepped, Tokens
from rubato.core.link_messages import PROTOCOL, Contract, Message, contract_of, event_row, packed, role_of, unpacked
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request, Sampling, Stage, without_texts
from rubato.engines.simulated import Engine
from rubato.fleet.local_host import LocalHost
from rubato.fleet.upstream import Headers, UpstreamError
from rubato.latency.affine import Model
from rubato.policies import load


class StubCore:
    """policy: of its scheduler; tell: where its reports go."""

    def __init__(
        self, latency: Model, limits: Limits, clock: Clock, policy: str, options: ReplicaOptions, *, seed: int = 0,
        noise: float = 0.0, settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.policy = policy
        self.limits = limits
        self.model = replace(latency)
        self.engine = Engine(latency, limits, clock, seed=seed, noise=noise)
        self.host = LocalHost(
            "stub", self.engine, load(policy, settings or {}), self.model, clock, emit=self._emit, lost=self._lost,
            policy=policy, options=options, kv_transfer=False,
        )  # fmt: skip
        self.peers: list[Callable[[Message], None]] = []
        self.silent = False  # its reports are not sent
        self.listeners: dict[str, Callable[[Event], None]] = {}
        self._contracts: dict[str, Contract] = {}
        self._rows: list[list[Any]] = []
        self._done: list[Stepped] = []
        self._shown: dict[str, tuple[int, int]] = {}
        self._number = 0
        self._soon = False
        self._told_batch = False

    async def start(self) -> None:
        await self.host.start()

    # ----------------------------------------------------------------- the link

    def hear(self, message: Message, tell: Callable[[Message], None]) -> None:
        """A gateway has sent this; answers go to `tell`."""
        if message["kind"] == "hello":
            if tell not in self.peers:
                self.peers.append(tell)
            tell(
                {
                    "kind": "hello", "protocol": PROTOCOL, "asked": message["asked"],
                    "policy": self.policy, "model": "stub", "vllm": "0.32.0",
                    "rubato": "0", "supports": sorted(self.host.supports), "limits": asdict(self.limits),
                    "latency": self.model.to_dict(), **self._times(),
                }
            )  # fmt: skip
            self._snapshot(tell)
        elif message["kind"] == "ping":
            tell({"kind": "beat", "asked": message["asked"], **self._times()})
        elif message["kind"] == "resync":
            self._snapshot(tell)
        elif message["kind"] == "do":
            for command in message["commands"]:
                self._obey(command)

    def _obey(self, command: Sequence[Any]) -> None:
        match command:
            case ["expect", answer, fields]:
                self._contracts[answer] = contract_of(fields)
            case ["assign", fields]:
                self.host.assign(role_of(fields))
            case ["recall", kind]:
                self.host.recall(kind)
            case ["demote", answer]:
                self._contracts[answer] = self._contracts[answer]._replace(demoted=True)

    def _times(self) -> dict[str, float]:
        return {"clock": self.clock.now(), "unix": unix_time()}

    # ----------------------------------------------------------------- requests

    def contract(self, answer: str) -> Contract | None:
        return self._contracts.pop(answer, None)

    def submit(self, request: Request, listener: Callable[[Event], None]) -> None:
        self.listeners[request.id] = listener
        self._emit(Offered(self.clock.now(), request.id, request))
        self.host.submit(request)

    def _emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._done.append(event)
        elif isinstance(event, Offered):
            about = {"at": event.at, "id": event.id, "request": without_texts(event.request)}
            self._rows.append(["Offered", about, event.id])
        elif isinstance(event, HandedOff):
            handoff = event.request.handoff
            assert handoff is not None
            self._rows.append(["h", event.id, handoff.reason, event.at])
        else:
            self._rows.append(event_row(event))
        if not isinstance(event, Stepped | Offered):
            listener = self.listeners.get(event.id)
            if isinstance(event, Finished | HandedOff):
                self.listeners.pop(event.id, None)
            if listener is not None:
                listener(event)
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        """A step that is done, and the batch that runs now."""
        self._soon = False
        replica = self.host.replica
        assert replica is not None
        flying = {s.id: s.in_flight for s in replica.running.values() if s.in_flight}
        at, said = self.clock.now(), dict[str, Any]({"kind": "report", "kv": replica.kv.free})
        if self._rows:
            said["events"], self._rows = self._rows, []
        if self._done:
            (done,), self._done = self._done, []
            said["done"], at = (done.shape, done.seconds), done.at
            self._told_batch = False
        if flying and not self._told_batch:
            self._told_batch = True
            said |= {"shape": replica.shape, "busy": replica.busy_until, "tokens": flying}
        self._send({**said, "at": at, "held": self._held()})

    def _held(self) -> dict[str, tuple[int, int]]:
        replica = self.host.replica
        assert replica is not None
        rows = {s.id: (s.cached, s.blocks) for s in replica.running.values()}
        changed = {id: row for id, row in rows.items() if self._shown.get(id) != row}
        self._shown = rows
        return changed

    def _send(self, message: Message) -> None:
        self._number += 1
        if not self.silent:
            for tell in self.peers:
                tell(unpacked(packed({**message, "n": self._number})))

    def _snapshot(self, tell: Callable[[Message], None]) -> None:
        replica = self.host.replica
        assert replica is not None
        rows = []
        for seq in sorted([*replica.waiting, *replica.running.values()], key=lambda s: s.order):
            about = {"at": self.clock.now(), "id": seq.id, "request": without_texts(seq.request)}
            state = (seq.id not in replica.running, seq.started, seq.demoted, seq.cached, seq.blocks)
            rows.append([about, seq.id, state, list(seq.times_of_stage()), []])
        flying = {s.id: s.in_flight for s in replica.running.values() if s.in_flight}
        said = {"kind": "snapshot", "n": self._number, "at": self.clock.now(), "kv": replica.kv.free, "seqs": rows}
        if not self.silent:
            tell(unpacked(packed({**said, "batches": [flying] if flying else []})))

    def _lost(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        raise error


class MemoryLink:
    """A gateway's end of a link to a core in this process (`server_link.Link`)."""

    def __init__(self, core: StubCore) -> None:
        self._core = core
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        self._core.hear(unpacked(packed(message)), self._messages.put_nowait)

    async def receive(self) -> Message:
        return await self._messages.get()

    def close(self) -> None:
        if self._messages.put_nowait in self._core.peers:
            self._core.peers.remove(self._messages.put_nowait)


class MemoryReply:
    """A response that comes part by part (`upstream.Reply`)."""

    def __init__(self, status: int, kind: str, leave: Callable[[], None] = lambda: None) -> None:
        self.status = status
        self.headers: Headers = [("content-type", kind)]
        self._parts: asyncio.Queue[bytes | UpstreamError] = asyncio.Queue()
        self._leave = leave
        self._over = False

    def put(self, part: bytes | UpstreamError) -> None:
        self._parts.put_nowait(part)

    async def part(self) -> bytes:
        if self._over:
            return b""
        found = await self._parts.get()
        if isinstance(found, UpstreamError):
            raise found
        self._over = found == b""
        return found

    def close(self) -> None:
        if not self._over:
            self._leave()


class StubServer:
    """The API server of a core, in this process (`upstream.Upstream`)."""

    def __init__(self, core: StubCore, model: str = "stub") -> None:
        self.core = core
        self.model = model
        self.requests = 0
        self.down = False

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None
    ) -> MemoryReply:
        if self.down:
            raise UpstreamError("ConnectionRefusedError")
        if method == "POST":
            return self._completion(dict(headers), orjson.loads(body))
        pages: dict[str, Any] = {
            "/health": {}, "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.core.limits.max_model_len}]},
        }  # fmt: skip
        reply = MemoryReply(200 if path in pages else 404, "application/json")
        reply.put(orjson.dumps(pages.get(path, {"error": "no such page"})))
        reply.put(b"")
        return reply

    async def close(self) -> None:
        pass

    def _completion(self, headers: dict[str, str], body: dict[str, Any]) -> MemoryReply:
        self.requests += 1
        answer = f"cmpl-{headers['x-request-id']}"
        contract = self.core.contract(answer)
        prompt = tuple(body["prompt"])
        most = int(body["max_tokens"])
        request = Request(
            answer if contract is None else contract.ids[0], (Stage(len(prompt), token_ids=prompt),),
            self.core.clock.now(), sampling=Sampling(max_tokens=most, ignore_eos=True),
        )  # fmt: skip
        if contract is not None:
            had = contract.progress
            received = 0 if had is None else sum(map(len, had.times))
            stage = Stage(len(prompt) - received, contract.slo, token_ids=prompt[: len(prompt) - received])
            sampling = Sampling(max_tokens=most + received, ignore_eos=True)
            if contract.demoted:
                from rubato.core.request import Progress

                had = replace(had or Progress((contract.arrival,), ((),)), demoted=True)
            request = replace(
                request, stages=(stage,), arrival=contract.arrival, tier=contract.tier, tenant=contract.tenant,
                sampling=sampling, on_decline=contract.on_decline, handoff=contract.handoff, progress=had,
            )  # fmt: skip
        streams = bool(body.get("stream"))
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        reply = MemoryReply(200, kind, lambda: self.core.host.cancel(request.id, "aborted"))
        said: list[str] = []

        def listener(event: Event) -> None:
            if isinstance(event, Tokens):
                said.append(event.text)
                if streams:
                    reply.put(_chunk(answer, {"text": event.text, "finish_reason": None}))
            elif isinstance(event, Finished) and event.outcome == "completed":
                if streams:
                    reply.put(_chunk(answer, {"text": "", "finish_reason": event.reason}) + b"data: [DONE]\n\n")
                else:
                    usage = {"prompt_tokens": len(prompt), "completion_tokens": event.output}
                    choice = {"index": 0, "text": "".join(said), "finish_reason": event.reason}
                    reply.put(orjson.dumps({"id": answer, "choices": [choice], "usage": usage}))
                reply.put(b"")
            elif isinstance(event, Finished):
                reply.put(UpstreamError("aborted") if streams and said else b'{"error": {}}')
                reply.status = 500 if not said else 200
                reply.put(b"")

        self.core.submit(request, listener)
        return reply


def _chunk(answer: str, choice: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"id": answer, "choices": [{"index": 0, **choice}]}) + b"\n\n"
