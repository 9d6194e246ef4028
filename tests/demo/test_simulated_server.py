"""The simulated server as a client without a gateway sees it, and what it would have learnt of its own steps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import Any

import orjson
import pytest

from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.plan import NO_BATCH
from rubato.demo import simulated_server
from rubato.demo.simulated_api import CHAT, COMPLETIONS, SimulatedApi
from rubato.demo.simulated_core import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PROFILE
from rubato.demo.simulated_server import core_of, fit_model, parser
from rubato.fleet.server_probe import KV_USAGE, with_cache
from rubato.latency import profiles
from tests.kit import on_virtual_clock


def ask(method: str, path: str, body: Any = None) -> tuple[int, bytes, float]:
    """The status, the whole body, and the seconds it took."""

    async def main() -> tuple[int, bytes, float]:
        clock = VirtualClock()
        core = core_of(parser().parse_args(["--policy", "vllm"]), clock)
        await core.start()
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        reply, begin = SimulatedApi(core, "m").answer(method, path, {}, raw), clock.now()
        parts = [part async for part in _parts(reply)]
        await core.host.close()
        return reply.status, b"".join(parts), clock.now() - begin

    return run_virtual(main())


async def _parts(reply: Any) -> Any:
    while part := await reply.part():
        yield part


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "prompt", "output"),
    [
        (CHAT, {"messages": HI, "max_tokens": 4}, len("user: hi\n"), 4),
        (CHAT, {"messages": HI, "max_completion_tokens": 5}, len("user: hi\n"), 5),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, len("user: hi\n"), 128),
        (COMPLETIONS, {"prompt": "abc"}, 3, 16),
        (COMPLETIONS, {"prompt": [1, 2], "max_tokens": 2, "n": 3}, 2, 6),
    ],
)
def test_answer_as_a_whole_counts_tokens_and_takes_a_gpus_time(
    path: str, body: dict[str, Any], prompt: int, output: int
) -> None:
    status, raw, seconds = ask("POST", path, body)
    answer = orjson.loads(raw)
    assert status == 200
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    steps = output / len(answer["choices"])
    alone = profiles.load(PROFILE).model().step_time(NO_BATCH.with_entries([(1, 10)]))
    assert seconds == pytest.approx(steps * alone, rel=0.15)


def test_stream_counts_with_each_chunk_where_asked() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, raw, _ = ask("POST", CHAT, {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": options})
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"{"),
        (CHAT, {"messages": 5}),
        (CHAT, {}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}),
        (COMPLETIONS, {"prompt": "a" * 40_000}),
    ],
)
def test_body_that_cannot_be_served_is_a_400(path: str, body: Any) -> None:
    status, raw, _ = ask("POST", path, body)
    assert status == 400
    assert orjson.loads(raw)["error"]["message"]


def test_server_that_says_where_it_listens_can_be_reached_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that begins meanwhile leaves out who refuses its connection."""
    reached = []

    def connect_at_once(line: str, **_: Any) -> None:
        with socket.create_connection(("127.0.0.1", json.loads(line)["port"]), 1.0):
            reached.append(line)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(simulated_server, "print", connect_at_once, raising=False)
    monkeypatch.setattr("sys.argv", ["simulated_server", "--policy", "vllm", "--link", "-1"])
    simulated_server.main()
    assert len(reached) == 1


def test_metrics_say_what_a_gateway_without_the_link_reads() -> None:
    status, raw, _ = ask("GET", "/metrics")
    page = raw.decode()
    limits = profiles.load(PROFILE).limits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    assert status == 200
    assert KV_USAGE.findall(page) == ["0.000000"]
    found = with_cache(limits, page)
    assert (found.kv_blocks, found.block_size) == (limits.kv_blocks, limits.block_size)


@pytest.mark.parametrize(("seqs", "chunk"), [(1, 0), (40, 0), (200, 0), (30, 200), (10, 1800)])
def test_what_it_has_learnt_of_its_steps_is_near_the_profile(seqs: int, chunk: int) -> None:
    truth = profiles.load(PROFILE).model()
    shape = NO_BATCH.with_entries([(1, 1500)] * seqs + ([(chunk, 500)] if chunk else []))
    assert fit_model(truth, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS).step_time(shape) == pytest.approx(
        truth.step_time(shape), rel=0.1
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--profile", "llama-3.1-70b"], "no profile 'llama-3.1-70b'"),
        (["--policy", "edff"], "did you mean"),
        (["--policy", "rubato:speed=2"], "speed"),
        (["--policy", "smart_spec"], "draft"),
    ],
)
@on_virtual_clock
async def test_server_that_cannot_be_says_why(asked: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_of(parser().parse_args(asked), VirtualClock())
    await asyncio.sleep(0)
