"""A gateway's socket to an engine core, over ZeroMQ itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import zmq

from rubato.core.link_messages import packed
from rubato.fleet.server_link import ZmqLink


def test_what_is_sent_takes_no_message_from_who_waits_for_one() -> None:
    """A send takes in what has come to the socket: without a word to the loop, its receiver would wait for ever."""

    async def main() -> None:
        core: Any = zmq.Context.instance().socket(zmq.ROUTER)
        link = ZmqLink(f"tcp://127.0.0.1:{core.bind_to_random_port('tcp://127.0.0.1')}")
        try:
            for number in range(3):
                link.send({"kind": "ping", "asked": 0.0})
                who, _ = await asyncio.to_thread(core.recv_multipart)
                waiting = asyncio.ensure_future(link.receive())
                await asyncio.sleep(0.02)
                core.send_multipart([who, packed({"kind": "beat", "number": number})])
                time.sleep(0.05)  # noqa: ASYNC251 - the loop is busy, and the message has come
                link.send({"kind": "ping", "asked": 0.0})
                assert (await asyncio.wait_for(waiting, 5.0))["number"] == number
                await asyncio.to_thread(core.recv_multipart)
        finally:
            link.close()
            core.close(linger=0)

    asyncio.run(main())


def test_what_there_is_no_room_for_is_lost() -> None:
    async def main() -> None:
        link = ZmqLink("tcp://127.0.0.1:1")  # nobody there
        try:
            for _ in range(10_100):
                link.send({"kind": "ping", "asked": 0.0})
        finally:
            link.close()

    asyncio.run(asyncio.wait_for(main(), 20.0))
