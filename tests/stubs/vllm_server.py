"""A server as vLLM with the plug-in is one, and what may go wrong with it: the product's simulated server with faults.

`StubCore` is the engine core (`demo.simulated_core`): it may fall silent, and hands KV to other cores of this process.
`StubServer` is the API server in front of it (`demo.simulated_api`), which a gateway asks without HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rubato.core.clock import ARRIVAL, Clock, unix_time
from rubato.core.events import Event, Finished, Offered, Stepped, Tokens
from rubato.core.plan import KV, Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request, without_texts
from rubato.core.slo import judge
from rubato.demo.simulated_api import (
    FAILED_STREAM,
    FIRST_WORD_ID,
    STREAM_EVENTS,
    ResponseWriter,
    SimulatedApi,
    SimulatedReply,
)
from rubato.demo.simulated_core import SimulatedCore
from rubato.fleet.upstream import MAX_SILENCE_S, BrokenError, Headers, UnreachableError, UpstreamError
from rubato.latency.affine import Model
from rubato.wire.messages import (
    Beat,
    Do,
    FromCore,
    Greeting,
    HandOffRow,
    Hello,
    Ping,
    PresentRow,
    Report,
    Resync,
    SentRow,
    State,
    ToCore,
    decode_command,
    decode_from_core,
    decode_to_core,
    encode,
)

__all__ = ["FIRST_WORD_ID", "STREAM_EVENTS", "MemoryLink", "MemoryReply", "StubCore", "StubServer", "reply_of"]


class StubCore(SimulatedCore):
    """latency: of its steps, and what its scheduler begins with."""

    def __init__(
        self, latency: Model, limits: Limits, clock: Clock, policy: str, options: ReplicaOptions, *, seed: int = 0,
        noise: float = 0.0, settings: dict[str, Any] | None = None, kv_lease: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            latency, replace(latency), limits, clock, policy, options, seed=seed, noise=noise, settings=settings,
            kv_lease_s=kv_lease,
        )  # fmt: skip
        self.on_report = self._tell
        self.kept: dict[str, Request] = {}  # prefilled for another core, which has not read their KV yet
        self.reading_fails = False  # KV does not come
        self.reads = 0  # of another core's KV
        self._prefill_only: set[str] = set()
        self._asked: list[tuple[Request, StubCore, str]] = []  # whose KV is to be read when there is memory
        self.peers: list[Callable[[FromCore], None]] = []
        self.silent = False  # its reports are not sent
        self.deaf = False  # nor anything else
        self.unix_off = 0.0  # seconds that this machine's Unix time is off
        self._offered: dict[str, Request] = {}  # of those that are only prefilled

    # ----------------------------------------------------------------- the link

    def hear(self, message: ToCore, tell: Callable[[FromCore], None]) -> None:
        """A gateway has sent this; answers go to `tell`."""
        if self.deaf:
            return
        match message:
            case Hello():
                if tell not in self.peers:
                    self.peers.append(tell)
                tell(Greeting(message.asked, *self._times(), self.describe()))
                self._send_snapshot(tell)
            case Ping():
                tell(Beat(message.asked, *self._times()))
            case Resync():
                self._send_snapshot(tell)
            case Do(commands):
                for raw in commands:
                    self.apply_command(decode_command(raw))

    def _times(self) -> tuple[float, float]:
        return self.clock.now(), unix_time() + self.unix_off

    def _tell(self, report: Report) -> None:
        if not self.silent:
            for tell in self.peers:
                tell(decode_from_core(encode(report)))

    def _send_snapshot(self, tell: Callable[[FromCore], None]) -> None:
        if not self.silent:
            tell(decode_from_core(encode(self.snapshot())))

    # ----------------------------------------------------------------- KV of other cores

    def prefill(self, request: Request, listener: Callable[[Event], None]) -> None:
        """Run its prompt, and keep the KV for another core, or until the lease is over."""
        self._prefill_only.add(request.id)
        self.submit(request, listener)

    def go_on(self, request: Request, source: StubCore, there: str, listener: Callable[[Event], None]) -> None:
        """With a prompt of which another core has the KV, by that name."""
        self.listeners[request.id] = listener
        self._emit(Offered(self.clock.now(), request.id, request))
        self._asked.append((request, source, there))
        self._read()

    def _read(self) -> None:
        """KV of others, as far as there is memory for it."""
        while self._asked and (self._asked[0][0].id not in self.listeners or self.host.reserve(self._asked[0][0])):
            request, source, there = self._asked.pop(0)
            if request.id in self.listeners:
                self.clock.spawn(self._receive(request, source, there), f"KV of {request.id}")

    async def _receive(self, request: Request, source: StubCore, there: str) -> None:
        await self.clock.sleep_until(self.clock.now() + 0.002, ARRIVAL)
        assert request.handoff is not None
        if request.id in self.listeners:
            self.reads += there in source.kept
            if self.reading_fails or there not in source.kept:  # as vLLM's `kv_load_failure_policy` has it
                self.host.release(request.id)
                end = judge(request, [], "failed", "deadline")
                self._emit(Finished(self.clock.now(), request.id, "failed", "error", end))
                return
            await self.host.receive(request.id, KV(request.handoff.cached, "simulated", (0,), b"", 0))
        source.give_up(there)

    def give_up(self, id: str) -> None:
        """Its KV was read, or the lease is over."""
        if self.kept.pop(id, None) is not None:
            self._rows.append(SentRow(id))
            self._report_soon()

    def _emit(self, event: Event) -> None:
        if isinstance(event, Tokens) and event.id in self._prefill_only:
            return
        if isinstance(event, Finished) and event.id in self._prefill_only:
            self._prefill_only.discard(event.id)
            if event.outcome == "completed":
                self.kept[event.id] = request = self._offered.pop(event.id)
                self._rows.append(HandOffRow(event.id, "prefilled", event.at, max(1, _length(request) - 1)))
                assert self.kv_lease_s is not None
                self.clock.call_at(self.clock.now() + self.kv_lease_s, ARRIVAL, lambda: self.give_up(event.id))
                self.listeners.pop(event.id)(event)
                self._report_soon()
                return
        if isinstance(event, Stepped):
            self._read()
        elif isinstance(event, Offered) and event.id in self._prefill_only:
            self._offered[event.id] = event.request
        super()._emit(event)

    def kv_free(self) -> int:
        return super().kv_free() - sum(self.limits.blocks(_length(request)) for request in self.kept.values())

    def _present(self) -> list[PresentRow]:
        rows = super()._present()
        coming: list[tuple[Request, State]] = [(seq.request, "arriving") for seq in self._replica.migrating_in.values()]
        coming += [(request, "arriving") for request, _, _ in self._asked if request.id in self.listeners]
        for request, where in [*coming, *((request, "leaving") for request in self.kept.values())]:
            blocks = self.limits.blocks(_length(request))
            rows.append(PresentRow(without_texts(request), request.id, where, False, False, 0, blocks))
        return rows


class MemoryLink:
    """A gateway's end of a link to a core in this process (`server_link.Link`)."""

    is_refused = False

    def __init__(self, core: StubCore) -> None:
        self._core = core
        self._messages: asyncio.Queue[FromCore] = asyncio.Queue()

    def send(self, message: ToCore) -> None:
        self._core.hear(decode_to_core(encode(message)), self._messages.put_nowait)

    async def receive(self) -> FromCore:
        return await self._messages.get()

    def close(self) -> None:
        if self._messages.put_nowait in self._core.peers:
            self._core.peers.remove(self._messages.put_nowait)


class MemoryReply(SimulatedReply):
    """A response whose parts may fail or be held up (`upstream.Reply`)."""

    def __init__(self, status: int, kind: str, leave: Callable[[], None] = lambda: None) -> None:
        super().__init__(status, kind, leave)
        self._faults: asyncio.Queue[bytes | UpstreamError] = asyncio.Queue()
        self.flows = asyncio.Event()  # unset: nothing comes through, and the connection stays open
        self.flows.set()
        self.delay = 0.0  # seconds that each part takes
        self.head = asyncio.Event()  # the status is what it will be

    def put(self, part: bytes | UpstreamError) -> None:
        self.head.set()
        self._faults.put_nowait(part)

    async def part(self) -> bytes:
        if self.has_ended:
            return b""
        found = await self._faults.get()
        await self.flows.wait()
        if self.delay:
            await asyncio.sleep(self.delay)
        if isinstance(found, UpstreamError):
            raise found
        self.has_ended = found == b""
        return found

    async def pump(self, sink: Callable[[bytes], None]) -> None:
        while part := await self.part():
            sink(part)

    def pause(self) -> None:
        self.flows.clear()

    def resume(self) -> None:
        self.flows.set()

    def close(self) -> None:
        if not self.has_ended:
            self.put(UpstreamError("given up"))
        super().close()


def reply_of(
    *parts: bytes | UpstreamError, status: int = 200, kind: str = "application/json", ends: bool = True
) -> MemoryReply:
    """A response of these parts, which ends or stays open."""
    reply = MemoryReply(status, kind)
    for part in (*parts, *([b""] if ends else [])):
        reply.put(part)
    return reply


Respond = Callable[[str, bytes], Awaitable[MemoryReply | None]]


class StubServer(SimulatedApi):
    """The API server of a core, in this process (`upstream.Upstream`). down: nobody listens. broken: the next requests
    are answered with this status; final: which says that no retry helps. cut: the stream of the next request breaks off
    after so many tokens. merged: so many come in its first chunk. metrics: the text of that page; empty:
    it has none; no_metrics: it does not come. pages: answers in the place of its own, by path: status and body; status
    0: none that is HTTP. respond: its answer to a request, by path and body, in the place of its own; None: its own.
    servers: all of them, by name, for those that read each other's KV."""

    servers: ClassVar[dict[str, StubServer]] = {}
    core: StubCore
    reply_class = MemoryReply
    default_chat_tokens = 16

    def __init__(self, core: StubCore, model: str = "stub") -> None:
        super().__init__(core, model)
        self.bodies: list[dict[str, Any]] = []  # of completions
        self.heads: list[dict[str, str]] = []
        self.queries: list[str] = []
        self.down = False
        self.hangs = False  # it takes requests and never answers
        self.mute = False  # the same, but for questions such as /health
        self.broken = 0
        self.final = False
        self.cut = 0
        self.says_error_after = 0  # chunks, of the next request
        self.adds: dict[str, Any] = {}  # to the last chunk of streams
        self.open_replies: set[MemoryReply] = set()
        self.merged = 1
        self.claims = 0  # tokens of each prompt, where its usage is a lie
        self.fuses = False  # for it two words are a token
        self.version = "0.32.0"
        self.says_nothing_of_kv = False
        self.metrics = ""
        self.no_metrics = False
        self.pages: dict[str, tuple[int, bytes]] = {}
        self.respond: Respond | None = None
        self.name = f"engine {len(self.servers)}"
        self.servers[self.name] = self

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None,
        is_working: Callable[[], bool] = lambda: False,
    ) -> MemoryReply:  # fmt: skip
        path, _, query = path.partition("?")
        if self.down:
            raise UnreachableError("ConnectionRefusedError")
        if self.respond is not None and (reply := await self.respond(path, body)) is not None:
            self.open_replies.add(reply)
            return reply
        if method == "POST":
            self.is_working = is_working
        if self.hangs or (self.no_metrics and path == "/metrics") or (self.mute and method == "POST"):
            try:
                await asyncio.wait_for(asyncio.Event().wait(), seconds or MAX_SILENCE_S)
            except TimeoutError:
                raise UpstreamError("TimeoutError") from None
        is_completion = method == "POST" and ("completions" in path or path in STREAM_EVENTS)
        if is_completion:
            fields = json.loads(body)
            self.bodies.append(fields)
            self.heads.append(dict(headers))
            self.queries.append(query)
            if self.broken:
                return self._broken_reply()
        elif path in self.pages:
            status, page = self.pages[path]
            if not status:
                raise UpstreamError("the server's answer is no HTTP")
            return memory(self.text(status, "application/json", page))
        elif path == "/version":
            return memory(self.page(200, {"version": self.version}))
        elif path == "/metrics" and not self.metrics:
            return memory(self.page(404, {}))
        reply = memory(self.answer(method, path, dict(headers), body))
        if is_completion and not fields.get("stream"):
            await reply.head.wait()
        return reply

    def _broken_reply(self) -> MemoryReply:
        reply = memory(self.page(self.broken, {"error": {"message": "never" if self.final else "not now"}}))
        final = [("x-should-retry", "false"), ("x-rubato-reject-reason", "rejected-slo-infeasible")]
        reply.headers = [*reply.headers, *(final if self.final else [])]
        return reply

    def metrics_page(self) -> str:
        return self.metrics

    def split_words(self, text: str) -> list[str]:
        return super().split_words(text)[:: 1 + self.fuses]

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        """As kill -9 does: every connection breaks, what was there is gone, and the core says no more."""
        self.down = self.core.silent = True
        for reply in self.open_replies:
            reply.put(BrokenError("ConnectionResetError"))
        self.open_replies.clear()

    def writer(
        self, reply: SimulatedReply, answer: str, path: str, ids: Sequence[str], fields: Mapping[str, Any], prompt: int
    ) -> FaultyWriter:
        self.open_replies = {one for one in self.open_replies if not one.has_ended} | {memory(reply)}
        made = FaultyWriter(reply, answer, self.model, path, ids, fields, self.claims or prompt)
        made.cut, made.adds, made.merged = self.cut or -self.says_error_after, self.adds, self.merged
        self.cut, self.says_error_after, self.merged = 0, 0, 1
        return made

    def submit(self, request: Request, writer: ResponseWriter, fields: Mapping[str, Any]) -> None:
        assert isinstance(writer, FaultyWriter)
        kv = fields.get("kv_transfer_params") or {}
        prompt = list(request.stages[0].token_ids or ())
        if kv.get("do_remote_decode"):
            about = {"remote_engine_id": self.name, "prompt": prompt, "remote_request_id": writer.ids[0]}
            writer.kv = None if self.says_nothing_of_kv else {"do_remote_prefill": True, **about}
            self.core.prefill(request, writer.on_event)
        elif kv.get("do_remote_prefill"):
            assert kv["prompt"] == prompt, "KV of another prompt"
            self.core.go_on(
                request, self.servers[kv["remote_engine_id"]].core, kv["remote_request_id"], writer.on_event
            )
        else:
            super().submit(request, writer, fields)


def memory(reply: SimulatedReply) -> MemoryReply:
    assert isinstance(reply, MemoryReply)
    return reply


def _length(request: Request) -> int:
    """Tokens of its prompt, and of what it has received."""
    had = request.progress
    return request.prompt + (0 if had is None else sum(map(len, had.times)))


class FaultyWriter(ResponseWriter):
    """cut: the connection breaks after so many tokens; negative: the stream says an error then. adds: fields of last
    chunks. merged: tokens of the first chunk. kv: where the KV is, of a prompt that was prefilled for another."""

    cut = 0
    merged = 1
    adds: Mapping[str, Any] = {}
    kv: dict[str, Any] | None = None
    _late = ""  # text that is not sent yet

    def write_text(self, event: Tokens) -> None:
        self._late += event.text
        if self._tokens >= self.merged:
            super().write_text(replace(event, text=self._late))
            self._late = ""
        if self.cut and self._tokens == abs(self.cut):
            self._is_over = True
            assert isinstance(self._reply, MemoryReply)
            self._reply.put(BrokenError("ConnectionResetError") if self.cut > 0 else FAILED_STREAM)
            self._reply.put(b"")

    def last_fields(self) -> Mapping[str, Any]:
        return self.adds

    def whole_fields(self) -> Mapping[str, Any]:
        return {"kv_transfer_params": self.kv} if self.kv else {}
