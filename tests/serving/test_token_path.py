"""Streams whose tokens pass in one call: the same bytes, counts and ends as by the long way."""

from __future__ import annotations

import re

import numpy as np
import orjson
import pytest

from rubato.core.events import Finished, Tokens
from rubato.fleet.token_path import TokenPath
from rubato.serving.asgi_client import WRITER_KEY
from tests.kit import on
from tests.kit.asgi import Answer, call_asgi
from tests.kit.gateways import Fleet, gateway

BODY = {"model": "stub", "prompt": [1, 2, 3], "stream": True, "service_tier": "chat"}


class Connection(Answer):
    """A client's connection (`asgi_client.Writer`). direct: parts that came past ASGI; body: all that came."""

    flow = None

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.direct.append(data)
        self.body += data

    async def ask(self, fleet: Fleet, tokens: int, *, directly: bool = True) -> bytes:
        """The body of a stream, without what differs between two of them."""
        fields = orjson.dumps({**BODY, "max_tokens": tokens})
        extensions = {"extensions": {WRITER_KEY: self}} if directly else {}
        await call_asgi(fleet.app, "/v1/completions", fields, into=self, **extensions)
        return re.sub(rb'("id":"cmpl-)[^"]*|("created":)\d+|("[a-z0-9_]+_ms":)[\d.e-]+', rb"\1\2\3", self.body)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("continues", [True, False])
def test_a_stream_written_directly_has_the_same_bytes_and_end(linked: bool, continues: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        connection = Connection()
        whole = await Connection().ask(fleet, 40, directly=False)
        assert whole == await connection.ask(fleet, 40)
        assert len(connection.direct) > 30
        first, second = fleet.of(Finished)
        assert (second.outcome, second.reason, second.output) == (first.outcome, first.reason, first.output)
        assert second.verdict.tpot == pytest.approx(first.verdict.tpot)

    gateway(scenario, servers=1, linked=linked, is_vllm=lambda: continues)


@on(gateway, servers=1, linked=False)
async def test_tokens_counted_on_the_way_are_told_of_once_with_their_times(fleet: Fleet) -> None:
    await Connection().ask(fleet, 40)
    told = fleet.of(Tokens)
    times = [at for event in told for at in event.times]
    assert sum(event.tokens for event in told) == len(times) == 40
    assert np.diff(times) == pytest.approx(np.full(39, 0.1))
    assert len(told) < 8  # several at once
    assert all(0 <= event.at - event.times[0] < 1.2 for event in told)
    assert [type(event) for event in fleet.events].index(Finished) > fleet.events.index(told[-1])
    assert await fleet.metric("vllm:inter_token_latency_seconds_count") == 39
    assert await fleet.metric("vllm:inter_token_latency_seconds_sum") == pytest.approx(3.9)


@on(gateway, servers=1, linked=False)
async def test_a_view_shows_tokens_that_nobody_was_told_of(fleet: Fleet) -> None:
    (host,) = fleet.cluster.hosts.values()
    seen: list[tuple[int, int]] = []

    def look() -> None:
        told = sum(event.tokens for event in fleet.of(Tokens))
        seen.extend((seq.output, told) for seq in host.view().running)

    start = fleet.clock.now()
    for step in range(1, 8):
        fleet.clock.call_at(start + 0.1 * step + 0.05, 0, look)
    assert (await fleet.complete(stream=True, max_tokens=10)).status_code == 200
    assert [output for output, _ in seen] == list(range(1, len(seen) + 1))
    assert any(output > told for output, told in seen)


@pytest.mark.parametrize("linked", [True, False])
@on(gateway, "linked", servers=2)
async def test_a_stream_cut_on_the_way_goes_on_elsewhere_with_every_token(fleet: Fleet) -> None:
    fleet.servers[0].cut = 20
    raw = await Connection().ask(fleet, 40)
    assert raw.endswith(b"[DONE]\n\n")
    assert raw.count(b'"text":"') >= 40
    end = fleet.of(Finished)[-1]
    assert (end.outcome, end.output) == ("completed", 40)


def test_nothing_passes_once_the_trip_has_changed() -> None:
    class Reader:
        def is_like_before(self, data: bytes) -> bool:
            return True

    class Replica:
        is_linked = True

    slow: list[bytes] = []
    path, client = TokenPath(Replica(), Reader(), slow.append, None), Connection()  # type: ignore[arg-type]
    path.take(b"a")
    path.writer = client
    path.take(b"b")
    Replica.is_linked = False  # and where its tokens are counted is not known yet
    path.take(b"c")
    path.writer = None
    path.take(b"d")
    assert (slow, client.direct, path.passed_tokens) == ([b"a", b"c", b"d"], [b"b"], 1)
