"""`rubato gateway` over two stub servers, all in processes of their own: one is killed, and clients do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import openai
import pytest

from rubato.core.events import Finished
from tests.processes.conftest import ROOT, STOP_SECONDS, Server, Start

REQUESTS, OUTPUT = 8, 90  # of each form; tokens, one each 10 ms


@dataclass
class Stub:
    process: subprocess.Popen[bytes]
    url: str


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    """Two of them, ended when the test is."""
    with ExitStack() as stack:
        processes = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.stubs", "--step", "0.01"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            )
            stack.callback(process.wait, STOP_SECONDS)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            processes.append(process)
        made = []
        for process in processes:
            assert process.stdout is not None
            made.append(Stub(process, f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"))
        yield made


async def ask(url: str, stub: Stub) -> tuple[list[tuple[str, str, int, Any]], list[Any]]:
    """Streams and whole answers at once, and in the middle of them a server is killed. Of each stream its text, why it
    ended, how many ids it had and its verdict; and the answers."""
    halfway = asyncio.Event()

    async def stream(client: openai.AsyncOpenAI, chat: bool) -> tuple[str, str, int, Any]:
        said: list[str] = []
        ids, end, verdict = set(), "", None
        if chat:
            chunks: Any = await client.chat.completions.create(
                model="stub", messages=[{"role": "user", "content": "hi"}], max_tokens=OUTPUT, stream=True
            )
        else:
            chunks = await client.completions.create(model="stub", prompt="abc", max_tokens=OUTPUT, stream=True)
        async for chunk in chunks:
            choice = chunk.choices[0]
            said.append((choice.delta.content if chat else choice.text) or "")
            ids.add(chunk.id)
            end = choice.finish_reason or end
            verdict = getattr(chunk, "rubato", verdict)
            if len(said) > OUTPUT // 3:
                halfway.set()
        return "".join(said), end, len(ids), verdict

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(model="stub", prompt="abc", max_tokens=OUTPUT)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        streams = [asyncio.create_task(stream(client, chat)) for _ in range(REQUESTS) for chat in (True, False)]
        answers = [asyncio.create_task(whole(client)) for _ in range(REQUESTS)]
        await halfway.wait()
        stub.process.kill()
        return await asyncio.gather(*streams), await asyncio.gather(*answers)


def test_a_killed_server_costs_no_request(start: Start, stubs: list[Stub]) -> None:
    gateway = start(command="gateway", servers=[stub.url for stub in stubs], policy={"name": "edf"})
    assert gateway.metrics()("rubato_server_linked") == 2
    streams, answers = asyncio.run(ask(gateway.url, stubs[0]))
    texts = {text for text, *_ in streams} | {answer.choices[0].text for answer in answers}
    assert len(texts) == 1  # nothing twice, nothing missing
    assert len(texts.pop().split()) == OUTPUT
    assert {(end, ids) for _, end, ids, _ in streams} == {("length", 1)}
    assert all(verdict["met"] for *_, verdict in streams)
    assert {answer.usage.completion_tokens for answer in answers} == {OUTPUT}
    gateway.wait_until(lambda value: value("rubato_server_linked") == 1)
    value = gateway.metrics()
    assert value("rubato_requests_in_flight") == 0
    assert 0 < value("rubato_streams_continued_total") < value("rubato_requests_placed_again_total") < 3 * REQUESTS
    assert httpx2.get(f"{gateway.url}/health").status_code == 200
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        last = client.completions.create(model="stub", prompt="abc", max_tokens=OUTPUT, stream=True)
        next(iter(last))
        gateway.process.send_signal(15)  # it drains: what runs goes on to its end
        assert [chunk.choices[0].finish_reason for chunk in last][-1] == "length"
    assert gateway.end(None) == 0
    ends = [event for event in gateway.events() if isinstance(event, Finished)]
    assert Counter(event.outcome for event in ends) == {"completed": 3 * REQUESTS + 1}
    assert {event.output for event in ends} == {OUTPUT}


CLIENTS = 500  # at the same moment, a connection each
LARGE = "x" * (3 << 20)
TOKENS = 20


@dataclass
class Seen:
    """By clients. answered: by status; wrong: what came of streams that are not all of their text and one end; left:
    how many have left a stream; health: by status."""

    answered: Counter[int] = field(default_factory=Counter)
    errors: list[tuple[int, Any]] = field(default_factory=list)
    wrong: list[bytes] = field(default_factory=list)
    left: int = 0
    health: Counter[int] = field(default_factory=Counter)


def text_of(stream: bytes) -> str:
    """Of a whole stream of one choice; empty where it is not whole."""
    if stream.count(b"data: [DONE]\n\n") != 1 or not stream.endswith(b"data: [DONE]\n\n"):
        return ""
    chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def stream_all_at_once(url: str, expected: str) -> Seen:
    """20 of them send 3 MB, half of which are prompts that no server takes; 50 leave once they have the head."""
    seen = Seen()
    body = {"model": "stub", "prompt": "abc", "max_tokens": TOKENS, "stream": True}

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        large = {"user": LARGE} if number % 50 else {"prompt": LARGE}
        sent = json.dumps({**body, **(large if number % 25 == 0 else {})}).encode()
        async with http.post(f"{url}/v1/completions", data=sent) as response:
            seen.answered[response.status] += 1
            if response.status != 200:
                seen.errors.append((response.status, (await response.json())["error"]))
            elif number % 10 == 1:
                seen.left += 1
                response.close()
            elif text_of(raw := await response.read()) != expected:
                seen.wrong.append(raw)

    async def ask_for_health(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.get(f"{url}/health") as response:
                seen.health[response.status] += 1
            await asyncio.sleep(0.05)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120.0)) as http:
        watching = asyncio.create_task(ask_for_health(http))
        await asyncio.gather(*(client(http, number) for number in range(CLIENTS)))
        watching.cancel()
    return seen


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.full
@pytest.mark.parametrize("most", [None, 300])
def test_five_hundred_streams_at_once(start: Start, stubs: list[Stub], most: int | None) -> None:
    bound = {} if most is None else {"max_in_flight": most}
    gateway = start(command="gateway", servers=[stub.url for stub in stubs], policy={"name": "edf"}, **bound)
    body = {"model": "stub", "prompt": "abc", "max_tokens": TOKENS}
    first = httpx2.post(f"{gateway.url}/v1/completions", json=body)  # what is loaded at the first request is loaded
    expected = first.json()["choices"][0]["text"]
    assert len(expected.split()) == TOKENS
    before = descriptors(gateway)
    seen = asyncio.run(stream_all_at_once(gateway.url, expected))
    assert not seen.wrong
    assert seen.answered.total() == CLIENTS
    assert set(seen.answered) <= {200, 400, 429}, Counter(map(str, seen.errors))
    errors = {(status, error["code"]) for status, error in seen.errors}
    assert errors <= {(400, "context_length_exceeded"), *([(429, "rejected-saturated")] if most else [])}
    assert most or seen.answered[400] == 10
    assert set(seen.health) == {200}
    gateway.wait_until(lambda value: value("rubato_requests_in_flight") == 0)
    value = gateway.metrics()
    offered = CLIENTS + 1 - seen.answered[400]
    assert value("rubato_requests_offered_total") == value("rubato_requests_finished_total") == offered
    refused = seen.answered[429]
    assert value("rubato_requests_finished_total", outcome="refused") == refused
    ended = [value("rubato_requests_finished_total", outcome=outcome) for outcome in ("completed", "cancelled")]
    assert sum(ended) == offered - refused
    assert ended[1] <= seen.left  # who leaves a stream may be too late
    deadline = time.monotonic() + 30.0
    while descriptors(gateway) > before + 8:  # connections to servers are kept for some seconds
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert gateway.end() == 0
    assert gateway.log.count("reason=rejected-saturated") == seen.answered[429]


async def stream_where_there_is_room(url: str, clients: int) -> Counter[tuple[int, int]]:
    """By status and number of ends; (0, 0): the connection was refused."""
    found: Counter[tuple[int, int]] = Counter()
    body = {"model": "stub", "prompt": "abc", "max_tokens": TOKENS, "stream": True}

    async def client(http: aiohttp.ClientSession) -> None:
        try:
            async with http.post(f"{url}/v1/completions", json=body) as response:
                found[response.status, (await response.read()).count(b"data: [DONE]\n\n")] += 1
        except aiohttp.ClientError:
            found[0, 0] += 1

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60.0)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return found


@pytest.mark.full
def test_more_clients_than_descriptors_cost_no_server_and_no_stream(start: Start, stubs: list[Stub]) -> None:
    """Each client takes two: a gateway without one for its servers would think these lost."""
    servers = [stub.url for stub in stubs]
    gateway = start(command="gateway", servers=servers, policy={"name": "edf"}, descriptors=540)
    found = asyncio.run(stream_where_there_is_room(gateway.url, 400))
    assert found[200, 1] + found[0, 0] == 400
    assert found[200, 1] > 0
    gateway.wait_until(lambda value: value("rubato_requests_in_flight") == 0)
    value = gateway.metrics()
    assert value("rubato_requests_finished_total") == found[200, 1]
    assert (value("rubato_requests_placed_again_total"), value("rubato_server_linked")) == (0, 2)
    assert not found[0, 0] or "max_connections (206) reached" in gateway.log
