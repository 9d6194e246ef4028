"""What stands before a stub server: bytes pass, but for answers that are lies and requests that are poison.

A lie breaks HTTP, the standard of server-sent events or OpenAI's API, or spells it in an unusual way that is legal.
Poison is a request at which every server fails; its prompt says how (`poison:KIND`).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
STREAM = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'"usage":{"prompt_tokens":1,"completion_tokens":1000000000}'
ERROR = b'data: {"error":{"message":"odd","type":"BadRequestError","code":500}}\n\ndata: [DONE]\n\n'
ENDLESS_BYTES = 8 << 20  # of what goes on for ever, beyond every bound of a gateway
POISON = re.compile(rb"poison:(\w+)")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _sized(body: bytes, size: int | None = None) -> bytes:
    return JSON + b"content-length: %d\r\n\r\n%b" % (len(body) if size is None else size, body)


# Answers of no server: `...` stands for a connection that stays open, and None for one that is reset.
Answer = tuple[bytes | None, ...]
WHOLE = b'{"id":"x","choices":[{"index":0,"message":{"content":"x"},"text":"x","finish_reason":"stop"}],' + USAGE + b"}"
HOLD = b"..."
ANYWHERE: dict[str, Answer] = {
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n",),
    "an endless head": (OK + (b"x-filler: %b\r\n" % (b"a" * 4000)) * (ENDLESS_BYTES // 4000), HOLD),
    "a body that is too short": (_sized(b'{"id":', 1000),),
    "a body that is too long": (_sized(b'{"data":[],"id":7}', 2), HOLD),
    "half a JSON": (_sized(b'{"choices":['),),
    "a list": (_sized(b"[]"),),
    "nulls": (_sized(b'{"choices":null,"usage":7,"data":null}'),),
    "bad UTF-8": (_sized(b'{"id":"\xff\xfe"}'),),
    "two answers": (_sized(WHOLE) * 2, HOLD),
    "a redirect": (b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",),
    "503": (b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno",),
    "closed": (None,),
}
TO_COMPLETIONS: dict[str, Answer] = {
    **ANYWHERE,
    "a claim of a billion tokens": (_sized(WHOLE),),
    "an empty stream": (STREAM + b"0\r\n\r\n",),
    "an endless event": (STREAM + chunk(b'data: {"a":"'), chunk(b"a" * ENDLESS_BYTES), HOLD),
}
TO_PROBES: dict[str, Answer] = {
    **ANYWHERE,
    "an empty page": (_sized(b""),),
    "no number": (_sized(b"vllm:kv_cache_usage_perc NaN\nvllm:cache_config_info{num_gpu_blocks=\"-1\"} x\n"),),
    "an endless page": (STREAM + chunk(b"vllm:kv_cache_usage_perc 0.5\n" * (ENDLESS_BYTES // 29)), HOLD),
}  # fmt: skip
PROBES = (b"/health", b"/v1/models", b"/metrics", b"/version", b"/rubato/link")
FAILURES: dict[str, Answer] = {
    **{code: (b"HTTP/1.1 %b X\r\ncontent-length: 20\r\n\r\n" % code.encode() + b'{"error":{"code":1}}',)
       for code in ("500", "501", "503")},
    "error": (STREAM + chunk(ERROR) + b"0\r\n\r\n",),
    "closed": (None,),
}  # fmt: skip

# What is done to each part of a stream that comes from the stub; a list: each of these is a part of its own.
Change = Callable[[bytes], bytes | list[bytes]]
DONE = b"data: [DONE]\n\n"
AGAIN = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"again"},"finish_reason":"stop"}]}\n\n'


def _commented(part: bytes) -> bytes:
    return re.sub(rb"(?m)^data: ", b": ping\n\nid: 7\nretry: 1\ndata:", part)


CHANGES: dict[str, Change] = {
    "CRLF": lambda part: part.replace(b"\n", b"\r\n"),
    "CR": lambda part: part.replace(b"\n", b"\r"),
    "comments and other fields": _commented,
    "byte by byte": lambda part: [part[at : at + 1] for at in range(len(part))],
    "-Infinity": lambda part: part.replace(b'"finish_reason":"', b'"logprobs":{"x":-Infinity},"finish_reason":"'),
    "bad UTF-8 in a chunk": lambda part: part.replace(b'"content":"', b'"content":"\xff\xfe'),
    "chunks that are no JSON": lambda part: b"data: {no\n\n" + part,
    "a claim of a billion tokens in a stream": lambda part: part.replace(
        DONE, b'data: {"id":"x","choices":[],' + USAGE + b"}\n\n" + DONE
    ),
    "a second answer": lambda part: part.replace(DONE, DONE + AGAIN + DONE),
    "no [DONE]": lambda part: part.replace(DONE, b""),
    "no end": lambda part: part.replace(DONE, b": ping\n\n"),
}


class Front:
    """Listens at `port`, in front of a server at `inner`. falls: told that a request is to kill or to hang the
    server; whether it does."""

    def __init__(self, port: int, inner: int, rng: Random, falls: Callable[[str], bool]) -> None:
        self._port, self._inner, self._rng, self._falls = port, inner, rng, falls
        self.lies = 0.0  # the share of answers
        self.told: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    def close(self) -> None:
        """As of a process that is gone: nobody listens, and all connections break."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        backend: asyncio.StreamWriter | None = None
        pump: asyncio.Task[None] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"(?i)\ncontent-length: (\d+)", head)
                request = head + (await reader.readexactly(int(size[1])) if size else b"")
                if await self._misbehaves(request, reader, writer):
                    return
                if backend is None:
                    source, backend = await asyncio.open_connection("127.0.0.1", self._inner)
                    pump = asyncio.create_task(_pump(source, writer))
                backend.write(request)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the last: at the end of it all
            pass
        finally:
            self._open.discard(writer)
            for one in (writer, backend):
                if one is not None:
                    one.close()
            if pump is not None:
                pump.cancel()

    async def _misbehaves(self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether it has, so that the connection is of no more use."""
        method, path, _ = request.split(b" ", 2)
        if (poison := POISON.search(request)) is not None:
            kind = poison[1].decode()
            self.told[f"poison: {kind}"] += 1
            if kind == "broken":
                await self._change(lambda part: [part, b""], request, reader, writer)
            elif kind in FAILURES:
                await _answer(FAILURES[kind], reader, writer)
            else:
                await _answer((HOLD,) if self._falls(kind) else FAILURES["500"], reader, writer)
            return True
        if b"slow" in path:
            await asyncio.sleep(3.0)
        if self._rng.random() >= self.lies:
            return False
        if method == b"POST" and b"completions" in path:
            kind = self._rng.choice([*TO_COMPLETIONS, *CHANGES])
        elif path in PROBES:
            kind = self._rng.choice(list(TO_PROBES))
        else:
            return False
        self.told[kind] += 1
        if kind in CHANGES:
            await self._change(CHANGES[kind], request, reader, writer)
        else:
            await _answer((TO_COMPLETIONS | TO_PROBES)[kind], reader, writer)
        return True

    async def _change(
        self, change: Change, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass an answer on with changes; what is empty after them breaks it off."""
        source, backend = await asyncio.open_connection("127.0.0.1", self._inner)
        left = asyncio.create_task(reader.read(1))
        left.add_done_callback(lambda _: backend.close())  # its client has left
        try:
            backend.write(request)
            head = await source.readuntil(b"\r\n\r\n")
            writer.write(head)
            async for part in _parts(head, source):
                changed = change(part)
                for one in changed if isinstance(changed, list) else [changed] if changed else []:
                    if not one:
                        writer.transport.abort()
                        return
                    writer.write(chunk(one) if b"chunked" in head else one)
                await writer.drain()
            if change is CHANGES["no end"]:
                await left
            elif b"chunked" in head:
                writer.write(b"0\r\n\r\n")
        finally:
            left.cancel()
            backend.close()


async def _answer(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for piece in answer:
        if piece is None:
            writer.transport.abort()
        elif piece == HOLD:
            await reader.read(1)
        else:
            writer.write(piece)
            await writer.drain()


async def _pump(source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


async def _parts(head: bytes, source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a body: chunks, or all of it."""
    if b"chunked" not in head:
        yield await source.read(-1)
        return
    while size := int(await source.readuntil(b"\r\n"), 16):
        yield (await source.readexactly(size + 2))[:-2]
