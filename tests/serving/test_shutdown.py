"""The end of a server is not put off, however often it is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from rubato.serving.logs import LogWriter
from rubato.serving.shutdown import CLOSE_TIMEOUT_S, Shutdown

DRAIN = 1000.0


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_limit_is_only_ever_brought_forward() -> None:
    async def main() -> list[float]:
        ending = Shutdown(DRAIN, LogWriter(os.open(os.devnull, os.O_WRONLY)))
        timers = []
        try:
            for _ in range(4):
                signal.raise_signal(signal.SIGTERM)
                timers.append(ending._timer)
            await asyncio.wait_for(ending.second_signal.wait(), 20)
            assert ending.first_signal.is_set()
        finally:
            for timer in timers:
                assert timer is not None
                timer.cancel()
        return [timer.interval for timer in dict.fromkeys(timers) if timer is not None]

    assert asyncio.run(main()) == [DRAIN + CLOSE_TIMEOUT_S, CLOSE_TIMEOUT_S]
