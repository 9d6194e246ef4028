"""A body costs a door little more memory than its bytes, whatever is in it: each door in a process of its own, under a
memory limit (RLIMIT_AS)."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import pytest

from rubato.core.clock import run_virtual
from rubato.engines.vllm import link
from tests.doors.doors import DOORS, Door

SIZE = 4_000_000  # bytes of each body
FACTOR = 6  # of the body, that a door may take beyond what it has
SLACK = 12 << 20  # bytes of the allocator
# What playing the client and the servers takes, in bodies: two halves; the gateway's stub servers read what they get;
# the picker has the messages of its protocol, too.
CLIENT = {"server": 1, "gateway": 8, "middleware": 1, "picker": 8}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMOJI = "\U0001f600".encode()
HEAD = b'{"model":"MODEL","max_tokens":2,'
HELLO = HEAD + b'"messages":[{"role":"user","content":"hi"}],'


def _many(part: bytes) -> bytes:
    return b",".join([part] * (SIZE // (len(part) + 1)))


BODIES: dict[str, tuple[str, bytes, set[int]]] = {  # path, body, statuses that are right
    "objects in messages": (CHAT, HEAD + b'"messages":[' + _many(b'{"a":1}') + b"]}", {400}),
    "lists in an unknown field": (CHAT, HELLO + b'"metadata":[' + _many(b"[]") + b"]}", {400}),
    "token ids": (TEXT, HEAD + b'"prompt":[' + _many(b"300") + b"]}", {400}),
    "prompts of a letter": (TEXT, HEAD + b'"prompt":[' + _many(b'"a"') + b"]}", {400}),
    "fields": (CHAT, HELLO + b",".join([b'"%x":1' % number for number in range(SIZE // 10)]) + b"}", {400}),
    "tools": (CHAT, HELLO + b'"tools":[' + _many(b'{"type":"function","function":{"name":"f"}}') + b"]}", {400}),
    "a text": (TEXT, HEAD + b'"prompt":"' + b"abc," * (SIZE // 4) + b'"}', {200, 400}),
    "a text with one emoji": (TEXT, HEAD + b'"prompt":"' + b"abc," * (SIZE // 4) + EMOJI + b'"}', {200, 400}),
    "escapes": (TEXT, HEAD + b'"prompt":"' + b"\\u00e9" * (SIZE // 6) + b'"}', {200, 400}),
    "an image": (CHAT, HEAD + b'"messages":[{"role":"user","content":[{"type":"image_url",'
                 b'"image_url":{"url":"data:image/png;base64,' + b"QUJD" * (SIZE // 4) + b'"}}]}]}', {200, 400}),
    "nested lists": (CHAT, HELLO + b'"metadata":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}", {400}),
}  # fmt: skip


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


async def _ask_all(door: Any) -> dict[str, dict[str, float]]:
    found = {}
    async with door.opened({"max_body_bytes": 5 << 20}) as opened:
        assert isinstance(opened, Door)
        assert (await opened.ask()).status == 200  # all that is loaded late is there
        for name, (path, raw, statuses) in BODIES.items():
            body = raw.replace(b"MODEL", opened.model.encode())
            limit = _address_space() + (FACTOR + CLIENT[opened.name]) * len(body) + SLACK
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            began = time.process_time()
            try:
                answer = await asyncio.wait_for(opened.ask(path, body), 600.0)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert answer.status in statuses, (name, answer.status, answer.body[:200])
            found[name] = {"status": answer.status, "cpu_seconds": time.process_time() - began}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_body_of_any_kind_takes_at_most_six_times_its_size(door: Any) -> None:
    environment = {**os.environ, link.KEY: "a key", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.doors.test_sizes", door.name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == BODIES.keys()
    print(door.name, {name: round(row["cpu_seconds"], 2) for name, row in found.items()})


if __name__ == "__main__":
    print(json.dumps(run_virtual(_ask_all(next(door for door in DOORS if door.name == sys.argv[1])))))
