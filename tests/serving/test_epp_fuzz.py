"""The picker against streams that no data plane sends: seeded changes to the messages of right ones."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from rubato.core.clock import VirtualClock, run_virtual
from rubato.serving.epp_messages import ProtocolError
from rubato.serving.epp_server import _check_messages, _parse_message
from tests.serving.test_epp import CHAT, CHUNKS, Fleet, fleet_of, head, part, request_head, wire

STREAM = [
    request_head(),
    wire(4, part(json.dumps(CHAT).encode(), last=True)),
    wire(3, head({":status": "200", "content-type": "text/event-stream"})),
    *[wire(5, part(chunk)) for chunk in CHUNKS],
    wire(5, part(b"", last=True)),
    wire(7, wire(1, b"")),
]


def changed(random_: random.Random) -> list[bytes]:
    """A stream with one to three changes: a byte, an end cut off, more bytes, messages left out, doubled or moved."""
    messages = [bytearray(message) for message in STREAM]
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(len(messages))
        message = messages[at]
        where = random_.randrange(len(message)) if message else 0
        match random_.randrange(8):
            case 0:
                messages[at : at + 1] = [message, message]
            case 1 if len(messages) > 1:
                del messages[at]
            case 2 if at:
                messages[at - 1], messages[at] = message, messages[at - 1]
            case 3:
                del message[where:]
            case 4:
                message += random_.randbytes(random_.randrange(9))
            case _ if message:
                message[where] = random_.randrange(256)
    return [bytes(message) for message in messages]


@pytest.mark.parametrize(
    ("seed", "streams"), [(1, 300), *[pytest.param(seed, 3000, marks=pytest.mark.full) for seed in (2, 3)]]
)
def test_picker_given_changed_streams_ends_each_and_goes_on(
    seed: int, streams: int, caplog: pytest.LogCaptureFixture
) -> None:
    random_, ends = random.Random(seed), Counter[str]()

    async def one(fleet: Fleet) -> None:
        messages = changed(random_)

        async def come() -> AsyncIterator[ProcessingRequest | None]:
            for raw in messages:
                yield _parse_message(raw)
                await asyncio.sleep(0.001)

        async def write(answer: ProcessingResponse) -> None:
            assert bytes(answer)

        try:
            await asyncio.wait_for(fleet.picker.process(_check_messages(come()), write), 100.0)
            ends["answered"] += 1
        except ProtocolError:
            ends["protocol"] += 1

    async def main() -> None:
        async with fleet_of(VirtualClock(), settings={}) as fleet:
            for _ in range(streams):
                await one(fleet)
            await asyncio.sleep(10.0)
            assert fleet.picker.cluster.in_flight == 0
            stream = fleet.sends()
            await stream.serves(await stream.endpoint())

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert not caplog.records
    assert ends["answered"] > streams // 5
    assert ends["protocol"] > streams // 5
