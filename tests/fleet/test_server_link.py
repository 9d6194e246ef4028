"""A gateway's socket to an engine core, over ZeroMQ itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import zmq

from rubato.core.events import Finished, Offered
from rubato.core.link_messages import event_row, packed
from rubato.core.request import Request, Stage
from rubato.core.slo import judge
from rubato.fleet.link_reader import LinkReader
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


def test_the_end_of_one_try_is_not_taken_for_that_of_the_next() -> None:
    """The server of both is the same: it may say of the first one that it was aborted when the second is on its way."""
    tries = {"a": 1}

    def own(name: str) -> str:
        id, _, number = name.rpartition("~")
        return id if str(tries.get(id)) == number else ""

    def offered(engines: str, name: str) -> list[Any]:
        event = Offered(1.0, engines, Request(engines, (Stage(5),), 0.0))
        return ["Offered", {"at": 1.0, "id": engines, "request": event.request}, name]

    def report(number: int, *events: list[Any], **more: Any) -> dict[str, Any]:
        return {"kind": "report", "n": number, "at": 1.0, "kv": 9, "events": list(events), **more}

    reader = LinkReader("r0", own)
    reader.read({"kind": "snapshot", "n": 0, "at": 1.0, "kv": 10, "seqs": [], "batches": []})
    first = reader.read(report(1, offered("e1", "a~1"), shape=(5, 1, 5, 5, 0, 0, 0, 0, 0), busy=2.0, tokens={"e1": 5}))
    assert first is not None
    assert [event.id for event in first.events] == ["a"]
    tries["a"] = 2
    reader.disown("a")
    end = Finished(
        1.5, "e1", "cancelled", "aborted", judge(Request("e1", (Stage(5),), 0.0), [], "cancelled", "deadline")
    )
    both = reader.read(report(2, event_row(end), offered("e2", "a~2"), offered("e3", "a~1"), held={"e2": (5, 1)}))
    assert both is not None
    assert [event.id for event in both.events] == ["e1", "a", "e3"]
    assert both.held["a"].blocks == 1
    state = ("running", True, False, 5, 1)
    seqs = [[offered(e, name)[1], name, state, [], []] for e, name in (("e3", "a~1"), ("e2", "a~2"))]
    again = reader.read({"kind": "snapshot", "n": 3, "at": 1.0, "kv": 10, "seqs": seqs, "batches": []})
    assert again is not None
    assert again.there is not None
    assert [one.request.id for one in again.there] == ["e3", "a"]
