"""A gateway's socket to an engine core, over ZeroMQ itself."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import zmq

from rubato.core.events import Finished
from rubato.core.plan import Shape
from rubato.core.request import Request, Stage
from rubato.core.slo import judge
from rubato.fleet.link_reader import LinkReader
from rubato.fleet.server_link import ZmqLink
from rubato.wire.messages import (
    Beat,
    OfferedRow,
    Ping,
    PresentRow,
    Report,
    Row,
    Snapshot,
    decode_from_core,
    encode,
    event_row,
)


def test_what_is_sent_takes_no_message_from_who_waits_for_one() -> None:
    """A send takes in what has come to the socket: without a word to the loop, its receiver would wait for ever."""

    async def main() -> None:
        core: Any = zmq.Context.instance().socket(zmq.ROUTER)
        link = ZmqLink(f"tcp://127.0.0.1:{core.bind_to_random_port('tcp://127.0.0.1')}")
        try:
            for number in range(3):
                link.send(Ping(0.0))
                who, _ = await asyncio.to_thread(core.recv_multipart)
                waiting = asyncio.ensure_future(link.receive())
                await asyncio.sleep(0.02)
                core.send_multipart([who, encode(Beat(float(number), 0.0, 0.0))])
                time.sleep(0.05)  # noqa: ASYNC251 - the loop is busy, and the message has come
                link.send(Ping(0.0))
                assert await asyncio.wait_for(waiting, 5.0) == Beat(float(number), 0.0, 0.0)
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
                link.send(Ping(0.0))
        finally:
            link.close()

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_the_end_of_one_try_is_not_taken_for_that_of_the_next() -> None:
    """The server of both is the same: it may say of the first one that it was aborted when the second is on its way."""
    tries = {"a": 1}

    def own(name: str) -> str:
        id, _, number = name.rpartition("~")
        return id if str(tries.get(id)) == number else ""

    def offered(engines: str, name: str) -> OfferedRow:
        return OfferedRow(1.0, Request(engines, (Stage(5),), 0.0), name)

    def report(number: int, *events: Row, **more: Any) -> Report:
        return decode_from_core(encode(Report(number, 1.0, 9, events, **more)))  # type: ignore[return-value]

    reader = LinkReader("r0", own)
    reader.read(Snapshot(0, 1.0, 10))
    first = reader.read(report(1, offered("e1", "a~1"), shape=Shape(5, 1, 5, 5), busy=2.0, tokens={"e1": 5}))
    assert first is not None
    assert [event.id for event in first.events] == ["a"]
    tries["a"] = 2
    reader.detach_previous_try("a")
    end = Finished(
        1.5, "e1", "cancelled", "aborted", judge(Request("e1", (Stage(5),), 0.0), [], "cancelled", "deadline")
    )
    both = reader.read(report(2, event_row(end), offered("e2", "a~2"), offered("e3", "a~1"), held={"e2": (5, 1)}))
    assert both is not None
    assert [event.id for event in both.events] == ["e1", "a", "e3"]
    assert both.kv_usage["a"].blocks == 1
    seqs = [
        PresentRow(offered(e, name).request, name, "running", True, False, 5, 1)
        for e, name in (("e3", "a~1"), ("e2", "a~2"))
    ]
    again = reader.read(Snapshot(3, 1.0, 10, seqs))
    assert again is not None
    assert again.snapshot is not None
    assert [one.request.id for one in again.snapshot] == ["e3", "a"]


def test_links_that_are_closed_twice_leave_nothing_open() -> None:
    async def main() -> list[int]:
        found = []
        for _ in range(4):
            link = ZmqLink("tcp://127.0.0.1:9")
            await asyncio.sleep(0.02)
            assert not link.is_refused
            link.close()
            link.close()
            await asyncio.sleep(0.1)
            found.append(len(os.listdir("/proc/self/fd")))
        return found

    first, *others = asyncio.run(main())
    assert others == [first] * 3
