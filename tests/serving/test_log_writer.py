"""The log's own thread: nothing that logs waits, what is dropped is counted and said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import IO

import pytest

from rubato.serving.logs import LogWriter

SECONDS = 20.0  # after which a test is not merely slow
LINES = 5000


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], int]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        yield reader, write


def logger(writer: LogWriter) -> logging.Logger:
    writer.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    own = logging.Logger("test")  # outside of the tree that pytest listens to
    own.addHandler(writer)
    return own


def test_lines_come_in_order_and_whole(pipe: tuple[IO[bytes], int]) -> None:
    reader, write = pipe
    writer = LogWriter(write)
    log = logger(writer)
    values = [1]
    log.info("first %s", values)
    values.append(2)  # the line says what was so when it was logged
    try:
        raise RuntimeError("seen")
    except RuntimeError:
        log.exception("second")
    assert writer.drain(SECONDS)
    os.close(write)
    text = reader.read().decode()
    assert text.startswith("INFO first [1]\nERROR second\nTraceback")
    assert text.endswith("RuntimeError: seen\n")
    assert writer.dropped == 0


def test_a_reader_that_does_not_read_holds_nothing_up(pipe: tuple[IO[bytes], int]) -> None:
    reader, write = pipe
    writer = LogWriter(write, max_queued_lines=10)
    log = logger(writer)
    logged = 0
    while writer.drain(0.2):  # a pipe takes 64 KiB
        assert logged < LINES
        log.info("line %05d %s", logged, "x" * 1000)
        logged += 1
    for _ in range(LINES):  # without the thread it would wait here for ever
        log.info("too much")
    assert writer.dropped == LINES - 10
    taken = [reader.readline() for _ in range(logged)]
    assert writer.drain(SECONDS)
    log.info("the reader is back")
    while b"the reader is back" not in taken[-1]:
        taken.append(reader.readline())
    assert writer.drain(SECONDS)
    (note,) = [line for line in taken if b"were dropped" in line]
    assert note == b"WARNING %d log lines were dropped: their reader did not keep up\n" % (LINES - 10)
    assert writer.dropped == LINES - 10
    os.close(write)


def test_a_line_that_cannot_be_made_costs_its_caller_nothing(pipe: tuple[IO[bytes], int]) -> None:
    reader, write = pipe
    writer = LogWriter(write)
    logger(writer).info("x %d", "a")
    assert writer.drain(SECONDS)
    os.close(write)
    assert reader.read().startswith(b"INFO 'x %d' with ('a',) (TypeError: ")


def test_a_reader_that_is_gone_costs_lines_only(pipe: tuple[IO[bytes], int]) -> None:
    reader, write = pipe
    reader.close()
    writer = LogWriter(write)
    log = logger(writer)
    for _ in range(3):
        log.info("nobody reads this")
    assert writer.drain(SECONDS)
    assert writer.dropped == 3
    os.close(write)
