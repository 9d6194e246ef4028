"""A server as vLLM with the plug-in is one, seen from a gateway: OpenAI's completions and the link, over a formula.

`StubCore` is the engine core: a replica of ours with a simulated engine, which tells gateways of its steps in the
messages of `wire.messages`. `StubServer` is the API server in front of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from rubato.core.clock import ARRIVAL, Clock, unix_time
from rubato.core.events import Event, Finished, HandedOff, Offered, Stepped, Tokens
from rubato.core.plan import KV, Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Progress, Request, Sampling, Stage, without_texts
from rubato.core.slo import judge
from rubato.engines.simulated import Engine
from rubato.fleet.local_host import LocalHost
from rubato.fleet.upstream import MAX_SILENCE_S, BrokenError, Headers, UnreachableError, UpstreamError
from rubato.latency.affine import Model
from rubato.policies import load
from rubato.wire.messages import (
    Assign,
    Beat,
    Contract,
    CoreAbout,
    Demote,
    Do,
    Expect,
    FromCore,
    Greeting,
    HandOffRow,
    Hello,
    Ping,
    PresentRow,
    Recall,
    Report,
    Resync,
    Row,
    SentRow,
    Snapshot,
    State,
    ToCore,
    decode_command,
    decode_from_core,
    decode_to_core,
    encode,
    event_row,
    offered_row,
)

WORDS = 1_000_000  # ids of a text's tokens begin here
EVENTS = {  # of streams that are no chunks: how their text is named, and their last one
    "/v1/messages": ("content_block_delta", "message_stop"),
    "/v1/responses": ("response.output_text.delta", "response.completed"),
}


class StubCore:
    """policy: of its scheduler; tell: where its reports go."""

    def __init__(
        self, latency: Model, limits: Limits, clock: Clock, policy: str, options: ReplicaOptions, *, seed: int = 0,
        noise: float = 0.0, settings: dict[str, Any] | None = None, kv_lease: float | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.policy = policy
        self.limits = limits
        self.model = replace(latency)
        self.engine = Engine(latency, limits, clock, seed=seed, noise=noise)
        self.host = LocalHost(
            "stub",
            self.engine,
            load(policy, settings or {}),
            self.model,
            clock,
            emit=self._emit,
            lost=self._lost,
            policy=policy,
            options=options,
            kv_transfer=kv_lease is not None,
        )
        self.kv_lease = kv_lease
        self.kept: dict[str, Request] = {}  # prefilled for another core, which has not read their KV yet
        self.reading_fails = False  # KV does not come
        self.reads = 0  # of another core's KV
        self._prefill_only: set[str] = set()
        self._asked: list[tuple[Request, StubCore, str]] = []  # whose KV is to be read when there is memory
        self.peers: list[Callable[[FromCore], None]] = []
        self.silent = False  # its reports are not sent
        self.deaf = False  # nor anything else
        self.unix_off = 0.0  # seconds that this machine's Unix time is off
        self.ask: Callable[[], None] = lambda: None  # take in what gateways have sent
        self.listeners: dict[str, Callable[[Event], None]] = {}
        self._contracts: dict[str, Contract] = {}
        self._offered: dict[str, Request] = {}  # of those that are only prefilled
        self._rows: list[Row] = []
        self._done: list[Stepped] = []
        self._shown: dict[str, tuple[int, int]] = {}
        self._number = 0
        self._soon = False
        self._told_batch = False

    async def start(self) -> None:
        await self.host.start()

    # ----------------------------------------------------------------- the link

    def about(self) -> CoreAbout:
        supports, latency = tuple(sorted(self.host.supports)), self.model.to_dict()
        return CoreAbout(self.policy, supports, self.limits, latency, self.kv_lease, "stub", "0.32.0", "0")

    def hear(self, message: ToCore, tell: Callable[[FromCore], None]) -> None:
        """A gateway has sent this; answers go to `tell`."""
        if self.deaf:
            return
        match message:
            case Hello():
                if tell not in self.peers:
                    self.peers.append(tell)
                tell(Greeting(message.asked, *self._times(), self.about()))
                self._snapshot(tell)
            case Ping():
                tell(Beat(message.asked, *self._times()))
            case Resync():
                self._snapshot(tell)
            case Do(commands):
                for raw in commands:
                    self._obey(decode_command(raw))

    def _obey(self, command: Expect | Assign | Recall | Demote) -> None:
        match command:
            case Expect(answer, contract):
                self._contracts[answer] = contract
            case Assign():
                self.host.assign(command.role)
            case Recall(kind):
                self.host.recall(kind)
            case Demote(answer):
                self._contracts[answer] = self._contracts[answer]._replace(demoted=True)

    def _times(self) -> tuple[float, float]:
        return self.clock.now(), unix_time() + self.unix_off

    # ----------------------------------------------------------------- requests

    def expects(self, answer: str) -> bool:
        return answer in self._contracts

    def contract(self, answer: str) -> Contract | None:
        """What a gateway has promised."""
        self.ask()
        return self._contracts.pop(answer, None)

    def submit(self, request: Request, listener: Callable[[Event], None]) -> None:
        self.listeners[request.id] = listener
        self._emit(Offered(self.clock.now(), request.id, request))
        self.host.submit(request)

    def abort(self, id: str) -> None:
        replica = self.host.replica
        assert replica is not None
        if id in replica.arriving:
            self.host.release(id)
        else:
            self.host.cancel(id, "aborted")
        self.listeners.pop(id, None)

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
            self._tell_soon()

    def _kept_blocks(self) -> int:
        return sum(self.limits.blocks(_length(request)) for request in self.kept.values())

    def _emit(self, event: Event) -> None:
        if isinstance(event, Tokens) and event.id in self._prefill_only:
            return
        if isinstance(event, Finished) and event.id in self._prefill_only:
            self._prefill_only.discard(event.id)
            if event.outcome == "completed":
                self.kept[event.id] = request = self._offered.pop(event.id)
                self._rows.append(HandOffRow(event.id, "prefilled", event.at, max(1, _length(request) - 1)))
                assert self.kv_lease is not None
                self.clock.call_at(self.clock.now() + self.kv_lease, ARRIVAL, lambda: self.give_up(event.id))
                self.listeners.pop(event.id)(event)
                self._tell_soon()
                return
        if isinstance(event, Stepped):
            self._done.append(event)
            self._read()
        elif isinstance(event, Offered):
            self._rows.append(offered_row(event, event.id))
            if event.id in self._prefill_only:
                self._offered[event.id] = event.request
        elif isinstance(event, HandedOff):
            handoff = event.request.handoff
            assert handoff is not None
            self._rows.append(HandOffRow(event.id, handoff.reason, event.at, 0))
        else:
            self._rows.append(event_row(event))
        if not isinstance(event, Stepped | Offered):
            listener = self.listeners.get(event.id)
            if isinstance(event, Finished | HandedOff):
                self.listeners.pop(event.id, None)
            if listener is not None:
                listener(event)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        """A step that is done, and the batch that runs now."""
        self._soon = False
        replica = self.host.replica
        assert replica is not None
        flying = {s.id: s.in_flight for s in replica.running.values() if s.in_flight}
        at, said = self.clock.now(), dict[str, Any]()
        rows, self._rows = self._rows, []
        if self._done:
            (done,), self._done = self._done, []
            said["done"], at = (done.shape, done.seconds), done.at
            self._told_batch = False
        if flying and not self._told_batch:
            self._told_batch = True
            said |= {"shape": replica.shape, "busy": replica.busy_until, "tokens": flying}
        self._number += 1
        report = Report(self._number, at, replica.kv.free - self._kept_blocks(), rows, held=self._held(), **said)
        if not self.silent:
            for tell in self.peers:
                tell(decode_from_core(encode(report)))

    def _held(self) -> dict[str, tuple[int, int]]:
        replica = self.host.replica
        assert replica is not None
        rows = {s.id: (s.cached, s.blocks) for s in (*replica.running.values(), *replica.arriving.values())}
        changed = {id: row for id, row in rows.items() if self._shown.get(id) != row}
        self._shown = rows
        return changed

    def _snapshot(self, tell: Callable[[FromCore], None]) -> None:
        if not self.silent:
            tell(decode_from_core(encode(self.snapshot())))

    def snapshot(self) -> Snapshot:
        replica = self.host.replica
        assert replica is not None
        rows = []
        for seq in sorted([*replica.waiting, *replica.running.values()], key=lambda s: s.order):
            where: State = "running" if seq.id in replica.running else "waiting"
            state = (where, seq.started, seq.demoted, seq.cached, seq.blocks)
            rows.append(PresentRow(without_texts(seq.request), seq.id, *state, tuple(seq.times_of_stage())))
        flying = {s.id: s.in_flight for s in replica.running.values() if s.in_flight}
        coming: list[tuple[Request, State]] = [(seq.request, "arriving") for seq in replica.arriving.values()]
        coming += [(request, "arriving") for request, _, _ in self._asked if request.id in self.listeners]
        for request, where in [*coming, *((request, "leaving") for request in self.kept.values())]:
            blocks = self.limits.blocks(_length(request))
            rows.append(PresentRow(without_texts(request), request.id, where, False, False, 0, blocks))
        kv = replica.kv.free - self._kept_blocks()
        return Snapshot(self._number, self.clock.now(), kv, rows, [flying] if flying else [])

    def _lost(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        raise error


FAILED = b'data: {"error":{"message":"","type":"InternalServerError"}}\n\ndata: [DONE]\n\n'  # what vLLM then says


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


class MemoryReply:
    """A response that comes part by part (`upstream.Reply`)."""

    def __init__(self, status: int, kind: str, leave: Callable[[], None] = lambda: None) -> None:
        self.status = status
        self.headers: Headers = [("content-type", kind)]
        self._parts: asyncio.Queue[bytes | UpstreamError] = asyncio.Queue()
        self._leave = leave
        self.over = False
        self.flows = asyncio.Event()  # unset: nothing comes through, and the connection stays open
        self.flows.set()
        self.delay = 0.0  # seconds that each part takes
        self.head = asyncio.Event()  # the status is what it will be

    def put(self, part: bytes | UpstreamError) -> None:
        self.head.set()
        self._parts.put_nowait(part)

    async def part(self) -> bytes:
        if self.over:
            return b""
        found = await self._parts.get()
        await self.flows.wait()
        if self.delay:
            await asyncio.sleep(self.delay)
        if isinstance(found, UpstreamError):
            raise found
        self.over = found == b""
        return found

    async def pump(self, sink: Callable[[bytes], None]) -> None:
        while part := await self.part():
            sink(part)

    def pause(self) -> None:
        self.flows.clear()

    def resume(self) -> None:
        self.flows.set()

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.put(UpstreamError("given up"))
            self._leave()


class StubServer:
    """The API server of a core, in this process (`upstream.Upstream`). down: nobody listens. broken: the next requests
    are answered with this status; final: which says that no retry helps. cut: the stream of the next request breaks off
    after so many tokens. merged: so many come in its first chunk. metrics: the text of that page; empty:
    it has none; no_metrics: it does not come. pages: answers in the place of its own, by path: status and body; status
    0: none that is HTTP. servers: all of them, by name, for those that read each other's KV."""

    servers: ClassVar[dict[str, StubServer]] = {}

    def __init__(self, core: StubCore, model: str = "stub") -> None:
        self.core = core
        self.model = model
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
        self.name = f"engine {len(self.servers)}"
        self.servers[self.name] = self

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None,
        is_working: Callable[[], bool] = lambda: False,
    ) -> MemoryReply:  # fmt: skip
        path, _, query = path.partition("?")
        if self.down:
            raise UnreachableError("ConnectionRefusedError")
        if method == "POST":
            self.is_working = is_working
        if self.hangs or (self.no_metrics and path == "/metrics") or (self.mute and method == "POST"):
            try:
                await asyncio.wait_for(asyncio.Event().wait(), seconds or MAX_SILENCE_S)
            except TimeoutError:
                raise UpstreamError("TimeoutError") from None
        if method == "POST" and ("completions" in path or path in EVENTS):
            fields = json.loads(body)
            self.bodies.append(fields)
            self.heads.append(dict(headers))
            self.queries.append(query)
            if self.broken:
                reply = _page(self.broken, {"error": {"message": "never" if self.final else "not now"}})
                final = [("x-should-retry", "false"), ("x-rubato-reject-reason", "rejected-slo-infeasible")]
                reply.headers = [*reply.headers, *(final if self.final else [])]
                return reply
            if fields.get("temperature", 0) < 0:
                return _page(400, {"error": {"message": "temperature must be 0 or more"}})
            reply = self._completion(path, dict(headers)["x-request-id"], fields)
            if not fields.get("stream"):
                await reply.head.wait()
            return reply
        if path in self.pages:
            status, page = self.pages[path]
            if not status:
                raise UpstreamError("the server's answer is no HTTP")
            return _text(status, "application/json", page)
        if path == "/metrics" and self.metrics:
            return _text(200, "text/plain; version=0.0.4", self.metrics.encode())
        words = orjson.loads(body)["prompt"].split() if path == "/tokenize" else []
        words = words[:: 1 + self.fuses]
        pages: dict[str, Any] = {
            "/health": {}, "/version": {"version": self.version},
            "/tokenize": {"count": len(words), "tokens": [WORDS + i for i in range(len(words))]},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": self.core.limits.max_model_len}]},
        }  # fmt: skip
        return _page(
            200 if path in pages else 404,
            pages.get(
                path,
                {"error": {"message": "no such page.", "type": "invalid_request_error", "param": None, "code": None}},
            ),
        )

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        """As kill -9 does: every connection breaks, what was there is gone, and the core says no more."""
        self.down = self.core.silent = True
        for reply in self.open_replies:
            reply.put(BrokenError("ConnectionResetError"))
        self.open_replies.clear()

    def _completion(self, path: str, id: str, body: dict[str, Any]) -> MemoryReply:
        chat = "chat" in path
        answer, n = f"{'chatcmpl' if chat or path == '/v1/messages' else 'cmpl'}-{id}", int(body.get("n", 1))
        if path == "/v1/responses":  # no header names it
            answer = body.get("request_id", f"resp_{len(self.bodies)}")
        contract = self.core.contract(answer)
        if path == "/v1/responses":
            prompt = tuple(body["input"].encode())
        elif chat or path in EVENTS:
            prompt = tuple("".join(f"{m['role']}: {m['content']}\n" for m in body["messages"]).encode())
        else:
            prompt = tuple(body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"])
        if contract is None and len(prompt) >= self.core.limits.max_model_len:
            return _page(400, {"error": {"message": "the prompt is longer than the model's context", "code": 400}})
        ids = contract.ids if contract is not None else [answer if n == 1 else f"{answer}-{i}" for i in range(n)]
        kv = body.get("kv_transfer_params") or {}
        requests = [self._request(one, prompt, int(body.get("max_tokens", 16)), contract) for one in ids]
        streams = bool(body.get("stream"))
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        reply = MemoryReply(200, kind, lambda: self._abort(answering))
        self.open_replies = {one for one in self.open_replies if not one.over} | {reply}
        answering = _Answering(reply, answer, chat, ids, streams, len(prompt), self.cut or -self.says_error_after)
        answering.adds, answering.events, answering.merged = self.adds, EVENTS.get(path), self.merged
        answering.claims = self.claims
        answering.with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.cut, self.says_error_after, self.merged = 0, 0, 1
        for request in requests:
            if kv.get("do_remote_decode"):
                answering.kv = (
                    None
                    if self.says_nothing_of_kv
                    else {
                        "do_remote_prefill": True,
                        "remote_engine_id": self.name,
                        "prompt": list(prompt),
                        "remote_request_id": ids[0],
                    }
                )
                self.core.prefill(request, answering.hear)
            elif kv.get("do_remote_prefill"):
                assert kv["prompt"] == list(prompt), "KV of another prompt"
                source = self.servers[kv["remote_engine_id"]].core
                self.core.go_on(request, source, kv["remote_request_id"], answering.hear)
            else:
                self.core.submit(request, answering.hear)
        return reply

    def _abort(self, answering: _Answering) -> None:
        for id in answering.ids:
            if self.core.listeners.get(id) == answering.hear:  # else it has come back: vLLM gives that another id
                self.core.abort(id)

    def _request(self, id: str, prompt: tuple[int, ...], most: int, contract: Contract | None) -> Request:
        now = self.core.clock.now()
        if contract is None:
            said = sum(id >= WORDS for id in prompt)  # by us, which is gone on with
            had = Progress((now,), ((now,) * said,)) if said else None
            stage = Stage(len(prompt) - said, token_ids=prompt[: len(prompt) - said])
            return Request(id, (stage,), now, sampling=Sampling(max_tokens=most + said, ignore_eos=True), progress=had)
        had = contract.progress
        received = 0 if had is None else sum(map(len, had.times))
        if contract.demoted:
            had = replace(had or Progress((contract.arrival,), ((),)), demoted=True)
        length = len(prompt) - received
        return Request(
            id, (Stage(length, contract.slo, token_ids=prompt[:length]),), contract.arrival, tier=contract.tier,
            tenant=contract.tenant, sampling=Sampling(max_tokens=most + received, ignore_eos=True),
            on_decline=contract.on_decline, handoff=contract.handoff, progress=had,
        )  # fmt: skip


def _length(request: Request) -> int:
    """Tokens of its prompt, and of what it has received."""
    had = request.progress
    return request.prompt + (0 if had is None else sum(map(len, had.times)))


class _Answering:
    """From the events of an answer's requests to its response."""

    def __init__(
        self, reply: MemoryReply, answer: str, chat: bool, ids: Sequence[str], streams: bool, prompt: int, cut: int
    ) -> None:
        self._reply, self._answer, self._chat, self._streams = reply, answer, chat, streams
        self.ids, self._prompt, self._cut = list(ids), prompt, cut
        self._said: dict[str, list[str]] = {id: [] for id in ids}
        self._ends: dict[str, Finished] = {}
        self._tokens = 0
        self._over = False
        self.adds: dict[str, Any] = {}
        self.kv: dict[str, Any] | None = None  # where the KV is, of a prompt that was prefilled for another
        self.events: tuple[str, str] | None = None  # names of a text's and of the last one
        self.merged = 1  # tokens of the first chunk
        self.claims = 0
        self.with_usage = False  # a stream's last chunk counts
        self._late = ""  # text that is not sent yet
        self._begun = not (streams and chat)

    def hear(self, event: Event) -> None:
        if self._over or not isinstance(event, Tokens | Finished):
            return
        if not self._begun:  # with the first word of the engine, whatever it is
            self._begun = True
            for index in range(len(self.ids)):
                self._put(index, {"role": "assistant", "content": ""}, None)
        if isinstance(event, Tokens):
            self._said[event.id].append(event.text)
            self._tokens += 1
            self._late += event.text
            if self._streams and self._tokens >= self.merged:
                self._put(self.ids.index(event.id), {"content" if self._chat else "text": self._late}, None)
                self._late = ""
            if self._cut and self._tokens == abs(self._cut):
                self._over = True
                self._reply.put(BrokenError("ConnectionResetError") if self._cut > 0 else FAILED)
                self._reply.put(b"")
            return
        self._ends[event.id] = event
        if event.outcome != "completed":
            if not self._streams:
                self._reply.status = 500
            self._reply.put(FAILED if self._streams else b'{"error": {}}')
            self._reply.put(b"")
            return
        if self._streams:
            self._put(self.ids.index(event.id), {} if self._chat else {"text": ""}, event.reason)
        if len(self._ends) == len(self.ids):
            self._end()

    def _end(self) -> None:
        if self.events is not None and self._streams:
            self._event(self.events[1], {"type": self.events[1]})
            self._reply.put(b"")
            return
        output = sum(end.output for end in self._ends.values())
        usage = {"prompt_tokens": self.claims or self._prompt, "completion_tokens": output}
        if self._streams:
            if self.with_usage:
                last = {"id": self._answer, "choices": [], "usage": usage}
                self._reply.put(b"data: " + orjson.dumps(last) + b"\n\n")
            self._reply.put(b"data: [DONE]\n\n")
        else:
            choices = []
            for index, id in enumerate(self.ids):
                text = "".join(self._said[id])
                said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
                choices.append({"index": index, **said, "finish_reason": self._ends[id].reason})
            said = {"id": self._answer, "choices": choices, "usage": usage}
            self._reply.put(orjson.dumps({**said, "kv_transfer_params": self.kv} if self.kv else said))
        self._reply.put(b"")

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        self._reply.put(f"event: {name}\ndata: ".encode() + orjson.dumps(fields) + b"\n\n")

    def _put(self, index: int, said: dict[str, Any], reason: str | None) -> None:
        if self.events is not None and reason is None:
            self._event(self.events[0], {"delta": said})
        if self.events is not None:
            return
        choice = {"index": index, **({"delta": said} if self._chat else said), "finish_reason": reason}
        more = self.adds if reason is not None else {}
        self._reply.put(b"data: " + orjson.dumps({"id": self._answer, "choices": [choice], **more}) + b"\n\n")


def _page(status: int, content: Any) -> MemoryReply:
    return _text(status, "application/json", orjson.dumps(content))


def _text(status: int, kind: str, content: bytes) -> MemoryReply:
    reply = MemoryReply(status, kind)
    reply.put(content)
    reply.put(b"")
    return reply
