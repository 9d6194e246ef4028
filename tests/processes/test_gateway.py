"""`rubato gateway` over two stub servers, all in processes of their own: one is killed, and clients do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest

from rubato.core.events import Finished
from tests.processes.conftest import ROOT, STOP_SECONDS, Start

REQUESTS, OUTPUT = 8, 150  # of each form; tokens, one each 10 ms


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
