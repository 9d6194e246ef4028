"""The endpoint picker against what Envoy sends in full duplex: the bytes of its messages over gRPC, and streams on the
virtual clock, in front of stub servers.

Messages are written here as the protocol's files number their fields (envoyproxy/data-plane-api,
envoy/service/ext_proc/v3/external_processor.proto, and kubernetes-sigs/gateway-api-inference-extension,
docs/proposals/004-endpoint-picker-protocol), not with the library that the picker reads them with.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc
import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rubato.cli.main import main as command
from rubato.config.schema import ConfigError, load
from rubato.core.clock import ARRIVAL, Clock, VirtualClock, WallClock, run_strict, run_virtual
from rubato.core.events import Event, Finished, HandedOff, Offered, Placed, Tokens
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.picked_trip import endpoint_of
from rubato.latency.affine import Model
from rubato.serving.epp import Picker, picker_of
from rubato.serving.epp_messages import ProtocolError
from rubato.serving.epp_server import bind, server_of
from tests.kit import on
from tests.kit.servers import stub_servers
from tests.stubs.vllm_server import StubServer

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, kv_blocks=256, block_size=16)
STEP = Model(k=(0.0, 0.0), b=(0.1, 0.0))  # seconds, whatever the batch
ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000")
ALL = frozenset(ENDPOINTS)
TIERS = {"chat": {"ttft_ms": 1000, "tpot_ms": 200}}
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}


# --------------------------------------------------------------------------- the wire


def number(value: int) -> bytes:
    """A varint."""
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def wire(field: int, value: bytes | str | int) -> bytes:
    """A field of a message: an integer, a text or a message."""
    if isinstance(value, int):
        return number(field << 3) + number(value)
    value = value.encode() if isinstance(value, str) else value
    return number(field << 3 | 2) + number(len(value)) + value


def struct(**fields: Any) -> bytes:
    """A google.protobuf.Struct."""
    pairs = [wire(1, key.replace("__", ".")) + wire(2, value_of(value)) for key, value in fields.items()]
    return b"".join([wire(1, pair) for pair in pairs])


def value_of(value: Any) -> bytes:
    if isinstance(value, dict):
        return wire(5, struct(**value))
    if isinstance(value, list):
        return wire(6, b"".join([wire(1, value_of(one)) for one in value]))
    return wire(3, str(value))


def metadata(**namespaces: dict[str, Any]) -> bytes:
    """ProcessingRequest.metadata_context."""
    one = [wire(1, wire(1, name.replace("__", ".")) + wire(2, struct(**found))) for name, found in namespaces.items()]
    return wire(8, b"".join(one))


def head(headers: dict[str, str], *, last: bool = False) -> bytes:
    """HttpHeaders, as Envoy writes them: values in `raw_value`."""
    pairs = b"".join([wire(1, wire(1, name) + wire(3, value)) for name, value in headers.items()])
    return wire(1, pairs) + (wire(3, 1) if last else b"")


def part(data: bytes, *, last: bool = False) -> bytes:
    return (wire(1, data) if data else b"") + (wire(2, 1) if last else b"")


DUPLEX = wire(11, wire(1, 4) + wire(2, 4))  # protocol_config: both bodies FULL_DUPLEX_STREAMED


def request_head(path: str = "/v1/chat/completions", method: str = "POST", *, last: bool = False, **more: str) -> bytes:
    headers = {
        ":authority": "llm.example", ":path": path, ":method": method, ":scheme": "http",
        "content-type": "application/json", "x-forwarded-proto": "http",
        "x-request-id": "7c0f6f0e-2f5b-4a0a-9a51-3a6b1a1a3d6f",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }  # fmt: skip
    return wire(2, head(headers, last=last)) + DUPLEX


def told(endpoint: str) -> bytes:
    """The whole answer to a request's headers."""
    option = wire(1, wire(1, "x-gateway-destination-endpoint") + wire(3, endpoint)) + wire(3, 2)
    common = wire(2, wire(1, option)) + wire(5, 1)
    return wire(1, wire(1, common)) + wire(8, struct(envoy__lb={"x-gateway-destination-endpoint": endpoint}))


def passed(field: int, data: bytes, *, last: bool) -> bytes:
    """A piece of a body: 3 of the request's, 4 of the response's."""
    return wire(field, wire(1, wire(3, wire(3, part(data, last=last)))))


CHUNKS = [
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"c"}}]}\n\n',
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
]


# --------------------------------------------------------------------------- a fleet, and Envoy


@dataclass
class Fleet:
    picker: Picker
    clock: Clock
    servers: dict[str, StubServer]
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def here(self) -> dict[str, int]:
        """Requests that count at each endpoint."""
        hosts: Any = self.picker.cluster.hosts.values()
        return {endpoint_of(host.url): host.view().count for host in hosts}

    def sends(self, **more: Any) -> Envoy:
        """A chat that Envoy has of its client."""
        envoy = Envoy(self)
        envoy.shows(request_head(**more.pop("head", {})) + more.pop("metadata", b""))
        envoy.shows(wire(4, part(json.dumps({**CHAT, **more}).encode(), last=True)))
        return envoy


class Envoy:
    """One HTTP request, as the filter passes it on."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.answers: list[bytes] = []
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(fleet.picker.process(self._come(), self._write))

    async def _come(self) -> AsyncIterator[ProcessingRequest]:
        while (raw := await self._messages.get()) is not None:
            yield ProcessingRequest.parse(raw)

    async def _write(self, answer: ProcessingResponse) -> None:
        self.answers.append(bytes(answer))
        self._news.set()

    def shows(self, raw: bytes | None) -> None:
        """None: it has closed the stream."""
        self._messages.put_nowait(raw)

    async def closes(self) -> None:
        """Close the stream, and wait for the picker to be done with it."""
        self.shows(None)
        await self.task

    async def answered(self, count: int) -> list[bytes]:
        while len(self.answers) < count:
            self._news.clear()
            await self._news.wait()
        return self.answers

    async def endpoint(self) -> str:
        """Where it is told to go."""
        answers = await self.answered(1)
        found = ProcessingResponse.parse(answers[0])
        assert found.dynamic_metadata is not None, found
        return str(found.dynamic_metadata.to_dict()["envoy.lb"]["x-gateway-destination-endpoint"])

    async def error(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """The response that it is to give itself."""
        await self.task
        found = ProcessingResponse.parse(self.answers[-1]).immediate_response
        assert found is not None
        assert found.status is not None
        assert found.headers is not None
        headers = {one.header.key: one.header.raw_value.decode() for one in found.headers.set_headers if one.header}
        return int(found.status.code), headers, json.loads(found.body)["error"]

    async def serves(self, endpoint: str, body: dict[str, Any] = CHAT) -> None:
        """Have a server answer, and show that."""
        server = self.fleet.servers[f"http://{endpoint}"]
        headers = [("x-request-id", f"r{len(server.bodies)}")]
        reply = await server.open("POST", "/v1/chat/completions", headers, json.dumps(body).encode())
        self.shows(wire(3, head({":status": str(reply.status), **dict(reply.headers)})))
        while data := await reply.part():
            self.shows(wire(5, part(data)))
        self.shows(wire(5, part(b"", last=True)))
        await self.closes()


@asynccontextmanager
async def fleet_of(clock: Clock, *, settings: dict[str, Any]) -> AsyncIterator[Fleet]:
    options = ClusterOptions(PolicyChoice("edf"), ReplicaOptions(causes=False))
    async with stub_servers(clock, [f"http://{end}" for end in ENDPOINTS], STEP, LIMITS, options) as servers:
        said = {"servers": list(servers), "policy": "edf", "router": "least_loaded", "tiers": TIERS, **settings}
        picker = await picker_of(load(said, []), clock, transport=servers.__getitem__)
        try:
            await picker.cluster.start()
            fleet = Fleet(picker, clock, servers)
            picker.cluster.listen(fleet.events.append)
            yield fleet
            assert not picker.trips
            assert not picker.allowed_endpoints
            assert sorted(e.id for e in fleet.of(Offered)) == sorted(e.id for e in fleet.of(Finished))
        finally:
            await picker.cluster.close()


def picking(scenario: Callable[[Fleet], Awaitable[None]], **settings: Any) -> None:
    """On the virtual clock."""

    async def main() -> None:
        async with fleet_of(VirtualClock(), settings=settings) as fleet:
            await scenario(fleet)

    run_virtual(main())


async def after(fleet: Fleet, seconds: float) -> None:
    await fleet.clock.sleep_until(fleet.clock.now() + seconds, ARRIVAL)


# --------------------------------------------------------------------------- over gRPC


def test_what_envoy_sends_over_grpc_is_answered_byte_for_byte() -> None:
    body = json.dumps(CHAT).encode()
    served = metadata(envoy__lb={"x-gateway-destination-endpoint-served": ENDPOINTS[0]})

    async def scenario(fleet: Fleet, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
        for raw in (request_head(), wire(4, part(body[:20])), wire(4, part(body[20:])), wire(4, part(b"", last=True))):
            await call.write(raw)
        assert await call.read() == told(ENDPOINTS[0])
        assert await call.read() == passed(3, body, last=True)
        assert fleet.here() == {ENDPOINTS[0]: 1, ENDPOINTS[1]: 0}
        await call.write(wire(3, head({":status": "200", "content-type": "text/event-stream"})) + served)
        assert await call.read() == wire(2, wire(1, b""))
        for at, chunk in enumerate(CHUNKS):
            await call.write(wire(5, part(chunk, last=at == len(CHUNKS) - 1)))
            assert await call.read() == passed(4, chunk, last=at == len(CHUNKS) - 1)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        (end,) = fleet.of(Finished)
        assert (end.outcome, end.output) == ("completed", 3)
        assert fleet.here() == {ENDPOINTS[0]: 0, ENDPOINTS[1]: 0}

    over_grpc(scenario)


def test_health_modes_and_a_stream_that_is_cancelled_over_grpc() -> None:
    async def scenario(fleet: Fleet, channel: grpc.aio.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

        names = ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")
        assert [await status(name) for name in names] == [1, 1, 1, 1]
        fleet.picker.is_draining = True
        assert [await status(name) for name in names] == [1, 2, 2, 2]
        fleet.picker.is_draining = False
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("other")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        buffered = process()
        await buffered.write(request_head().replace(DUPLEX, wire(11, wire(1, 2) + wire(2, 4))))
        assert await buffered.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await buffered.details() == "request_body_mode is BUFFERED: set the filter's to FULL_DUPLEX_STREAMED"

        call = process()
        await call.write(request_head())
        await call.write(wire(4, part(json.dumps(CHAT).encode(), last=True)))
        assert await call.read() == told(ENDPOINTS[0])
        call.cancel()
        await asyncio.wait_for(fleet.picker.cluster.drain(), 10.0)
        assert [end.outcome for end in fleet.of(Finished)] == ["cancelled"]

    over_grpc(scenario)


def test_a_port_that_is_taken_is_refused() -> None:
    async def scenario(fleet: Fleet, channel: grpc.aio.Channel) -> None:
        first, second = server_of(fleet.picker), server_of(fleet.picker)
        config = load({"servers": [f"http://{ENDPOINTS[0]}"], "port": 0}, [])
        port = bind(first, config)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*give another --listen"):
            bind(second, config.model_copy(update={"port": port}))
        for server in (first, second):
            await server.stop(None)

    over_grpc(scenario)


def over_grpc(scenario: Callable[[Fleet, grpc.aio.Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        async with fleet_of(WallClock(), settings={}) as fleet:
            server = server_of(fleet.picker)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    await scenario(fleet, channel)
            finally:
                await server.stop(None)

    run_strict(main())


# --------------------------------------------------------------------------- placing


@pytest.mark.parametrize("router", ["least_loaded", "lmetric", "round_robin"])
@on(picking, "router")
async def test_requests_spread_over_the_servers_and_are_counted_there(fleet: Fleet) -> None:
    streams = [fleet.sends() for _ in range(6)]
    endpoints = [await stream.endpoint() for stream in streams]
    assert Counter(endpoints) == dict.fromkeys(ENDPOINTS, 3)
    assert fleet.here() == dict.fromkeys(ENDPOINTS, 3)
    await asyncio.gather(*[one.serves(end) for one, end in zip(streams, endpoints, strict=True)])
    await after(fleet, 0.5)
    assert fleet.here() == dict.fromkeys(ENDPOINTS, 0)
    assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 4)] * 6
    assert sum([event.tokens for event in fleet.of(Tokens)]) == 24


@pytest.mark.parametrize("router", ["power_of_two", "random", "polyserve"])
def test_every_router_that_needs_no_link_places_by_step_times_that_are_configured(router: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        streams = [fleet.sends(service_tier="chat") for _ in range(4)]
        endpoints = [await stream.endpoint() for stream in streams]
        assert set(endpoints) <= ALL
        await asyncio.gather(*[one.serves(end) for one, end in zip(streams, endpoints, strict=True)])
        await after(fleet, 0.5)
        assert [end.outcome for end in fleet.of(Finished)] == ["completed"] * 4

    policy = router if router == "polyserve" else "edf"
    picking(scenario, policy=policy, router=router, latency={"kind": "affine", "k": [0.0, 0.0], "b": [0.1, 0.0]})


def test_a_router_that_needs_more_than_is_known_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="needs step_times, which replica 'r0' lacks"):
        picking(nothing, policy="polyserve", router="polyserve")


async def nothing(fleet: Fleet) -> None:
    """No request comes."""


@on(picking)
async def test_choices_of_one_prompt_are_placed_together_with_the_session_of_a_header(fleet: Fleet) -> None:
    stream = fleet.sends(n=2, head={"x_session_id": "mine"})
    assert await stream.endpoint() in ALL
    assert [event.request.session for event in fleet.of(Offered)] == ["mine"] * 2
    assert len({event.replica for event in fleet.of(Placed)}) == 1
    await stream.closes()


@on(picking)
async def test_a_body_passes_as_it_came_in_pieces_and_trailers_behind_it(fleet: Fleet) -> None:
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "ö" * 80_000}]}).encode()
    stream = Envoy(fleet)
    stream.shows(request_head())
    for at in range(0, len(body), 16_384):
        stream.shows(wire(4, part(body[at : at + 16_384])))
    stream.shows(wire(6, wire(1, b"")))
    pieces = [body[at : at + 62_000] for at in range(0, len(body), 62_000)]
    answers = await stream.answered(len(pieces) + 2)
    assert answers[1:-1] == [passed(3, piece, last=False) for piece in pieces]
    assert answers[-1] == wire(5, b"")
    stream.shows(wire(3, head({":status": "200", "content-type": "application/json"})))
    whole = b'{"choices":[{}],"usage":{"prompt_tokens":9,"completion_tokens":3}}'
    stream.shows(wire(5, part(whole)))
    stream.shows(wire(7, wire(1, b"")))
    await stream.closes()
    assert stream.answers[-2:] == [passed(4, whole, last=False), wire(6, b"")]
    await after(fleet, 0.5)
    assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 3)]


@on(picking)
async def test_what_generates_nothing_goes_to_the_servers_in_turn(fleet: Fleet) -> None:
    streams = [Envoy(fleet) for _ in range(4)]
    for stream in streams:
        stream.shows(request_head("/v1/models", "GET", last=True))
        stream.shows(wire(3, head({":status": "204"}, last=True)))
        await stream.closes()
        assert len(stream.answers) == 2
    assert Counter([await stream.endpoint() for stream in streams]) == dict.fromkeys(ENDPOINTS, 2)
    assert fleet.of(Offered) == []


# --------------------------------------------------------------------------- candidates, and where it went


@pytest.mark.parametrize(
    "subset", [[ENDPOINTS[1]], ENDPOINTS[1], f"10.9.9.9:1, {ENDPOINTS[1]}", ["10.0.0.2"], ["10.9.9.9:1", ENDPOINTS[1]]]
)
@on(picking)
async def test_only_candidates_are_picked(fleet: Fleet, subset: Any) -> None:
    hint = metadata(**{"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": subset}})
    streams = [fleet.sends(metadata=hint) for _ in range(3)] + [fleet.sends()]
    assert [await stream.endpoint() for stream in streams] == [ENDPOINTS[1]] * 3 + [ENDPOINTS[0]]
    for stream in streams:
        await stream.closes()


@pytest.mark.parametrize("subset", [[], "", ["10.9.9.9:8000"], ["10.0.0.2:8001"], [["10.0.0.2:8000"]]])
@on(picking)
async def test_without_a_known_candidate_it_is_a_503(fleet: Fleet, subset: Any) -> None:
    hint = metadata(**{"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": subset}})
    status, _, error = await fleet.sends(metadata=hint).error()
    assert (status, error["code"]) == (503, "no_server")


@on(picking)
async def test_a_request_counts_where_it_was_served(fleet: Fleet) -> None:
    stream = fleet.sends()
    picked = await stream.endpoint()
    other = next(end for end in ENDPOINTS if end != picked)
    assert fleet.here() == {picked: 1, other: 0}
    served = metadata(envoy__lb={"x-gateway-destination-endpoint-served": other})
    stream.shows(wire(3, head({":status": "200", "content-type": "text/event-stream"})) + served)
    stream.shows(wire(5, part(CHUNKS[1])))
    await after(fleet, 0.1)
    assert fleet.here() == {picked: 0, other: 1}
    assert [event.id for event in fleet.of(HandedOff)] == [fleet.of(Offered)[0].id]
    for at in (2, 3):
        stream.shows(wire(5, part(CHUNKS[at], last=at == 3)))
    await stream.closes()
    await after(fleet, 0.1)
    assert [(end.outcome, end.output) for end in fleet.of(Finished)] == [("completed", 3)]


@on(picking)
async def test_an_endpoint_that_is_no_server_of_ours_changes_nothing(fleet: Fleet) -> None:
    stream = fleet.sends()
    picked = await stream.endpoint()
    served = metadata(envoy__lb={"x-gateway-destination-endpoint-served": "10.9.9.9:1"})
    stream.shows(wire(3, head({":status": "200", "content-type": "text/event-stream"})) + served)
    stream.shows(wire(5, part(CHUNKS[1])))
    await after(fleet, 0.1)
    assert fleet.here()[picked] == 1
    await stream.closes()


# --------------------------------------------------------------------------- refusals, waits and ends


@dataclass
class Router:
    """Holds every request until a time: this module is a policy."""

    needs: ClassVar[frozenset[str]] = frozenset()
    until: float = 0.0

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        if now < self.until:
            return Dispatch(wake_at=self.until)
        return Dispatch(place={seq.id: fleet[0].id for seq in held})


SOURCE = "a test"


@on(picking, router={"name": __name__, "until": 3.0})
async def test_request_is_held_until_it_is_placed(fleet: Fleet) -> None:
    stream = fleet.sends()
    await after(fleet, 2.9)
    assert stream.answers == []
    assert await stream.endpoint() == ENDPOINTS[0]
    assert fleet.clock.now() == 3.0
    await stream.serves(ENDPOINTS[0])
    await after(fleet, 0.5)


@pytest.mark.parametrize(("slo", "seconds"), [({"e2e_ms": 5000}, 5.0), ({"ttft_ms": 100}, 60.0), ({}, 60.0)])
@on(picking, router={"name": __name__, "until": 1e6})
async def test_request_is_held_no_longer_than_its_end_or_a_minute(
    fleet: Fleet, slo: dict[str, int], seconds: float
) -> None:
    began = fleet.clock.now()
    status, headers, error = await fleet.sends(slo=slo).error()
    assert fleet.clock.now() - began == pytest.approx(seconds)
    assert (status, error["code"], headers["x-rubato-reject-reason"]) == (429, "held-too-long", "held-too-long")
    assert int(headers["retry-after"]) >= 1


@on(picking, router={"name": __name__, "until": 9.0})
async def test_client_that_leaves_while_it_is_held_is_not_placed(fleet: Fleet) -> None:
    stream = fleet.sends()
    await after(fleet, 1.0)
    await stream.closes()
    assert stream.answers == []
    assert [end.outcome for end in fleet.of(Finished)] == ["cancelled"]
    assert fleet.of(Placed) == []


@on(picking)
async def test_without_a_server_it_is_not_ready_and_answers_503_until_one_is_back(fleet: Fleet) -> None:
    for server in fleet.servers.values():
        server.down = True
    await after(fleet, 10.0)
    assert not fleet.picker.is_ready
    assert (await fleet.sends().error())[0] == 503
    fleet.servers[f"http://{ENDPOINTS[1]}"].down = False
    await after(fleet, 3.0)
    assert fleet.picker.is_ready
    stream = fleet.sends()
    assert await stream.endpoint() == ENDPOINTS[1]
    await stream.closes()


@on(picking)
async def test_a_server_that_envoy_cannot_reach_is_given_a_rest(fleet: Fleet) -> None:
    only, failed = b"", ""
    for _ in range(2):  # one alone may itself be at fault
        first = fleet.sends(metadata=only)
        failed = await first.endpoint()
        only = metadata(**{"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [failed]}})
        first.shows(wire(3, head({":status": "503", "content-type": "text/plain"})))
        first.shows(wire(5, part(b"upstream connect error", last=True)))
        await first.closes()
        await after(fleet, 0.1)
    _, end = fleet.of(Finished)
    assert (end.outcome, "Envoy has sent it to" in end.reason) == ("failed", True)
    streams = [fleet.sends() for _ in range(2)]
    assert failed not in [await stream.endpoint() for stream in streams]
    streams.append(fleet.sends(metadata=only))
    assert await streams[-1].endpoint() == failed  # once it has rested
    assert 0.9 <= fleet.clock.now() - end.at <= 2.0
    for stream in streams:
        await stream.closes()


@on(picking)
async def test_a_server_that_is_lost_ends_its_requests_whose_rest_still_passes(fleet: Fleet) -> None:
    stream = fleet.sends()
    endpoint = await stream.endpoint()
    stream.shows(wire(3, head({":status": "200", "content-type": "text/event-stream"})))
    fleet.servers[f"http://{endpoint}"].down = True
    await after(fleet, 10.0)
    assert [end.outcome for end in fleet.of(Finished)] == ["failed"]
    assert fleet.here().keys() == ALL - {endpoint}
    stream.shows(wire(5, part(CHUNKS[1], last=True)))
    await stream.closes()
    assert stream.answers[-1] == passed(4, CHUNKS[1], last=True)


@on(picking)
async def test_a_stream_that_envoy_ends_early_is_cancelled(fleet: Fleet) -> None:
    stream = fleet.sends()
    endpoint = await stream.endpoint()
    stream.shows(wire(3, head({":status": "200", "content-type": "text/event-stream"})))
    stream.shows(wire(5, part(CHUNKS[1])))
    await after(fleet, 0.1)
    assert fleet.here()[endpoint] == 1
    await stream.closes()
    assert [end.outcome for end in fleet.of(Finished)] == ["cancelled"]
    assert fleet.here()[endpoint] == 0


@on(picking)
async def test_what_the_protocol_does_not_have_ends_the_stream(fleet: Fleet) -> None:
    early = Envoy(fleet)
    early.shows(wire(3, head({":status": "200"})))
    with pytest.raises(ProtocolError, match="response_headers came before the end of the request"):
        await early.task
    late = fleet.sends()
    await late.endpoint()
    late.shows(wire(4, part(b"more", last=True)))
    with pytest.raises(ProtocolError, match="request_body came after the end of the request"):
        await late.task


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000"), ("http://10.0.0.7/", "10.0.0.7:80"),
        ("https://10.0.0.7", "10.0.0.7:443"), ("http://[fd00::1]:8000", "[fd00::1]:8000"),
    ],
)  # fmt: skip
def test_an_endpoint_is_an_address_and_a_port(url: str, endpoint: str) -> None:
    assert endpoint_of(url) == endpoint


@pytest.mark.parametrize("url", ["http://vllm-0:8000", "http://localhost", "http://10.0.0.7:70000", "http://:80"])
def test_a_server_by_name_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give its IP address and port"):
        endpoint_of(url)


def test_a_server_under_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="has no servers under a path"):
        endpoint_of("http://10.0.0.7:8000/team-a")


def test_tenants_are_refused() -> None:
    with pytest.raises(ConfigError, match="an endpoint picker does not check keys"):
        picking(nothing, tenants={"me": {"keys": ["a-key-of-sixteen-letters"]}})


def test_spans_are_refused() -> None:
    with pytest.raises(ConfigError, match="an endpoint picker makes no spans"):
        picking(nothing, otlp_traces_endpoint="auto")


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no server: give --server URL"),
        (["--server", "http://10.0.0.7:8000", "--listen", "9002"], "--listen 9002: give an address and a port"),
        (["--server", "http://vllm-0:8000"], "give its IP address and port"),
        (["--server", "http://127.0.0.1:1"], "is not there"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["epp", *words]) == 2
    assert said in capfd.readouterr().err
