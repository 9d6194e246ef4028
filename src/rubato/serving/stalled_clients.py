"""Stalled clients: a connection whose client neither reads nor sends what it should is cut off.

uvicorn waits for ever for a client that does not read its answer, or does not finish its request. Its request would go
on, its buffers and its file descriptor stay. Here the write buffer is bounded by what the kernel holds (`SEND_BUFFER`)
and one piece more, and whoever makes no progress for `stall_seconds` is aborted: its request ends as cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SEND_BUFFER = 128 << 10  # bytes of a socket's send buffer; Linux would let it grow to megabytes a connection
CHECKS = 4  # looks per stall_seconds
BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)

log = logging.getLogger(__name__)


def stall_guard(stall_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with this patience."""

    class Patient(_StallGuard):
        stall = stall_seconds

    return Patient


class _StallGuard(HttpToolsProtocol):
    stall: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # The next piece is asked for only when the last one is gone, so that what is left shrinks or is stuck.
        transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)
        self._idle = 0  # looks without progress: not seconds, which may have passed while the loop was busy
        self._left = (0, 0)
        self._check = self.loop.call_later(self.stall / CHECKS, self._cut_off_if_stalled)

    def data_received(self, data: bytes) -> None:
        self._idle = 0
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def _cut_off_if_stalled(self) -> None:
        left = (self.transport.get_write_buffer_size(), self._acknowledged())
        stuck = left == self._left and (left[0] > 0 or self._clients_turn())
        self._idle = self._idle + 1 if stuck else 0
        self._left = left
        if self._idle >= CHECKS:
            log.info("a client stalled for %.1f s: cut off", self.stall)
            self.transport.abort()
            return
        self._check = self.loop.call_later(self.stall / CHECKS, self._cut_off_if_stalled)

    def _acknowledged(self) -> int:
        """Bytes that the client's kernel has taken, ever. Linux lets us write again only when a third of the buffer
        is free, long after a slow reader took something. Elsewhere 0: then only what is written is seen."""
        if not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
            return 0
        raw = self.transport.get_extra_info("socket")
        try:
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
        except OSError:  # it is being closed
            return 0
        return int.from_bytes(info[BYTES_ACKED:], sys.byteorder)

    def _clients_turn(self) -> bool:
        """Whether a request is to come, or the rest of one. Between requests uvicorn's own timer runs."""
        if self.timeout_keep_alive_task is not None or self.flow.read_paused:
            return False
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body
