"""What goes on all the time beside the good tenants of a gateway: poison, many choices, large bodies, calls that are
passed through, strangers at the link, and a data plane that asks the picker over the same servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Coroutine
from random import Random
from typing import Any
from uuid import uuid4

import aiohttp
import grpc
import zmq
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse

from tests.serving.test_epp import head, part, request_head, wire
from tests.soak.clients import KEEP_ALIVE_S, LATE, Seen
from tests.soak.fleet import Fleet
from tests.soak.front import FAILURES
from tests.soak.server import KEYS

KEY = {"authorization": f"Bearer {KEYS['hostile']}"}
FAILED = (200, 429, 500, 502, 503)  # what a request may get at which servers fail; 200: an error ends its stream
MAX_BODY_BYTES = 4 << 20  # the gateway's default
PARTS = 20_000  # of a message
SERVICE = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

Attack = Callable[[Fleet, aiohttp.ClientSession, Random, Seen], Coroutine[Any, Any, None]]


def chat(content: object, **fields: object) -> dict[str, Any]:
    return {"model": "soak", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


async def harass(fleet: Fleet, seconds: float, rng: Random, seen: Seen) -> None:
    """All of it, each at its own pace, for so long and until all has ended."""
    until = time.monotonic() + seconds
    timeout, connector = (
        aiohttp.ClientTimeout(total=LATE),
        aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
    )
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:

        async def repeat(attack: Attack, every: float) -> None:
            while time.monotonic() < until:
                group.create_task(attack(fleet, http, rng, seen))
                await asyncio.sleep(every)

        attacks: list[tuple[Attack, float]] = [
            (poisoner(), 0.5), (many_choices, 2.0), (large_body, 5.0), (passed_through, 0.5), (stranger, 4.0),
            (picked, 0.5),
        ]  # fmt: skip
        for attack, every in attacks:
            group.create_task(repeat(attack, every))


async def _ask(
    fleet: Fleet, http: aiohttp.ClientSession, seen: Seen, what: str, body: dict[str, Any], may: Collection[int]
) -> None:
    """An answer that ends, with one of these statuses."""
    try:
        async with http.post(f"{fleet.url}/v1/chat/completions", json=body, headers=KEY) as answer:
            raw = await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.broken(f"{what}: no answer: {type(error).__name__} {error}")
        return
    seen.others[f"{what}: {answer.status}"] += 1
    if answer.status not in may:
        seen.broken(f"{what}: {answer.status} {raw[:200]!r}")


def poisoner() -> Attack:
    """Each kind of failure in turn; now and then a request that kills its server, or hangs it."""
    numbers = itertools.count(1)

    async def poison(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
        number = next(numbers)
        kinds = (*FAILURES, "broken")
        kind = "hangs" if number % 120 == 60 else "dies" if number % 40 == 20 else kinds[number % len(kinds)]
        await _ask(fleet, http, seen, f"poison that {kind}", chat(f"poison:{kind}", stream=True), FAILED)

    return poison


async def many_choices(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
    await _ask(fleet, http, seen, "16 choices", chat("hi", n=16, stream=rng.random() < 0.5), FAILED)


async def large_body(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
    """Around the most that is taken, and a message of many parts."""
    if rng.random() < 0.3:
        parts = [{"type": "text", "text": "a"}] * PARTS
        await _ask(fleet, http, seen, "many parts", chat(parts), (*FAILED, 400))
        return
    beyond = rng.choice((-100, 100))
    body = chat("hi", stream=True, filler="")
    body["filler"] = "x" * (MAX_BODY_BYTES + beyond - len(json.dumps(body)))
    await _ask(fleet, http, seen, f"a large body ({beyond:+d})", body, FAILED if beyond < 0 else (413,))


async def passed_through(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
    """Calls that are not ours, half of them slow; some clients do not wait."""
    path = rng.choice(("/v1/embeddings", "/v1/models/other", "/no/such/path")) + rng.choice(("", "?slow"))
    method = "POST" if "embeddings" in path else "GET"
    what = "passed through"
    try:
        async with (
            asyncio.timeout(rng.choice((0.05, 1.0, 10.0))),
            http.request(method, fleet.url + path, headers=KEY, json={"input": "hi"}) as answer,
        ):
            await answer.read()
            what += f": {answer.status}"
            if answer.status not in ((403,) if path.startswith("/no") else (404, 502, 503)):
                seen.broken(what)
    except TimeoutError:
        what += ": its client left"
    except aiohttp.ClientError as error:  # a server was killed meanwhile
        what += f": {type(error).__name__}"
    seen.others[what] += 1


async def stranger(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
    """A peer without the token at the link of some engine core."""
    kind = rng.choice(("frames", "flood", "oversized", "wrong token", "bytes"))
    port = rng.choice([stub.link for stub in fleet.stubs if stub.link >= 0])
    seen.others[f"stranger: {kind}"] += 1
    if kind == "bytes":
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rng.randbytes(10_000))
            await asyncio.sleep(1.0)
            writer.close()
        return
    hello = json.dumps({"kind": "hello", "protocol": 1, "token": "wrong", "gateway": "x", "asked": 0}).encode()
    messages = {
        "frames": [[rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(5))] for _ in range(200)],
        "flood": [[b'{"kind":"ping"}']] * 3000,
        "oversized": [[b'{"kind":[' + b"[]," * 4_000_000 + b"0]}"]],
        "wrong token": [[hello]] * 100,
    }[kind]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for message in messages:
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(message or [b""], zmq.NOBLOCK)
        await asyncio.sleep(2.0)


# --------------------------------------------------------------------------- the picker's data plane


async def picked(fleet: Fleet, http: aiohttp.ClientSession, rng: Random, seen: Seen) -> None:
    """One HTTP request as Envoy's filter has it: the picker says where it goes, and is shown what comes back."""
    kind = rng.choice(("whole",) * 5 + ("stalls", "leaves", "leaves its response", "bytes", "poison"))
    body = json.dumps(chat("poison:500" if kind == "poison" else "hi", stream=True)).encode()
    at = f"{fleet.picker.host}:{fleet.picker.port}"
    what = "data plane"
    async with grpc.aio.insecure_channel(at, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(SERVICE)()
        try:
            async with asyncio.timeout(LATE):
                await call.write(request_head() if kind != "bytes" else rng.randbytes(100))
                await call.write(wire(4, part(body[:20])))
                if kind == "leaves":
                    call.cancel()
                    return
                if kind != "stalls":  # else the picker ends it in time
                    await call.write(wire(4, part(body[20:], last=True)))
                first = ProcessingResponse.parse(await call.read())
                if first.dynamic_metadata is None:
                    assert first.immediate_response is not None
                    assert first.immediate_response.status is not None
                    status = int(first.immediate_response.status.code)
                    what += f" ({kind}): {status}"
                    if kind == "stalls" and status != 408:
                        seen.broken(what)
                else:
                    endpoint = str(first.dynamic_metadata.to_dict()["envoy.lb"]["x-gateway-destination-endpoint"])
                    await _show(call, http, endpoint, body, leaves=kind == "leaves its response")
                    what += f" ({kind}): picked"
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError, asyncio.InvalidStateError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
            what += f" ({kind}): {code}"
            if kind in ("whole", "poison"):
                seen.broken(what)
        except (aiohttp.ClientError, OSError) as error:  # its server failed at it
            what += f" ({kind}): {type(error).__name__}"
        except TimeoutError:
            seen.broken(f"{what} ({kind}): it hangs")
    seen.others[what] += 1


async def _show(call: Any, http: aiohttp.ClientSession, endpoint: str, body: bytes, *, leaves: bool) -> None:
    """Have the server answer, and show that. Raises what that raises."""

    async def drop() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    dropping = asyncio.create_task(drop())
    headers, timeout = {"x-request-id": uuid4().hex}, aiohttp.ClientTimeout(total=20.0)
    try:
        async with http.post(
            f"http://{endpoint}/v1/chat/completions", data=body, headers=headers, timeout=timeout
        ) as answer:
            await call.write(wire(3, head({":status": str(answer.status), "content-type": answer.content_type})))
            async for data in answer.content.iter_any():
                await call.write(wire(5, part(data)))
                if leaves:
                    call.cancel()
                    return
        await call.write(wire(5, part(b"", last=True)))
        await call.done_writing()
        await dropping
    except TimeoutError:  # a stream without an end: the client leaves
        call.cancel()
    finally:
        dropping.cancel()
